package local

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// online runs a test as a user who has the test's internet, and as root who has it.
func online(t *testing.T, test func(p *person)) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, to be the internet")
	}
	for _, program := range []string{"curl", "setpriv"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Fatal(err)
		}
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for name, uid := range map[string]int{"user": ordinary, "root": 0} {
		t.Run(name, func(t *testing.T) {
			if uid == 0 {
				slow(t)
			}
			p := newPerson(t, uid)
			// The internet is root's, whoever uses it.
			dir, err := os.MkdirTemp("", "berm-internet-")
			p.must(err)
			t.Cleanup(func() { os.RemoveAll(dir) })
			p.must(os.Chmod(dir, 0o755))
			p.outer = []string{"env", "GORACE=atexit_sleep_ms=0", "unshare", "--net", "--mount", "--propagation", "private", self, "internet", dir}
			if uid != 0 {
				id := strconv.Itoa(uid)
				p.outer = append(p.outer, "setpriv", "--reuid="+id, "--regid="+id, "--clear-groups")
			}
			p.rootOutside = true
			test(p)
		})
	}
}

const opened = internetAddress + "/32"

// fetch tries each target with curl and prints status and body, or how curl failed.
func fetch(targets ...string) string {
	var script strings.Builder
	for _, target := range targets {
		script.WriteString("curl -sS -m 10 -w ' %{http_code}\n' " + target + " 2>&1 || echo failed $?\n")
	}
	return script.String()
}

func TestAllow(t *testing.T) {
	online(t, func(p *person) {
		r := p.sh("getent hosts www.example | cut -d. -f1-2; getent hosts other.example || echo unknown\n"+
			fetch("-k https://www.example/a", "http://www.example/b", "https://other.example/", "http://"+internetAddress+"/",
				"-H 'Host: other.example' http://www.example/", "--connect-to other.example:443:www.example:443 -k https://other.example/",
				"http://169.254.169.254/", "http://www.example:22/"),
			"--allow", "www.example", "--open", opened)
		for _, want := range []string{
			"198.18\nunknown\n", "GET www.example /a\n 200\n", "GET www.example /b\n 200\n",
		} {
			if !strings.Contains(r.stdout, want) {
				t.Errorf("no %q in %v", want, r)
			}
		}
		if strings.Contains(r.stdout, "other.example /") || strings.Count(r.stdout, " 200\n") != 2 {
			t.Errorf("more than two answers: %v", r)
		}
		for _, denied := range []string{
			"other.example (not_listed); --allow other.example", internetAddress + ":80 (not_listed)",
			"169.254.169.254:80 (metadata)", "www.example:22 (port)", "www.example:443 (sni_mismatch)",
		} {
			if !strings.Contains(r.stderr, "denied: "+denied) {
				t.Errorf("%q is not told: %v", denied, r)
			}
		}
		r = p.sh(fetch("http://www.example:81/", "http://www.example:81/"), "--allow", "www.example:81", "--open", internetAddress)
		if strings.Count(r.stderr, "not reached: www.example:81: ") != 1 || !strings.Contains(r.stderr, "connection refused") {
			t.Errorf("why nothing answers is not told once: %v", r)
		}
	})
}

// A name that does not exist does not inside either, and is no denial. Denials are counted, and the
// requests are told.
func TestSummary(t *testing.T) {
	online(t, func(p *person) {
		p.write("project/net.yaml", `version: 1
rules:
  - id: api
    to: [www.example, nowhere.example]
    http:
      allow: [{methods: [GET], paths: ["/public/**"]}]
`)
		targets := []string{"https://nowhere.example/public/", "http://nowhere.example/public/", "https://www.example/secret", "https://www.example/secret", "-X POST https://www.example/public/x"}
		for i := range 7 {
			targets = append(targets, fmt.Sprintf("https://www.example/secret/%d", i))
		}
		r := p.sh(fetch(targets...)+"curl -s http://other.example; curl -s http://other.example; true", "--policy", "net.yaml", "--open", opened)
		if strings.Count(r.stdout, "Could not resolve host: nowhere.example") != 2 || strings.Contains(r.stderr, "nowhere.example") {
			t.Errorf("a name that does not exist: %v", r)
		}
		for _, want := range []string{
			"denied: www.example:443 (path), 9 times:\n", "  GET /secret, 2 times: /secret is not a path of the rule\n", "  GET /secret/3: ", "and 3 more: berm audit --local --sandbox i",
			"denied: www.example:443 (method): POST /public/x", "denied: other.example (not_listed); --allow other.example",
		} {
			if !strings.Contains(r.stderr, want) {
				t.Errorf("no %q in %v", want, r)
			}
		}
	})
}

// Without --open the address of the test is no public one, whoever names it.
func TestSpecialAddressesStayClosed(t *testing.T) {
	online(t, func(p *person) {
		r := p.sh(fetch("http://www.example/", "http://"+internetAddress+"/"), "--allow", "www.example", "--allow", internetAddress)
		if strings.Contains(r.stdout, " 200\n") {
			t.Errorf("reached: %v", r)
		}
		r.says(internetAddress+" is not the public internet (host): it stays denied unless --open opens it too",
			"denied: www.example:80 (dns_private_answer): its address "+internetAddress+" is not public; --open "+internetAddress+" lets it through",
			"denied: "+internetAddress+":80 (host): "+internetAddress+" is closed whatever is allowed; --open "+internetAddress+" lets it through")
		r = p.sh(fetch("http://www.example/", "http://"+internetAddress+"/"), "--allow", "www.example", "--allow", internetAddress, "--open", internetAddress)
		if strings.Count(r.stdout, " 200\n") != 2 {
			t.Errorf("not reached: %v", r)
		}
		p.sh("true", "--open", opened).refuses("--open "+opened+" opens nothing", "add --allow HOST")
	})
}

func TestRequestsAreJudged(t *testing.T) {
	online(t, func(p *person) {
		p.write("project/net.yaml", `version: 1
rules:
  - id: api
    to: [www.example]
    http:
      allow: [{methods: [GET], paths: ["/public/**"]}]
`)
		r := p.sh(fetch("https://www.example/public/x", "https://www.example/secret", "-X POST -d a=b https://www.example/public/x",
			"https://www.example/public/../secret --path-as-is", "http://www.example/public/y", "-H 'Host: other.example' https://www.example/public/"),
			"--policy", "net.yaml", "--open", opened)
		for _, want := range []string{"GET www.example /public/x\n 200\n", "GET www.example /public/y\n 200\n", `"reason":"path"`, `"reason":"method"`} {
			if !strings.Contains(r.stdout, want) {
				t.Errorf("no %q in %v", want, r)
			}
		}
		if strings.Count(r.stdout, " 200\n") != 2 || strings.Contains(r.stdout, "GET www.example /secret") {
			t.Errorf("more than two answers: %v", r)
		}
	})
}

// Every denial is told, also of a command that ends right after it, and is in the record.
func TestLastDenialIsTold(t *testing.T) {
	online(t, func(p *person) {
		for range 5 {
			r := p.berm("run", "--allow", "www.example", "--json", "--", "bash", "-c", "exec 3<>/dev/tcp/203.0.113.9/80")
			var result struct {
				Denied []struct{ Address, Reason string }
			}
			line := r.stderr[strings.LastIndex(strings.TrimSpace(r.stderr), "\n")+1:]
			if err := json.Unmarshal([]byte(line), &result); err != nil || len(result.Denied) != 1 || result.Denied[0].Address != "203.0.113.9" {
				t.Fatalf("%v: %+v", r, result)
			}
		}
		if record := p.read(".local/state/berm/audit/log.jsonl"); strings.Count(record, `"net.flow"`) < 5 {
			t.Errorf("the record has %d flows", strings.Count(record, `"net.flow"`))
		}
	})
}

// When the network service dies, another one takes its place, with the same policy.
func TestServiceDies(t *testing.T) {
	online(t, func(p *person) {
		cmd := p.command("run", "--rw", ".", "--allow", "www.example", "--open", opened, "--", "sh", "-c",
			"curl -sS -m 20 http://www.example/a; echo; until test -e go; do sleep 0.1; done; curl -sS -m 20 http://www.example/b; echo; curl -sS -m 20 http://other.example/c || echo none")
		out, err := cmd.StdoutPipe()
		p.must(err)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		p.must(cmd.Start())
		defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
		lines := bufio.NewReader(out)
		if line, err := lines.ReadString('\n'); err != nil || line != "GET www.example /a\n" {
			p.Fatalf("%q, %v", line, err)
		}
		for _, process := range below(cmd.Process.Pid) {
			if strings.Contains(process.cmdline, "\x00egressd\x00") {
				p.must(syscall.Kill(process.pid, syscall.SIGKILL))
			}
		}
		time.Sleep(500 * time.Millisecond)
		p.write("project/go", "")
		rest, _ := io.ReadAll(lines)
		_ = cmd.Wait()
		if !strings.Contains(string(rest), "GET www.example /b\n") || !strings.Contains(string(rest), "none\n") || strings.Contains(string(rest), "/c") {
			t.Errorf("%q", rest)
		}
		for _, want := range []string{"the network service ended: signal: killed; another one took its place", "denied: other.example (not_listed)"} {
			if !strings.Contains(stderr.String(), want) {
				t.Errorf("no %q in %s", want, stderr.String())
			}
		}
	})
}
