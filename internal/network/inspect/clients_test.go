package inspect

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/cgi"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/internal/trust"
	"github.com/berm-sandbox/berm/internal/trust/root"
)

// shop is an upstream with what clients are tried with.
var shop = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/events":
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 3 {
			fmt.Fprintf(w, "data: %d\n\n", i)
			w.(http.Flusher).Flush()
			time.Sleep(10 * time.Millisecond)
		}
	case "/upload":
		n, _ := io.Copy(io.Discard, r.Body)
		fmt.Fprintf(w, "%d bytes by %s", n, r.Header.Get("Authorization"))
	default:
		echo(w, r)
	}
})

// run starts a client as it is started inside, with the variables of Trust.
func (r *rig) run(t *testing.T, name string, args ...string) string {
	t.Helper()
	program, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("%s is not installed", name)
	}
	cmd := exec.Command(program, args...)
	cmd.Dir = t.TempDir()
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + cmd.Dir}, r.env(t)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v: %s%s", name, err, out, stderr.Bytes())
	}
	return string(out)
}

// env writes the files of Trust below a directory, and names them there.
func (r *rig) env(t *testing.T) (env []string) {
	t.Helper()
	files, vars, err := trust.Files(root.Root{}, r.config.CA.PEM(), nil)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, f := range files {
		os.MkdirAll(filepath.Dir(dir+f.Path), 0o755)
		os.WriteFile(dir+f.Path, f.Data, 0o644)
	}
	for name, value := range vars {
		if strings.HasPrefix(value, "/") {
			value = dir + value
		}
		env = append(env, name+"="+value)
	}
	return env
}

// credentialed is a rig whose requests get a secret and whose replies are searched.
func credentialed(t *testing.T, handler http.Handler) *rig {
	return newRig(t, handler, options{change: func(c *Config) {
		c.Credentials = broker{func() Filter { return &mask{} }}
	}})
}

func TestCurl(t *testing.T) {
	r := credentialed(t, shop)
	big := filepath.Join(t.TempDir(), "big")
	os.WriteFile(big, make([]byte, 3<<20), 0o644)
	for _, version := range []string{"--http1.1", "--http2", "--http2-prior-knowledge", "--http1.0"} {
		curl := func(args ...string) string {
			return r.run(t, "curl", append([]string{"-sS", "--max-time", "20", version}, args...)...)
		}
		if got := curl(r.url("/events")); got != "data: 0\n\ndata: 1\n\ndata: 2\n\n" {
			t.Errorf("%s: %q", version, got)
		}
		if got := curl("-T", big, r.url("/upload")); got != "3145728 bytes by Bearer ************" {
			t.Errorf("%s: %q", version, got)
		}
		if version == "--http1.1" {
			if got := curl("-H", "Expect: 100-continue", "-H", "Transfer-Encoding: chunked", "--data-binary", "@"+big, r.url("/upload")); !strings.HasPrefix(got, "3145728 bytes") {
				t.Errorf("%s chunked: %q", version, got)
			}
		}
		if got := curl("-o", os.DevNull, "-w", "%{http_code} %header{x-berm-deny}", "--path-as-is", r.url("/a/../b")); got != "403 path" {
			t.Errorf("%s: %q", version, got)
		}
		if got := curl("-o", os.DevNull, "-w", "%{http_code}", "-H", "Host: evil.test", r.url("/")); got != "421" {
			t.Errorf("%s: %q", version, got)
		}
		if got := curl("-I", "-o", os.DevNull, "-w", "%{http_code} %{ssl_verify_result}", r.url("/")); got != "200 0" {
			t.Errorf("%s: %q", version, got)
		}
	}
}

func TestPython(t *testing.T) {
	r := credentialed(t, shop)
	got := r.run(t, "python3", "-c", `
import sys, urllib.request, json
url = sys.argv[1]
print(urllib.request.urlopen(url + "/events").read().decode().count("data:"))
print(urllib.request.urlopen(urllib.request.Request(url + "/upload", data=b"x" * 100000)).read().decode())
try:
    urllib.request.urlopen(url + "/a/../b")
except urllib.error.HTTPError as e:
    print(e.code, json.load(e)["reason"])
try: # a large body, which is sent before the reply is read
    urllib.request.urlopen(urllib.request.Request(url + "/a/../b", data=b"x" * 20000000))
except urllib.error.HTTPError as e:
    print(e.code, json.load(e)["reason"])
try:
    import requests
except ImportError:
    requests = None
if requests:
    s = requests.Session()
    with s.get(url + "/events", stream=True) as reply:
        print(sum(line.startswith(b"data") for line in reply.iter_lines()))
    print(s.post(url + "/upload", data=(b"x" * 1000 for _ in range(100))).text)
else:
    print("3\n100000 bytes by Bearer ************")
`, r.url(""))
	want := "3\n100000 bytes by Bearer ************\n403 path\n403 path\n3\n100000 bytes by Bearer ************\n"
	if got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestNode(t *testing.T) {
	r := credentialed(t, shop)
	got := r.run(t, "node", "-e", `
const url = process.argv[1];
(async () => {
  let events = 0;
  const decoder = new TextDecoder();
  for await (const piece of (await fetch(url + "/events")).body)
    events += decoder.decode(piece).split("data:").length - 1;
  console.log(events);
  console.log(await (await fetch(url + "/upload", {method: "PUT", body: "x".repeat(100000)})).text());
  const denied = await fetch(url + "/%2e%2e%2fx..");
  console.log(denied.status, (await denied.json()).reason);
  const http2 = require("http2");
  const session = http2.connect(url, {ca: require("fs").readFileSync(process.env.NODE_EXTRA_CA_CERTS)});
  const stream = session.request({":path": "/x", ":method": "POST"});
  let text = "";
  stream.on("data", d => text += d);
  stream.on("end", () => { console.log(JSON.parse(text).body); session.close(); });
  stream.end("over h2");
})();
`, r.url(""))
	if want := "3\n100000 bytes by Bearer ************\n403 path\nover h2\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// gitServer is git's own server of the repository a.git, which everybody may push to.
func gitServer(t *testing.T) http.Handler {
	t.Helper()
	execPath, err := exec.Command("git", "--exec-path").Output()
	if err != nil {
		t.Skip("git is not installed")
	}
	backend := filepath.Join(strings.TrimSpace(string(execPath)), "git-http-backend")
	if _, err := os.Stat(backend); err != nil {
		t.Skip("git's HTTP server is not installed")
	}
	repos := t.TempDir()
	git := func(args ...string) {
		t.Helper()
		cmd := exec.Command("git", args...)
		cmd.Dir = repos
		cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v: %s", args, err, out)
		}
	}
	git("init", "-q", "--bare", "-b", "main", "a.git")
	git("-C", "a.git", "config", "http.receivepack", "true")
	return &cgi.Handler{Path: backend, Root: "/", Env: []string{"GIT_PROJECT_ROOT=" + repos, "GIT_HTTP_EXPORT_ALL=1"}}
}

// TestGit clones and pushes over HTTPS.
func TestGit(t *testing.T) {
	r := newRig(t, gitServer(t), options{})
	got := r.run(t, "sh", "-ec", `
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a GIT_TERMINAL_PROMPT=0
git clone -q "$0/a.git" one 2>/dev/null
cd one
git checkout -q -b main
head -c 3000000 /dev/urandom >big
git add big
git commit -q -m first
git push -q origin main
cd ..
git clone -q "$0/a.git" two
cmp one/big two/big
git -C two log --format=%s
git -C two ls-remote origin main | cut -f2
`, r.url(""))
	if got != "first\nrefs/heads/main\n" {
		t.Errorf("%q", got)
	}
}

// TestGitDenied has git show why it may not do something, by whichever of its requests it
// comes to know.
func TestGitDenied(t *testing.T) {
	var denied string
	r := newRig(t, gitServer(t), options{change: func(c *Config) {
		c.Judge = judgeFunc(func(_ context.Context, r Request) Verdict {
			if strings.Contains(r.Method+" "+r.Target, denied) {
				return Verdict{Reason: "path", Rule: "git", Detail: "not today", Hint: "It allows\nother things."}
			}
			return Verdict{Allow: true, Target: r.Target}
		})
	}})
	denied = "nothing"
	dir := r.run(t, "sh", "-ec", `
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a
git clone -q "$0/a.git" . 2>/dev/null
git commit -q --allow-empty -m first
git push -q origin HEAD:refs/heads/main
pwd
`, r.url(""))
	for _, test := range []struct{ denied, command, want string }{
		{"GET /a.git/info/refs?service=git-upload-pack", "ls-remote origin", "remote: "},
		{"POST /a.git/git-upload-pack", "ls-remote origin", "remote error: "},
		{"POST /a.git/git-upload-pack", "-c protocol.version=0 clone -q $(git config remote.origin.url) x", "remote error: "},
		{"GET /a.git/info/refs?service=git-receive-pack", "push origin HEAD:refs/heads/other", "remote: "},
		{"POST /a.git/git-receive-pack", "push origin HEAD:refs/heads/other", "remote: "},
	} {
		denied = test.denied
		got := r.run(t, "sh", "-c", "cd "+strings.TrimSpace(dir)+"; ! git "+test.command+" 2>&1")
		for _, want := range []string{test.want + strings.SplitN(test.denied, "?", 2)[0] + " at localhost:", "is not allowed: not today", "It allows", "other things."} {
			if !strings.Contains(got, want) {
				t.Errorf("%s, %s: without %q:\n%s", test.denied, test.command, want, got)
			}
		}
	}
}

// TestGo has another process of Go trust the authority by SSL_CERT_FILE alone.
func TestGo(t *testing.T) {
	if url := os.Getenv("BERM_TEST_URL"); url != "" {
		res, err := http.Get(url)
		if err != nil {
			t.Fatal(err)
		}
		v := parse(t, read(t, res))
		fmt.Println("proto", res.Proto, v.Target)
		return
	}
	r := newRig(t, shop, options{})
	cmd := exec.Command(os.Args[0], "-test.run=^TestGo$")
	cmd.Env = append(r.env(t), "BERM_TEST_URL="+r.url("/x"))
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "proto HTTP/1.1 /x\n") {
		t.Errorf("%v: %s", err, out)
	}
}

// TestJava has Java trust the authority by its own store alone.
func TestJava(t *testing.T) {
	if os.Getenv("BERM_TEST_ALL") == "" {
		t.Skip("slow: BERM_TEST_ALL=1 runs it")
	}
	r := newRig(t, shop, options{})
	files, _, err := trust.Files(root.Root{Stores: []string{"/cacerts"}}, r.config.CA.PEM(), nil)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	os.WriteFile(filepath.Join(dir, "cacerts"), files[len(files)-1].Data, 0o644)
	os.WriteFile(filepath.Join(dir, "Get.java"), []byte(`
import java.net.URI;
import java.net.http.*;
class Get {
  public static void main(String[] args) throws Exception {
    HttpClient client = HttpClient.newHttpClient();
    HttpResponse<String> reply = client.send(HttpRequest.newBuilder(URI.create(args[0])).build(), HttpResponse.BodyHandlers.ofString());
    System.out.println(reply.version() + " " + reply.body());
  }
}`), 0o644)
	got := r.run(t, "java", "-Djavax.net.ssl.trustStore="+filepath.Join(dir, "cacerts"), filepath.Join(dir, "Get.java"), r.url("/x"))
	version, body, _ := strings.Cut(got, " ")
	var v seen
	if err := json.Unmarshal([]byte(body), &v); err != nil || version != "HTTP_1_1" || v.Target != "/x" {
		t.Errorf("%q", got)
	}
	// Over plain HTTP it offers HTTP/2 by an upgrade, which is declined.
	r = newRig(t, shop, options{plain: true})
	if got = r.run(t, "java", filepath.Join(dir, "Get.java"), r.url("/x")); !strings.HasPrefix(got, "HTTP_1_1 ") {
		t.Errorf("%q", got)
	}
}
