package layer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/local/change"
)

const child = "BERM_TEST_LAYER"

// inNamespace runs the calling test again in a mount namespace of its own.
func inNamespace(t *testing.T) bool {
	t.Helper()
	if os.Getenv(child) != "" {
		return true
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), child+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	out, err := cmd.CombinedOutput()
	switch {
	case errors.Is(err, syscall.EPERM):
		t.Skip("needs user namespaces for ordinary users")
	case err != nil:
		t.Fatalf("%v\n%s", err, out)
	}
	return false
}

// box is an overlay over two layers.
type box struct {
	t                  *testing.T
	low, high          string
	upper, merged, log string
}

func newBox(t *testing.T) *box {
	t.Helper()
	dir := t.TempDir()
	at := func(name string) string {
		path := filepath.Join(dir, name)
		must(t, os.Mkdir(path, 0o755))
		return path
	}
	b := &box{t, at("low"), at("high"), at("upper"), at("merged"), at("log")}
	for layer, files := range map[string]map[string]string{
		b.low:  {"same": "same", "edited": "before\n", "gone/x": "x", "gone/y": "y", "opaque/old": "old", "touched": "t", "mode": "m", "binary": "a\x00b", "low": "low"},
		b.high: {"low": "from the high layer"},
	} {
		for name, content := range files {
			must(t, os.MkdirAll(filepath.Join(layer, filepath.Dir(name)), 0o755))
			must(t, os.WriteFile(filepath.Join(layer, name), []byte(content), 0o644))
		}
	}
	must(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	work := at("work")
	must(t, unix.Mount("overlay", b.merged, "overlay", 0, fmt.Sprintf("userxattr,lowerdir=%s:%s,upperdir=%s,workdir=%s", b.high, b.low, b.upper, work)))
	t.Cleanup(func() { must(t, unix.Unmount(b.merged, unix.MNT_DETACH)) })
	return b
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func sum(s string) string {
	h := sha256.Sum256([]byte(s))
	return hex.EncodeToString(h[:])
}

func (b *box) sh(script string) {
	b.t.Helper()
	cmd := exec.CommandContext(b.t.Context(), "/bin/sh", "-ec", script)
	cmd.Dir = b.merged
	if out, err := cmd.CombinedOutput(); err != nil {
		b.t.Fatalf("%v: %s", err, out)
	}
}

func (b *box) written() *berm.Written {
	b.t.Helper()
	w := &berm.Written{}
	for _, dir := range []string{b.upper, b.low, b.high} {
		f, err := os.Open(dir)
		must(b.t, err)
		if w.Upper == nil {
			w.Upper = f
		} else {
			w.Layers = append(w.Layers, f)
		}
	}
	b.t.Cleanup(w.Close)
	return w
}

// look returns the changes by path, as the log would have them.
func (b *box) look(ctx context.Context) ([]audit.Record, map[string]audit.Change) {
	b.t.Helper()
	records, err := Records(ctx, b.written(), Identity{}, audit.Directory(b.log), "end", "trace", nil)
	must(b.t, err)
	line, err := json.Marshal(records[0].Data)
	must(b.t, err)
	var data audit.Changes
	must(b.t, json.Unmarshal(line, &data))
	for _, r := range records {
		line, err := json.Marshal(r)
		must(b.t, err)
		if len(line) > audit.MaxLine-1024 {
			b.t.Errorf("a record of %d bytes", len(line))
		}
		for _, blob := range r.Blobs {
			content := b.blob(blob.SHA256)
			if sum(string(content)) != blob.SHA256 || int64(len(content)) != blob.Size {
				b.t.Errorf("blob %+v has other content", blob)
			}
			if blob.Kind == audit.KindChanges {
				data.Changes = nil
				must(b.t, json.Unmarshal(content, &data.Changes))
			}
		}
	}
	all := map[string]audit.Change{}
	for _, c := range data.Changes {
		path := c.Path
		if c.PathBytes != nil {
			path = string(c.PathBytes)
		}
		all[path] = c
	}
	return records, all
}

func (b *box) blob(hash string) []byte {
	b.t.Helper()
	content, err := os.ReadFile(filepath.Join(b.log, audit.BlobDir, hash[:2], hash))
	must(b.t, err)
	return content
}

func (b *box) kept(hash string) bool {
	_, err := os.Stat(filepath.Join(b.log, audit.BlobDir, hash[:2], hash))
	return err == nil
}

// The probe AU-03 and its like: what counts is what is there at the end.
func TestChanges(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	b := newBox(t)
	b.sh(`
		head -c 4096 /dev/zero | tr '\0' 1 >a; printf 2 | dd of=a conv=notrunc status=none; mv a b; ln b c; truncate -s 1 c; chmod 777 c; touch -d @0 c; ln -s c d; rm b
		printf 'after\n' >edited; touch -d @0 edited
		touch touched; chmod 600 touched; chmod 644 touched
		chmod 755 mode
		rm -r gone; rm -r opaque; mkdir opaque; printf new >opaque/new
		printf 'a\000c' >binary
		printf 'low' >low
		mkfifo fifo
	`)
	records, got := b.look(t.Context())
	want := map[string]audit.Change{
		"c":          {Op: "add", Kind: "file", Size: 1, Mode: "0777", After: sum("2")},
		"d":          {Op: "add", Kind: "link", Mode: "0777", Target: "c", After: sum("c")},
		"edited":     {Op: "modify", Kind: "file", Size: 6, Mode: "0644", Before: sum("before\n"), After: sum("after\n")},
		"mode":       {Op: "mode", Kind: "file", Size: 1, Mode: "0755", Before: sum("m"), After: sum("m")},
		"gone":       {Op: "delete", Kind: "dir", Mode: "0755"},
		"gone/x":     {Op: "delete", Kind: "file", Size: 1, Mode: "0644", Before: sum("x")},
		"gone/y":     {Op: "delete", Kind: "file", Size: 1, Mode: "0644", Before: sum("y")},
		"opaque/old": {Op: "delete", Kind: "file", Size: 3, Mode: "0644", Before: sum("old")},
		"opaque/new": {Op: "add", Kind: "file", Size: 3, Mode: "0644", After: sum("new")},
		"binary":     {Op: "modify", Kind: "file", Size: 3, Mode: "0644", Before: sum("a\x00b"), After: sum("a\x00c")},
		"low":        {Op: "modify", Kind: "file", Size: 3, Mode: "0644", Before: sum("from the high layer"), After: sum("low")},
		"fifo":       {Op: "add", Kind: "fifo", Mode: "0644"},
	}
	for path, w := range want {
		w.Path = path
		if g := got[path]; fmt.Sprintf("%+v", g) != fmt.Sprintf("%+v", w) {
			t.Errorf("%s: %+v, want %+v", path, g, w)
		}
		delete(got, path)
	}
	if len(got) > 0 {
		t.Errorf("also: %+v", got)
	}
	if r := records[0]; r.Outcome != audit.OK || r.Type != audit.FileChange || len(records) != 1 {
		t.Errorf("%+v", records)
	}
	for _, text := range []string{"before\n", "after\n", "x", "new"} {
		if !b.kept(sum(text)) {
			t.Errorf("the content %q is not kept", text)
		}
	}
	if b.kept(sum("a\x00c")) {
		t.Error("binary content is kept")
	}
}

func TestHostileNames(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	b := newBox(t)
	names := []string{"a\nb", "\x1b[2J", "\xff\xfe", `x","type":"exec.exit`, strings.Repeat("n", 255)}
	for _, name := range names {
		must(t, os.WriteFile(filepath.Join(b.merged, name), []byte(name), 0o644))
	}
	must(t, os.Symlink("/etc/passwd", filepath.Join(b.merged, "out")))
	must(t, os.Symlink("\xff", filepath.Join(b.merged, "odd")))
	must(t, os.Mkdir(filepath.Join(b.merged, "shut"), 0))
	if os.Geteuid() == 0 && unix.Mknod(filepath.Join(b.merged, "null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))) == nil {
		names = append(names, "null")
	}
	records, got := b.look(t.Context())
	for _, name := range names {
		c, ok := got[name]
		if !ok || c.Op != "add" || c.Kind == "file" && c.After != sum(name) {
			t.Errorf("%q: %+v", name, c)
		}
	}
	if c := got["out"]; c.Kind != "link" || c.Target != "/etc/passwd" || c.After != sum("/etc/passwd") {
		t.Errorf("%+v", c)
	}
	if c := got["odd"]; string(c.TargetBytes) != "\xff" {
		t.Errorf("%+v", c)
	}
	line, err := json.Marshal(records[0])
	must(t, err)
	if bytes.ContainsAny(line, "\n\x1b") {
		t.Errorf("control characters in %s", line)
	}
}

// A large tree has a record that fits, and every change in a blob.
func TestManyChanges(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	b := newBox(t)
	const files = 3000
	for i := range files {
		must(t, os.WriteFile(filepath.Join(b.merged, fmt.Sprintf("file-%04d", i)), fmt.Appendf(nil, "content %d", i), 0o644))
	}
	records, got := b.look(t.Context())
	data := records[0].Data.(audit.Changes)
	if len(got) != files || len(data.Changes)+data.More != files || data.More == 0 || records[0].Outcome != audit.OK {
		t.Errorf("%d changes, %d in the line and %d more: %v", len(got), len(data.Changes), data.More, records[0].Reason)
	}
	contents := 0
	for _, r := range records {
		for _, blob := range r.Blobs {
			if blob.Kind == audit.KindContent {
				contents++
			}
		}
	}
	if contents != maxFiles {
		t.Errorf("the content of %d files is kept", contents)
	}
}

// What there is no time for is told as missing; small files come first.
func TestTimeEnds(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	b := newBox(t)
	b.sh("truncate -s 1T sparse; printf x >small")
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	begin := time.Now()
	records, got := b.look(ctx)
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("it took %v", took)
	}
	if r := records[0]; r.Outcome != audit.Failed || r.Data.(audit.Changes).Unhashed != 1 {
		t.Errorf("%+v", r)
	}
	if got["small"].After != sum("x") || got["sparse"].After != "" || got["sparse"].Size != 1<<40 {
		t.Errorf("%+v", got)
	}
	ended, cancel := context.WithDeadline(t.Context(), time.Now())
	defer cancel()
	l := &look{ctx: ended} // without trees: whatever is opened panics
	l.describe([]change.Change{
		{Path: "a", Kind: change.Added, New: change.Entry{Mode: 0o644}},
		{Path: "b", Kind: change.Modified, Old: change.Entry{Mode: 0o644}, New: change.Entry{Mode: 0o600}},
	})
	if l.data.Unhashed != 3 {
		t.Errorf("%d hashes are told as missing", l.data.Unhashed)
	}
	if records, err := Records(ended, b.written(), Identity{}, audit.Directory(b.log), "end", "", nil); err == nil && records[0].Outcome == audit.OK {
		t.Errorf("%+v", records)
	}
}

// A file that is hardly there is not read to its end, which would take as long as a look may.
func TestSparseFile(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	b := newBox(t)
	b.sh("truncate -s 8E sparse 2>/dev/null || truncate -s 4T sparse; truncate -s 1M hole; printf x >small")
	records, got := b.look(t.Context())
	if r := records[0]; r.Data.(audit.Changes).Unhashed != 1 || got["small"].After != sum("x") || got["hole"].After == "" || got["sparse"].After != "" {
		t.Errorf("%+v, %+v", r, got)
	}
}

// One layer needs no mount, so that an ordinary user's server can compare too.
func TestOneLayer(t *testing.T) {
	dir := t.TempDir()
	w := &berm.Written{}
	defer w.Close()
	for _, name := range []string{"upper", "lower"} {
		must(t, os.Mkdir(filepath.Join(dir, name), 0o755))
		f, err := os.Open(filepath.Join(dir, name))
		must(t, err)
		if name == "upper" {
			w.Upper = f
		} else {
			w.Layers = append(w.Layers, f)
		}
		must(t, os.WriteFile(filepath.Join(dir, name, "f"), []byte(name), 0o644))
	}
	records, err := Records(t.Context(), w, Identity{}, audit.Directory(filepath.Join(dir, "log")), "pause", "", nil)
	must(t, err)
	if c := records[0].Data.(audit.Changes).Changes; len(c) != 1 || c[0].Before != sum("lower") || c[0].After != sum("upper") {
		t.Errorf("%+v", c)
	}
}

// What Berm writes is no change of the sandbox's, unless somebody wrote over it.
func TestOwnFilesAreLeftOut(t *testing.T) {
	of := Identity{Sandbox: "i00000000000000000000", Template: "base", Nameserver: "10.0.2.2"}
	ours := map[string]string{
		"etc/hostname":             string(of.Sandbox) + "\n",
		"etc/hosts":                "127.0.0.1\tlocalhost\n127.0.1.1\t" + string(of.Sandbox) + "\n::1\tlocalhost ip6-localhost ip6-loopback\n",
		"etc/resolv.conf":          "nameserver 10.0.2.2\noptions attempts:1 timeout:5\n",
		"etc/machine-id":           strings.Repeat("0a", 16) + "\n",
		"run/e2b/.E2B_SANDBOX":     "true",
		"run/e2b/.E2B_SANDBOX_ID":  string(of.Sandbox),
		"run/e2b/.E2B_TEMPLATE_ID": "base",
	}
	see := func(tamper func(upper string)) (paths []string) {
		t.Helper()
		dir := t.TempDir()
		upper, lower := filepath.Join(dir, "upper"), filepath.Join(dir, "lower")
		must(t, os.MkdirAll(filepath.Join(lower, "etc"), 0o755))
		must(t, os.MkdirAll(filepath.Join(lower, "run"), 0o755))
		for _, d := range []string{"etc", "run/e2b"} {
			must(t, os.MkdirAll(filepath.Join(upper, d), 0o755))
		}
		must(t, os.WriteFile(filepath.Join(lower, "etc/hosts"), nil, 0o644))
		for name, content := range ours {
			mode := os.FileMode(0o444)
			if strings.HasPrefix(name, "etc/") {
				mode = 0o644
			}
			must(t, os.WriteFile(filepath.Join(upper, name), []byte(content), mode))
		}
		tamper(upper)
		w := &berm.Written{}
		defer w.Close()
		var err error
		w.Upper, err = os.Open(upper)
		must(t, err)
		layer, err := os.Open(lower)
		must(t, err)
		w.Layers = append(w.Layers, layer)
		records, err := Records(t.Context(), w, of, audit.Directory(filepath.Join(dir, "log")), "end", "", nil)
		must(t, err)
		for _, c := range records[0].Data.(audit.Changes).Changes {
			paths = append(paths, c.Path)
		}
		return paths
	}
	if got := see(func(string) {}); len(got) != 0 {
		t.Errorf("changes of a sandbox that did nothing: %q", got)
	}
	for name, content := range ours {
		for what, tamper := range map[string]func(string){
			"other content": func(upper string) {
				must(t, os.Remove(filepath.Join(upper, name)))
				must(t, os.WriteFile(filepath.Join(upper, name), []byte("x"+content[1:]+"y"), 0o644))
			},
			"another mode": func(upper string) { must(t, os.Chmod(filepath.Join(upper, name), 0o666)) },
			"a link": func(upper string) {
				must(t, os.Remove(filepath.Join(upper, name)))
				must(t, os.Symlink("/proc/self/mem", filepath.Join(upper, name)))
			},
		} {
			if got := see(tamper); len(got) != 1 || got[0] != name {
				t.Errorf("%s of %s: changes %q", what, name, got)
			}
		}
	}
}

// What looks like a secret is not kept, and the hashes are of the content all the same.
func TestSecretsAreNotKept(t *testing.T) {
	dir := t.TempDir()
	secret := "ghp_" + strings.Repeat("a1", 20)
	for name, files := range map[string]map[string]string{
		"lower": {"old": "token " + secret + "\n"},
		"upper": {"old": "token " + secret + "\nmore\n", "new": "password=" + secret + "\n", "plain": "text\n"},
	} {
		must(t, os.Mkdir(filepath.Join(dir, name), 0o755))
		for file, content := range files {
			must(t, os.WriteFile(filepath.Join(dir, name, file), []byte(content), 0o644))
		}
	}
	w := &berm.Written{}
	defer w.Close()
	var err error
	w.Upper, err = os.Open(filepath.Join(dir, "upper"))
	must(t, err)
	lower, err := os.Open(filepath.Join(dir, "lower"))
	must(t, err)
	w.Layers = append(w.Layers, lower)
	log := filepath.Join(dir, "log")
	records, err := Records(t.Context(), w, Identity{}, audit.Directory(log), "end", "", nil)
	must(t, err)
	for _, b := range records[0].Blobs {
		content, err := os.ReadFile(filepath.Join(log, audit.BlobDir, b.SHA256[:2], b.SHA256))
		must(t, err)
		if strings.Contains(string(content), secret) || sum(string(content)) != b.SHA256 {
			t.Errorf("kept: %q", content)
		}
	}
	changes := map[string]audit.Change{}
	for _, c := range records[0].Data.(audit.Changes).Changes {
		changes[c.Path] = c
	}
	want := map[string]audit.Change{
		"old":   {Before: sum("token " + secret + "\n"), After: sum("token " + secret + "\nmore\n"), KeptBefore: sum("token ghp_[masked]\n"), KeptAfter: sum("token ghp_[masked]\nmore\n")},
		"new":   {After: sum("password=" + secret + "\n"), KeptAfter: sum("password=[masked]\n")},
		"plain": {After: sum("text\n")},
	}
	for name, w := range want {
		c := changes[name]
		if got := (audit.Change{Before: c.Before, After: c.After, KeptBefore: c.KeptBefore, KeptAfter: c.KeptAfter}); !reflect.DeepEqual(got, w) {
			t.Errorf("%s: %+v, want %+v", name, got, w)
		}
	}
}

// A look that names more content than a record has room for is told in records that continue the
// first one, and say so.
func TestManyTexts(t *testing.T) {
	if !inNamespace(t) {
		return
	}
	b := newBox(t)
	b.sh(`i=0; while [ $i -lt 130 ]; do echo $i >text$i; i=$((i+1)); done`)
	records, changes := b.look(t.Context())
	if len(records) != 3 || len(changes) < 130 {
		t.Fatalf("%d records, %d changes", len(records), len(changes))
	}
	for i, r := range records {
		data := r.Data.(audit.Changes)
		if data.Continues != (i > 0) || len(r.Blobs) == 0 || r.TraceID != records[0].TraceID || data.At != "end" {
			t.Errorf("record %d: %d contents, trace %s, %+v", i, len(r.Blobs), r.TraceID, data)
		}
	}
}

// Secrets that are known are masked in what is kept of files; without who knows them nothing is kept.
func TestKnownSecretsAreMasked(t *testing.T) {
	const secret, other = "correct horse battery", "of no use to anybody"
	for name, failure := range map[string]error{"masked": nil, "nobody masks": errors.New("no broker")} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			log := filepath.Join(dir, "log")
			must(t, os.Mkdir(filepath.Join(dir, "upper"), 0o755))
			must(t, os.Mkdir(filepath.Join(dir, "lower"), 0o755))
			must(t, os.WriteFile(filepath.Join(dir, "upper", "config"), []byte("key: "+secret+"\n"), 0o644))
			must(t, os.WriteFile(filepath.Join(dir, "upper", "other"), []byte(other), 0o644))
			w := &berm.Written{}
			defer w.Close()
			var err error
			w.Upper, err = os.Open(filepath.Join(dir, "upper"))
			must(t, err)
			lower, err := os.Open(filepath.Join(dir, "lower"))
			must(t, err)
			w.Layers = append(w.Layers, lower)
			records, err := Records(t.Context(), w, Identity{}, audit.Directory(log), "end", "", func(_ context.Context, content []byte) ([]byte, error) {
				return bytes.ReplaceAll(content, []byte(secret), bytes.Repeat([]byte("*"), len(secret))), failure
			})
			must(t, err)
			r := records[0]
			kept := ""
			for _, blob := range r.Blobs {
				content, err := os.ReadFile(filepath.Join(log, audit.BlobDir, blob.SHA256[:2], blob.SHA256))
				must(t, err)
				kept += string(content)
			}
			if failure != nil {
				if kept != "" || r.Outcome != audit.Failed || !strings.Contains(r.Reason, "no broker") {
					t.Errorf("kept %q: %+v", kept, r)
				}
				return
			}
			if strings.Contains(kept, secret) || !strings.Contains(kept, "key: ****") || !strings.Contains(kept, other) || r.Outcome != audit.OK {
				t.Errorf("kept %q: %+v", kept, r)
			}
		})
	}
}
