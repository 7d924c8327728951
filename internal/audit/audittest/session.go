// Package audittest writes logs of sandboxes that never were, for tests of what reads logs.
package audittest

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

// Begin is when the sessions of a Log begin.
var Begin = time.Date(2026, 3, 14, 9, 26, 53, 0, time.UTC)

// Log is a log that is being made.
type Log struct {
	tb  testing.TB
	Dir string
	// Team is whose the sandboxes of records are that are added from now on.
	Team berm.Team
	seq  uint64
	now  time.Time
}

// New makes an empty log in dir.
func New(tb testing.TB, dir string) *Log { return &Log{tb: tb, Dir: dir, now: Begin} }

// Wait moves the log's clock.
func (l *Log) Wait(d time.Duration) { l.now = l.now.Add(d) }

// Now is the log's clock.
func (l *Log) Now() time.Time { return l.now }

// Add appends a record. What it leaves empty of the envelope is filled in.
func (l *Log) Add(r audit.Record) {
	l.tb.Helper()
	l.seq++
	l.Wait(3 * time.Millisecond)
	r.V, r.Seq, r.Time, r.Host = audit.Version, l.seq, l.now, "host"
	if r.Sandbox != "" && r.Team == "" {
		r.Team = l.Team
	}
	if r.Trust == "" {
		r.Trust = audit.TrustHost
	}
	if r.Outcome == "" {
		r.Outcome = audit.OK
	}
	if r.Actor.Type == "" {
		r.Actor.Type = "system"
	}
	line, err := json.Marshal(r)
	if err != nil {
		l.tb.Fatal(err)
	}
	if len(line) > audit.MaxLine {
		l.tb.Fatalf("a line of %d bytes", len(line))
	}
	f, err := os.OpenFile(filepath.Join(l.Dir, "log.jsonl"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		l.tb.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(append(line, '\n')); err != nil {
		l.tb.Fatal(err)
	}
}

// Blob keeps content.
func (l *Log) Blob(kind, content string) audit.Blob {
	l.tb.Helper()
	w, err := audit.Directory(l.Dir).NewBlob(kind)
	if err == nil {
		_, err = w.Write([]byte(content))
	}
	if err != nil {
		l.tb.Fatal(err)
	}
	b, err := w.Commit()
	if err != nil {
		l.tb.Fatal(err)
	}
	return b
}

// Frames keeps output.
func (l *Log) Frames(frames []audit.Frame) audit.Blob {
	l.tb.Helper()
	w, err := audit.Directory(l.Dir).NewBlob(audit.KindFrames)
	if err != nil {
		l.tb.Fatal(err)
	}
	fw := audit.NewFrameWriter(w)
	for _, f := range frames {
		if err := fw.Write(f); err != nil {
			l.tb.Fatal(err)
		}
	}
	b, err := w.Commit()
	if err != nil {
		l.tb.Fatal(err)
	}
	return b
}

// Step is output some time after what was before.
type Step struct {
	After  time.Duration
	Stream audit.Stream
	Text   string
}

// Command is a command of a session.
type Command struct {
	PID    int
	Argv   []string
	TTY    *audit.Size
	Steps  []Step
	Code   int
	Signal string
	// During is called after the start, for what the command does.
	During func()
}

// Run adds a command with its processes and output.
func (l *Log) Run(id berm.SandboxID, actor audit.Actor, c Command) {
	l.tb.Helper()
	data := audit.Command{Argv: c.Argv, Cwd: "/workspace", User: "user", Env: []string{"HOME", "PATH"}, TTY: c.TTY}
	begin, trace := l.now, fmt.Sprintf("t%d", l.seq)
	l.Add(audit.Record{Sandbox: id, Actor: actor, Type: audit.ExecStart, Src: "router", Data: data, TraceID: trace})
	l.Proc(id, audit.ProcExec, audit.Process{PID: c.PID, PPID: 2, UID: 1000, Exe: "/usr/bin/" + filepath.Base(c.Argv[0]), Argv: c.Argv, Cwd: "/workspace"})
	if c.During != nil {
		c.During()
	}
	var frames []audit.Frame
	var at time.Duration
	for _, s := range c.Steps {
		if s.Stream == 0 {
			s.Stream = audit.Stdout
		}
		at += s.After
		frames = append(frames, audit.Frame{At: at, Stream: s.Stream, Data: []byte(s.Text)})
		data.Output += int64(len(s.Text))
	}
	if end := begin.Add(at); l.now.Before(end) {
		l.now = end
	}
	l.Wait(20 * time.Millisecond)
	exit := data
	exit.PID, exit.Signal, exit.Millis = c.PID, c.Signal, l.now.Sub(begin).Milliseconds()
	process := audit.Process{PID: c.PID, UID: 1000, Signal: c.Signal}
	if c.Signal == "" {
		exit.Code, process.Code = &c.Code, &c.Code
	}
	l.Proc(id, audit.ProcExit, process)
	r := audit.Record{Sandbox: id, Actor: actor, Type: audit.ExecExit, Src: "router", Data: exit, TraceID: trace}
	if c.Signal != "" || c.Code != 0 {
		r.Outcome = audit.Failed
	}
	if len(frames) > 0 {
		r.Blobs = []audit.Blob{l.Frames(frames)}
	}
	l.Add(r)
}

// Proc adds a record of a process.
func (l *Log) Proc(id berm.SandboxID, t audit.Type, p audit.Process) {
	l.tb.Helper()
	l.Add(audit.Record{Sandbox: id, Type: t, Src: "capture", Data: p})
}

// Flow adds a record of the network or of a credential.
func (l *Log) Flow(id berm.SandboxID, e egress.Event) {
	l.tb.Helper()
	r := audit.Record{Sandbox: id, Type: audit.NetFlow, Src: "egress", Reason: e.Reason, PolicyID: "1", Data: &e}
	switch {
	case e.Kind == "dns":
		r.Type = audit.NetDNS
	case e.Kind != "flow" && e.Kind != "http":
		r.Type = audit.Type(e.Kind)
	}
	if e.Action == "deny" {
		r.Outcome = audit.Denied
	}
	e.Time = l.now.Add(-time.Duration(e.Duration * float64(time.Second)))
	l.Add(r)
}

// The contents of the file that the session changes.
const (
	MainBefore = "package main\n\nimport \"fmt\"\n\nfunc main() {\n\tfmt.Println(\"hello\")\n}\n"
	MainAfter  = "package main\n\nimport \"fmt\"\n\nfunc main() {\n\tfmt.Println(\"hello, world\")\n}\n"
)

// Session adds a coding session: it clones, edits, builds, tests, installs a package, fails,
// tries what it may not, hits its limit of memory and is killed.
func (l *Log) Session(id berm.SandboxID) {
	l.tb.Helper()
	key := audit.Actor{Type: "key", ID: "k1"}
	of := func(t audit.Type, data any) {
		l.Add(audit.Record{Sandbox: id, Actor: key, Type: t, Src: "control", Data: data})
	}
	of(audit.SandboxCreate, map[string]any{"template": "base", "level": "namespace", "limits": map[string]any{"memory": 512 << 20}})
	of(audit.PolicySet, map[string]any{"network": map[string]any{"revision": 1}})
	l.Wait(120 * time.Millisecond)
	of(audit.SandboxStart, map[string]any{"ms": 123})
	l.Add(audit.Record{Sandbox: id, Actor: key, Type: audit.APICall, Src: "api", Data: map[string]any{"route": "/sandboxes", "method": "POST", "status": 201}})
	l.Wait(400 * time.Millisecond)

	l.Run(id, key, Command{
		PID: 10, Argv: []string{"git", "clone", "https://git.test/app.git", "."},
		Steps: []Step{{0, audit.Stderr, "Cloning into '.'...\n"}, {800 * time.Millisecond, audit.Stderr, "Receiving objects: 100% (42/42), done.\n"}},
		During: func() {
			l.Proc(id, audit.ProcFork, audit.Process{PID: 11, PPID: 10, UID: 1000})
			l.Proc(id, audit.ProcExec, audit.Process{PID: 11, PPID: 10, UID: 1000, Exe: "/usr/lib/git-core/git-remote-https", Argv: []string{"git-remote-https", "origin", "https://git.test/app.git"}})
			l.Wait(300 * time.Millisecond)
			l.Flow(id, egress.Event{Kind: "credential.use", Name: "git.test", Port: 443, Action: "allow", Method: "GET", Path: "/app.git/info/refs", Status: 200, Credential: "git-token", Rule: "git"})
			l.Flow(id, egress.Event{Kind: "flow", Name: "git.test", Address: "203.0.113.7", Port: 443, Protocol: "tcp", Action: "allow", Rule: "git", Up: 1840, Down: 92144, Duration: 0.25})
			zero := 0
			l.Proc(id, audit.ProcExit, audit.Process{PID: 11, Code: &zero})
		},
	})
	l.Wait(700 * time.Millisecond)
	l.Add(audit.Record{Sandbox: id, Actor: key, Type: audit.FileAPI, Src: "router", Data: audit.FileAccess{
		Path: "/workspace/main.go", Op: "write", Size: int64(len(MainAfter)), SHA256: l.Blob(audit.KindContent, MainAfter).SHA256,
	}})
	l.Wait(600 * time.Millisecond)
	l.Run(id, key, Command{
		PID: 20, Argv: []string{"go", "build", "./..."}, Code: 1,
		Steps: []Step{
			{300 * time.Millisecond, audit.Stderr, "# app\n"},
			{200 * time.Millisecond, audit.Stderr, "./util.go:7:2: undefined: frobnicate\n"},
		},
		During: func() {
			for i := range 3 {
				pid, zero := 21+i, 0
				l.Proc(id, audit.ProcFork, audit.Process{PID: pid, PPID: 20, UID: 1000})
				l.Proc(id, audit.ProcExec, audit.Process{PID: pid, PPID: 20, UID: 1000, Exe: "/usr/local/go/pkg/tool/linux_amd64/compile", Argv: []string{"compile", "-o", "/tmp/b.a", fmt.Sprintf("f%d.go", i)}})
				l.Wait(60 * time.Millisecond)
				l.Proc(id, audit.ProcExit, audit.Process{PID: pid, Code: &zero})
			}
			l.Add(audit.Record{Sandbox: id, Type: audit.ProcSum, Src: "capture", Data: audit.ProcessSum{Exe: "/usr/bin/git", Count: 240}})
		},
	})
	l.Wait(900 * time.Millisecond)
	size := &audit.Size{Columns: 80, Rows: 12}
	l.Run(id, key, Command{
		PID: 30, Argv: []string{"npm", "install", "left-pad"}, TTY: size,
		Steps: []Step{
			{200 * time.Millisecond, 0, "\x1b[?25l\x1b[36m⠋\x1b[0m resolving packages\r"},
			{400 * time.Millisecond, 0, "\x1b[2K\x1b[36m⠙\x1b[0m fetching left-pad\r"},
			{500 * time.Millisecond, 0, "\x1b[2K\x1b[32madded 1 package\x1b[0m in 1s\r\n\x1b[?25h"},
		},
		During: func() {
			l.Wait(150 * time.Millisecond)
			l.Flow(id, egress.Event{Kind: "http", Name: "registry.test", Port: 443, Action: "allow", Method: "GET", Path: "/left-pad", Status: 200, Rule: "npm"})
			l.Flow(id, egress.Event{Kind: "flow", Name: "registry.test", Address: "203.0.113.9", Port: 443, Protocol: "tcp", Action: "allow", Rule: "npm", Up: 912, Down: 18231, Duration: 0.1})
			l.Flow(id, egress.Event{Kind: "dns", Name: "telemetry.evil.test", Action: "deny", Reason: "no-rule", Detail: "no rule allows telemetry.evil.test: allow: [telemetry.evil.test]"})
			l.Flow(id, egress.Event{Kind: "flow", Name: "telemetry.evil.test", Address: "198.51.100.66", Port: 443, Protocol: "tcp", Action: "deny", Reason: "no-rule", Rule: "default", Detail: "allow: [telemetry.evil.test]", Count: 3})
			l.Flow(id, egress.Event{Kind: "flow", Address: "169.254.169.254", Port: 80, Protocol: "tcp", Action: "deny", Reason: "metadata", Rule: "hard"})
			l.Flow(id, egress.Event{Kind: "credential.leak", Name: "registry.test", Port: 443, Action: "deny", Reason: "leak", Credential: "git-token", Detail: "the secret itself came from inside"})
		},
	})
	l.Wait(500 * time.Millisecond)
	l.Change(id, "npm install", []audit.Change{
		{Path: "/workspace/main.go", Op: "add", Kind: "file", Size: int64(len(MainBefore)), Mode: "644", After: l.Blob(audit.KindContent, MainBefore).SHA256},
	})
	l.Wait(500 * time.Millisecond)
	l.Run(id, key, Command{
		PID: 40, Argv: []string{"sh", "-c", "go test ./... 2>&1 | tee 'test log'"}, Signal: "SIGKILL",
		Steps: []Step{{600 * time.Millisecond, 0, "ok  \tapp/util\t0.012s\n"}, {2 * time.Second, 0, "=== RUN   TestAll\n"}, {0, audit.Cut, "70000"}},
		During: func() {
			l.Add(audit.Record{Sandbox: id, Type: audit.LimitHit, Src: "control", Data: map[string]any{"limit": "memory"}})
		},
	})
	l.Add(audit.Record{Type: audit.Gap, Src: "audit", Data: map[string]any{"source": "capture", "count": 12}, Reason: "there were too many at once"})
	l.Wait(300 * time.Millisecond)
	l.Change(id, "end", []audit.Change{
		{Path: "/etc/motd", Op: "delete", Kind: "file", Before: l.Blob(audit.KindContent, "welcome\n").SHA256},
		{Path: "/workspace/bin", Op: "add", Kind: "dir", Mode: "755"},
		{Path: "/workspace/latest", Op: "add", Kind: "link", Target: "bin/app"},
		{Path: "/workspace/main.go", Op: "add", Kind: "file", Size: int64(len(MainAfter)), Mode: "644", After: l.Blob(audit.KindContent, MainAfter).SHA256},
		{Path: "/workspace/node_modules/left-pad/index.js", Op: "add", Kind: "file", Size: 7, Mode: "644", After: l.Blob(audit.KindContent, "module\n").SHA256},
	})
	l.Add(audit.Record{Sandbox: id, Actor: key, Type: audit.SandboxExit, Src: "control", Reason: "killed", Data: map[string]any{"reason": "killed"}})
}

// Change adds a look at the writable layer.
func (l *Log) Change(id berm.SandboxID, at string, changes []audit.Change) {
	l.tb.Helper()
	var blobs []audit.Blob
	for i, c := range changes {
		changes[i].Path = strings.TrimPrefix(c.Path, "/") // as the layer has it
		if c.After != "" && c.Kind == "file" {
			blobs = append(blobs, audit.Blob{SHA256: c.After, Size: c.Size, Kind: audit.KindContent})
		}
	}
	l.Add(audit.Record{Sandbox: id, Type: audit.FileChange, Src: "capture", Data: audit.Changes{At: at, Changes: changes}, Blobs: blobs})
}

// Hostile adds a session in which everything that a sandbox chooses tries to act on who looks
// at it.
func (l *Log) Hostile(id berm.SandboxID) {
	l.tb.Helper()
	key := audit.Actor{Type: "key", ID: "k1"}
	l.Add(audit.Record{Sandbox: id, Actor: key, Type: audit.SandboxCreate, Src: "control", Data: map[string]any{"template": "base" + Evil, "level": "namespace"}})
	l.Run(id, key, Command{PID: 10, Argv: []string{"sh", "-c", Evil}, TTY: &audit.Size{Columns: 80, Rows: 10},
		Steps: []Step{{0, 0, Evil}, {100 * time.Millisecond, audit.Resize, "9999999x-1"}, {100 * time.Millisecond, 0, Evil + "\r\nend of it\r\n"}},
		During: func() {
			l.Flow(id, egress.Event{Kind: "flow", Name: Evil, Port: 443, Protocol: Evil, Action: "deny", Reason: "no-rule", Rule: Evil, Detail: Evil})
			l.Flow(id, egress.Event{Kind: "credential.use", Name: Evil, Port: 443, Action: "allow", Method: Evil, Path: Evil, Credential: Evil})
		},
	})
	l.Change(id, "end", []audit.Change{
		{Path: "/" + Evil, Op: "add", Kind: "file", Size: 5, After: l.Blob(audit.KindContent, Evil+"\n"+Evil).SHA256},
		{Path: "/link", Op: "add", Kind: "link", Target: Evil},
	})
	l.Add(audit.Record{Sandbox: id, Actor: key, Type: audit.SandboxExit, Src: "control", Reason: Evil})
}

// Evil is text that sets the clipboard and the title, asks the terminal, links, switches
// screens and orders text anew; and markup and script that would run in a page.
const Evil = "\x1b]52;c;cHduCg==\a\x1b]0;owned\a\x1bP$q\"p\x1b\\\x1b]8;;http://evil.test\a\x1b[6n\x1b[?1049h\u202e\u009b31m" +
	"</script><script>window.owned=1</script><img src=http://evil.test/x onerror=window.owned=2>`${window.owned=3}`'\"<!--"
