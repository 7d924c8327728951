package writer_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/audit/writer"
	"github.com/berm-sandbox/berm/internal/audit/writer/writertest"
	"github.com/berm-sandbox/berm/internal/service"
)

// The test is its own writer, or a server.
func TestMain(m *testing.M) {
	writertest.Main()
	if dir := os.Getenv("WRITER_SERVER"); dir != "" {
		serve(dir)
	}
	service.Interval = 100 * time.Millisecond
	os.Exit(m.Run())
}

func open(t testing.TB, dir string, change ...func(*writer.Config)) *writer.Log {
	t.Helper()
	c := writer.Config{Dir: dir, Program: writertest.Program, Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Wait: time.Minute}
	for _, f := range change {
		f(&c)
	}
	l, err := writer.Open(c)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func closeLog(t testing.TB, l *writer.Log) {
	t.Helper()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

func record(text string) audit.Record {
	return audit.Record{
		Actor: audit.Actor{Type: "system"}, Type: audit.APICall, Src: "test", Trust: audit.TrustHost, Outcome: audit.OK, Reason: text,
	}
}

// lines are the records of a log that verifies.
func lines(t testing.TB, dir string) (all []trail.Line) {
	t.Helper()
	report, err := trail.Verify(dir, trail.Trust{})
	if err != nil {
		t.Fatal(err)
	}
	if len(report.Problems) > 0 {
		t.Fatalf("the log does not verify: %v", report.Problems)
	}
	for line, err := range trail.Dir(dir).Records(0) {
		if err != nil {
			t.Fatal(err)
		}
		line.Raw = nil
		all = append(all, line)
	}
	return all
}

// once fails when a text is not in the log exactly once.
func once(t testing.TB, dir string, texts map[string]bool) {
	t.Helper()
	found := map[string]int{}
	for _, line := range lines(t, dir) {
		found[line.Reason]++
	}
	for text := range texts {
		if found[text] != 1 {
			t.Errorf("%q was acknowledged and is there %d times", text, found[text])
		}
	}
}

func TestLog(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "audit")
	anchor := filepath.Join(t.TempDir(), "anchors")
	l := open(t, dir, func(c *writer.Config) { c.Anchors = []string{anchor} })
	var group sync.WaitGroup
	want := map[string]bool{}
	for i := range 200 {
		text := fmt.Sprint("record ", i)
		want[text] = true
		group.Go(func() {
			if err := l.Emit(record(text)); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	if l.Seq() != 200 || l.Origin() == "" {
		t.Errorf("%d records of %q", l.Seq(), l.Origin())
	}
	b, err := l.NewBlob(audit.KindContent)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Write([]byte("content")); err != nil {
		t.Fatal(err)
	}
	blob, err := b.Commit()
	if err != nil {
		t.Fatal(err)
	}
	r := record("has content")
	r.Blobs = []audit.Blob{blob}
	if err := l.Emit(r); err != nil {
		t.Fatal(err)
	}
	thrown, err := l.NewBlob(audit.KindContent)
	if err != nil {
		t.Fatal(err)
	}
	thrown.Discard()
	if err := l.RotateKey(); err != nil {
		t.Fatal(err)
	}
	closeLog(t, l)
	once(t, dir, want)
	if left, _ := filepath.Glob(filepath.Join(dir, audit.BlobDir, "new-*")); len(left) > 0 {
		t.Errorf("left are %v", left)
	}
	if text, err := os.ReadFile(anchor); err != nil || len(trail.ParseAnchors(string(text))) == 0 {
		t.Errorf("the anchor has %q, %v", text, err)
	}
	if os.Geteuid() == 0 {
		uid, _ := service.ID(service.Auditd)
		for _, name := range []string{"", "log.jsonl", "key", "tree", "checkpoints.jsonl", "blobs", "blobs/" + blob.SHA256[:2], "blobs/" + blob.SHA256[:2] + "/" + blob.SHA256} {
			info, err := os.Stat(filepath.Join(dir, name))
			if err != nil || info.Sys().(*syscall.Stat_t).Uid != uid {
				t.Errorf("%q is not the writer's: %v", name, err)
			}
		}
	}
	if err := l.Emit(record("late")); berm.KindOf(err) != berm.Unavailable {
		t.Errorf("a closed log took a record: %v", err)
	}
}

// A record that is none spoils no other, and what only the log tells of is refused.
// Several are kept in their order, but for one that is refused, also when they are more than one batch and the
// writer dies meanwhile.
func TestSeveral(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "audit")
	l := open(t, dir)
	var records []audit.Record
	for i := range 2500 {
		records = append(records, record(fmt.Sprint("record ", i)))
	}
	bad := records[1700]
	bad.Type = audit.Removed
	records[1700] = bad
	done := make(chan error)
	go func() { done <- l.EmitAll(records) }()
	for l.Seq() == 0 {
		time.Sleep(time.Millisecond)
	}
	if err := unix.Kill(l.PID(), unix.SIGKILL); err != nil {
		t.Error(err)
	}
	if err := <-done; berm.KindOf(err) != berm.Invalid {
		t.Errorf("with a record that only the log may make: %v", err)
	}
	closeLog(t, l)
	if err := l.EmitAll(records[:2]); berm.KindOf(err) != berm.Unavailable {
		t.Errorf("of a log that is closed: %v", err)
	}
	next := 0
	for _, line := range lines(t, dir) {
		if n, err := fmt.Sscanf(line.Reason, "record %d", new(int)); n != 1 || err != nil {
			continue // of the log itself
		}
		if next == 1700 {
			next++
		}
		if line.Reason != fmt.Sprint("record ", next) {
			t.Fatalf("%q in the place of record %d", line.Reason, next)
		}
		next++
	}
	if next != len(records) {
		t.Errorf("%d records of %d", next, len(records))
	}
}

func TestRefusedRecords(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir)
	want := map[string]bool{}
	var group sync.WaitGroup
	for i := range 60 {
		text := fmt.Sprint("good ", i)
		want[text] = true
		group.Go(func() {
			if err := l.Emit(record(text)); err != nil {
				t.Error(err)
			}
		})
		bad := record("bad")
		switch i % 3 {
		case 0:
			bad.Type = audit.Removed
		case 1:
			bad.Src = audit.OwnSource
		default:
			bad.Type = "no.such"
		}
		group.Go(func() {
			if err := l.Emit(bad); berm.KindOf(err) != berm.Invalid {
				t.Errorf("%+v: %v", bad, err)
			}
		})
	}
	group.Wait()
	long := record("long")
	long.Data = strings.Repeat("x", 1<<20)
	if err := l.Emit(long); err != nil {
		t.Error(err)
	}
	escaped := record("grows")
	escaped.Data = strings.Repeat("\u0085", audit.MaxLine/3)
	if err := l.Emit(escaped); err != nil {
		t.Error(err)
	}
	closeLog(t, l)
	want["long"], want["grows"] = true, true
	once(t, dir, want)
	for _, line := range lines(t, dir) {
		if line.Reason == "bad" {
			t.Error("a record that is none was taken")
		}
	}
}

// kill -9 of the writer at any time loses nothing that was acknowledged, and nobody notices.
func TestWriterDies(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir)
	var mu sync.Mutex
	acknowledged := map[string]bool{}
	var stop atomic.Bool
	var group sync.WaitGroup
	for worker := range 8 {
		group.Go(func() {
			for i := 0; !stop.Load() && i < 100_000; i++ {
				text := fmt.Sprint(worker, " ", i)
				if err := l.Emit(record(text)); err != nil {
					t.Errorf("%s: %v", text, err)
					return
				}
				mu.Lock()
				acknowledged[text] = true
				mu.Unlock()
			}
		})
	}
	for kill := range 8 {
		pid := 0
		for end := time.Now().Add(time.Minute); pid == 0; time.Sleep(time.Millisecond) {
			if pid = l.PID(); time.Now().After(end) {
				t.Fatal("there is no writer")
			}
		}
		time.Sleep(time.Duration(kill*7) * time.Millisecond) // anywhere in a batch
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			t.Fatal(err)
		}
		for end := time.Now().Add(time.Minute); l.PID() == pid || l.PID() == 0; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal("the writer is not started again")
			}
		}
		b, err := l.NewBlob(audit.KindContent)
		if err != nil {
			t.Fatal(err)
		}
		b.Discard()
	}
	stop.Store(true)
	group.Wait()
	closeLog(t, l)
	once(t, dir, acknowledged)
	gaps := 0
	for _, line := range lines(t, dir) {
		if line.Type == audit.Gap && line.Src == "server" {
			gaps++
		}
	}
	if gaps != 8 {
		t.Errorf("%d gap records tell of 8 deaths", gaps)
	}
}

// A writer that hangs holds up nobody for ever: what it did not answer is refused, a gap tells how
// many, and another one goes on.
func TestWriterHangs(t *testing.T) {
	defer writer.SetPatience(200 * time.Millisecond)()
	dir := t.TempDir()
	l := open(t, dir)
	if err := l.Emit(record("before")); err != nil {
		t.Fatal(err)
	}
	pid := l.PID()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	refused := 0
	for end := time.Now().Add(time.Minute); l.PID() == pid; {
		if err := l.Emit(record("meanwhile")); berm.KindOf(err) == berm.Unavailable && err != nil {
			refused++
		}
		if time.Now().After(end) {
			t.Fatal("it is left to hang")
		}
	}
	for end := time.Now().Add(time.Minute); ; {
		err := l.Emit(record("after"))
		if err == nil {
			break
		}
		refused++ // on a busy machine
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
	closeLog(t, l)
	lost, there := 0, 0
	for _, line := range lines(t, dir) {
		switch {
		case line.Type == audit.Gap:
			lost += int(line.Data.(map[string]any)["count"].(float64))
			if !strings.Contains(line.Reason, "did not answer") {
				t.Errorf("told: %s", line.Reason)
			}
		case line.Reason == "meanwhile" || line.Reason == "after":
			there++
		}
	}
	if refused == 0 || lost+there < refused+1 {
		t.Errorf("%d were refused, a gap tells of %d, %d are there", refused, lost, there)
	}
	once(t, dir, map[string]bool{"before": true})
}

// Who waits for a writer that hangs for a moment too long is told so; its record is written when the writer goes on,
// and so are those after it.
func TestWriterHangsForAMoment(t *testing.T) {
	defer writer.SetPatience(50 * time.Millisecond)()
	defer func(before time.Duration) { service.Interval = before }(service.Interval)
	service.Interval = 5 * time.Second // it is not killed
	dir := t.TempDir()
	l := open(t, dir)
	pid := l.PID()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	begin, text := time.Now(), ""
	for i, err := 0, error(nil); err == nil; i++ { // it stops a moment later
		text = fmt.Sprint("meanwhile ", i)
		if err = l.Emit(record(text)); err != nil && berm.KindOf(err) != berm.Unavailable {
			t.Fatal(err)
		}
	}
	waited := time.Since(begin)
	if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	for i, end := 0, time.Now().Add(time.Minute); i < 3; { // on a busy machine one may be refused
		if l.Emit(record(fmt.Sprint("after ", i))) == nil {
			i++
		} else if time.Now().After(end) {
			t.Fatal("it does not go on")
		}
	}
	if l.PID() != pid || waited > 10*time.Second {
		t.Errorf("it was waited for %s", waited)
	}
	closeLog(t, l)
	once(t, dir, map[string]bool{text: true})
}

// serve is a server that tells which records were acknowledged until it is killed.
func serve(dir string) {
	l, err := writer.Open(writer.Config{Dir: dir, Program: writertest.Program, Log: slog.Default(), Wait: time.Minute})
	if err != nil {
		fmt.Println("open:", err)
		os.Exit(1)
	}
	for worker := range 4 {
		go func() {
			for i := 0; ; i++ {
				text := fmt.Sprintf("%d/%d/%d", os.Getpid(), worker, i)
				if err := l.Emit(record(text)); err != nil {
					fmt.Println("emit:", err)
					os.Exit(1)
				}
				fmt.Println(text)
			}
		}()
	}
	select {}
}

// kill -9 of the server loses nothing that was acknowledged; the writer ends by itself and tells of
// it, and the next server goes on at once.
func TestServerDies(t *testing.T) {
	dir := t.TempDir()
	acknowledged := map[string]bool{}
	const deaths = 5
	for round := range deaths {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), "WRITER_SERVER="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		told := bufio.NewReader(out)
		for n := 0; ; n++ {
			text, err := told.ReadString('\n')
			if err != nil { // half a line may be left
				break
			}
			if strings.Count(text, "/") != 2 {
				t.Error(text)
			}
			acknowledged[strings.TrimSpace(text)] = true
			if n == 0 {
				time.AfterFunc(time.Duration(round*20)*time.Millisecond, func() { _ = cmd.Process.Kill() })
			}
		}
		_ = cmd.Wait() // killed
	}
	closeLog(t, open(t, dir))
	once(t, dir, acknowledged)
	died := 0
	for _, line := range lines(t, dir) {
		if line.Type == audit.ServerStop && line.Outcome == audit.Failed {
			died++
		}
	}
	if died != deaths {
		t.Errorf("%d of %d deaths are told", died, deaths)
	}
}

// Records for which there is no space are refused and counted, and the log goes on when there is.
func TestDiskFull(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("missing: root, to mount a small disk")
	}
	dir := filepath.Join(t.TempDir(), "disk")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=512k,mode=700"); err != nil {
		t.Skipf("missing: a disk in memory: %v", err)
	}
	defer func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	ballast := filepath.Join(dir, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 256<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	log := filepath.Join(dir, "audit")
	l := open(t, log)
	acknowledged := map[string]bool{}
	refused := 0
	for i := 0; refused < 5 && i < 10_000; i++ {
		text := fmt.Sprint(i, strings.Repeat(" ", 500))
		switch err := l.Emit(record(text)); {
		case err == nil:
			acknowledged[text] = true
		case berm.KindOf(err) == berm.Unavailable && strings.Contains(berm.HintOf(err), "space"):
			refused++
		default:
			t.Fatal(err)
		}
	}
	if refused < 5 {
		t.Fatal("the disk does not get full")
	}
	if err := syscall.Kill(l.PID(), syscall.SIGKILL); err != nil { // it goes on without space too
		t.Fatal(err)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	if err := l.Emit(record("after")); err != nil {
		t.Fatal(err)
	}
	acknowledged["after"] = true
	closeLog(t, l)
	once(t, log, acknowledged)
	// That the writer died may be refused, too, and is counted then.
	if n := lost(t, log); n != refused && n != refused+1 {
		t.Errorf("%d were refused, and gaps tell of %d", refused, n)
	}
}

// lost is how many records the gap records of a log tell of.
func lost(t testing.TB, dir string) (n int) {
	for _, line := range lines(t, dir) {
		if line.Type == audit.Gap {
			n += int(line.Data.(map[string]any)["count"].(float64))
		}
	}
	return n
}

// The file of a blob comes to who asked for it, whatever is asked beside it.
func TestBlobsAtOnce(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir)
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			for i := range 200 {
				b, err := l.NewBlob(audit.KindContent)
				if err != nil {
					t.Error(err)
					return
				}
				_, _ = fmt.Fprint(b, i)
				if _, err := b.Commit(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	closeLog(t, l)
	if left, _ := filepath.Glob(filepath.Join(dir, audit.BlobDir, "new-*")); len(left) > 0 {
		t.Errorf("left are %v", left)
	}
}

// A writer that was killed in the middle of a line and of a blob has lost neither.
func TestWriterDiesInTheMiddle(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir)
	if err := l.Emit(record("before")); err != nil {
		t.Fatal(err)
	}
	b, err := l.NewBlob(audit.KindContent)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "log.jsonl"), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(`{"v":1,"seq":2,"ti`); err != nil {
		t.Fatal(err)
	}
	f.Close()
	if err := syscall.Kill(l.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_, _ = b.Write([]byte("content"))
	blob, err := b.Commit()
	if err != nil {
		t.Fatal(err)
	}
	r := record("after")
	r.Blobs = []audit.Blob{blob}
	if err := l.Emit(r); err != nil {
		t.Fatal(err)
	}
	closeLog(t, l)
	once(t, dir, map[string]bool{"before": true, "after": true})
	if n := lost(t, dir); n != 0 {
		t.Errorf("gaps tell of %d", n)
	}
}

// A log whose writer died and cannot be started again is closed, also when a batch was on its way.
func TestCloseWithoutWriter(t *testing.T) {
	defer writer.SetPatience(200 * time.Millisecond)()
	var gone atomic.Bool
	l := open(t, t.TempDir(), func(c *writer.Config) {
		program := c.Program
		c.Program = func() (*os.File, error) {
			if gone.Load() {
				return nil, errors.New("no program")
			}
			return program()
		}
	})
	pid := l.PID()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if err := l.Emit(record("on its way")); berm.KindOf(err) != berm.Unavailable {
		t.Errorf("it was taken: %v", err)
	}
	gone.Store(true)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	closed := make(chan error)
	go func() { closed <- l.Close() }()
	select {
	case err := <-closed:
		if err == nil {
			t.Error("that there is no writer is not told")
		}
	case <-time.After(time.Minute):
		t.Fatal("it is not closed")
	}
}

// A log that another process writes is told so; its directory may be a link.
func TestInUse(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "audit")
	if err := os.Symlink(t.TempDir(), dir); err != nil {
		t.Fatal(err)
	}
	l := open(t, dir)
	_, err := writer.Open(writer.Config{Dir: dir, Program: writertest.Program, Log: slog.Default(), Wait: 50 * time.Millisecond})
	if berm.KindOf(err) != berm.Conflict || !strings.Contains(berm.HintOf(err), "berm auditd") {
		t.Errorf("%v, hint %q", err, berm.HintOf(err))
	}
	closeLog(t, l)
	lines(t, dir)
}
