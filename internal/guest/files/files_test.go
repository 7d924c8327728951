package files

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net"
	"net/http"
	"net/http/httptest"
	"net/textproto"
	"net/url"
	"os"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/guest/config"
	"github.com/berm-sandbox/berm/internal/guest/metadata"
)

const token = "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0"

type bench struct {
	t   *testing.T
	url string
	dir string // working directory
}

func serve(t *testing.T) *bench {
	t.Helper()
	syscall.Umask(0o022)
	me, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	c, _ := config.Open(nil, "")
	if err := c.Init(fmt.Appendf(nil, `{"accessToken":%q,"defaultUser":%q,"defaultWorkdir":%q}`, token, me.Username, dir)); err != nil {
		t.Fatal(err)
	}
	h := NewHandler(c)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /files", h.Get)
	mux.HandleFunc("POST /files", h.Post)
	mux.HandleFunc("POST /files/compose", h.Compose)
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	return &bench{t, srv.URL, dir}
}

type response struct {
	*http.Response
	body string
}

func (b *bench) do(method, path string, body io.Reader, header ...string) response {
	b.t.Helper()
	req, err := http.NewRequestWithContext(b.t.Context(), method, b.url+path, body)
	if err != nil {
		b.t.Fatal(err)
	}
	req.Header.Set(TokenHeader, token)
	req.Header.Set("Accept-Encoding", "identity") // the client would ask for gzip and hide it
	for i := 0; i < len(header); i += 2 {
		if req.Header.Set(header[i], header[i+1]); header[i+1] == "" {
			req.Header.Del(header[i])
		}
	}
	c := http.Client{Timeout: 20 * time.Second}
	resp, err := c.Do(req)
	if err != nil {
		b.t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	return response{resp, string(data)}
}

func (b *bench) get(path string, header ...string) response {
	b.t.Helper()
	return b.do("GET", "/files?path="+b.in(path), nil, header...)
}

// in is a query value for a file in the test's directory. (Relative paths start at
// the home directory of whoever runs the test.)
func (b *bench) in(name string) string {
	if strings.ContainsAny(name[:1], "/~") {
		return url.QueryEscape(name)
	}
	return url.QueryEscape(b.dir + "/" + name)
}

func (b *bench) fails(r response, code int, message string) {
	b.t.Helper()
	var got map[string]any
	if err := json.Unmarshal([]byte(r.body), &got); err != nil || r.StatusCode != code || len(got) != 2 ||
		got["code"] != float64(code) || !strings.Contains(got["message"].(string), message) {
		b.t.Errorf("status %d, body %q; want %d with %q", r.StatusCode, r.body, code, message)
	}
}

func (b *bench) wrote(r response) []entry {
	b.t.Helper()
	var entries []entry
	if err := json.Unmarshal([]byte(r.body), &entries); err != nil || r.StatusCode != 200 {
		b.t.Fatalf("status %d, %v: %q", r.StatusCode, err, r.body)
	}
	return entries
}

func TestSignatureVector(t *testing.T) {
	want := "v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E"
	if got := sign("hello.txt", read, "user", token, ""); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestSignedURLs(t *testing.T) {
	b := serve(t)
	path := b.dir + "/hello.txt"
	if err := os.WriteFile(path, []byte("hello"), 0o600); err != nil {
		t.Fatal(err)
	}
	at := func(d time.Duration) string { return strconv.FormatInt(time.Now().Add(d).Unix(), 10) }
	query := func(op, expiry, signature string) string {
		q := url.Values{"path": {path}, "signature": {signature}}
		if signature == "" {
			q.Set("signature", sign(path, op, "", token, expiry))
		}
		if expiry != "" {
			q.Set("signature_expiration", expiry)
		}
		return "/files?" + q.Encode()
	}
	for name, q := range map[string]string{"unlimited": query(read, "", ""), "limited": query(read, at(time.Minute), "")} {
		if r := b.do("GET", q, nil, TokenHeader, ""); r.StatusCode != 200 || r.body != "hello" {
			t.Errorf("%s: %d %q", name, r.StatusCode, r.body)
		}
	}
	unescaped := "/files?path=" + path + "&signature=" + sign(path, read, "", token, "")
	if r := b.do("GET", unescaped, nil, TokenHeader, ""); r.StatusCode != 200 {
		t.Errorf("unescaped +: %d %q", r.StatusCode, r.body)
	}
	b.fails(b.do("GET", query(read, at(-time.Minute), ""), nil, TokenHeader, ""), 401, "signature is already expired")
	b.fails(b.do("GET", query(write, "", ""), nil, TokenHeader, ""), 401, "invalid signature")
	b.fails(b.do("GET", query(read, at(-time.Minute), "v1_x"), nil, TokenHeader, ""), 401, "invalid signature")
	b.fails(b.do("GET", "/files?path="+path, nil, TokenHeader, ""), 401, "missing signature query parameter")
	b.fails(b.do("GET", query(read, "", ""), nil, TokenHeader, "wrong"), 401, "access token present in header but does not match")
	b.fails(b.do("POST", query(read, "", ""), strings.NewReader(""), TokenHeader, ""), 401, "invalid signature")

	// A form of a browser: its part has no filename, the path of the query counts.
	var form bytes.Buffer
	w := multipart.NewWriter(&form)
	w.WriteField("file", "from a browser")
	w.Close()
	r := b.do("POST", query(write, at(time.Minute), ""), &form, TokenHeader, "", "Content-Type", w.FormDataContentType())
	if want := fmt.Sprintf(`[{"name":"hello.txt","path":%q,"type":"file"}]`+"\n", b.dir+"/hello.txt"); r.body != want {
		t.Errorf("got %s, want %s", r.body, want)
	}
	if data, _ := os.ReadFile(b.dir + "/hello.txt"); string(data) != "from a browser" {
		t.Errorf("content %q", data)
	}
}

func TestDownload(t *testing.T) {
	b := serve(t)
	os.WriteFile(b.dir+"/f.txt", []byte("0123456789"), 0o600)
	os.WriteFile(b.dir+"/empty", nil, 0o600)
	os.Mkdir(b.dir+"/d", 0o700)

	r := b.get("f.txt")
	if r.body != "0123456789" || r.ContentLength != 10 || !strings.HasPrefix(r.Header.Get("Content-Type"), "text/plain") ||
		r.Header.Get("Content-Disposition") != `inline; filename=f.txt` || r.Header.Get("Vary") != "Accept-Encoding" {
		t.Errorf("%q, %v", r.body, r.Header)
	}
	if r := b.get("f.txt", "Range", "bytes=2-4"); r.StatusCode != 206 || r.body != "234" || r.Header.Get("Content-Range") != "bytes 2-4/10" {
		t.Errorf("range: %d %q %v", r.StatusCode, r.body, r.Header)
	}
	if r := b.get("f.txt", "Range", "bytes=20-"); r.StatusCode != 416 {
		t.Errorf("range beyond the end: %d", r.StatusCode)
	}
	if r := b.get("f.txt", "If-Modified-Since", time.Now().Add(time.Hour).UTC().Format(http.TimeFormat)); r.StatusCode != 304 {
		t.Errorf("not modified: %d", r.StatusCode)
	}
	for _, encoding := range []string{"identity", "gzip"} {
		if r := b.get("empty", "Accept-Encoding", encoding); r.StatusCode != 200 || r.Header.Get("Content-Length") != "0" || r.Header.Get("Content-Encoding") != "" {
			t.Errorf("empty file, %s: %d %v", encoding, r.StatusCode, r.Header)
		}
	}
	r = b.get("f.txt", "Accept-Encoding", "gzip, deflate")
	z, err := gzip.NewReader(strings.NewReader(r.body))
	if err != nil || r.Header.Get("Content-Encoding") != "gzip" {
		t.Fatalf("gzip: %v %v", err, r.Header)
	}
	if data, err := io.ReadAll(z); err != nil || string(data) != "0123456789" {
		t.Errorf("gzip: %q, %v", data, err)
	}
	b.fails(b.get("f.txt", "Accept-Encoding", "br;q=1, *;q=0"), 406, "encoding")
	b.fails(b.get("f.txt", "Accept-Encoding", "gzip, identity;q=0", "Range", "bytes=0-1"), 406, "encoding")
	b.fails(b.get("none"), 404, "path '"+b.dir+"/none' does not exist")
	b.fails(b.get("d"), 400, "path '"+b.dir+"/d' is a directory")
	b.fails(b.do("GET", "/files?path=x&username=no-such-user", nil), 401, "invalid username: 'no-such-user'")
	b.fails(b.get("~other/x"), 400, "home dir")
}

// The kernel says that files in /proc are empty, and that those in /sys are a page.
func TestDownloadGeneratedFiles(t *testing.T) {
	b := serve(t)
	for _, path := range []string{"/proc/self/status", "/proc/version", "/sys/kernel/mm/transparent_hugepage/enabled"} {
		want, err := os.ReadFile(path)
		if err != nil {
			t.Logf("%s is not here: %v", path, err)
			continue
		}
		r := b.get(path)
		if r.StatusCode != 200 || len(r.body) == 0 || strings.SplitN(r.body, "\n", 2)[0] != strings.SplitN(string(want), "\n", 2)[0] {
			t.Errorf("%s: %d %q", path, r.StatusCode, r.body)
		}
	}
	// Longer than one buffer.
	if r := b.get("/proc/kallsyms"); r.StatusCode == 200 && len(r.body) < bufferSize {
		t.Errorf("%d bytes of kallsyms", len(r.body))
	}
}

// Nothing that a program inside can make may hold the agent.
func TestSpecialFiles(t *testing.T) {
	b := serve(t)
	unix.Mkfifo(b.dir+"/fifo", 0o600)
	l, err := net.Listen("unix", b.dir+"/socket")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	os.Symlink("/dev/zero", b.dir+"/zero")
	os.Symlink("loop", b.dir+"/loop")
	began := time.Now()
	for _, name := range []string{"fifo", "socket", "zero"} {
		b.fails(b.get(name), 400, "is not a regular file")
		b.fails(b.do("POST", "/files?path="+b.in(name), strings.NewReader("x"), "Content-Type", "application/octet-stream"), 400, "is not a regular file")
	}
	if r := b.get("loop"); r.StatusCode/100 == 2 {
		t.Errorf("a loop of links: %d", r.StatusCode)
	}
	b.fails(b.do("POST", "/files?path="+b.in("loop"), strings.NewReader("x"), "Content-Type", "application/octet-stream"), 400, "too many levels")
	if d := time.Since(began); d > 20*time.Second {
		t.Errorf("took %v", d)
	}
	// A huge sparse file is streamed, not gathered.
	f, err := os.Create(b.dir + "/sparse")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(1 << 50); err != nil {
		if err = f.Truncate(1 << 40); err != nil {
			t.Fatal(err)
		}
	}
	if r := b.get("sparse", "Range", "bytes=1099511620000-1099511620003"); r.StatusCode != 206 || r.body != "\x00\x00\x00\x00" {
		t.Errorf("sparse: %d %q", r.StatusCode, r.body)
	}
}

func TestUploadOctetStream(t *testing.T) {
	b := serve(t)
	post := func(path, body string, header ...string) response {
		return b.do("POST", "/files?path="+b.in(path), strings.NewReader(body), append([]string{"Content-Type", "application/octet-stream"}, header...)...)
	}
	got := b.wrote(post("new/dir/f", "content"))
	path := b.dir + "/new/dir/f"
	if len(got) != 1 || got[0].Name != "f" || got[0].Path != path || got[0].Type != "file" || got[0].Metadata != nil {
		t.Errorf("got %+v", got)
	}
	fi, err := os.Stat(path)
	if err != nil || fi.Mode() != 0o644 {
		t.Errorf("%v, %v", fi.Mode(), err)
	}
	b.wrote(post("new/dir/f", "less")) // shorter: nothing of the old may stay
	if data, _ := os.ReadFile(path); string(data) != "less" {
		t.Errorf("content %q", data)
	}
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	z.Write([]byte("unpacked"))
	z.Close()
	b.wrote(post("z", zipped.String(), "Content-Encoding", "gzip"))
	if data, _ := os.ReadFile(b.dir + "/z"); string(data) != "unpacked" {
		t.Errorf("content %q", data)
	}
	b.fails(post("z", "x", "Content-Encoding", "br"), 400, "unsupported Content-Encoding")
	b.fails(post("z", "no gzip", "Content-Encoding", "gzip"), 400, "gzip")
	b.fails(post("z", zipped.String()[:zipped.Len()-6], "Content-Encoding", "gzip"), 400, "read body")
	b.fails(post("new", "x"), 400, "is a directory")
	b.fails(post("new/dir/f/below", "x"), 400, "not a directory")
	b.fails(b.do("POST", "/files", strings.NewReader("x"), "Content-Type", "application/octet-stream"), 400, "path query parameter is required")
	b.fails(b.do("POST", "/files?path=x", strings.NewReader("x"), "Content-Type", "text/plain"), 400, "unsupported content type")
	b.fails(post(strings.Repeat("n", 300), "x"), 400, "too long")
}

func TestUploadOwner(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("as root only: gives files to another user")
	}
	b := serve(t)
	os.Mkdir(b.dir+"/sticky", 0o777)
	os.Chmod(b.dir+"/sticky", 0o777|os.ModeSticky)
	b.wrote(b.do("POST", "/files?username=nobody&path="+b.in("sticky/f"), strings.NewReader("x"), "Content-Type", "application/octet-stream"))
	// fs.protected_regular must not keep root from overwriting it.
	b.wrote(b.do("POST", "/files?username=nobody&path="+b.in("sticky/f"), strings.NewReader("y"), "Content-Type", "application/octet-stream"))
	b.wrote(b.do("POST", "/files?username=nobody&path="+b.in("a/b/f"), strings.NewReader("x"), "Content-Type", "application/octet-stream"))
	for _, name := range []string{"sticky/f", "a", "a/b", "a/b/f"} {
		if fi, err := os.Stat(b.dir + "/" + name); err != nil || fi.Sys().(*syscall.Stat_t).Uid != 65534 || fi.Sys().(*syscall.Stat_t).Gid != 65534 {
			t.Errorf("%s: %+v, %v", name, fi.Sys(), err)
		}
	}
}

func form(t *testing.T, parts ...[2]string) (io.Reader, string) {
	t.Helper()
	var body bytes.Buffer
	w := multipart.NewWriter(&body)
	for _, p := range parts {
		h := textproto.MIMEHeader{}
		h.Set("Content-Disposition", p[0])
		part, err := w.CreatePart(h)
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(part, p[1])
	}
	w.Close()
	return &body, w.FormDataContentType()
}

func TestUploadMultipart(t *testing.T) {
	b := serve(t)
	post := func(query string, parts ...[2]string) response {
		body, contentType := form(t, parts...)
		return b.do("POST", "/files"+query, body, "Content-Type", contentType)
	}
	abs := b.dir + "/abs/olute"
	got := b.wrote(post("",
		[2]string{`form-data; name="file"; filename="` + b.dir + `/z/../last.txt"`, "1"},
		[2]string{`form-data; name="other"; filename="` + b.dir + `/ignored"`, "2"},
		[2]string{`form-data; name="file"; filename="` + abs + `"`, "3"},
		[2]string{`form-data; name="file"; filename="` + b.dir + `/ünï \"q\".txt"`, "4"},
		[2]string{`form-data; name="file"; filename*=utf-8''` + strings.ReplaceAll(b.dir, "/", "%2f") + `%2f%e2%82%ac.txt`, "5"},
	))
	want := []string{b.dir + "/last.txt", abs, b.dir + "/ünï \"q\".txt", b.dir + "/€.txt"}
	if len(got) != len(want) {
		t.Fatalf("got %+v", got)
	}
	for i := range want {
		if got[i].Path != want[i] || got[i].Name != filepath.Base(want[i]) {
			t.Errorf("part %d: %+v, want %s", i, got[i], want[i])
		}
	}
	if _, err := os.Stat(b.dir + "/ignored"); err == nil {
		t.Error("a part with another name was written")
	}
	if r := post(""); r.StatusCode != 200 || r.body != "[]\n" {
		t.Errorf("no parts: %d %q", r.StatusCode, r.body)
	}
	b.fails(post("", [2]string{`form-data; name="file"; filename="` + abs + `"`, "1"}, [2]string{`form-data; name="file"; filename="` + abs + `"`, "2"}), 400, "multiple files to the same path")
	b.fails(post("?path="+abs, [2]string{`form-data; name="file"; filename="a"`, "1"}, [2]string{`form-data; name="file"; filename="b"`, "2"}), 400, "multiple files to the same path")
	b.fails(post("", [2]string{`form-data; name="file"`, "1"}), 400, "no filename")
	b.fails(b.do("POST", "/files", strings.NewReader("--y\r\n\r\nx"), "Content-Type", "multipart/form-data; boundary=x"), 400, "multipart body")
	b.fails(b.do("POST", "/files", strings.NewReader(""), "Content-Type", "multipart/form-data"), 400, "boundary")
}

func TestMetadata(t *testing.T) {
	b := serve(t)
	if err := unix.Setxattr(b.dir, "user.probe", []byte("x"), 0); err != nil {
		t.Skip("no user extended attributes here (tmpfs has them from Linux 6.6):", err)
	}
	post := func(path string, header ...string) response {
		return b.do("POST", "/files?path="+b.in(path), strings.NewReader("x"), append([]string{"Content-Type", "application/octet-stream"}, header...)...)
	}
	got := b.wrote(post("f", "X-Metadata-Author", "mish", "X-Metadata-PURPOSE", "up load"))
	if m := got[0].Metadata; len(m) != 2 || m["author"] != "mish" || m["purpose"] != "up load" {
		t.Errorf("metadata %v", m)
	}
	got = b.wrote(post("f", "X-Metadata-Other", "o"))
	if m := got[0].Metadata; len(m) != 1 || m["other"] != "o" {
		t.Errorf("the old metadata stayed: %v", m)
	}
	if r := post("f"); strings.Contains(r.body, "metadata") {
		t.Errorf("no metadata must be absent: %s", r.body)
	}
	if m := metadata.Read(b.dir + "/f"); m != nil {
		t.Errorf("on disk: %v", m)
	}
	for _, bad := range [][2]string{
		{"X-Metadata-" + strings.Repeat("k", 247), "v"},
		{"X-Metadata-A", strings.Repeat("v", 4096)},
		{"X-Metadata-A", "b\xc3\xa4d"},
	} {
		b.fails(post("rejected", bad[0], bad[1]), 400, "metadata")
	}
	if _, err := os.Stat(b.dir + "/rejected"); err == nil {
		t.Error("a refused upload made the file")
	}
}

// On a full disk what was there stays as it was, and of what was not there nothing is left.
func TestNoSpace(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("as root only: needs a full file system")
	}
	b := serve(t)
	// /dev/full is no regular file: a full disk is a small tmpfs, in a mount namespace of
	// one thread so that the machine never sees it.
	const disk, page = 512 << 10, 4096
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread dies with its namespace
		done <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
				return err
			}
			if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
				return err
			}
			if err := unix.Mount("tmpfs", b.dir, "tmpfs", 0, fmt.Sprintf("size=%d", disk)); err != nil {
				return err
			}
			me, _ := config.Open(nil, "")
			me.Init([]byte(`{"defaultUser":"root"}`))
			root, _ := me.Account("root")
			store := func(name string, n int, sized bool) *failure {
				size := int64(n)
				if !sized {
					size = unsized
				}
				u := upload{user: root}
				return u.store(b.dir+"/"+name, struct{ io.Reader }{strings.NewReader(strings.Repeat("n", n))}, size)
			}
			for _, sized := range []bool{true, false} {
				for _, was := range []int{0, 5, 2 * page, 300 << 10} {
					for _, n := range []int{2 * disk, disk - 100<<10} {
						old := strings.Repeat("o", was)
						if err := os.WriteFile(b.dir+"/keep", []byte(old), 0o640); err != nil {
							return err
						}
						before, _ := os.Stat(b.dir + "/keep")
						for _, name := range []string{"keep", "new"} {
							fail := store(name, n, sized)
							if fits := n < disk && (was <= 2*page || name == "keep"); fits {
								if fail != nil {
									t.Errorf("%s of %d bytes over %d: %+v", name, n, was, fail)
								}
								// Make room again.
								if name == "keep" {
									_ = os.WriteFile(b.dir+"/keep", []byte(old), 0o640)
								} else {
									_ = os.Remove(b.dir + "/new")
								}
								continue
							}
							if fail == nil || fail.code != 507 || fail.message != "not enough disk space available" {
								t.Errorf("%s of %d bytes over %d, size known %v: %+v", name, n, was, sized, fail)
							}
						}
						after, err := os.Stat(b.dir + "/keep")
						if err != nil || !os.SameFile(before, after) || after.Mode() != before.Mode() {
							t.Errorf("the file is another one: %v, %v", after, err)
						}
						if got, err := os.ReadFile(b.dir + "/keep"); err != nil || string(got) != old {
							t.Errorf("%d bytes over %d, size known %v: %d bytes are left, %v", n, was, sized, len(got), err)
						}
						if left, _ := os.ReadDir(b.dir); len(left) != 1 {
							t.Errorf("left: %v", left)
						}
					}
				}
			}
			// What needs no more space than the old content had is written to a full disk.
			if err := os.WriteFile(b.dir+"/keep", make([]byte, page), 0o640); err != nil {
				return err
			}
			filler, err := os.Create(b.dir + "/filler")
			if err != nil {
				return err
			}
			if _, err := io.Copy(filler, strings.NewReader(strings.Repeat("x", 2*disk))); !errors.Is(err, syscall.ENOSPC) {
				return fmt.Errorf("a disk that is not full: %w", err)
			}
			filler.Close()
			if fail := store("keep", page, true); fail != nil {
				t.Errorf("as large as before: %+v", fail)
			}
			if fail := store("keep", page+1, true); fail == nil || fail.code != 507 {
				t.Errorf("larger than before: %+v", fail)
			}
			if got, _ := os.ReadFile(b.dir + "/keep"); string(got) != strings.Repeat("n", page) {
				t.Errorf("%d bytes", len(got))
			}
			return nil
		}()
	}()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A body that ends before its end leaves what was there, and nothing of what was not.
func TestBodiesThatBreak(t *testing.T) {
	b := serve(t)
	me, _ := config.Open(nil, "")
	who, _ := user.Current()
	me.Init(fmt.Appendf(nil, `{"defaultUser":%q}`, who.Username))
	account, _ := me.Account(who.Username)
	for _, n := range []int{10, 3 * bufferSize} {
		os.WriteFile(b.dir+"/keep", []byte("old"), 0o640)
		for _, name := range []string{"keep", "new"} {
			u := upload{user: account}
			body := io.MultiReader(strings.NewReader(strings.Repeat("n", n)), iotest.ErrReader(io.ErrUnexpectedEOF))
			if fail := u.store(b.dir+"/"+name, body, int64(2*n)); fail == nil || fail.code != 400 || len(u.entries) != 0 {
				t.Errorf("%s: %+v, %v", name, fail, u.entries)
			}
		}
		if got, _ := os.ReadFile(b.dir + "/keep"); string(got) != "old" {
			t.Errorf("%d bytes are left", len(got))
		}
		if left, _ := os.ReadDir(b.dir); len(left) != 1 {
			t.Errorf("left: %v", left)
		}
	}
}

// A file that is written over is the same one, under all of its names and for who has it open.
func TestWrittenOver(t *testing.T) {
	b := serve(t)
	path := b.dir + "/f"
	for _, sizes := range [][2]int{{5, 3}, {3, 5}, {5, 0}, {5, 3 * bufferSize}, {3 * bufferSize, 5}, {2 * bufferSize, 3 * bufferSize}, {3 * bufferSize, 2*bufferSize + 1}} {
		os.WriteFile(path, []byte(strings.Repeat("o", sizes[0])), 0o751)
		os.Chmod(path, 0o751)
		os.Link(path, b.dir+"/other")
		os.Symlink("f", b.dir+"/link")
		open, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		before, _ := open.Stat()
		want := strings.Repeat("new", sizes[1]/3+1)[:sizes[1]]
		for _, name := range []string{"f", "link"} {
			b.wrote(b.do("POST", "/files?path="+b.in(name), strings.NewReader(want), "Content-Type", "application/octet-stream"))
			after, err := os.Stat(path)
			if err != nil || !os.SameFile(before, after) || after.Mode() != 0o751 {
				t.Errorf("%v: another file, %v, %v", sizes, after.Mode(), err)
			}
			if got, _ := os.ReadFile(b.dir + "/other"); string(got) != want {
				t.Errorf("%v: the other name has %d bytes", sizes, len(got))
			}
			if got, _ := io.ReadAll(io.NewSectionReader(open, 0, 1<<20)); string(got) != want {
				t.Errorf("%v: who has it open reads %d bytes", sizes, len(got))
			}
		}
		open.Close()
		if left, _ := os.ReadDir(b.dir); len(left) != 3 {
			t.Errorf("left: %v", left)
		}
		for _, name := range []string{"f", "other", "link"} {
			os.Remove(b.dir + "/" + name)
		}
	}
}

// What may not be written is the caller's fault.
func TestFault(t *testing.T) {
	for errno, code := range map[syscall.Errno]int{
		syscall.EROFS: 403, syscall.EACCES: 403, syscall.EPERM: 403, syscall.ETXTBSY: 403,
		syscall.ENOSPC: 507, syscall.EDQUOT: 507, syscall.ENAMETOOLONG: 400, syscall.EIO: 500,
	} {
		if f := fault(&os.PathError{Op: "write", Path: "/f", Err: errno}); f.code != code {
			t.Errorf("%v: %d, want %d", errno, f.code, code)
		}
	}
}

func TestCompose(t *testing.T) {
	b := serve(t)
	os.WriteFile(b.dir+"/a", []byte("one "), 0o600)
	os.WriteFile(b.dir+"/b", []byte("two"), 0o600)
	compose := func(body string) response {
		return b.do("POST", "/files/compose", strings.NewReader(strings.ReplaceAll(body, "DIR", b.dir)), "Content-Type", "application/json")
	}
	b.fails(compose(`{"source_paths":["DIR/a","DIR/none"],"destination":"DIR/out"}`), 404, "does not exist")
	b.fails(compose(`{"source_paths":["DIR/a"],"destination":"DIR/a"}`), 400, "same as destination")
	b.fails(compose(`{"source_paths":[],"destination":"DIR/out"}`), 400, "must not be empty")
	b.fails(compose(`{`), 400, "invalid request body")
	unix.Mkfifo(b.dir+"/fifo", 0o600)
	b.fails(compose(`{"source_paths":["DIR/fifo"],"destination":"DIR/out"}`), 400, "not a regular file")
	if names, _ := filepath.Glob(b.dir + "/*out*"); len(names) != 0 {
		t.Errorf("failures left %v", names)
	}
	r := compose(`{"source_paths":["DIR/a","DIR/b"],"destination":"DIR/sub/out"}`)
	if want := fmt.Sprintf(`{"name":"out","path":%q,"type":"file"}`+"\n", b.dir+"/sub/out"); r.body != want {
		t.Errorf("got %s, want %s", r.body, want)
	}
	if data, _ := os.ReadFile(b.dir + "/sub/out"); string(data) != "one two" {
		t.Errorf("content %q", data)
	}
	for _, gone := range []string{"/a", "/b"} {
		if _, err := os.Stat(b.dir + gone); err == nil {
			t.Errorf("%s is still there", gone)
		}
	}
	if names, _ := filepath.Glob(b.dir + "/sub/.compose*"); len(names) != 0 {
		t.Errorf("left %v", names)
	}
}

func TestAcceptEncoding(t *testing.T) {
	for header, want := range map[string][2]bool{
		"":                           {false, true},
		"gzip":                       {true, true},
		"GZIP;q=0.5":                 {true, true},
		"gzip;q=0":                   {false, true},
		"gzip, deflate, br":          {true, true},
		"identity":                   {false, true},
		"identity, gzip;q=0.5":       {false, true},
		"identity;q=0.5, gzip;q=0.8": {true, true},
		"*":                          {false, true},
		"*;q=0":                      {false, false},
		"gzip, *;q=0":                {true, false},
		"identity;q=0":               {false, false},
		"identity;q=0, *":            {true, false},
		"br;q=1, identity;q=0":       {false, false},
		"gzip;q=nonsense":            {true, true},
	} {
		if gzip, plain := acceptEncoding(header); gzip != want[0] || plain != want[1] {
			t.Errorf("%q: gzip %v, plain %v; want %v", header, gzip, plain, want)
		}
	}
}

func FuzzAcceptEncoding(f *testing.F) {
	f.Add("gzip;q=0.1, *;q=0")
	f.Fuzz(func(t *testing.T, header string) { acceptEncoding(header) })
}

func FuzzVerify(f *testing.F) {
	f.Add("path=a&signature=v1_x&signature_expiration=1&username=u")
	f.Fuzz(func(t *testing.T, raw string) {
		q, err := url.ParseQuery(raw)
		if err != nil {
			return
		}
		// Without the token nobody finds a signature.
		if verify(q, read, token, time.Unix(1e9, 0)) == nil {
			t.Errorf("%q was accepted", raw)
		}
		q.Set("signature", sign(q.Get("path"), read, q.Get("username"), token, q.Get("signature_expiration")))
		err = verify(q, read, token, time.Unix(1e9, 0))
		at, bad := strconv.ParseInt(q.Get("signature_expiration"), 10, 64)
		if q.Get("signature_expiration") == "" || bad == nil && at >= 1e9 {
			if err != nil {
				t.Errorf("%q with a right signature: %v", raw, err)
			}
		} else if err == nil {
			t.Errorf("%q is expired and was accepted", raw)
		}
	})
}

func FuzzDisposition(f *testing.F) {
	f.Add(`form-data; name="file"; filename="/a/b c"`)
	f.Add(`form-data; name=file; filename*=utf-8''%2e%2e`)
	f.Fuzz(func(t *testing.T, header string) {
		part := &multipart.Part{Header: textproto.MIMEHeader{"Content-Disposition": {header}}}
		name, filename, ok := disposition(part)
		if name == "" && ok && filename == "" && !strings.Contains(strings.ToLower(header), "filename") {
			t.Errorf("%q: a filename from nowhere", header)
		}
	})
}

func FuzzMultipart(f *testing.F) {
	f.Add([]byte("--x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\nbody\r\n--x--\r\n"))
	f.Fuzz(func(t *testing.T, body []byte) {
		dir := t.TempDir()
		c, _ := config.Open(nil, "")
		c.Init([]byte(`{"defaultUser":"root"}`))
		r := httptest.NewRequest("POST", "/files?path="+url.QueryEscape(dir+"/f"), bytes.NewReader(body))
		r.Header.Set("Content-Type", "multipart/form-data; boundary=x")
		w := httptest.NewRecorder()
		NewHandler(c).Post(w, r)
		if w.Code != 200 && w.Code != 400 && os.Geteuid() == 0 {
			t.Errorf("status %d: %s", w.Code, w.Body)
		}
	})
}

// FuzzRange: whatever the header says, the answer is all, a part, or a refusal.
func FuzzRange(f *testing.F) {
	f.Add("bytes=0-1,3-4")
	f.Add("bytes=-3")
	f.Add("bytes=18446744073709551615-")
	file := filepath.Join(f.TempDir(), "f")
	const content = "0123456789"
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		f.Fatal(err)
	}
	c, _ := config.Open(nil, "")
	c.Init([]byte(`{"defaultUser":"root"}`))
	f.Fuzz(func(t *testing.T, header string) {
		r := httptest.NewRequest("GET", "/files?path="+url.QueryEscape(file), nil)
		r.Header.Set("Range", header)
		w := httptest.NewRecorder()
		NewHandler(c).Get(w, r)
		switch {
		case w.Code == 200 && w.Body.String() == content:
		case w.Code == 206 && (strings.Contains(content, w.Body.String()) || strings.HasPrefix(w.Header().Get("Content-Type"), "multipart/")):
		case w.Code == 416:
		default:
			t.Errorf("%q: %d %q", header, w.Code, w.Body)
		}
	})
}
