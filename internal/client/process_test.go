package client_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/client"
	"github.com/berm-sandbox/berm/internal/client/clienttest"
)

// start starts a command in a new sandbox of a new server.
func start(t *testing.T, ctx context.Context, c client.Command) (*clienttest.Server, berm.SandboxID, *client.Process) {
	t.Helper()
	s := clienttest.Start(t)
	b := s.Add(client.Sandbox{})
	p, err := s.Client(t).Agent(&b, "").Start(ctx, c)
	if err != nil {
		t.Fatal(err)
	}
	return s, b.ID, p
}

func shell(script string) client.Command {
	return client.Command{Path: "/bin/sh", Args: []string{"-c", script}}
}

// safeBuffer can be read while a process writes to it.
type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *safeBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *safeBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func (b *safeBuffer) waitFor(t *testing.T, text string) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !strings.Contains(b.String(), text); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("no %q in %q", text, b.String())
		}
	}
}

func TestExitCodes(t *testing.T) {
	s := clienttest.Start(t)
	b := s.Add(client.Sandbox{})
	agent := s.Client(t).Agent(&b, "")
	for _, test := range []struct {
		command client.Command
		want    int
	}{
		{shell("exit 0"), 0}, {shell("exit 3"), 3}, {shell("exit 255"), 255},
		{shell("kill -KILL $$"), 137}, {shell("kill -TERM $$"), 143}, {shell("kill -SEGV $$"), 139},
		{client.Command{Path: "/no/such/command"}, 127},
	} {
		p, err := agent.Start(t.Context(), test.command)
		if err != nil {
			t.Fatal(err)
		}
		end, err := p.Wait(t.Context(), client.Output{})
		if err != nil || end.ExitCode() != test.want {
			t.Errorf("%v: %d, %v; want %d", test.command, end.ExitCode(), err, test.want)
		}
	}
}

func TestOutputStaysApart(t *testing.T) {
	c := shell(`echo out; echo err >&2; printf '\000\377' ; echo "$X in $PWD"`)
	c.Env = map[string]string{"X": "a b"}
	s, _, p := start(t, t.Context(), c)
	var stdout, stderr bytes.Buffer
	if _, err := p.Wait(t.Context(), client.Output{Stdout: &stdout, Stderr: &stderr}); err != nil {
		t.Fatal(err)
	}
	if want := "out\n\x00\xffa b in " + s.Home + "\n"; stdout.String() != want || stderr.String() != "err\n" {
		t.Errorf("stdout %q, stderr %q", stdout.String(), stderr.String())
	}
}

func TestPipe(t *testing.T) {
	c := shell("sha256sum")
	c.Stdin = true
	_, _, p := start(t, t.Context(), c)
	hash := sha256.New()
	in := io.TeeReader(io.LimitReader(rand.NewChaCha8([32]byte{1}), 3<<20+7), hash)
	piped := make(chan error, 1)
	go func() { piped <- p.Pipe(t.Context(), in) }()
	var out bytes.Buffer
	if _, err := p.Wait(t.Context(), client.Output{Stdout: &out}); err != nil {
		t.Fatal(err)
	}
	if err := <-piped; err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("%x", hash.Sum(nil)); !strings.HasPrefix(out.String(), want) {
		t.Errorf("%s, want %s", out.String(), want)
	}
}

func TestPipeToCommandThatDoesNotRead(t *testing.T) {
	c := shell("exit 4")
	c.Stdin = true
	_, _, p := start(t, t.Context(), c)
	end, err := p.Wait(t.Context(), client.Output{})
	if err != nil || end.ExitCode() != 4 {
		t.Fatalf("%v, %v", end, err)
	}
	if err := p.Pipe(t.Context(), strings.NewReader(strings.Repeat("x", 1<<20))); err != nil {
		t.Errorf("input for a command that ended: %v", err)
	}
}

func TestSignalReachesTheGroup(t *testing.T) {
	// The shell ignores INT, what it started does not.
	_, _, p := start(t, t.Context(), shell(`trap 'echo caught' INT; (trap - INT; exec sleep 60); echo child $?; exit 9`))
	var out safeBuffer
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		time.Sleep(200 * time.Millisecond)
		if err := p.Signal(t.Context(), syscall.SIGINT); err != nil {
			t.Error(err)
		}
	}()
	end, err := p.Wait(t.Context(), client.Output{Stdout: &out})
	<-sent
	if err != nil || end.ExitCode() != 9 || !strings.Contains(out.String(), "caught\n") || !strings.Contains(out.String(), "child 130\n") {
		t.Errorf("end %+v, %v, output %q", end, err, out.String())
	}
}

func TestKillSignal(t *testing.T) {
	_, _, p := start(t, t.Context(), shell(`trap '' TERM INT HUP; sleep 60 & wait`))
	time.AfterFunc(100*time.Millisecond, func() { p.Signal(t.Context(), syscall.SIGKILL) })
	if end, err := p.Wait(t.Context(), client.Output{}); err != nil || end.ExitCode() != 137 {
		t.Errorf("%+v, %v", end, err)
	}
}

func TestTimeout(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, _, p := start(t, ctx, shell("sleep 60"))
	if _, err := p.Wait(ctx, client.Output{}); !errors.Is(err, client.ErrTimeout) {
		t.Errorf("%v", err)
	}
}

func TestReconnect(t *testing.T) {
	c := shell(`echo first; read x; echo "got $x"; exit 5`)
	c.Stdin = true
	s, _, p := start(t, t.Context(), c)
	var out safeBuffer
	back, piped := make(chan struct{}, 1), make(chan struct{})
	notify := func(lost bool, _ string) {
		if !lost {
			back <- struct{}{}
		}
	}
	go func() {
		defer close(piped)
		out.waitFor(t, "first")
		s.CloseClientConnections()
		<-back
		if err := p.Pipe(t.Context(), strings.NewReader("line\n")); err != nil {
			t.Error(err)
		}
	}()
	end, err := p.Wait(t.Context(), client.Output{Stdout: &out, Notify: notify})
	<-piped
	if err != nil || end.Code != 5 || out.String() != "first\ngot line\n" {
		t.Errorf("%+v, %v, %q", end, err, out.String())
	}
}

func TestEndDuringLostConnection(t *testing.T) {
	s, id, p := start(t, t.Context(), shell(`echo first; sleep 0.3; exit 6`))
	var out safeBuffer
	go func() {
		out.waitFor(t, "first")
		// As a paused sandbox whose process ends none the less: the fake's processes
		// are not frozen.
		s.Edit(id, func(b *client.Sandbox) { b.State = berm.Paused })
		s.CloseClientConnections()
		time.Sleep(600 * time.Millisecond)
		s.Edit(id, func(b *client.Sandbox) { b.State = berm.Running })
	}()
	var said []string
	end, err := p.Wait(t.Context(), client.Output{Stdout: &out, Notify: func(_ bool, m string) { said = append(said, m) }})
	if err != nil || end.Code != 6 {
		t.Errorf("%+v, %v", end, err)
	}
	if len(said) != 2 || !strings.Contains(said[0], "paused") || !strings.Contains(said[1], "connected again") {
		t.Errorf("notices %q", said)
	}
}

func TestSandboxDiesDuringCommand(t *testing.T) {
	s, id, p := start(t, t.Context(), shell(`echo first; sleep 60`))
	s.Set(func(s *clienttest.Server) { s.Exits = map[berm.SandboxID]berm.Exit{id: {Reason: berm.ReasonOOM}} })
	var out safeBuffer
	go func() {
		out.waitFor(t, "first")
		s.Remove(id)
	}()
	_, err := p.Wait(t.Context(), client.Output{Stdout: &out, Notify: func(bool, string) {}})
	if berm.KindOf(err) != berm.NotFound || !strings.Contains(err.Error(), string(id)+" has ended: oom") {
		t.Errorf("%v", err)
	}
}

func TestLostWithoutNotifyIsAnError(t *testing.T) {
	s, _, p := start(t, t.Context(), shell(`echo first; sleep 60`))
	var out safeBuffer
	go func() {
		out.waitFor(t, "first")
		s.CloseClientConnections()
	}()
	if _, err := p.Wait(t.Context(), client.Output{Stdout: &out}); berm.KindOf(err) != berm.Unavailable {
		t.Errorf("%v", err)
	}
}

func TestTerminal(t *testing.T) {
	c := shell(`stty size; read x; stty size; echo "got $x"`)
	c.PTY = &client.Size{Cols: 91, Rows: 31}
	_, _, p := start(t, t.Context(), c)
	var out safeBuffer
	typed := make(chan struct{})
	go func() {
		defer close(typed)
		out.waitFor(t, "31 91")
		if err := p.Resize(t.Context(), client.Size{Cols: 101, Rows: 41}); err != nil {
			t.Error(err)
		}
		if err := p.Send(t.Context(), []byte("word\n"), true); err != nil {
			t.Error(err)
		}
	}()
	if _, err := p.Wait(t.Context(), client.Output{Stdout: &out}); err != nil {
		t.Fatal(err)
	}
	<-typed
	if got := out.String(); !strings.Contains(got, "41 101") || !strings.Contains(got, "got word") {
		t.Errorf("%q", got)
	}
}

func TestWrongTokenIsDenied(t *testing.T) {
	s := clienttest.Start(t)
	b := s.Add(client.Sandbox{})
	b.AgentToken = "wrong"
	agent := s.Client(t).Agent(&b, "")
	if _, err := agent.Start(t.Context(), shell("true")); berm.KindOf(err) != berm.Denied {
		t.Errorf("start: %v", err)
	}
	if _, err := agent.Download(t.Context(), "x"); berm.KindOf(err) != berm.Denied {
		t.Errorf("download: %v", err)
	}
}

func TestFailingWriter(t *testing.T) {
	_, _, p := start(t, t.Context(), shell("while :; do echo x; done"))
	r, w := io.Pipe()
	r.CloseWithError(syscall.EPIPE)
	var failed *client.WriteError
	if _, err := p.Wait(t.Context(), client.Output{Stdout: w}); !errors.As(err, &failed) || !errors.Is(err, syscall.EPIPE) {
		t.Errorf("%v", err)
	}
	if err := p.Signal(t.Context(), syscall.SIGKILL); err != nil {
		t.Error(err)
	}
}
