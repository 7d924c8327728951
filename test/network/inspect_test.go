package network

import (
	"context"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
)

// startTrusting is start with a server whose services trust the internet of the test.
func startTrusting(t *testing.T, args ...string) (context.Context, *harness.Server) {
	t.Helper()
	harness.Slow(t)
	startInternet(t)
	trustInternet(t)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx, harness.Serve(t, append([]string{"--resolver", resolver + ":53"}, args...)...)
}

// trustInternet has servers that start from here on trust the internet.
func trustInternet(t *testing.T) {
	t.Helper()
	answer, err := http.Get("http://" + gateway + ":8000/certificate")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	certificate, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "berm-roots-") // readable by the services, which are nobody
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	file := filepath.Join(dir, "roots.pem")
	for _, err := range []error{os.Chmod(dir, 0o755), os.WriteFile(file, certificate, 0o644)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("SSL_CERT_FILE", file)
}

// broker is the process of the service of credentials.
func broker(t *testing.T) int {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if pids := harness.Processes("berm\x00brokerd"); len(pids) == 1 {
			return pids[0]
		}
	}
	t.Fatal("there is not one service of credentials")
	return 0
}

func setPolicy(t *testing.T, ctx context.Context, s *harness.Server, sandbox *harness.Sandbox, policy string) {
	t.Helper()
	if err := s.Call(ctx, "PUT", "/berm/v1/sandboxes/"+sandbox.ID+"/network", rawJSON(policy), nil); err != nil {
		t.Fatal(err)
	}
}

// get asks for URLs with clients that trust what a sandbox is made to trust, and returns what
// each answer begins with, or the client's exit code.
func get(t *testing.T, ctx context.Context, sandbox *harness.Sandbox, curls ...string) []string {
	t.Helper()
	var script strings.Builder
	for _, c := range curls {
		script.WriteString("curl -sS -m 8 " + c + " 2>&1 || echo \"exit $?\"; echo '#'\n")
	}
	out := run(t, ctx, sandbox, script.String()).Stdout
	got := strings.Split(strings.TrimSuffix(out, "#\n"), "#\n")
	if len(got) != len(curls) {
		t.Fatalf("%d answers for %d requests: %s", len(got), len(curls), out)
	}
	return got
}

const looksInto = `{"version":1,"rules":[
	{"id":"web","to":["www.example.com"],"http":{"allow":[{"methods":["GET"],"paths":["/a/**"]}]}},
	{"id":"files","to":["files.example.com"]}]}`

// Rules look into requests of a server's sandboxes, whose programs trust that, and none of the
// deaths lets anything through that was not allowed.
func TestInspection(t *testing.T) {
	ctx, s := startTrusting(t)
	sandbox := create(t, ctx, s, nil)
	if pids := harness.Processes("berm\x00brokerd"); len(pids) != 0 {
		t.Error("there is a service of credentials, and nobody needs one")
	}
	check := func(when string) {
		t.Helper()
		var got []string
		for end := time.Now().Add(15 * time.Second); ; {
			got = get(t, ctx, sandbox, "https://www.example.com/a/x", "https://www.example.com/b", "-X POST https://www.example.com/a/x", "http://www.example.com/a/x",
				"-k https://files.example.com/", "-k https://1.1.1.1/")
			if strings.HasPrefix(got[0], "hello") || time.Now().After(end) {
				break
			}
		}
		for i, want := range []string{"hello www.example.com", `"path"`, `"method"`, "hello www.example.com", "hello files.example.com", "exit "} {
			if !strings.Contains(got[i], want) {
				t.Errorf("%s: request %d: %q, want %q\n%s", when, i, got[i], want, s.Log())
			}
		}
	}
	setPolicy(t, ctx, s, sandbox, looksInto)
	check("at first")
	python := run(t, ctx, sandbox, `python3 -c 'import urllib.request; print(urllib.request.urlopen("https://www.example.com/a/p").read())'`)
	if !strings.Contains(python.Stdout, "hello") {
		t.Errorf("Python: %+v", python)
	}
	// From inside there is no key, and the authority is this sandbox's own.
	other := create(t, ctx, s, nil)
	setPolicy(t, ctx, s, other, looksInto)
	for _, sb := range []*harness.Sandbox{sandbox, other} {
		if out := run(t, ctx, sb, "grep -rl 'PRIVATE KEY' /etc /usr/local /run /var /opt 2>/dev/null"); strings.TrimSpace(out.Stdout) != "" {
			t.Errorf("a key: %s", out.Stdout)
		}
	}
	const fingerprint = "sha256sum </usr/local/share/ca-certificates/sandbox.crt"
	mine, theirs := run(t, ctx, sandbox, fingerprint).Stdout, run(t, ctx, other, fingerprint).Stdout
	if mine == theirs || !strings.Contains(mine, "-") {
		t.Errorf("authorities %q and %q", mine, theirs)
	}
	for name, process := range map[string]func(*testing.T) int{"network service": service, "service of credentials": broker} {
		if err := syscall.Kill(process(t), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		check("after the death of the " + name)
	}
	// The pause too.
	if err := s.Call(ctx, "POST", "/sandboxes/"+sandbox.ID+"/pause", object{}, nil); err != nil {
		t.Fatal(err)
	}
	s.Crash()
	if err := s.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	if err := s.Call(ctx, "POST", "/v2/sandboxes/"+sandbox.ID+"/connect", object{"timeout": 60}, nil); err != nil {
		t.Fatal(err)
	}
	check("after the death of the server")
	if again := run(t, ctx, sandbox, fingerprint).Stdout; again != mine {
		t.Error("another authority after the deaths")
	}
	never(t)
}

// Sandboxes leave nothing behind in the service of credentials, and cost it little while they
// idle.
func TestBrokerKeepsNothing(t *testing.T) {
	ctx, s := startTrusting(t)
	setSecret(t, ctx, s, "token", stored)
	options := object{"berm": object{"credentials": []object{{"name": "api", "secret": "secret:token", "hosts": []string{"www.example.com"}}}}}
	cycle := func(n int, options object) (took time.Duration, made []*harness.Sandbox) {
		for range n {
			sandbox := create(t, ctx, s, options)
			made = append(made, sandbox)
			for _, step := range sandbox.Steps {
				if step.Name == "network" {
					took += step.Took
				}
			}
		}
		return took / time.Duration(n), made
	}
	end := func(made []*harness.Sandbox) {
		for _, sandbox := range made {
			if err := sandbox.Kill(ctx); err != nil {
				t.Fatal(err)
			}
		}
	}
	_, made := cycle(2, options)
	pid := broker(t)
	end(made)
	before, rss := harness.Descriptors(pid), harness.RSS(pid)
	const n = 10
	plain, made := cycle(n, nil)
	end(made)
	took, made := cycle(n, options)
	t.Logf("the network took %s at create, %s without credentials; %d KiB and %.1f descriptors each in a process of %d KiB",
		took, plain, (harness.RSS(pid)-rss)>>10/n, float64(harness.Descriptors(pid)-before)/n, rss>>10)
	answers(t, ctx, s, made[0], 5*time.Second, hash, hashed("Bearer "+stored))
	end(made)
	for limit := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		after := harness.Descriptors(pid)
		if after <= before {
			return
		}
		if time.Now().After(limit) {
			t.Errorf("%d descriptors before, %d after", before, after)
			return
		}
	}
}
