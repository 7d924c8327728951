package container_test

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/api/router"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/capture"
	"github.com/berm-sandbox/berm/internal/container"
	"github.com/berm-sandbox/berm/internal/container/containertest"
	"github.com/berm-sandbox/berm/internal/control"
	"github.com/berm-sandbox/berm/internal/control/enginetest"
	"github.com/berm-sandbox/berm/internal/store"
)

// world is a server's containers over an engine in memory.
type world struct {
	*container.Manager
	t        testing.TB
	engine   *enginetest.Engine
	inside   *containertest.Interpreter
	sessions *control.Manager
	db       *store.DB
	log      *records
	records  string // where the blobs of the log are
	dir      string // the files inside
}

// templates has a template whose working directory is that of the test.
type templates struct {
	enginetest.Templates
	dir string
}

func (t templates) Resolve(ctx context.Context, team berm.Team, ref string) (berm.Template, error) {
	found, err := t.Templates.Resolve(ctx, team, ref)
	found.Workdir = t.dir
	return found, err
}

// records keeps the records of an audit log, or fails to.
type records struct {
	mu   sync.Mutex
	all  []audit.Record
	fail func(audit.Record) error
}

func (l *records) Emit(r audit.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fail != nil {
		if err := l.fail(r); err != nil {
			return err
		}
	}
	l.all = append(l.all, r)
	return nil
}

func (l *records) of(what audit.Type) (found []audit.Record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.all {
		if r.Type == what {
			found = append(found, r)
		}
	}
	return found
}

// shown is what an execution showed, by its record.
func (w *world) shown(r audit.Record) (frames []string) {
	w.t.Helper()
	if len(r.Blobs) != 1 {
		w.t.Fatalf("%+v", r)
	}
	f, err := os.Open(filepath.Join(w.records, audit.BlobDir, r.Blobs[0].SHA256[:2], r.Blobs[0].SHA256))
	if err != nil {
		w.t.Fatal(err)
	}
	defer f.Close()
	for reader := audit.NewFrameReader(f); ; {
		frame, err := reader.Read()
		if err != nil {
			return frames
		}
		frames = append(frames, string(frame.Stream)+" "+string(frame.Data))
	}
}

func newWorld(t testing.TB) *world {
	w := &world{t: t, engine: &enginetest.Engine{}, inside: &containertest.Interpreter{}, log: &records{}, dir: t.TempDir()}
	w.engine.Ports = containertest.Ports(t, w.inside, w.dir)
	var err error
	if w.db, err = store.Open(t.TempDir()); err != nil {
		t.Fatal(err)
	}
	w.start()
	return w
}

// start begins a server with what there is.
func (w *world) start() {
	w.t.Helper()
	log := slog.New(slog.DiscardHandler)
	w.sessions = control.New(control.Config{
		Engine: w.engine, Templates: templates{dir: w.dir}, Store: w.db, Audit: w.log, Log: log,
		Seed: make([]byte, 32), MaxTimeout: 24 * time.Hour, SampleEvery: time.Hour, MaxSandboxes: 5, SnapshotDir: w.t.TempDir(),
	})
	if err := w.sessions.Start(context.Background()); err != nil {
		w.t.Fatal(err)
	}
	w.records = w.t.TempDir()
	recorder := capture.New(w.log, audit.Directory(w.records), true, log)
	inside := router.Inside{Sessions: w.sessions, Capture: recorder}
	w.Manager = container.New(container.Config{Sessions: w.sessions, Inside: inside, Template: "base", Audit: w.log, Capture: recorder})
}

// end ends the server and all that there is.
func (w *world) end() {
	w.t.Helper()
	for _, s := range w.sessions.List(control.Filter{}) {
		if err := w.sessions.Kill(context.Background(), s.ID, me); err != nil {
			w.t.Error(err)
		}
	}
	left, err := w.engine.List(context.Background())
	if err != nil || len(left) != 0 {
		w.t.Errorf("left over: %v, %v", left, err)
	}
	w.sessions.Close()
	if err := w.db.Close(); err != nil {
		w.t.Error(err)
	}
}

var me, other = audit.Actor{Type: "key", ID: "k1"}, audit.Actor{Type: "key", ID: "k2"}

func (w *world) thread(owner audit.Actor, name string) (container.Container, bool) {
	w.t.Helper()
	c, made, err := w.Create(context.Background(), container.Request{Thread: name, Sandbox: control.CreateRequest{Actor: owner}})
	if err != nil {
		w.t.Fatal(err)
	}
	return c, made
}

func (w *world) want(kind berm.Kind, err error, text string) {
	w.t.Helper()
	if err == nil || berm.KindOf(err) != kind || !strings.Contains(err.Error(), text) {
		w.t.Errorf("error %q of kind %v, want %v with %q", err, berm.KindOf(err), kind, text)
	}
}

func TestThreadsHaveOneContainerEach(t *testing.T) {
	w := newWorld(t)
	defer w.end()
	const calls, threads = 40, 3
	ids := make([]berm.SandboxID, calls)
	made := make([]bool, calls)
	var group sync.WaitGroup
	for i := range calls {
		group.Go(func() {
			var c container.Container
			c, made[i] = w.thread(me, fmt.Sprint(i%threads))
			ids[i] = c.ID
		})
	}
	group.Wait()
	makers := map[berm.SandboxID]int{}
	for i := range calls {
		if ids[i] != ids[i%threads] {
			t.Errorf("call %d got another container than call %d", i, i%threads)
		}
		if made[i] {
			makers[ids[i]]++
		}
	}
	if len(w.engine.Specs) != threads || len(makers) != threads || slices.Max(slices.Collect(maps.Values(makers))) != 1 {
		t.Errorf("%d sandboxes made by %v, for %d threads", len(w.engine.Specs), makers, threads)
	}
	// Whoever has another key has other threads.
	if c, isNew := w.thread(other, "0"); !isNew || slices.Contains(ids, c.ID) {
		t.Errorf("the thread of another key: made %v", isNew)
	}
}

func TestThreadsAreHeldToTheirSettings(t *testing.T) {
	w := newWorld(t)
	defer w.end()
	ask := func(settings string) (container.Container, error) {
		c, _, err := w.Create(context.Background(), container.Request{Thread: "t", Name: "n", Settings: settings, Sandbox: control.CreateRequest{Actor: me}})
		return c, err
	}
	first, err := ask("a")
	if err != nil {
		t.Fatal(err)
	}
	for _, same := range []string{"a", ""} {
		if c, err := ask(same); err != nil || c.ID != first.ID {
			t.Errorf("with settings %q: %v, %v", same, c.ID, err)
		}
	}
	_, err = ask("b")
	w.want(berm.Conflict, err, string(first.ID))
	if berm.HintOf(err) == "" {
		t.Error("it does not say what to do")
	}
	if err := w.Delete(context.Background(), first.ID, me); err != nil {
		t.Fatal(err)
	}
	if c, err := ask("b"); err != nil || c.ID == first.ID {
		t.Errorf("after its end: %v, %v", c.ID, err)
	}
}

func TestCreateThatFailsLeavesNothing(t *testing.T) {
	w := newWorld(t)
	defer w.end()
	for name, fail := range map[string]func(){
		"engine": func() {
			w.engine.Fail(func(_ berm.SandboxID, method string) error {
				if method == "Create" {
					return berm.Errorf(berm.Unavailable, "no room")
				}
				return nil
			})
		},
		"after the engine": func() {
			w.engine.Fail(func(_ berm.SandboxID, method string) error {
				if method == "Policy" {
					return berm.Errorf(berm.Unavailable, "no room")
				}
				return nil
			})
		},
		"at the end": func() {
			w.log.fail = func(r audit.Record) error {
				if r.Type == audit.SandboxStart {
					return berm.Errorf(berm.Unavailable, "no room")
				}
				return nil
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			fail()
			_, _, err := w.Create(context.Background(), container.Request{Thread: "t", Sandbox: control.CreateRequest{Actor: me}})
			w.want(berm.Unavailable, err, "no room")
			w.engine.Fail(nil)
			w.log.fail = nil
			all, err := w.List(context.Background(), container.Filter{})
			held, listErr := w.engine.List(context.Background())
			if err := errors.Join(err, listErr); err != nil || len(all)+len(held) != 0 {
				t.Errorf("left over: %v %v, %v", all, held, err)
			}
		})
	}
	// A caller who leaves while another makes it waits no longer, and takes nothing away.
	begun, goOn := make(chan struct{}), make(chan struct{})
	w.engine.Fail(func(_ berm.SandboxID, method string) error {
		if method == "Create" {
			close(begun)
			<-goOn
		}
		return nil
	})
	made := make(chan container.Container)
	go func() { c, _ := w.thread(me, "t"); made <- c }()
	<-begun
	gone, leave := context.WithCancel(context.Background())
	leave()
	_, _, err := w.Create(gone, container.Request{Thread: "t", Sandbox: control.CreateRequest{Actor: me}})
	w.want(berm.Unavailable, err, "being made")
	close(goOn)
	first := <-made
	w.engine.Fail(nil)
	if c, isNew := w.thread(me, "t"); isNew || c.ID != first.ID {
		t.Errorf("container %s after %s", c.ID, first.ID)
	}
	// Without the template there is no interpreter.
	w.Template = "nothing"
	_, _, err = w.Create(context.Background(), container.Request{})
	w.want(berm.Unsupported, err, "nothing")
}

// A container lives for the time Idle after it was last used, whoever watches it.
func TestExpiryFromLastUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		defer w.end()
		ctx := context.Background()
		c, _, err := w.Create(ctx, container.Request{Thread: "t", Idle: 20 * time.Minute, Sandbox: control.CreateRequest{Actor: me}})
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(w.dir, "f"), []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
		file := container.FileID(filepath.Join(w.dir, "f"))
		uses := map[string]func() error{
			"get":      func() error { _, err := w.Get(ctx, c.ID, me); return err },
			"thread":   func() error { w.thread(me, "t"); return nil },
			"code":     func() error { return w.run(c.ID, "print x") },
			"upload":   func() error { _, err := w.Upload(ctx, c.ID, "g", strings.NewReader("x"), 1, me); return err },
			"files":    func() error { _, err := w.Files(ctx, c.ID, "", me); return err },
			"file":     func() error { _, err := w.File(ctx, c.ID, file, me); return err },
			"contexts": func() error { _, err := w.Contexts(ctx, c.ID, me); return err },
			"content": func() error {
				a, err := w.Open(ctx, c.ID, file, "", me)
				if err == nil {
					_, err = io.ReadAll(a.Body)
					a.Body.Close()
				}
				return err
			},
			// As long as code runs, it is in use.
			"long code": func() error {
				long, cancel := context.WithTimeout(ctx, 3*time.Hour)
				defer cancel()
				_, err := w.Execute(long, c.ID, container.Execution{Code: "wait", Timeout: 12 * time.Hour}, me, func(container.Event) error { return nil })
				if long.Err() == nil {
					return fmt.Errorf("it ended before its client left: %w", err)
				}
				return nil
			},
		}
		for name, use := range uses {
			time.Sleep(19 * time.Minute)
			if err := use(); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			now := time.Now()
			all, err := w.List(ctx, container.Filter{})
			if err != nil || len(all) != 1 || all[0].LastActive().Before(now.Add(-time.Second)) || all[0].LastActive().After(now) {
				t.Fatalf("after %s at %s: %+v, %v", name, now, all, err)
			}
		}
		// To look at the list is no use.
		for range 19 {
			time.Sleep(time.Minute)
			if all, err := w.List(ctx, container.Filter{}); err != nil || len(all) != 1 {
				t.Fatalf("%v, %v", all, err)
			}
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		_, err = w.Get(ctx, c.ID, me)
		w.want(berm.NotFound, err, "expired: it was not used for 20m")
		if again, made := w.thread(me, "t"); !made || again.ID == c.ID {
			t.Error("the thread has the container that expired")
		}
	})
}

// run runs code and drops what it shows.
func (w *world) run(id berm.SandboxID, code string) error {
	_, err := w.Execute(context.Background(), id, container.Execution{Code: code}, me, func(container.Event) error { return nil })
	return err
}

func TestContainersSurviveTheServer(t *testing.T) {
	w := newWorld(t)
	defer w.end()
	first, _, err := w.Create(context.Background(), container.Request{Name: "n", Thread: "t", Idle: time.Hour, Settings: "s", Sandbox: control.CreateRequest{Actor: me}})
	if err != nil {
		t.Fatal(err)
	}
	w.sessions.Close()
	w.start()
	c, made := w.thread(me, "t")
	if made || c.ID != first.ID || c.Name() != "n" || c.Thread() != "t" || c.Idle() != time.Hour {
		t.Errorf("%+v, made %v", c, made)
	}
	if err := w.run(c.ID, "print x"); err != nil {
		t.Error(err)
	}
}

// A fork is a container, and another one than that of the thread.
func TestForksLeaveTheThreadAlone(t *testing.T) {
	w := newWorld(t)
	defer w.end()
	c, _ := w.thread(me, "t")
	children, err := w.sessions.Fork(context.Background(), c.ID, 1, time.Hour, false, other)
	if err != nil || children[0].Err != nil {
		t.Fatal(err, children)
	}
	if again, made := w.thread(me, "t"); made || again.ID != c.ID {
		t.Errorf("container %s, made %v, want %s", again.ID, made, c.ID)
	}
	if err := w.run(children[0].Sandbox.ID, "print x"); err != nil {
		t.Error(err)
	}
}

// Whoever makes a sandbox may give it the metadata of a container.
func TestSandboxesThatLookLikeContainers(t *testing.T) {
	w := newWorld(t)
	defer w.end()
	ctx := context.Background()
	s, err := w.sessions.Create(ctx, control.CreateRequest{Template: "base", Timeout: time.Hour, Actor: me})
	if err != nil {
		t.Fatal(err)
	}
	w.want(berm.NotFound, w.run(s.ID, "print x"), "not found")
	s, err = w.sessions.Create(ctx, control.CreateRequest{
		Template: "base", Timeout: 0, OnDeadline: berm.PauseAtDeadline, Metadata: map[string]string{"berm.container": "", "berm.container.thread": "t"}, Actor: other,
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := w.sessions.Connect(ctx, s.ID, time.Hour, me); err != nil {
		t.Fatal(err)
	}
	if err := w.run(s.ID, "print x"); err != nil {
		t.Error(err)
	}
	if c, made := w.thread(me, "t"); !made || c.ID == s.ID {
		t.Error("the thread of a key is a sandbox of another")
	}
}

func TestPausedContainersWakeWhenUsed(t *testing.T) {
	w := newWorld(t)
	defer w.end()
	c, _ := w.thread(me, "t")
	if err := w.sessions.Pause(context.Background(), c.ID, me); err != nil {
		t.Fatal(err)
	}
	if err := w.run(c.ID, "print x"); err != nil {
		t.Error(err)
	}
}

func TestAPauseDuringAnExecutionIsTold(t *testing.T) {
	w := newWorld(t)
	defer w.end()
	c, _ := w.thread(me, "t")
	_, err := w.Execute(context.Background(), c.ID, container.Execution{Code: "wait"}, me, func(container.Event) error {
		return w.sessions.Pause(context.Background(), c.ID, me)
	})
	w.want(berm.Conflict, err, "paused")
}

func TestWhatBecameOfAContainerIsTold(t *testing.T) {
	w := newWorld(t)
	defer w.end()
	ctx := context.Background()
	_, err := w.Get(ctx, "inothing", me)
	w.want(berm.NotFound, err, "was not found")
	s, err := w.sessions.Create(ctx, control.CreateRequest{Template: "base", Timeout: time.Hour, Actor: me})
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{w.Delete(ctx, s.ID, me), w.run(s.ID, "print x")} { // a sandbox, and no container
		w.want(berm.NotFound, err, "was not found")
	}
	c, _ := w.thread(me, "deleted")
	if err := w.Delete(ctx, c.ID, me); err != nil {
		t.Fatal(err)
	}
	w.want(berm.NotFound, w.run(c.ID, "print x"), "was deleted")
	w.want(berm.NotFound, w.Delete(ctx, c.ID, me), "was deleted")

	// One that ends during an execution says so, whatever ended it.
	c, _ = w.thread(me, "oom")
	_, err = w.Execute(ctx, c.ID, container.Execution{Code: "wait"}, me, func(container.Event) error {
		w.engine.End(c.ID, berm.ReasonOOM)
		return nil
	})
	w.want(berm.NotFound, err, "memory")
}

func TestExecution(t *testing.T) {
	w := newWorld(t)
	defer w.end()
	w.inside.Left = make(chan struct{}, 1)
	c, _ := w.thread(me, "t")
	run := func(e container.Execution) (container.Status, []string, error) {
		var lines []string
		status, err := w.Execute(context.Background(), c.ID, e, me, func(event container.Event) error {
			line, err := json.Marshal(event)
			lines = append(lines, string(line))
			return err
		})
		return status, lines, err
	}
	status, lines, err := run(container.Execution{Code: "print a\nenv E\n" + `show {"text":"1","png":"aGk=","chart":{"type":"bar"},"unknown":1}`, Env: map[string]string{"E": "v"}})
	want := []string{
		`{"type":"stdout","text":"a\n","timestamp":"2026-01-02T03:04:05Z"}`, `{"type":"stdout","text":"v\n"}`,
		`{"type":"result","text":"1","png":"aGk=","chart":{"type":"bar"},"extra":{},"is_main_result":true}`, `{"type":"number_of_executions","execution_count":1}`,
	}
	if err != nil || status != container.Completed || !slices.Equal(lines, want) {
		t.Errorf("%s %q, %v", status, lines, err)
	}
	if token := w.inside.Headers[0].Get("X-Access-Token"); token == "" || token != c.AccessToken {
		t.Errorf("the interpreter got the token %q", token)
	}
	if status, _, err = run(container.Execution{Code: "raise ValueError"}); err != nil || status != container.Failed {
		t.Errorf("%s, %v", status, err)
	}
	if status, _, err = run(container.Execution{Code: "print a\nwait", Timeout: 20 * time.Millisecond}); err != nil || status != container.TimedOut {
		t.Errorf("%s, %v", status, err)
	}
	<-w.inside.Left // it was interrupted

	_, _, err = run(container.Execution{Code: "print a", Context: "nope"})
	w.want(berm.NotFound, err, "Context nope not found")
	_, _, err = run(container.Execution{Code: "print a", Language: "cobol"})
	w.want(berm.Invalid, err, "no kernel for cobol")
	_, _, err = run(container.Execution{Code: "print a", Context: "default", Language: "python"})
	w.want(berm.Invalid, err, "exclude")
	for _, code := range []string{"cut", "print a\ncut", "raw {}}", "raw " + `{"type":"stdout","text":[]}`, "raw " + `{"type":"result","png":1}`} {
		_, _, err = run(container.Execution{Code: code})
		w.want(berm.Unavailable, err, "interpreter")
		if berm.HintOf(err) == "" {
			t.Errorf("%q: it does not say what to do", code)
		}
	}
	_, _, err = run(container.Execution{Code: "raw " + `{"type":"stdout","text":"` + strings.Repeat("x", 17<<20)})
	w.want(berm.Exhausted, err, "16 MiB")
	if status, lines, err = run(container.Execution{Code: "raw " + `{"type":"new","x":1}` + "\nraw \nraw " + "{\"type\":\"stdout\",\"text\":\"\xff\"}"}); err != nil || status != container.Completed || lines[0] != `{"type":"stdout","text":"�"}` {
		t.Errorf("%s %q, %v", status, lines, err)
	}

	// What a client no longer takes is interrupted too.
	stop := errors.New("stop")
	if _, err := w.Execute(context.Background(), c.ID, container.Execution{Code: "print a\nwait"}, me, func(container.Event) error { return stop }); !errors.Is(err, stop) {
		t.Error(err)
	}
	<-w.inside.Left

	starts, exits := w.log.of(audit.ExecStart), w.log.of(audit.ExecExit)
	if len(starts) != len(exits) || len(starts) < 10 {
		t.Fatalf("%d starts and %d ends are recorded", len(starts), len(exits))
	}
	first, last := starts[0].Data.(audit.Command), exits[0].Data.(audit.Command)
	if first.Argv[0] != "python" || !strings.HasPrefix(first.Argv[1], "print a\n") || first.Env[0] != "E" || *last.Code != 0 || starts[0].TraceID != exits[0].TraceID || starts[0].Sandbox != c.ID {
		t.Errorf("%+v, %+v", starts[0], exits[0])
	}
	want = []string{"o a\n", "o v\n", fmt.Sprintf("o 1\n[png: 2 bytes, sha256 %x]\n[chart: 14 bytes, sha256 %x]\n", sha256.Sum256([]byte("hi")), sha256.Sum256([]byte(`{"type":"bar"}`)))}
	if got := w.shown(exits[0]); !slices.Equal(got, want) || last.Output != int64(len(strings.Join(want, ""))-2*len(want)) {
		t.Errorf("%q, %d bytes", got, last.Output)
	}
	if got := w.shown(exits[1]); len(got) != 1 || !strings.HasPrefix(got[0], "e ") || !strings.Contains(got[0], "ValueError") {
		t.Errorf("%q", got)
	}
	if got := w.shown(exits[2]); !slices.Equal(got, []string{"o a\n"}) {
		t.Errorf("%q", got)
	}
	if timedOut := exits[2]; timedOut.Outcome != audit.Failed || timedOut.Data.(audit.Command).Signal != "SIGINT" {
		t.Errorf("%+v", timedOut)
	}
	// What is not recorded is not run.
	w.log.fail = func(r audit.Record) error {
		if r.Type == audit.ExecStart {
			return berm.Errorf(berm.Unavailable, "the disk is full")
		}
		return nil
	}
	before := len(w.inside.Headers)
	_, _, err = run(container.Execution{Code: "print a"})
	w.want(berm.Unavailable, err, "the disk is full")
	if len(w.inside.Headers) != before {
		t.Error("code ran without a record")
	}
	w.log.fail = nil
}

func TestTooMuchWaits(t *testing.T) {
	w := newWorld(t)
	c, _ := w.thread(me, "t")
	_, err := w.Execute(context.Background(), c.ID, container.Execution{Code: "queue"}, me, func(container.Event) error { return nil })
	w.want(berm.Exhausted, err, "100 executions wait")
}

func TestContexts(t *testing.T) {
	w := newWorld(t)
	defer w.end()
	ctx := context.Background()
	c, _ := w.thread(me, "t")
	made, err := w.CreateContext(ctx, c.ID, "bash", "/tmp", me)
	if err != nil || made.Language != "bash" || made.Cwd != "/tmp" {
		t.Fatalf("%+v, %v", made, err)
	}
	all, err := w.Contexts(ctx, c.ID, me)
	if err != nil || len(all) != 2 || all[1] != made {
		t.Errorf("%+v, %v", all, err)
	}
	if err := w.RestartContext(ctx, c.ID, made.ID, me); err != nil {
		t.Error(err)
	}
	if err := w.DeleteContext(ctx, c.ID, made.ID, me); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"nope", "", "../execute", "a/b", strings.Repeat("x", 200)} {
		w.want(berm.NotFound, w.DeleteContext(ctx, c.ID, name, me), "not found")
		w.want(berm.NotFound, w.RestartContext(ctx, c.ID, name, me), "not found")
	}
}

func TestFiles(t *testing.T) {
	w := newWorld(t)
	defer w.end()
	ctx := context.Background()
	c, _ := w.thread(me, "t")
	in, err := w.Upload(ctx, c.ID, "data/in put.csv", strings.NewReader("a,b\n"), -1, me)
	if err != nil || in.Path != filepath.Join(w.dir, "data/in put.csv") || in.Bytes != 4 || in.ID != container.FileID(in.Path) {
		t.Fatalf("%+v, %v", in, err)
	}
	for name, content := range map[string]string{"out.png": "png", ".hidden": "", ".cache/x": "", "data/.y/z": ""} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(filepath.Join(w.dir, name)), 0o755), os.WriteFile(filepath.Join(w.dir, name), []byte(content), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	all, err := w.Files(ctx, c.ID, "", me)
	if err != nil || len(all) != 2 || all[0].ID != in.ID || all[1].Path != filepath.Join(w.dir, "out.png") || all[1].Uploaded {
		t.Errorf("%+v, %v", all, err)
	}
	if all, err := w.Files(ctx, c.ID, "data", me); err != nil || len(all) != 1 {
		t.Errorf("%+v, %v", all, err)
	}
	f, err := w.File(ctx, c.ID, in.ID, me)
	if err != nil || f != all[0] {
		t.Errorf("%+v, %v", f, err)
	}
	read := func(part string) string {
		a, err := w.Open(ctx, c.ID, in.ID, part, me)
		if err != nil {
			t.Fatal(err)
		}
		defer a.Body.Close()
		text, err := io.ReadAll(a.Body)
		if err != nil {
			t.Error(err)
		}
		return a.Status + " " + string(text)
	}
	if whole, part := read(""), read("bytes=2-"); whole != "200 OK a,b\n" || part != "206 Partial Content b\n" {
		t.Errorf("%q, %q", whole, part)
	}
	if err := w.DeleteFile(ctx, c.ID, in.ID, me); err != nil {
		t.Error(err)
	}
	for _, id := range []string{in.ID, "", "cfile_", "cfile_!", container.FileID("relative"), container.FileID("/\xff"), container.FileID("/" + strings.Repeat("x", 5000)), container.FileID(w.dir)} {
		_, err := w.File(ctx, c.ID, id, me)
		_, openErr := w.Open(ctx, c.ID, id, "", me)
		for _, err := range []error{err, openErr, w.DeleteFile(ctx, c.ID, id, me)} {
			if kind := berm.KindOf(err); err == nil || kind != berm.NotFound && (id != container.FileID(w.dir) || kind != berm.Invalid) {
				t.Errorf("file %.80q: %v", id, err)
			}
		}
	}
	for _, name := range []string{"", "a/", "a\x00", "\xff"} {
		_, err := w.Upload(ctx, c.ID, name, strings.NewReader(""), 0, me)
		w.want(berm.Invalid, err, "no name")
	}
	_, err = w.Upload(ctx, c.ID, strings.Repeat("x", 4096), strings.NewReader(""), 0, me)
	w.want(berm.Invalid, err, "up to 4095 bytes, and this one has 4096")
	_, err = w.Upload(ctx, c.ID, "data", strings.NewReader(""), 0, me)
	w.want(berm.Invalid, err, "directory")
	// Nothing is written or removed outside of the working directory, whatever one calls it.
	outside := filepath.Join(t.TempDir(), "system")
	if err := os.WriteFile(outside, []byte("as it was"), 0o644); err != nil {
		t.Fatal(err)
	}
	up, err := filepath.Rel(w.dir, outside)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{outside, up, "./" + up, "data/../" + up, w.dir + "/" + up, w.dir + "x", "..", "/proc/sys/kernel/hostname"} {
		_, err := w.Upload(ctx, c.ID, name, strings.NewReader("x"), 1, me)
		w.want(berm.Invalid, err, "outside of the working directory")
	}
	w.want(berm.Invalid, w.DeleteFile(ctx, c.ID, container.FileID(outside), me), "outside of the working directory")
	if text, err := os.ReadFile(outside); err != nil || string(text) != "as it was" {
		t.Errorf("%q, %v", text, err)
	}
	for _, name := range []string{"data/../in", w.dir + "/in", "..data"} {
		if _, err := w.Upload(ctx, c.ID, name, strings.NewReader("x"), 1, me); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	// Files are recorded as those of other clients are.
	var told []string
	for _, r := range w.log.of(audit.FileAPI) {
		a := r.Data.(audit.FileAccess)
		told = append(told, string(r.Outcome)+" "+a.Op+" "+a.Path)
		if r.Actor != me || r.Sandbox != c.ID {
			t.Errorf("%+v", r)
		}
	}
	if told[0] != "ok write "+in.Path || !slices.Contains(told, "ok read "+in.Path) || !slices.Contains(told, "ok remove "+in.Path) {
		t.Errorf("%q", told)
	}
}

func TestLists(t *testing.T) {
	w := newWorld(t)
	defer w.end()
	ctx := context.Background()
	var ids []berm.SandboxID
	for i := range 4 {
		c, _, err := w.Create(ctx, container.Request{Name: fmt.Sprint(i % 2), Thread: fmt.Sprint(i), Sandbox: control.CreateRequest{Actor: me}})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, c.ID)
	}
	list := func(f container.Filter) (found []berm.SandboxID) {
		all, err := w.List(ctx, f)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range all {
			found = append(found, c.ID)
		}
		return found
	}
	check := func(what string, got []berm.SandboxID, want ...int) {
		t.Helper()
		var wanted []berm.SandboxID
		for _, i := range want {
			wanted = append(wanted, ids[i])
		}
		if !slices.Equal(got, wanted) {
			t.Errorf("%s: %v of %v, want %v", what, got, ids, want)
		}
	}
	check("all", list(container.Filter{}), 3, 2, 1, 0)
	check("ascending", list(container.Filter{Ascending: true}), 0, 1, 2, 3)
	check("by name", list(container.Filter{Name: "1"}), 3, 1)
	check("by thread", list(container.Filter{Thread: "2", Owner: me}), 2)
	check("by another's thread", list(container.Filter{Thread: "2", Owner: other}))
	if err := w.Delete(ctx, ids[2], me); err != nil {
		t.Fatal(err)
	}
	check("after one that ended", list(container.Filter{After: ids[2]}), 1, 0)
	check("ascending after one that ended", list(container.Filter{After: ids[2], Ascending: true}), 3)
	_, err := w.List(ctx, container.Filter{After: "inothing"})
	w.want(berm.Invalid, err, "no container")
}
