package network

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
)

// The canaries: one that is stored, and one that stands in a rule itself.
const (
	stored = "CANARY-stored-secret-0123456789"
	inline = "CANARY-inline-header-0123456789"
)

// hashed is what the internet answers to /hash when the field had that value.
func hashed(value string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(value))) }

func setSecret(t *testing.T, ctx context.Context, s *harness.Server, name, value string) {
	t.Helper()
	var status *harness.StatusError
	err := s.Call(ctx, "POST", "/secrets", object{"name": name, "value": value}, nil)
	if errors.As(err, &status) && status.Status == 409 {
		err = s.Call(ctx, "POST", "/secrets/"+name, object{"value": value}, nil)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// answers waits until a request is answered as wanted.
func answers(t *testing.T, ctx context.Context, s *harness.Server, sandbox *harness.Sandbox, limit time.Duration, curl, want string) {
	t.Helper()
	var got string
	for end := time.Now().Add(limit); ; {
		// Output of commands ends with the service of credentials too.
		out, err := sandbox.Run(ctx, harness.Shell("user", "curl -sS -m 8 "+curl+" 2>&1"))
		if got = fmt.Sprint(out.Stdout, err); err == nil && strings.Contains(got, want) {
			return
		}
		if time.Now().After(end) {
			t.Errorf("%s: %q, want %q\n%s", curl, got, want, s.Log())
			return
		}
	}
}

const hash = "'https://www.example.com/hash?field=Authorization'"

// Requests of a server's sandbox get secrets that nothing inside and nothing around it holds.
func TestCredentials(t *testing.T) {
	ctx, s := startTrusting(t)
	setSecret(t, ctx, s, "Token", stored)
	credentials := []object{{"name": "api", "secret": "secret:token", "hosts": []string{"www.example.com"}, "env": "API_TOKEN"}}
	sandbox := create(t, ctx, s, object{"berm": object{"credentials": credentials}, "network": object{
		"rules": object{"files.example.com": []object{{"transform": object{"headers": object{"X-Inline": inline, "X-Both": "a ${e2b.secrets.TOKEN} b"}}}}},
	}})
	got := get(t, ctx, sandbox, hash, "https://www.example.com/echo", "'https://files.example.com/hash?field=X-Both'", "'https://files.example.com/hash?field=X-Inline'",
		"'http://files.example.com/hash?field=X-Both'", "'https://www.example.com/hash?field=X-Both'", "'http://www.example.com/hash?field=Authorization'",
		"-H \"X-Key: $API_TOKEN\" https://www.example.com/", "-k https://1.1.1.1/hash?field=Authorization")
	for i, want := range []string{
		hashed("Bearer " + stored), "Bearer " + strings.Repeat("*", len(stored)), hashed("a " + stored + " b"), hashed(inline),
		hashed(""), hashed(""), hashed(""), `"credential_misuse"`, hashed(""),
	} {
		if !strings.Contains(got[i], want) {
			t.Errorf("request %d: %q, want %q", i, got[i], want)
		}
	}
	leaks := func(when string) {
		t.Helper()
		out := run(t, ctx, sandbox, "(cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; sudo find / -xdev -type f -size -100k -newermt -1hour -exec cat {} + 2>/dev/null) | rev")
		inside := []byte(out.Stdout)
		slices.Reverse(inside) // what comes out as it is would be masked
		places := map[string][]byte{"inside": inside, "the server's log": []byte(s.Log())}
		for _, p := range []struct{ name, command string }{{"egressd", "berm\x00egressd"}, {"a monitor", "berm-monitor"}, {"init", "berm-init"}, {"the agent", "berm-guest"}} {
			for _, pid := range harness.Processes(p.command) {
				for _, canary := range []string{stored, inline} {
					if holds(t, pid, canary) {
						t.Errorf("%s: the memory of %s has %q", when, p.name, canary)
					}
				}
			}
		}
		err := filepath.WalkDir(s.Data, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() && !isImage(path) {
				places[path], err = os.ReadFile(path)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		for where, text := range places {
			for _, canary := range []string{stored, inline} {
				if bytes.Contains(text, []byte(canary)) {
					t.Errorf("%s: %s has %q", when, where, canary)
				}
			}
		}
	}
	leaks("at first")
	if !holds(t, broker(t), stored) {
		t.Error("the memory of the service of credentials does not show its secret: the search finds nothing")
	}

	// Nothing goes out without what it is to have, whatever dies.
	token := strings.TrimSpace(run(t, ctx, sandbox, "echo $API_TOKEN").Stdout)
	for name, kill := range map[string]func(){
		"the network service":        func() { _ = syscall.Kill(service(t), syscall.SIGKILL) },
		"the service of credentials": func() { _ = syscall.Kill(broker(t), syscall.SIGKILL) },
		"the server": func() {
			s.Crash()
			if err := s.Restart(ctx); err != nil {
				t.Fatal(err)
			}
		},
	} {
		before, since := look(t).Bare, time.Now()
		kill()
		answers(t, ctx, s, sandbox, 15*time.Second, hash, hashed("Bearer "+stored))
		t.Logf("after the death of %s: %s", name, time.Since(since).Round(time.Millisecond))
		answers(t, ctx, s, sandbox, 5*time.Second, "'https://files.example.com/hash?field=X-Both'", hashed("a "+stored+" b"))
		if after := look(t).Bare; after != before {
			t.Errorf("after the death of %s %d requests came without their credential", name, after-before)
		}
		if again := strings.TrimSpace(run(t, ctx, sandbox, "echo $API_TOKEN").Stdout); again != token || token == "" {
			t.Errorf("after the death of %s the placeholder is %q, was %q", name, again, token)
		}
	}
	leaks("after the deaths")

	// A secret changes and ends for the sandboxes that use it.
	setSecret(t, ctx, s, "token", stored+"-2")
	answers(t, ctx, s, sandbox, time.Second, hash, hashed("Bearer "+stored+"-2"))
	if err := s.Call(ctx, "DELETE", "/secrets/TOKEN", nil, nil); err != nil {
		t.Fatal(err)
	}
	answers(t, ctx, s, sandbox, time.Second, hash, `"credential_revoked"`)
	setSecret(t, ctx, s, "token", stored)
	answers(t, ctx, s, sandbox, time.Second, hash, hashed("Bearer "+stored))

	// So do credentials, and fields by an update of the network.
	if err := s.Call(ctx, "PUT", "/berm/v1/sandboxes/"+sandbox.ID+"/credentials", object{"credentials": []object{}}, nil); err != nil {
		t.Fatal(err)
	}
	answers(t, ctx, s, sandbox, time.Second, "-k "+hash, hashed(""))
	if err := s.Call(ctx, "PUT", "/sandboxes/"+sandbox.ID+"/network", object{"rules": object{"*.example.com": []object{{"transform": object{"headers": object{"Authorization": "Basic ${e2b.secrets.token}"}}}}}}, nil); err != nil {
		t.Fatal(err)
	}
	answers(t, ctx, s, sandbox, time.Second, hash, hashed("Basic "+stored))
	answers(t, ctx, s, sandbox, time.Second, "'https://files.example.com/hash?field=X-Both'", hashed(""))
	if err := s.Call(ctx, "PUT", "/sandboxes/"+sandbox.ID+"/network", object{}, nil); err != nil {
		t.Fatal(err)
	}

	// The end of a sandbox is the end of its rights: a connection that is open is cut.
	if err := s.Call(ctx, "PUT", "/berm/v1/sandboxes/"+sandbox.ID+"/credentials", object{"credentials": credentials}, nil); err != nil {
		t.Fatal(err)
	}
	answers(t, ctx, s, sandbox, time.Second, hash, hashed("Bearer "+stored))
	if err := sandbox.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	closed(t, 20*time.Second, site)
}

// The commands store secrets from standard input and make sandboxes with them.
func TestCredentialCommands(t *testing.T) {
	ctx, s := startTrusting(t)
	binary, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	berm := func(stdin string, code int, args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(ctx, binary, args...)
		cmd.Env = append(os.Environ(), "BERM_URL="+s.URL, "BERM_API_KEY="+s.Key)
		cmd.Stdin = strings.NewReader(stdin)
		out, _ := cmd.CombinedOutput()
		if cmd.ProcessState.ExitCode() != code {
			t.Errorf("%v: exit code %d, want %d: %s", args, cmd.ProcessState.ExitCode(), code, out)
		}
		if strings.Contains(string(out), stored) {
			t.Errorf("%v prints the secret: %s", args, out)
		}
		return string(out)
	}
	berm(stored+"\n", 0, "secret", "set", "Cli_Token")
	berm("", 1, "secret", "set", "empty")
	berm("", 2, "secret", "set", "cli_token", stored) // never an argument
	if out := berm("", 0, "secret", "ls"); !strings.Contains(out, "cli_token") {
		t.Errorf("ls: %s", out)
	}
	berm("", 0, "secret", "rotate")
	berm("", 2, "create", "--cred", "api="+stored)
	berm("", 1, "create", "--cred", "api=secret:none,host=www.example.com")
	id := berm("", 0, "create", "--cred", "api=secret:cli_token,host=www.example.com,header=X-Key,prefix=Key ")
	id = strings.TrimSpace(id[strings.LastIndexByte(strings.TrimSpace(id), '\n')+1:])
	curl := []string{"exec", id, "--", "curl", "-sS", "https://www.example.com/hash?field=X-Key"}
	if out := berm("", 0, curl...); !strings.Contains(out, hashed("Key "+stored)) {
		t.Errorf("the request: %s\n%s", out, s.Log())
	}
	other := berm("", 0, "create", "--cred", "other=secret:cli_token,host=files.example.com,endpoint=OTHER_URL", "--cred", "swap=secret:cli_token,host=www.example.com,env=SWAP,swap")
	other = strings.TrimSpace(other[strings.LastIndexByte(strings.TrimSpace(other), '\n')+1:])
	out := berm("", 0, "exec", other, "--", "sh", "-c", `curl -sS "$OTHER_URL/hash?field=Authorization"; echo; curl -sS 'https://www.example.com/hash?field=Authorization'; echo; curl -sS -H "Authorization: Bearer $SWAP" 'https://www.example.com/hash?field=Authorization'`)
	if words := strings.Fields(out); !slices.Equal(words, []string{hashed("Bearer " + stored), hashed(""), hashed("Bearer " + stored)}) {
		t.Errorf("an endpoint, without and with the placeholder: %s\n%s", out, s.Log())
	}
	berm("", 0, "kill", other)
	berm("", 0, "secret", "rm", "cli_token")
	if out := berm("", 0, curl...); !strings.Contains(out, "credential_revoked") {
		t.Errorf("without its secret: %s", out)
	}
	if out := berm("", 0, "net", "log", id); !strings.Contains(out, "credential") {
		t.Errorf("the log: %s", out)
	}
	berm("", 0, "kill", id)
}

// Two teams have a secret of the same name, and the requests of their sandboxes get the one of theirs.
func TestCredentialsOfTeams(t *testing.T) {
	ctx, s := startTrusting(t)
	binary, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	administer := func(args ...string) string {
		t.Helper()
		out, err := exec.CommandContext(ctx, binary, append(args, "--data", s.Data)...).Output()
		if err != nil {
			t.Fatalf("%v: %v", args, err)
		}
		return strings.TrimSpace(string(out))
	}
	administer("team", "create", "blue")
	blue := *s
	blue.Key = administer("key", "create", "--team", "blue", "--name", "test")
	setSecret(t, ctx, s, "token", stored+"-own")
	setSecret(t, ctx, &blue, "token", stored+"-blue")
	setSecret(t, ctx, s, "only", stored+"-only")
	options := object{
		"berm":    object{"credentials": []object{{"name": "api", "secret": "secret:token", "hosts": []string{"www.example.com"}}}},
		"network": object{"rules": object{"files.example.com": []object{{"transform": object{"headers": object{"X-Key": "${e2b.secrets.token}", "X-Only": "${e2b.secrets.only}"}}}}}},
	}
	const field, only = "'https://files.example.com/hash?field=X-Key'", "'https://files.example.com/hash?field=X-Only'"
	ours, theirs := create(t, ctx, s, options), create(t, ctx, &blue, options)
	answers(t, ctx, s, ours, 5*time.Second, hash, hashed("Bearer "+stored+"-own"))
	answers(t, ctx, s, ours, 5*time.Second, field, hashed(stored+"-own"))
	answers(t, ctx, s, ours, 5*time.Second, only, hashed(stored+"-only"))
	answers(t, ctx, &blue, theirs, 5*time.Second, hash, hashed("Bearer "+stored+"-blue"))
	answers(t, ctx, &blue, theirs, 5*time.Second, only, `"credential_revoked"`)

	// A change is one of a team, a fork is of its parent's, and so is who is met by another server and service.
	setSecret(t, ctx, &blue, "only", stored+"-2")
	answers(t, ctx, &blue, theirs, 5*time.Second, only, hashed(stored+"-2"))
	if err := s.Call(ctx, "DELETE", "/secrets/token", nil, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Call(ctx, "POST", "/berm/v1/secrets/rotate", nil, nil); err != nil {
		t.Fatal(err)
	}
	fork, err := blue.Fork(ctx, theirs, 2*time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	_ = syscall.Kill(broker(t), syscall.SIGKILL)
	s.Crash()
	if err := s.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	answers(t, ctx, s, ours, 15*time.Second, hash, `"credential_revoked"`)
	for _, sandbox := range []*harness.Sandbox{theirs, fork} {
		answers(t, ctx, &blue, sandbox, 15*time.Second, hash, hashed("Bearer "+stored+"-blue"))
		answers(t, ctx, &blue, sandbox, 5*time.Second, field, hashed(stored+"-blue"))
		answers(t, ctx, &blue, sandbox, 5*time.Second, only, hashed(stored+"-2"))
		if err := sandbox.Kill(ctx); err != nil {
			t.Error(err)
		}
	}
	if err := ours.Kill(ctx); err != nil {
		t.Error(err)
	}
}

func holds(t *testing.T, pid int, text string) bool {
	t.Helper()
	has, err := harness.Holds(pid, text)
	if err != nil {
		t.Fatal(err)
	}
	return has
}

// While requests with a credential go on and everything is killed at random, none comes out
// without it, and nothing that is not allowed.
func TestDeathsWithCredentials(t *testing.T) {
	ctx, s := startTrusting(t)
	setSecret(t, ctx, s, "token", stored)
	policy := object{"version": 1, "rules": []object{{"id": "web", "to": []string{"www.example.com"}, "http": object{"methods": []string{"GET"}}}}}
	var made []*harness.Sandbox
	for range 2 {
		sandbox := create(t, ctx, s, object{"allow_internet_access": false, "berm": object{"credentials": []object{{"name": "api", "secret": "secret:token", "hosts": []string{"www.example.com"}}}}})
		if err := s.Call(ctx, "PUT", "/berm/v1/sandboxes/"+sandbox.ID+"/network", policy, nil); err != nil {
			t.Fatal(err)
		}
		made = append(made, sandbox)
	}
	// In the background of the sandbox: the server's death ends what it follows.
	const storm = `nohup python3 -c '
import ssl, threading, time, urllib.request
end = time.time() + 14
good = [0]
def go(url, method):
    while time.time() < end:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=3) as r:
                if r.read().decode() == "%s": good[0] += 1
        except OSError: time.sleep(.02)
threads = [threading.Thread(target=go, args=a) for a in [("https://www.example.com/hash?field=Authorization", "GET")] * 8
    + [("https://www.example.com/hash?field=Authorization", "POST"), ("https://files.example.com/hash?field=Authorization", "GET"), ("https://1.1.1.1/", "GET"), ("http://10.9.9.9/", "GET")]]
[x.start() for x in threads]
[x.join() for x in threads]
open("/tmp/good", "w").write(str(good[0]))' >/dev/null 2>&1 &`
	before := look(t)
	for _, sandbox := range made {
		run(t, ctx, sandbox, fmt.Sprintf(storm, hashed("Bearer "+stored)))
	}
	since := time.Now()
	for i := 0; time.Since(since) < 9*time.Second; i++ {
		time.Sleep(time.Duration(200+rand.IntN(800)) * time.Millisecond)
		switch i % 4 {
		case 0, 2:
			_ = syscall.Kill(broker(t), syscall.SIGKILL)
		case 1:
			_ = syscall.Kill(service(t), syscall.SIGKILL)
		case 3:
			s.Crash()
			if err := s.Restart(ctx); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, sandbox := range made {
		answers(t, ctx, s, sandbox, 10*time.Second, hash, hashed("Bearer "+stored))
		out := run(t, ctx, sandbox, "for i in $(seq 100); do [ -e /tmp/good ] && break; sleep .2; done; cat /tmp/good")
		t.Logf("%s requests with their credential", strings.TrimSpace(out.Stdout))
		if n, err := strconv.Atoi(strings.TrimSpace(out.Stdout)); err != nil || n < 20 {
			t.Errorf("%q requests: the storm was none", out.Stdout)
		}
	}
	after := look(t)
	if after.Bare != before.Bare {
		t.Errorf("%d requests came without their credential", after.Bare-before.Bare)
	}
	if after.Posts != before.Posts {
		t.Errorf("%d requests came by a method that is not allowed", after.Posts-before.Posts)
	}
	never(t, one, eight)
}
