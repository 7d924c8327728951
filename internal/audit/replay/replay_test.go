package replay

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/audittest"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

const id = berm.SandboxID("i0aaaaaaaaaaaaaaaaaaa")

func session(t *testing.T) (*Timeline, *audittest.Log) {
	t.Helper()
	l := audittest.New(t, t.TempDir())
	l.Add(audit.Record{Type: audit.Gap, Src: "audit", Data: map[string]any{"source": "log", "count": 1}}) // before it
	l.Session(id)
	l.Session("i0bbbbbbbbbbbbbbbbbbb") // another's, after it
	return load(t, l, id), l
}

func load(t *testing.T, l *audittest.Log, id berm.SandboxID) *Timeline {
	t.Helper()
	tl, err := Load(trail.Dir(l.Dir), id)
	if err != nil {
		t.Fatal(err)
	}
	return tl
}

func TestCommands(t *testing.T) {
	tl, _ := session(t)
	var got []string
	for _, c := range tl.Commands {
		got = append(got, Argv(c.Argv)+": "+c.Result())
	}
	want := []string{
		"git clone https://git.test/app.git .: exit 0", "go build ./...: exit 1", "npm install left-pad: exit 0",
		`sh -c 'go test ./... 2>&1 | tee '\''test log'\''': killed by SIGKILL`,
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q\nwant %q", got, want)
	}
	if !tl.Ended || tl.Reason != "killed" || tl.Template != "base" || !tl.Start.Before(tl.End) {
		t.Errorf("%+v", tl)
	}
	if len(tl.Warnings) != 1 || !strings.Contains(tl.Warnings[0], "(1 gap)") {
		t.Errorf("warnings %q", tl.Warnings)
	}
	if _, err := Load(tl.source, "i0ccccccccccccccccccc"); berm.KindOf(err) != berm.NotFound {
		t.Errorf("a sandbox that never was: %v", err)
	}
}

// A screen at a time is the same whether it was played up to or gone back to.
func TestPlayer(t *testing.T) {
	tl, _ := session(t)
	npm := tl.Commands[2]
	p := tl.Player(npm)
	at := func(ms int) string {
		s, err := p.Screen(npm.Start.Add(time.Duration(ms) * time.Millisecond))
		if err != nil {
			t.Fatal(err)
		}
		return s.Text(0)
	}
	for range 2 {
		for _, step := range []struct {
			ms   int
			want string
		}{{0, ""}, {250, "⠋ resolving packages"}, {700, "⠙ fetching left-pad"}, {5000, "added 1 package in 1s"}} {
			if got := at(step.ms); got != step.want {
				t.Errorf("after %d ms: %q, want %q", step.ms, got, step.want)
			}
		}
	}
	if c := tl.Showing(npm.Start.Add(time.Millisecond)); c != npm {
		t.Errorf("shows command %v", c)
	}
	if c := tl.Showing(tl.Start); c != nil {
		t.Errorf("shows command %v before there is one", c)
	}
}

func TestTree(t *testing.T) {
	tl, _ := session(t)
	names := func(at time.Time, linger time.Duration) (got []string) {
		for _, n := range tl.Tree(at, linger) {
			got = append(got, strings.Repeat(" ", n.Depth)+filepath.Base(n.At(at).Argv[0]))
		}
		return got
	}
	clone := tl.Commands[0]
	if got, want := names(clone.Start.Add(100*time.Millisecond), 0), []string{"git", " git-remote-https"}; !slices.Equal(got, want) {
		t.Errorf("while it clones: %q", got)
	}
	if got, want := names(clone.Start.Add(500*time.Millisecond), 0), []string{"git"}; !slices.Equal(got, want) {
		t.Errorf("later: %q", got)
	}
	build := tl.Commands[1]
	if got, want := names(build.End, time.Hour)[3:], []string{" compile", " compile", " compile"}; !slices.Equal(got, want) {
		t.Errorf("with those that ended: %q", got)
	}
	if got := names(tl.End, 0); got != nil {
		t.Errorf("after the end: %q", got)
	}
}

// Processes that name each other as parents are shown, once each.
func TestForgedTree(t *testing.T) {
	l := audittest.New(t, t.TempDir())
	for pid, ppid := range map[int]int{2: 3, 3: 4, 4: 2, 5: 5, 6: 99} {
		l.Proc(id, audit.ProcExec, audit.Process{PID: pid, PPID: ppid, Argv: []string{"x"}})
	}
	if got := load(t, l, id).Tree(l.Now(), 0); len(got) != 5 {
		t.Errorf("%d processes", len(got))
	}
}

// A number that is used again is another process.
func TestNumberUsedAgain(t *testing.T) {
	l := audittest.New(t, t.TempDir())
	l.Proc(id, audit.ProcFork, audit.Process{PID: 5, PPID: 2})
	l.Proc(id, audit.ProcExec, audit.Process{PID: 5, PPID: 2, Exe: "/a"})
	l.Proc(id, audit.ProcExec, audit.Process{PID: 5, PPID: 2, Exe: "/b"})
	l.Proc(id, audit.ProcExit, audit.Process{PID: 5})
	l.Proc(id, audit.ProcFork, audit.Process{PID: 5, PPID: 2})
	l.Proc(id, audit.ProcFork, audit.Process{PID: 5, PPID: 2}) // its end was lost
	tl := load(t, l, id)
	if len(tl.Processes) != 3 || len(tl.Processes[0].Images) != 2 {
		t.Errorf("%d processes, %d images", len(tl.Processes), len(tl.Processes[0].Images))
	}
}

func TestFiles(t *testing.T) {
	tl, _ := session(t)
	find := func(at time.Time, path string) (File, bool) {
		for _, f := range tl.FilesAt(at) {
			if f.Path == path {
				return f, true
			}
		}
		return File{}, false
	}
	if _, ok := find(tl.Start, "/workspace/main.go"); ok {
		t.Error("the file is there before it was written")
	}
	f, ok := find(tl.Commands[1].Start, "/workspace/main.go")
	if !ok || f.Seen != "api" || f.Op != "modify" {
		t.Errorf("written by the API: %+v", f)
	}
	f, _ = find(tl.End, "/workspace/main.go")
	got := tl.Diff(f)
	for _, want := range []string{"-\tfmt.Println(\"hello\")\n", "+\tfmt.Println(\"hello, world\")\n", "+++ b/workspace/main.go"} {
		if !strings.Contains(got, want) {
			t.Errorf("the diff lacks %q:\n%s", want, got)
		}
	}
	for path, want := range map[string]string{
		"/workspace/latest": "a link to bin/app",
		"/etc/motd":         "it was deleted",
		"/workspace/bin":    "a dir",
		"/workspace/node_modules/left-pad/index.js": "+module\n",
	} {
		f, _ := find(tl.End, path)
		if got := tl.Diff(f); !strings.Contains(got, want) {
			t.Errorf("%s: %q", path, got)
		}
	}
	added, changed, deleted := Counts(tl.FilesAt(tl.End))
	if added != 3 || changed != 0 || deleted != 1 {
		t.Errorf("%d added, %d changed, %d deleted", added, changed, deleted)
	}
}

// Changes that do not fit a record come from their blob.
func TestManyChanges(t *testing.T) {
	l := audittest.New(t, t.TempDir())
	var all []audit.Change
	for _, name := range []string{"/a", "/b", "/c"} {
		all = append(all, audit.Change{Path: name, Op: "add", Kind: "file"})
	}
	text, _ := json.Marshal(all)
	l.Add(audit.Record{Sandbox: id, Type: audit.FileChange, Data: audit.Changes{At: "end", Changes: all[:1], More: 2}, Blobs: []audit.Blob{l.Blob(audit.KindChanges, string(text))}})
	tl := load(t, l, id)
	if n := len(tl.FilesAt(tl.End)); n != 3 {
		t.Errorf("%d files", n)
	}
}

// Where secrets are masked in what is kept, that is compared, and said where nothing else differs.
func TestMaskedContent(t *testing.T) {
	l := audittest.New(t, t.TempDir())
	before, after := l.Blob(audit.KindContent, "[masked]\nold\n"), l.Blob(audit.KindContent, "[masked]\nnew\n")
	real := func(digit string) string { return strings.Repeat(digit, 64) }
	l.Add(audit.Record{Sandbox: id, Type: audit.FileChange, Blobs: []audit.Blob{before, after}, Data: audit.Changes{At: "end", Changes: []audit.Change{
		{Path: "a", Op: "modify", Kind: "file", Before: real("1"), After: real("2"), KeptBefore: before.SHA256, KeptAfter: after.SHA256},
		{Path: "b", Op: "modify", Kind: "file", Before: real("3"), After: real("4"), KeptBefore: before.SHA256, KeptAfter: before.SHA256},
	}}})
	tl := load(t, l, id)
	files := tl.FilesAt(tl.End)
	if got := tl.Diff(files[0]); !strings.Contains(got, "-old\n+new\n") {
		t.Errorf("%q", got)
	}
	if got := tl.Diff(files[1]); got != "it differs in what is masked" {
		t.Errorf("%q", got)
	}
}

// Content that is not what its name says is not shown.
func TestForgedContent(t *testing.T) {
	tl, l := session(t)
	c := tl.Commands[0]
	path := filepath.Join(l.Dir, audit.BlobDir, c.frames.SHA256[:2], c.frames.SHA256)
	if err := os.WriteFile(path, []byte("other"), 0o600); err != nil {
		t.Fatal(err)
	}
	if frames, err := tl.Frames(c); err == nil || frames != nil {
		t.Errorf("%v, %v", frames, err)
	}
	var out bytes.Buffer
	if err := Account(&out, tl, Part{}, false); err != nil || !strings.Contains(out.String(), "is another") {
		t.Errorf("the account does not tell: %v", err)
	}
}

// A newcomer answers from the account what was run, what changed, what was contacted, what was
// denied and why.
func TestAccountAnswers(t *testing.T) {
	tl, _ := session(t)
	var out bytes.Buffer
	if err := Account(&out, tl, Part{}, false); err != nil {
		t.Fatal(err)
	}
	got := out.String()
	for _, want := range []string{
		"What was run", "exit 1", "go build ./...", "killed by SIGKILL", "/usr/bin/git 241",
		"What changed", "add     /workspace/main.go", "delete  /etc/motd",
		"What was contacted", "allow  git.test:443, 1 time, 1840 bytes out, 92144 in",
		"allow  registry.test:443, 1 time, 1 request, 912 bytes out, 18231 in", // the request is in the connection
		"What was denied, and why", "deny   telemetry.evil.test:443, 3 times", "no-rule, rule default: allow: [telemetry.evil.test]", "169.254.169.254:80", "metadata",
		"use     git-token for git.test:443", "leak    git-token for registry.test:443",
		"limit of memory was reached", "ended: killed",
		"| ./util.go:7:2: undefined: frobnicate", "| added 1 package in 1s", "70000 bytes were not kept",
		"12 records of capture were lost",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("the account lacks %q", want)
		}
	}
	if t.Failed() || testing.Verbose() {
		t.Log(got)
	}
	out.Reset()
	if err := Account(&out, tl, Part{Lanes: []string{Network}, From: tl.Commands[2].Start}, false); err != nil {
		t.Fatal(err)
	}
	if got := out.String(); strings.Contains(got, "git.test:443") || strings.Contains(got, "undefined") || !strings.Contains(got, "registry.test:443") {
		t.Errorf("only the network, from a time on:\n%s", got)
	}
}

// Processes are told a moment later than the command that they are of ends, and are on the clock
// when they were.
func TestProcessesOfShortCommands(t *testing.T) {
	l := audittest.New(t, t.TempDir())
	l.Run(id, audit.Actor{Type: "key", ID: "k1"}, audittest.Command{Argv: []string{"first"}})
	begin := l.Now()
	code := 0
	l.Add(audit.Record{Sandbox: id, Type: audit.ExecStart, Data: audit.Command{Argv: []string{"sh"}}, TraceID: "t"})
	l.Wait(5 * time.Millisecond)
	l.Add(audit.Record{Sandbox: id, Type: audit.ExecExit, Data: audit.Command{PID: 70, Argv: []string{"sh"}, Code: &code}, TraceID: "t"})
	l.Wait(100 * time.Millisecond)
	for _, r := range []audit.Record{
		{Type: audit.ProcFork, Data: audit.Process{PID: 70, Host: 700, PPID: 1}}, {Type: audit.ProcExec, Data: audit.Process{PID: 70, Host: 700, Exe: "/bin/sh"}},
		{Type: audit.ProcExit, Data: audit.Process{PID: 70, Host: 700, Code: &code}},
	} {
		p := r.Data.(audit.Process)
		p.Ago = l.Now().Sub(begin.Add(2 * time.Millisecond)).Microseconds()
		r.Sandbox, r.Data = id, p
		l.Add(r)
	}
	tl := load(t, l, id)
	n := 0
	for _, p := range tl.Processes {
		if p.PID == 70 {
			n++
			if p.End.Sub(begin) > 10*time.Millisecond || p.Command == nil {
				t.Errorf("%+v", p)
			}
		}
	}
	if n != 1 {
		t.Errorf("%d processes, want one", n)
	}
}

// A hold, long after a sandbox, does not make its replay longer.
func TestHoldIsNotOfTheSession(t *testing.T) {
	l := audittest.New(t, t.TempDir())
	l.Session(id)
	before := load(t, l, id)
	l.Wait(48 * time.Hour)
	l.Add(audit.Record{Sandbox: id, Type: audit.HoldSet, Reason: "case"})
	if after := load(t, l, id); !after.End.Equal(before.End) || len(after.Events) != len(before.Events) {
		t.Errorf("it ends at %s, and before at %s", after.End, before.End)
	}
}

// The replay of a sandbox that was erased says so.
func TestErasedSession(t *testing.T) {
	l := audittest.New(t, t.TempDir())
	l.Add(audit.Record{Sandbox: id, Actor: audit.Actor{Type: "key", ID: "k7"}, Type: audit.Erase, Reason: "request 31", Data: audit.Erasure{Records: 12, Seqs: "1-12"}})
	tl := load(t, l, id)
	if len(tl.Warnings) != 1 || !strings.Contains(tl.Warnings[0], "erased") || !strings.Contains(tl.Warnings[0], "12 records") {
		t.Errorf("warnings %q", tl.Warnings)
	}
	if text := tl.Events[0].Text(); text != "12 records were erased from the log by key k7: request 31" {
		t.Error(text)
	}
	var out bytes.Buffer
	if err := Account(&out, tl, Part{}, false); err != nil || !strings.Contains(out.String(), "erased") {
		t.Errorf("%v: %s", err, out.String())
	}
}

// Nothing of a sandbox's choice acts on the terminal.
func TestHostileSession(t *testing.T) {
	l := audittest.New(t, t.TempDir())
	l.Hostile(id)
	tl := load(t, l, id)
	var out bytes.Buffer
	if err := Account(&out, tl, Part{}, false); err != nil {
		t.Fatal(err)
	}
	for _, r := range out.String() {
		if r != '\n' && !unicode.IsPrint(r) {
			t.Fatalf("the account has %q", r)
		}
	}
	if !strings.Contains(out.String(), "end of it") {
		t.Error("the output is not shown")
	}
}

func TestEntries(t *testing.T) {
	tl, _ := session(t)
	lanes := map[string]int{}
	last := -1.0
	err := Entries(tl, Part{}, func(e Entry) error {
		lanes[e.Lane]++
		if e.At < last {
			t.Errorf("%v comes after %v", e.At, last)
		}
		last = e.At
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for lane, want := range map[string]int{Life: 3, Exec: 8, Output: 10, Files: 3, Network: 6, Credentials: 2, Limits: 1, Policies: 1, API: 1, Log: 1} {
		if lanes[lane] != want {
			t.Errorf("%d of %s, want %d", lanes[lane], lane, want)
		}
	}
	if err := Entries(tl, Part{}, func(Entry) error { return io.ErrClosedPipe }); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("got %v", err)
	}
}

// What berm run records is a command, too.
func TestLocalRun(t *testing.T) {
	l := audittest.New(t, t.TempDir())
	me := audit.Actor{Type: "user", ID: "me"}
	l.Add(audit.Record{Sandbox: id, Actor: me, Trust: audit.TrustUser, Type: audit.SandboxCreate, Src: "local", Data: map[string]any{"argv": []string{"make", "test"}, "workspace": "/src/app"}})
	l.Flow(id, egress.Event{Kind: "flow", Name: "a.test", Port: 80, Protocol: "tcp", Action: "deny", Reason: "no-rule"})
	l.Add(audit.Record{Sandbox: id, Actor: me, Trust: audit.TrustUser, Type: audit.SandboxExit, Src: "local", Reason: "exit", Data: map[string]any{"level": "namespace", "exitCode": 2}})
	tl := load(t, l, id)
	if len(tl.Commands) != 1 || tl.Commands[0].Result() != "exit 2" || tl.Level != "namespace" {
		t.Errorf("%+v", tl.Commands)
	}
}

// Records and blobs are read as hostile.
func FuzzLoad(f *testing.F) {
	f.Add([]byte(`{"v":1,"seq":1,"time":"2026-01-01T00:00:00Z","sandbox":"i0aaaaaaaaaaaaaaaaaaa","type":"exec.start","data":{"pid":3,"argv":["a"]}}` + "\n" +
		`{"v":1,"seq":2,"time":"2026-01-01T00:00:01Z","sandbox":"i0aaaaaaaaaaaaaaaaaaa","type":"net.flow","data":{"kind":"flow","time":"2026-01-01T00:00:00Z"}}` + "\n" +
		`{"v":1,"seq":3,"time":"2026-01-01T00:00:01Z","sandbox":"i0aaaaaaaaaaaaaaaaaaa","type":"fs.change","data":{"changes":[{"path":"/a"}]}}` + "\n" +
		`{"v":1,"seq":4,"time":"2026-01-01T00:00:01Z","sandbox":"i0aaaaaaaaaaaaaaaaaaa","type":"proc.exec","data":{"pid":3,"ppid":3}}` + "\n"))
	f.Fuzz(func(t *testing.T, log []byte) {
		tl, err := Load(lines(log), id)
		if err != nil {
			return
		}
		_ = Account(io.Discard, tl, Part{}, false)
		_ = Entries(tl, Part{}, func(Entry) error { return nil })
		for _, f := range tl.FilesAt(tl.End) {
			_ = tl.Diff(f)
		}
		tl.Tree(tl.Start.Add(tl.End.Sub(tl.Start)/2), time.Second)
	})
}

// lines is a log in memory whose only content is its own text.
type lines []byte

func (l lines) Records(uint64) iter.Seq2[trail.Line, error] {
	return func(yield func(trail.Line, error) bool) {
		for raw := range bytes.Lines(l) {
			line := trail.Line{Raw: raw}
			if err := json.Unmarshal(raw, &line.Record); !yield(line, err) {
				return
			}
		}
	}
}

func (l lines) Blob(string) (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(l)), nil }

// A line says each thing once, and leaves out what there is not.
func TestReached(t *testing.T) {
	for want, e := range map[string]egress.Event{
		"use GET api.test:443 with credential api": {Kind: "credential.use", Action: "allow", Method: "GET", Name: "api.test", Port: 443, Credential: "api"},
		"deny leak with credential billing":        {Kind: "credential.leak", Action: "deny", Credential: "billing"},
		"deny POST api.test:443":                   {Kind: "credential.deny", Action: "deny", Method: "POST", Name: "api.test", Port: 443},
		"deny tcp a.test:22 (reason not_listed; this would allow it: - {to: [a.test]})": {Kind: "flow", Protocol: "tcp", Action: "deny", Name: "a.test", Port: 22,
			Reason: "not_listed", Detail: "this would allow it:\n  - {to: [a.test]}"},
	} {
		if got := Reached(&e); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// A look whose content takes several records is one, with the mark of today and without it.
func TestLookInSeveralRecords(t *testing.T) {
	for name, marked := range map[string]bool{"marked": true, "of older logs": false} {
		t.Run(name, func(t *testing.T) {
			l := audittest.New(t, t.TempDir())
			first, second := l.Blob(audit.KindContent, "one\n"), l.Blob(audit.KindContent, "two\n")
			l.Add(audit.Record{Sandbox: id, Type: audit.FileChange, TraceID: "look", Blobs: []audit.Blob{first}, Data: audit.Changes{At: "end", Changes: []audit.Change{
				{Path: "a", Op: "add", Kind: "file", After: first.SHA256}, {Path: "b", Op: "add", Kind: "file", After: second.SHA256},
			}}})
			l.Add(audit.Record{Sandbox: id, Type: audit.ProcExit, Data: audit.Process{PID: 7}}) // comes between
			l.Add(audit.Record{Sandbox: id, Type: audit.FileChange, TraceID: "look", Blobs: []audit.Blob{second}, Data: audit.Changes{At: "end", Continues: marked, Changes: []audit.Change{}}})
			tl := load(t, l, id)
			files := tl.FilesAt(tl.End)
			if len(files) != 2 {
				t.Fatalf("%d files", len(files))
			}
			if got := tl.Diff(files[1]); !strings.Contains(got, "+two\n") {
				t.Errorf("%q", got)
			}
			if n := len(tl.Of(Files, tl.End)); n != 1 {
				t.Errorf("%d looks are told", n)
			}
			if n := len(tl.Events[0].Blobs); n != 2 {
				t.Errorf("the look has %d contents", n)
			}
			if c := Compare(tl, tl, nil); !c.FilesKnown || c.Same != 2 {
				t.Errorf("compared with itself: %+v", c)
			}
			var out bytes.Buffer
			if err := Account(&out, tl, Part{}, false); err != nil || !strings.Contains(out.String(), "2 added, 0 changed, 0 deleted") {
				t.Errorf("%v\n%s", err, &out)
			}
		})
	}
	l := audittest.New(t, t.TempDir())
	l.Add(audit.Record{Sandbox: id, Type: audit.FileChange, Data: audit.Changes{At: "pause", Changes: []audit.Change{{Path: "a", Op: "add", Kind: "file"}}}})
	l.Add(audit.Record{Sandbox: id, Type: audit.FileChange, Data: audit.Changes{At: "end", Changes: []audit.Change{}}})
	tl := load(t, l, id)
	if files := tl.FilesAt(tl.End); len(files) != 0 {
		t.Errorf("a look that found nothing is no continuation: %v", files)
	}
}

// A command that the agent refused is told as what never ran.
func TestCommandNotStarted(t *testing.T) {
	l := audittest.New(t, t.TempDir())
	l.Add(audit.Record{Sandbox: id, Type: audit.ExecStart, TraceID: "t", Data: audit.Command{Argv: []string{"ls"}, User: "nobody2"}})
	l.Add(audit.Record{Sandbox: id, Type: audit.ExecExit, TraceID: "t", Outcome: audit.Failed, Reason: audit.NotStarted + ": no user nobody2", Data: audit.Command{Argv: []string{"ls"}}})
	tl := load(t, l, id)
	if got := tl.Commands[0].Result(); got != "not started" || !tl.Commands[0].Failed() {
		t.Errorf("%q", got)
	}
	if got := tl.Events[1].Text(); got != "not started: ls: no user nobody2" {
		t.Errorf("%q", got)
	}
}

// The level is the one that the sandbox got, and what a level does not record is not lost.
func TestLevelAndWhatItDoesNotRecord(t *testing.T) {
	l := audittest.New(t, t.TempDir())
	l.Add(audit.Record{Sandbox: id, Type: audit.SandboxCreate, Data: map[string]any{"template": "base", "level": "auto"}})
	l.Add(audit.Record{Sandbox: id, Type: audit.Gap, Reason: "not at this level", Data: map[string]any{"source": "processes"}})
	l.Add(audit.Record{Sandbox: id, Type: audit.SandboxStart, Data: map[string]any{"ms": 5, "level": "gvisor"}})
	tl := load(t, l, id)
	if tl.Level != "gvisor" {
		t.Errorf("level %s", tl.Level)
	}
	if got := tl.Events[1].Text(); got != "processes were not recorded: not at this level" {
		t.Errorf("%q", got)
	}
	if w := strings.Join(tl.Warnings, "\n"); strings.Contains(w, "lost") || !strings.Contains(w, "not everything was recorded") {
		t.Errorf("%q", w)
	}
}

// words is the account of a sandbox.
func words(t *testing.T, l *audittest.Log) string {
	t.Helper()
	var out bytes.Buffer
	if err := Account(&out, load(t, l, id), Part{}, false); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// holds says which of some texts an account lacks, and which it has that would be false.
func holds(t *testing.T, account string, wanted, false []string) {
	t.Helper()
	for _, text := range wanted {
		if !strings.Contains(account, text) {
			t.Errorf("the account lacks %q", text)
		}
	}
	for _, text := range false {
		if strings.Contains(account, text) {
			t.Errorf("the account says %q", text)
		}
	}
	if t.Failed() {
		t.Log(account)
	}
}

// What nobody watched is not told as if nothing had happened.
func TestLocalRunTellsWhatIsNotOnRecord(t *testing.T) {
	run := func(t *testing.T, data map[string]any) *audittest.Log {
		l := audittest.New(t, t.TempDir())
		data["argv"], data["workspace"] = []string{"make"}, "/src/app"
		l.Add(audit.Record{Sandbox: id, Trust: audit.TrustUser, Type: audit.SandboxCreate, Src: "local", Data: data})
		l.Add(audit.Record{Sandbox: id, Trust: audit.TrustUser, Type: audit.FileChange, Src: "local", Data: audit.Changes{At: "end", Changes: []audit.Change{}}})
		return l
	}
	always := []string{"of berm run in /src/app", "what it printed is not on record", "0 paths of another content than the project's"}
	t.Run("Host", func(t *testing.T) {
		holds(t, words(t, run(t, map[string]any{"network": "host"})), append(always, "not on record: it had the network of this machine"), []string{"nothing was tried", "allowed to reach"})
	})
	t.Run("Writable", func(t *testing.T) {
		l := audittest.New(t, t.TempDir())
		l.Add(audit.Record{Sandbox: id, Trust: audit.TrustUser, Type: audit.SandboxCreate, Src: "local", Data: map[string]any{"argv": []string{"make"}, "access": "rw"}})
		holds(t, words(t, l), []string{"not on record: it wrote straight into the project"}, []string{"berm diff"})
	})
	t.Run("None", func(t *testing.T) {
		holds(t, words(t, run(t, map[string]any{"network": "none"})), append(always, "nothing: it had no network"), []string{"nothing was tried", "allowed to reach"})
	})
	t.Run("Policy", func(t *testing.T) {
		l := run(t, map[string]any{"network": "policy", "open": []string{"10.1.0.0/16"}, "policy": egress.Policy{Entries: []string{"pypi.org", "a.test:8080"}}})
		l.Flow(id, egress.Event{Kind: "dns", Name: "b.test", Action: "deny", Reason: "not_listed"})
		l.Flow(id, egress.Event{Kind: "flow", Address: "10.0.0.1", Port: 80, Protocol: "tcp", Action: "deny", Reason: "private", Detail: "Denied (private): 10.0.0.1:80 is private use."})
		holds(t, words(t, l), append(always, "What it was allowed to reach\n  Allow pypi.org on ports 80 and 443.\n  Allow a.test on port 8080.\n  Everything else is denied.\n  Opened, for rules to allow: 10.1.0.0/16.\n",
			"not_listed: no rule of the policy names it", "         private: 10.0.0.1:80 is private use."), []string{"private: Denied"})
	})
}

func TestPoliciesOfASandbox(t *testing.T) {
	l := audittest.New(t, t.TempDir())
	set := func(data map[string]any) {
		l.Add(audit.Record{Sandbox: id, Actor: audit.Actor{Type: "key", ID: "k1"}, Type: audit.PolicySet, Src: "control", Data: data})
	}
	l.Add(audit.Record{Sandbox: id, Type: audit.SandboxCreate, Src: "control", Data: map[string]any{"template": "base"}})
	set(map[string]any{"level": "namespace", "network": "what the policy of the network service lets through"})
	set(map[string]any{"network": map[string]any{"reach": "public", "revision": 1, "document": map[string]any{"version": 1, "default": "allow-public"}}})
	l.Wait(time.Second)
	set(map[string]any{"network": map[string]any{"reach": "rules", "revision": 2, "document": map[string]any{"version": 1, "rules": []any{map[string]any{"id": "r", "to": []string{"a.test"}}}}}})
	set(map[string]any{"network": map[string]any{"revision": 3, "document": map[string]any{"version": 7}}})
	holds(t, words(t, l), []string{
		"the wall was set by key k1\n", "from 00:00.006 on\n    Everything on the public internet is allowed", "from 00:01.009 on\n    Allow a.test on ports 80 and 443.\n    Everything else is denied.\n",
		"the network policy was set by key k1: Allow a.test on ports 80 and 443. Everything else is denied.", "The log does not tell what: ", "nothing, and nothing was tried", "was not looked at yet: `berm audit changes` does\n  what the files API wrote:\n",
	}, nil)

	l = audittest.New(t, t.TempDir())
	l.Add(audit.Record{Sandbox: id, Type: audit.SandboxCreate, Src: "control", Data: map[string]any{"template": "base"}})
	set(map[string]any{"level": "namespace", "network": "none but loopback"})
	holds(t, words(t, l), []string{"nothing: it had no network"}, []string{"nothing was tried", "allowed to reach"})
}

// What lies in directories that people do not read is told in a line, but not the whole of a project
// that lies in one itself.
func TestCollapsedFiles(t *testing.T) {
	l := audittest.New(t, t.TempDir())
	l.Add(audit.Record{Sandbox: id, Type: audit.SandboxCreate, Src: "local", Data: map[string]any{"argv": []string{"make"}, "workspace": "/home/me/.work/app"}})
	var changes []audit.Change
	for _, path := range []string{"a", "venv/one", ".cache/x", ".cache/y"} {
		changes = append(changes, audit.Change{Path: "home/me/.work/app/" + path, Op: "add", Kind: "file", Size: 1})
	}
	l.Change(id, "end", changes)
	holds(t, words(t, l), []string{
		"add     /home/me/.work/app/a (1 bytes)\n", "add     /home/me/.work/app/venv/one (1 bytes)\n", "in      /home/me/.work/app/.cache/… (2 paths)\n",
	}, nil)
}

// A look that could not be taken is not one that found nothing.
func TestLookThatFailed(t *testing.T) {
	l := audittest.New(t, t.TempDir())
	l.Add(audit.Record{Sandbox: id, Type: audit.SandboxCreate, Src: "control", Data: map[string]any{"template": "base"}})
	unseen := audit.Record{Sandbox: id, Type: audit.FileChange, Src: "layer", Outcome: audit.Failed, Reason: "it is in memory", Data: audit.Changes{At: "end", Changes: []audit.Change{}}}
	l.Add(unseen)
	holds(t, words(t, l), []string{"what changed until 00:00.003 is not known: it is in memory", "looked at the writable layer (end): failed: it is in memory"}, []string{"seen at", "0 paths"})

	l = audittest.New(t, t.TempDir())
	l.Change(id, "pause", []audit.Change{{Path: "a", Op: "add", Kind: "file"}})
	l.Wait(time.Second)
	l.Add(unseen)
	holds(t, words(t, l), []string{"1 added, 0 changed, 0 deleted, seen at 00:00.000 (pause)", "what changed until 00:01.003 is not known: it is in memory"}, nil)
	l.Wait(time.Second)
	l.Change(id, "request", []audit.Change{{Path: "a", Op: "add", Kind: "file"}})
	holds(t, words(t, l), []string{"seen at 00:02.006 (request)"}, []string{"is not known"})
}
