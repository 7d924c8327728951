package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit/writer/writertest"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
	"github.com/berm-sandbox/berm/internal/client/clienttest"
)

// The test binary is berm when it is called by this variable.
const asBerm = "BERM_TEST_AS_BERM"

func TestMain(m *testing.M) {
	writertest.Main()
	if os.Getenv(asBerm) != "" {
		main()
	}
	os.Exit(m.Run())
}

// What the server keeps in the metadata of sandboxes is not shown to people.
func TestMetadataOfTheServer(t *testing.T) {
	all := map[string]string{"user": "ann", "berm.container": "", "berm.rerun": "i0", "bermuda": "x"}
	if got := sortedPairs(own(all)); got != "bermuda=x user=ann" || len(all) != 4 {
		t.Errorf("%q of %v", got, all)
	}
	if got := sortedPairs(own(nil)); got != "" {
		t.Errorf("%q", got)
	}
}

// hostile is what somebody puts into a name, metadata, an environment or a log to
// act on the terminal of who lists it.
const hostile = "\x1b]52;c;cHduCg==\a\x1b]0;t\a\x1b[?1049h\x1bP$q\"p\x1b\\\x1b]8;;http://evil.test\aX\x1b[6n\x1bc" +
	"a\rb\n\u009b31m\u202Eabc\u2028\x00\x7fEND"

// inert fails the test when text would act on a terminal: all but newlines, tabs
// and the colours that berm itself uses.
func inert(t *testing.T, text string) {
	t.Helper()
	text = regexp.MustCompile(`\x1b\[[0-9;]*m`).ReplaceAllString(text, "")
	for _, r := range text {
		if r < 0x20 && r != '\n' && r != '\t' || r >= 0x7f && r <= 0x9f || r == 0x202e || r == 0x2028 {
			t.Fatalf("%U in %q", r, text)
		}
	}
}

// setup is a berm with a server of its own, and without any configuration of whoever
// runs the test.
type setup struct {
	t      *testing.T
	server *clienttest.Server
	env    []string
}

func newSetup(t *testing.T) *setup {
	s := &setup{t: t, server: clienttest.Start(t)}
	s.env = []string{
		asBerm + "=1", "PATH=" + os.Getenv("PATH"), "HOME=" + t.TempDir(), "XDG_CONFIG_HOME=" + t.TempDir(),
		"GORACE=atexit_sleep_ms=0", // else a second each, in a build with the race detector
		"BERM_URL=" + s.server.URL, "BERM_API_KEY=" + clienttest.Key,
	}
	return s
}

func (s *setup) command(args ...string) *exec.Cmd {
	self, err := os.Executable()
	if err != nil {
		s.t.Fatal(err)
	}
	cmd := exec.Command(self, args...)
	cmd.Env = s.env
	return cmd
}

type result struct {
	stdout, stderr string
	code           int
}

func (s *setup) run(args ...string) result { return s.runWith("", args...) }

func (s *setup) runWith(stdin string, args ...string) result {
	s.t.Helper()
	cmd := s.command(args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		s.t.Fatal(err)
	}
	return result{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// ok runs a command that must succeed and returns its stdout.
func (s *setup) ok(args ...string) string {
	s.t.Helper()
	r := s.run(args...)
	if r.code != 0 {
		s.t.Fatalf("berm %q: code %d, %s", args, r.code, r.stderr)
	}
	return r.stdout
}

func TestLifeCycle(t *testing.T) {
	s := newSetup(t)
	id := strings.TrimSpace(s.ok("create", "--metadata", "user=ann", "--timeout", "90", "-e", "HOME"))
	if _, err := berm.ParseSandboxID(id); err != nil {
		t.Fatal(err)
	}
	other := strings.TrimSpace(s.ok("create", "base", "--timeout", "1h"))
	if got := s.ok("ls", "-q"); got != other+"\n"+id+"\n" {
		t.Errorf("ls -q: %q", got)
	}
	if got := s.ok("ls", "-q", "-m", "user=ann"); got != id+"\n" {
		t.Errorf("ls of metadata: %q", got)
	}
	s.ok("pause", id)
	if got := s.ok("ls", "-q", "--state", "paused"); got != id+"\n" {
		t.Errorf("ls of paused: %q", got)
	}
	if r := s.run("exec", id, "--", "true"); r.code != 1 || !strings.Contains(r.stderr, "hint: berm resume "+id) {
		t.Errorf("exec in a paused sandbox: %+v", r)
	}
	if got := s.ok("resume", "--json", id); got != `{"resumed":true,"sandboxID":"`+id+"\"}\n" {
		t.Errorf("resume: %q", got)
	}
	if r := s.run("kill", id, "i0nosuch", other); r.code != 1 || r.stdout != id+"\n"+other+"\n" || !strings.Contains(r.stderr, "i0nosuch") {
		t.Errorf("kill of three, one of them unknown: %+v", r)
	}
	var left []client.Sandbox
	if err := json.Unmarshal([]byte(s.ok("ls", "--json")), &left); err != nil || left == nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func TestTimeTravel(t *testing.T) {
	s := newSetup(t)
	id := strings.TrimSpace(s.ok("create"))
	if got := s.ok("snapshot", id, "--name", "before"); got != "before:default\n" {
		t.Errorf("snapshot: %q", got)
	}
	second := strings.TrimSpace(s.ok("snapshot", id))
	if got := s.ok("snapshots", "-q"); got != second+"\nbefore:default\n" {
		t.Errorf("snapshots: %q", got)
	}
	if r := s.run("snapshots", "i0other", "--json"); r.code != 1 || !strings.Contains(r.stderr+r.stdout, "not found") {
		t.Errorf("snapshots of none that there is: %+v", r)
	}
	r := s.run("fork", id, "-n", "3")
	if r.code != 1 || strings.Count(r.stdout, "\n") != 2 || !strings.Contains(r.stderr, "child 2: no room") {
		t.Errorf("fork: %+v", r)
	}
	child, _, _ := strings.Cut(r.stdout, "\n")
	lines := s.ok("timeline", id)
	for _, want := range []string{"berm create before:default", "berm create " + second, "berm connect " + child} {
		if !strings.Contains(lines, want) {
			t.Errorf("%q is not in %s", want, lines)
		}
	}
	if strings.Index(lines, "before") > strings.Index(lines, child) {
		t.Errorf("not in order: %s", lines)
	}
	checkpointed := strings.TrimSpace(s.ok("create", "--checkpoint", "every=5m,exec", "--checkpoint", "keep=3"))
	if got := s.ok("inspect", checkpointed); !strings.Contains(got, "every=5m0s,exec,keep=3") {
		t.Errorf("inspect: %s", got)
	}
	for _, bad := range []string{"", "hourly", "every", "every=1ms", "keep=0", "keep=x"} {
		if r := s.run("create", "--checkpoint", bad); r.code != 2 {
			t.Errorf("--checkpoint %q: %+v", bad, r)
		}
	}
	lines = s.ok("timeline", checkpointed)
	for _, want := range []string{"checkpoint: before a command", "missed: no room (2 in all)"} {
		if !strings.Contains(lines, want) {
			t.Errorf("%q is not in %s", want, lines)
		}
	}
	if got := s.ok("rollback", id, "before"); got != id+"\n" {
		t.Errorf("rollback: %q", got)
	}
	if got := s.ok("snapshots", "rm", "before:default"); got != "before:default\n" {
		t.Errorf("rm: %q", got)
	}
	if r := s.run("snapshots", "rm", "before:default"); r.code != 1 || !strings.Contains(r.stderr, "not found") {
		t.Errorf("rm twice: %+v", r)
	}
	s.ok("pause", "--files-only", id)
}

func TestUsageErrorsExitWith2(t *testing.T) {
	s := newSetup(t)
	for _, args := range [][]string{
		{"nosuch"}, {"--nosuch"}, {"ls", "extra"}, {"ls", "--state", "dead"}, {"ls", "-m", "novalue"}, {"create", "a", "b"},
		{"create", "--timeout", "soon"}, {"create", "--timeout", "-1s"}, {"create", "-e", "BERM_SURELY_NOT_SET"}, {"create", "--memory", "1X"},
		{"kill"}, {"kill", "../x"}, {"exec"}, {"exec", "i0"}, {"exec", "i0", "--"}, {"exec", "i0", "--nosuch", "--", "true"}, {"exec", "I0", "true"},
		{"cp", "a"}, {"cp", "a", "b"}, {"cp", "i0:a", "i0:b"}, {"connect"}, {"logs"}, {"metrics"}, {"inspect", "a/b"},
		{"context", "nosuch"}, {"context", "add", "x"}, {"context", "add", "x", "http://h"}, {"doctor", "x"},
	} {
		if r := s.run(args...); r.code != 2 || !strings.Contains(r.stderr, "hint:") || r.stdout != "" {
			t.Errorf("berm %q: %+v", args, r)
		}
	}
	if n := len(s.server.Requests()); n != 0 {
		t.Errorf("%d requests of wrong command lines: %q", n, s.server.Requests())
	}
}

func TestHelpBehindTheSandbox(t *testing.T) {
	s := newSetup(t)
	if got := s.ok("exec", "i0abc", "--help"); !strings.Contains(got, "berm exec SANDBOX") {
		t.Errorf("%q", got)
	}
	id := string(s.server.Add(client.Sandbox{}).ID)
	if got := s.ok("exec", id, "printf", "%s", "--help"); got != "--help" {
		t.Errorf("the command's own flag: %q", got)
	}
}

func TestErrors(t *testing.T) {
	s := newSetup(t)
	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"exec", "i0nosuch", "true"}, "not found"},
		{[]string{"create", "nosuch\x1b[2J"}, `template 'nosuch\x1b[2J' not found`},
		{[]string{"--context", "nosuch"}, "unknown flag"},
		{[]string{"ls", "--context", "nosuch"}, "hint: `berm context ls`"},
	} {
		r := s.run(test.args...)
		inert(t, r.stderr)
		if r.code == 0 || !strings.Contains(r.stderr, test.want) {
			t.Errorf("berm %q: %+v", test.args, r)
		}
	}
	r := s.run("kill", "--json", "i0nosuch")
	var object struct {
		Error struct{ Kind, Message string }
	}
	if err := json.Unmarshal([]byte(r.stderr), &object); err != nil || object.Error.Kind != "not found" || r.code != 1 {
		t.Errorf("error as JSON: %+v, %v", r, err)
	}
	s.env = append(s.env, "BERM_API_KEY=")
	if r := s.run("ls"); r.code != 1 || !strings.Contains(r.stderr, "no API key") || !strings.Contains(r.stderr, "hint: Set BERM_API_KEY") {
		t.Errorf("without a key: %+v", r)
	}
	s.env = append(s.env, "BERM_API_KEY=wrong")
	if r := s.run("ls"); r.code != 1 || !strings.Contains(r.stderr, "Invalid API key") || !strings.Contains(r.stderr, "berm key create") {
		t.Errorf("with a wrong key: %+v", r)
	}
}

// Whatever lists sandboxes prints what their users and their inhabitants chose.
func TestHostileStringsAreEscaped(t *testing.T) {
	s := newSetup(t)
	now := time.Now()
	id := string(s.server.Add(client.Sandbox{
		Alias: hostile, TemplateID: hostile, Metadata: map[string]string{hostile: hostile},
	}).ID)
	s.server.Set(func(s *clienttest.Server) {
		s.Policy = berm.Policy{
			Level: hostile, Mounts: []string{hostile}, Masked: []string{hostile, hostile}, Network: hostile, Landlock: hostile,
			Degraded: []string{hostile}, Seccomp: berm.Seccomp{Profile: hostile, Default: hostile, Allowed: []string{hostile}, Rules: []string{hostile}},
		}
	})
	s.server.Set(func(s *clienttest.Server) {
		s.Logs = []client.LogEntry{{Timestamp: now, Level: hostile, Message: hostile, Fields: map[string]string{hostile: hostile}}}
	})
	for _, args := range [][]string{
		{"ls"}, {"ls", "--json"}, {"logs", id}, {"logs", "--json", id}, {"inspect", id}, {"inspect", "--json", id},
		{"__complete", "kill", ""}, {"__complete", "cp", ""}, {"create", hostile}, {"create", "--json", hostile}, {"kill", hostile}, {hostile},
	} {
		if strings.ContainsRune(strings.Join(args, ""), 0) {
			for i := range args { // no argument of a process has one
				args[i] = strings.ReplaceAll(args[i], "\x00", "")
			}
		}
		r := s.run(args...)
		inert(t, r.stdout)
		inert(t, r.stderr)
		if args[0] != "__complete" && !strings.Contains(r.stdout+r.stderr, "END") && args[0] != "ls" {
			t.Errorf("berm %q does not show it at all: %+v", args, r)
		}
		// The same on a terminal, where there are colours.
		inert(t, strings.ReplaceAll(s.onTerminal(args...), "\r\n", "\n"))
	}
}

func TestLongValuesAreClipped(t *testing.T) {
	s := newSetup(t)
	s.server.Add(client.Sandbox{Metadata: map[string]string{"long": strings.Repeat("\x1b", 1<<20)}})
	if got := s.ok("ls"); len(got) > 400 || !strings.Contains(got, "…") {
		t.Errorf("a table of %d bytes", len(got))
	}
}

// onTerminal runs a command on a terminal and returns what appears there.
func (s *setup) onTerminal(args ...string) string {
	s.t.Helper()
	cmd := s.command(args...)
	cmd.Env = append(cmd.Env, "TERM=xterm")
	ptmx, err := pty.StartWithSize(cmd, &pty.Winsize{Cols: 90, Rows: 30})
	if err != nil {
		s.t.Fatal(err)
	}
	defer ptmx.Close()
	text, err := io.ReadAll(ptmx)
	if err != nil && !errors.Is(err, syscall.EIO) { // EIO: the other side is closed
		s.t.Fatal(err)
	}
	cmd.Wait()
	return string(text)
}

func TestColourOnATerminalOnly(t *testing.T) {
	s := newSetup(t)
	s.server.Add(client.Sandbox{})
	if got := s.onTerminal("ls"); !strings.HasPrefix(got, "\x1b[1mSANDBOX") {
		t.Errorf("on a terminal: %q", got)
	}
	if got := s.ok("ls"); strings.Contains(got, "\x1b") {
		t.Errorf("in a pipe: %q", got)
	}
	s.env = append(s.env, "NO_COLOR=1")
	if got := s.onTerminal("ls"); strings.Contains(got, "\x1b") {
		t.Errorf("with NO_COLOR: %q", got)
	}
}

func TestLogsFollow(t *testing.T) {
	s := newSetup(t)
	b := s.server.Add(client.Sandbox{})
	at := time.Now().Truncate(time.Millisecond)
	// More than a page, with more than a page in one millisecond, and the same line
	// twice at two times.
	var lines []client.LogEntry
	for i := range 2500 {
		stamp := at
		if i >= 1500 {
			stamp = at.Add(time.Duration(i-1500) * time.Millisecond)
		}
		lines = append(lines, client.LogEntry{Timestamp: stamp, Level: "info", Message: fmt.Sprint("line ", i)})
	}
	s.server.Set(func(s *clienttest.Server) { s.Logs = lines[:2490] })
	cmd := s.command("logs", "--follow", "--json", string(b.ID))
	var out bytes.Buffer
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(300 * time.Millisecond)
	s.server.Set(func(s *clienttest.Server) { s.Logs = lines })
	time.Sleep(1500 * time.Millisecond)
	s.server.Edit(b.ID, func(b *client.Sandbox) { b.ID = "i0gone" })
	s.server.Edit(b.ID, func(*client.Sandbox) { t.Error("still there") })
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case <-done: // logs of a sandbox that is gone are not found: any code will do
	case <-time.After(10 * time.Second):
		cmd.Process.Kill()
		t.Fatal("it does not end with the sandbox")
	}
	seen := map[string]int{}
	for line := range strings.Lines(out.String()) {
		var e client.LogEntry
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatal(err)
		}
		seen[e.Message]++
	}
	// The server's cursor is a millisecond: of the 1,501 of one, a page is all there is.
	for i := range 2500 {
		if n := seen[fmt.Sprint("line ", i)]; n != 1 && (i < 1000 || i > 1500) {
			t.Fatalf("line %d was printed %d times", i, n)
		}
	}
}

func TestMetrics(t *testing.T) {
	s := newSetup(t)
	id := string(s.server.Add(client.Sandbox{}).ID)
	if r := s.run("metrics", id); r.code != 0 || !strings.Contains(r.stderr, "no measurement yet") {
		t.Errorf("before the first: %+v", r)
	}
	at := time.Now().Add(-5 * time.Second)
	for i := range 3 {
		s.server.Set(func(s *clienttest.Server) {
			s.Metrics = append(s.Metrics, client.Metric{Timestamp: at.Add(time.Duration(i) * time.Second), CPUCount: 2, CPUUsedPct: float64(i), MemUsed: 100 << 20, MemTotal: 512 << 20})
		})
	}
	last := s.ok("metrics", id)
	if lines := strings.Split(strings.TrimSpace(last), "\n"); len(lines) != 2 || !strings.Contains(lines[1], "2.0") || !strings.Contains(lines[1], "100 MiB") || len(lines[0]) != len(lines[1]) {
		t.Errorf("last one:\n%s", last)
	}
	if got := s.ok("metrics", "--since", "1m", "--json", id); strings.Count(got, "\n") != 3 {
		t.Errorf("all: %q", got)
	}
}

func TestContextCommands(t *testing.T) {
	s := newSetup(t)
	s.env = append(s.env, "BERM_URL=", "BERM_API_KEY=")
	if r := s.runWith(clienttest.Key+"\n", "context", "add", "here", s.server.URL); r.code != 0 {
		t.Fatalf("%+v", r)
	}
	if r := s.runWith("e2b_x", "context", "add", "far", "http://berm.example:1"); r.code != 0 || !strings.Contains(r.stderr, "unencrypted") {
		t.Errorf("%+v", r)
	}
	s.ok("ls") // the first one is the current one
	if got := s.ok("context", "ls"); strings.Contains(got, "e2b_") || !strings.Contains(got, "*        here") {
		t.Errorf("%s", got)
	}
	if got := s.ok("context", "ls", "--json"); strings.Contains(got, "e2b_") {
		t.Errorf("keys in %s", got)
	}
	s.ok("context", "use", "far")
	s.ok("ls", "--context", "here")
	s.ok("context", "rm", "far", "here")
	if r := s.run("ls"); r.code != 1 || !strings.Contains(r.stderr, "no API key for http://127.0.0.1:7676") {
		t.Errorf("%+v", r)
	}
	s.env = append(s.env, "E2B_API_URL=foo")
	if r := s.run("ls"); r.code != 1 || !strings.Contains(r.stderr, `"foo" is no server address`) {
		t.Errorf("%+v", r)
	}
}

func TestCompletion(t *testing.T) {
	s := newSetup(t)
	id := string(s.server.Add(client.Sandbox{}).ID)
	s.ok("pause", id)
	running := string(s.server.Add(client.Sandbox{}).ID)
	s.ok("snapshot", running, "--name", "saved")
	for _, test := range []struct {
		args      string
		with, out string
	}{
		{"rollback", running, "saved"}, {"rollback " + running, "saved", "base"}, {"rollback " + running + " saved", "", running}, {"snapshots rm", "saved", "base"},
		{"audit --type", "net.flow", running}, {"create --level", "gvisor", "microvm"},
		{"kill", id, "-"}, {"exec", running, "-"}, {"resume", id, running}, {"pause", running, id},
		{"kill " + id, running, id}, {"exec " + id, "", running}, {"cp", id + ":", "-"}, {"create", "base", "-"},
	} {
		got := s.ok(append(append([]string{"__complete"}, strings.Fields(test.args)...), "")...)
		if !strings.Contains(got, test.with) || strings.Contains(got, test.out) {
			t.Errorf("%s <tab>: %q, want %q, not %q", test.args, got, test.with, test.out)
		}
	}
	s.env = append(s.env, "BERM_URL=http://127.0.0.1:1")
	if r := s.run("__complete", "kill", ""); r.code != 0 || strings.Contains(r.stdout, "berm:") {
		t.Errorf("without a server: %+v", r)
	}
}

func TestInspectShowsThePolicyButNoSecrets(t *testing.T) {
	s := newSetup(t)
	id := string(s.server.Add(client.Sandbox{TrafficToken: "traffic-secret"}).ID)
	s.server.Set(func(s *clienttest.Server) {
		s.Policy = berm.Policy{Level: berm.Namespace, Capabilities: []string{"CAP_CHOWN"}, Limits: berm.Limits{Memory: 512 << 20, CPU: 1.5}, Network: "none but loopback"}
	})
	text := s.ok("inspect", id)
	for _, want := range []string{"level           namespace", "CAP_CHOWN", "memory          512 MiB", "cpu             1.5 cores", "processes       no limit"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in:\n%s", want, text)
		}
	}
	var object struct {
		Sandbox client.Sandbox
		Policy  berm.Policy
	}
	raw := s.ok("inspect", "--json", id)
	if err := json.Unmarshal([]byte(raw), &object); err != nil || object.Policy.Limits.CPU != 1.5 || string(object.Sandbox.ID) != id {
		t.Errorf("%s: %v", raw, err)
	}
	if strings.Contains(raw+text, clienttest.Token) || strings.Contains(raw+text, "traffic-secret") {
		t.Error("it shows a token")
	}
}

// What matters most to who asks stands before the pages of system calls.
func TestInspectShowsNetworkAndCredentialsFirst(t *testing.T) {
	s := newSetup(t)
	id := string(s.server.Add(client.Sandbox{}).ID)
	s.server.Set(func(s *clienttest.Server) {
		s.Policy = berm.Policy{Level: berm.Namespace, Degraded: []string{"memory: no control group"}}
		s.Network = []json.RawMessage{json.RawMessage(`{"version":1,"rules":[{"id":"web","to":["example.com"]}]}`)}
		s.Credentials = client.Credentials{
			Credentials: []client.Credential{{Name: "api", Secret: "secret:some", Hosts: []string{"api.example"}}, {Name: "gh", Secret: "secret:gh", Service: "github"}},
			Fields:      map[string][]string{"*.example.com": {"X-Key"}},
		}
	})
	text := s.ok("inspect", id)
	calls := strings.Index(text, "\nPolicy\n")
	for _, want := range []string{
		"What the host could not give\n  memory: no control group", "Network policy, revision 1\n", "{id: web, to: [example.com]}",
		"api: secret:some, for requests to api.example", "gh: secret:gh, for requests to github", "*.example.com: X-Key",
	} {
		if at := strings.Index(text, want); at < 0 || at > calls {
			t.Errorf("%q is not before the policy (%d, %d):\n%s", want, at, calls, text)
		}
	}
	if raw := s.ok("inspect", "--json", id); !strings.Contains(raw, `"secret": "secret:some"`) || !strings.Contains(raw, `"X-Key"`) {
		t.Errorf("%s", raw)
	}
}

func TestNetworkPolicyOfASandbox(t *testing.T) {
	s := newSetup(t)
	file := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(file, []byte("version: 1\nrules:\n  - {id: db, to: [db.example.com], ports: [5432]}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	id := strings.TrimSpace(s.ok("create", "--allow", "pypi", "--policy", file))
	policy := func() string {
		var text string
		s.server.Set(func(s *clienttest.Server) { text = string(s.Network[len(s.Network)-1]) })
		return text
	}
	if got := policy(); !strings.Contains(got, `"pypi"`) || strings.Index(got, `"pypi"`) > strings.Index(got, "db.example.com") || slices.ContainsFunc(s.server.Requests(), func(r string) bool { return strings.HasPrefix(r, "PUT ") }) {
		t.Errorf("%s after %q", got, s.server.Requests())
	}
	if r := s.run("net", "set", id, "--allow", "npm"); r.stdout != "2\n" || !strings.Contains(r.stderr, "warning: a rule is never reached") || !strings.Contains(policy(), "npm") {
		t.Errorf("%+v, %s", r, policy())
	}
	if r := s.run("net", "set", id, "--policy", file, "--revision", "1"); r.code != 1 || !strings.Contains(r.stderr, "changed meanwhile") || !strings.Contains(policy(), "npm") {
		t.Errorf("%+v, %s", r, policy())
	}
	if got := s.ok("net", "set", "--json", id, "--policy", file, "--revision", "2"); !strings.Contains(got, `"revision":"3"`) && !strings.Contains(got, `"revision": "3"`) {
		t.Error(got)
	}
	if r := s.runWith("version: 1\n", "net", "set", id, "--policy", "-"); r.code != 0 || strings.Contains(policy(), "rules\":[{") {
		t.Errorf("%+v, %s", r, policy())
	}
	for _, args := range [][]string{{"net", "set", id}, {"net", "set", id, "--allow", "npm", "--revision", "x"}, {"net", "set", "a/b", "--allow", "npm"}} {
		if r := s.run(args...); r.code != 2 {
			t.Errorf("berm %q: %+v", args, r)
		}
	}
	for _, args := range [][]string{{"net", "set", id, "--allow", "a b"}, {"create", "--allow", "a b"}, {"create", "--policy", file + "x"}} {
		if r := s.run(args...); r.code == 0 || r.stdout != "" {
			t.Errorf("berm %q: %+v", args, r)
		}
	}
	s.server.Set(func(s *clienttest.Server) {
		s.Explained = `{"rules":[{"id":"web","text":"Allow 10.0.0.0/8."}],"default":"Everything else is denied."}`
	})
	if got := s.ok("policy", "explain", id); !strings.Contains(got, "revision 4") || !strings.Contains(got, "Allow 10.0.0.0/8. (web)") {
		t.Error(got)
	}
	if r := s.run("policy", "explain", "--open", "10.0.0.0/8", id); r.code != 2 {
		t.Errorf("%+v", r)
	}
	if r := s.run("net", "log", id); r.code != 0 || r.stdout != "" || !strings.Contains(r.stderr, "nothing was denied") {
		t.Errorf("%+v", r)
	}
	if r := s.run("net", "log", "i0ended"); !strings.Contains(r.stderr, "berm audit --sandbox i0ended --type net") {
		t.Errorf("%+v", r)
	}
	s.server.Set(func(s *clienttest.Server) { s.IsE2B = true })
	if r := s.run("create", "--allow", "pypi"); r.code != 1 || !strings.Contains(r.stderr, "no Berm server") {
		t.Errorf("%+v", r)
	}
}

func TestInspectOfADeadSandbox(t *testing.T) {
	s := newSetup(t)
	s.server.Set(func(s *clienttest.Server) {
		s.Exits = map[berm.SandboxID]berm.Exit{"i0dead": {Reason: berm.ReasonOOM, Signal: "SIGKILL", Detail: "the kernel ended it", At: time.Now()}}
	})
	if got := s.ok("inspect", "i0dead"); !strings.Contains(got, "oom, SIGKILL") || !strings.Contains(got, "the kernel ended it") || strings.Contains(got, "Policy") {
		t.Errorf("%s", got)
	}
}

func TestCreateLimitsAreNotDropped(t *testing.T) {
	s := newSetup(t)
	s.ok("create", "--memory", "1GiB", "--cpus", "1.5")
	s.server.Set(func(s *clienttest.Server) { s.IsE2B = true }) // it ignores what it does not know
	if r := s.run("create", "--memory", "1GiB"); r.code != 1 || !strings.Contains(r.stderr, "no Berm server") {
		t.Errorf("%+v", r)
	}
	if got := s.ok("ls", "-q"); strings.Count(got, "\n") != 1 {
		t.Errorf("the sandbox without limits is left: %q", got)
	}
}

func TestDoctor(t *testing.T) {
	found := berm.Feature{Name: "kernel", Found: true, Required: true, Detail: "6.1\x1b[2J"}
	needed := berm.Feature{Name: "user namespaces", Required: true, MinVersion: "3.8", Fix: "sysctl it"}
	wished := berm.Feature{Name: "cgroup.kill", MinVersion: "5.14", Fix: "newer kernel"}
	for name, test := range map[string]struct {
		probe berm.Probe
		args  []string
		code  int
		with  []string
		out   string
	}{
		"usable":     {berm.Probe{Level: berm.Namespace, Usable: true, Features: []berm.Feature{found, wished}}, nil, 0, []string{"Level namespace  usable", `6.1\x1b[2J`, "in Linux since 5.14", "--fix-hints says"}, "newer kernel"},
		"all hints":  {berm.Probe{Level: berm.Namespace, Usable: true, Features: []berm.Feature{found, wished}}, []string{"--fix-hints"}, 0, []string{"fix: newer kernel"}, "required"},
		"not usable": {berm.Probe{Level: berm.Namespace, Features: []berm.Feature{found, needed}}, nil, 1, []string{"not usable", "in Linux since 3.8; required", "fix: sysctl it"}, "--fix-hints"},
		"other one":  {berm.Probe{Level: berm.GVisor, Usable: true}, nil, 1, []string{"Level gvisor  usable"}, "namespace"},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			run := func(args ...string) (code int) {
				cmd := newDoctorCommand(func(context.Context) ([]berm.Probe, error) { return []berm.Probe{test.probe}, nil })
				cmd.SilenceErrors, cmd.SilenceUsage = true, true
				cmd.SetOut(&out)
				cmd.SetArgs(args)
				if cmd.Execute() != nil {
					return 1
				}
				return 0
			}
			if code := run(append([]string{}, test.args...)...); code != test.code {
				t.Errorf("code %d", code)
			}
			inert(t, out.String())
			for _, want := range test.with {
				if !strings.Contains(out.String(), want) {
					t.Errorf("no %q in:\n%s", want, out.String())
				}
			}
			if strings.Contains(out.String(), test.out) {
				t.Errorf("%q in:\n%s", test.out, out.String())
			}
			out.Reset()
			var probes []berm.Probe
			if code := run("--json"); code != test.code {
				t.Errorf("--json: code %d", code)
			}
			if err := json.Unmarshal(out.Bytes(), &probes); err != nil || len(probes) != 1 {
				t.Errorf("--json: %v, %s", err, out.String())
			}
		})
	}
}

// Whatever this host can do, doctor says it consistently.
func TestDoctorOfThisHost(t *testing.T) {
	s := newSetup(t)
	r := s.run("doctor", "--json")
	var probes []berm.Probe
	if err := json.Unmarshal([]byte(r.stdout), &probes); err != nil {
		t.Fatalf("%v: %+v", err, r)
	}
	usable := false
	for _, p := range probes {
		missing, seen := false, map[string]bool{}
		for _, f := range p.Features {
			missing = missing || f.Required && !f.Found
			if seen[f.Name] {
				t.Errorf("%s is there twice", f.Name)
			}
			seen[f.Name] = true
			if !f.Found && f.Fix == "" {
				t.Errorf("no way to get %+v", f)
			}
		}
		if p.Usable && missing {
			t.Errorf("usable without a required feature: %+v", p)
		}
		if p.Level == berm.Namespace {
			usable = p.Usable
			for _, name := range []string{"kernel", "user namespaces", "seccomp filters", "control groups"} {
				if !seen[name] {
					t.Errorf("nothing about %s", name)
				}
			}
		}
	}
	if (r.code == 0) != usable {
		t.Errorf("code %d, usable: %v", r.code, usable)
	}
}

func TestSizeAndDuration(t *testing.T) {
	for in, want := range map[string]int64{"1": 1, "512MiB": 512 << 20, "2G": 2 << 30, "1.5GiB": 3 << 29, "10K": 10 << 10, "7B": 7} {
		var n cli.SizeFlag
		if err := n.Set(in); err != nil || int64(n) != want {
			t.Errorf("%s is %d, %v", in, n, err)
		}
	}
	for _, in := range []string{"", "0", "-1", "x", "1X", "1e99", "NaN", "Inf", "1GG", "GiB"} {
		var n cli.SizeFlag
		if n.Set(in) == nil {
			t.Errorf("%q is taken as %d", in, n)
		}
	}
	for in, want := range map[string]time.Duration{"90": 90 * time.Second, "5m": 5 * time.Minute, "1h30m": 90 * time.Minute} {
		var d cli.DurationFlag
		if err := d.Set(in); err != nil || time.Duration(d) != want {
			t.Errorf("%s is %v, %v", in, d, err)
		}
	}
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 10 << 10: "10 KiB", 1023 << 10: "1.0 MiB", 1 << 40: "1.0 TiB"} {
		if got := cli.Size(n); got != want {
			t.Errorf("size(%d) = %q, want %q", n, got, want)
		}
	}
}

func TestCopyPaths(t *testing.T) {
	for in, want := range map[string][2]string{
		"i0abc:/x": {"i0abc", "/x"}, "i0abc:": {"i0abc", "."}, "i0abc-legacy:a:b": {"i0abc-legacy", "a:b"},
		"./i0abc:/x": {"", "./i0abc:/x"}, "/a:b": {"", "/a:b"}, "file": {"", "file"}, "C:x": {"", "C:x"},
	} {
		if id, name := splitPath(in); id != want[0] || name != want[1] {
			t.Errorf("%s: %q, %q", in, id, name)
		}
	}
}

func TestEveryCommandHasExamples(t *testing.T) {
	var walk func(*cobra.Command)
	walk = func(cmd *cobra.Command) {
		if cmd.HasParent() && cmd.Runnable() && !cmd.Hidden && (cmd.Example == "" || cmd.Short == "") {
			t.Errorf("%s: example %q, short %q", cmd.CommandPath(), cmd.Example, cmd.Short)
		}
		for _, c := range cmd.Commands() {
			walk(c)
		}
	}
	walk(newRootCommand())
}

// Start-up is what each command line pays. The bound is loose: it finds a package
// that reads files or compiles large tables at start. Time on a processor is that on a busy machine too.
func TestStartsFast(t *testing.T) {
	s := newSetup(t)
	best := time.Hour
	for range 10 {
		cmd := s.command("--help")
		if err := cmd.Run(); err != nil {
			t.Fatal(err)
		}
		best = min(best, cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime())
	}
	t.Logf("%v", best)
	if best > 100*time.Millisecond {
		t.Errorf("berm --help takes %v of a processor", best)
	}
}

func mustWrite(t *testing.T, name, content string, mode os.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
}

// An empty list is a sentence for a person, and nothing but its head for a program.
func TestEmptyList(t *testing.T) {
	s := newSetup(t)
	if out := s.ok("ls"); !strings.HasPrefix(out, "SANDBOX ") {
		t.Errorf("got %q", out)
	}
	terminal, err := pty.Start(s.command("ls"))
	if err != nil {
		t.Fatal(err)
	}
	defer terminal.Close()
	shown, _ := io.ReadAll(terminal) // it ends with an error when nobody holds the other side
	if !strings.Contains(string(shown), "no sandboxes") || strings.Contains(string(shown), "TEMPLATE") {
		t.Errorf("got %q", shown)
	}
}
