package egress_test

import (
	"context"
	"errors"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/kernel/seccomp"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/egress/server"
	"github.com/berm-sandbox/berm/internal/service"
)

// The test is its own service when it is started as one.
func TestMain(m *testing.M) {
	if len(os.Args) < 2 || os.Args[1] != egress.Command {
		os.Exit(m.Run())
	}
	if len(os.Args) < 3 || os.Args[2] != "--"+egress.Shared {
		os.Exit(2)
	}
	s, err := server.New(server.Config{})
	if err != nil {
		os.Exit(1)
	}
	work := s.Pass
	switch os.Args[len(os.Args)-1] {
	case "stuck":
		work = func() { select {} }
	case "rogue":
		rogue()
	}
	if service.Beat(work) != nil {
		os.Exit(1)
	}
	hub, err := service.Owner()
	if err != nil || s.Serve(hub) != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

// rogue does what no service does, under the filter of services.
func rogue() {
	runtime.LockOSThread()
	filter, err := seccomp.Egress().Assemble("")
	if err == nil {
		err = errors.Join(unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), seccomp.Load(filter))
	}
	if err == nil {
		_ = unix.Exec("/bin/true", nil, nil)
	}
	os.Exit(1)
}

// newService makes a service, and tells why its processes ended.
func newService(t *testing.T, args ...string) (s *egress.Service, ended chan error) {
	s = egress.NewService(egress.Command, func() (*os.File, error) { return os.Open("/proc/self/exe") }, args...)
	ended = make(chan error, 10)
	s.Ended = func(err error) { ended <- err }
	t.Cleanup(s.Close)
	return s, ended
}

// A process that does not answer is ended and said to be, whether it is stopped or stuck.
func TestServiceHangs(t *testing.T) {
	for _, how := range []string{"stopped", "stuck"} {
		t.Run(how, func(t *testing.T) {
			s, ended := newService(t, how)
			if err := s.Start(); err != nil {
				t.Fatal(err)
			}
			if how == "stopped" {
				if err := attach(t, s, wrong); berm.KindOf(err) != berm.Invalid {
					t.Fatalf("it does not work: %v", err)
				}
				time.Sleep(2 * egress.Patience) // a process that works is left alone
				if s.Starts() != 1 || len(ended) != 0 {
					t.Fatal("a process that works was ended")
				}
				if err := syscall.Kill(s.PID(), syscall.SIGSTOP); err != nil {
					t.Fatal(err)
				}
			}
			select {
			case err := <-ended:
				if !strings.Contains(err.Error(), "did not answer") {
					t.Errorf("told: %v", err)
				}
			case <-time.After(20 * egress.Patience):
				t.Fatal("it is left to hang")
			}
			if how == "stopped" {
				if err := attach(t, s, wrong); berm.KindOf(err) != berm.Invalid || s.Starts() != 2 {
					t.Errorf("afterwards: %v, %d processes", err, s.Starts())
				}
			}
		})
	}
}

// One that makes a call that is not its own dies, and it is told.
func TestServiceBreaksRules(t *testing.T) {
	s, ended := newService(t, "rogue")
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if !strings.Contains(err.Error(), "system call") || berm.HintOf(err) == "" {
			t.Errorf("told: %v, %q", err, berm.HintOf(err))
		}
	case <-time.After(10 * time.Second):
		t.Fatal("it lives on")
	}
}

// attach asks the service for something that it refuses, and returns the refusal: who gets
// one has reached it.
func attach(t *testing.T, s *egress.Service, p egress.Policy) error {
	t.Helper()
	link, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer link.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	_, _, err = s.Attach(ctx, "i0test", link, nil, p, nil, func(egress.Event) {})
	return err
}

var wrong = egress.Policy{JSON: []byte(`{"version":2}`), Source: "p"}

func TestServiceRefusesWhatItCannotKeep(t *testing.T) {
	s, _ := newService(t)
	for document, kind := range map[string]berm.Kind{
		`{"version":2}`: berm.Invalid,
		`{"version":1,"rules":[{"to":["example.com"],"tls":"passthrough","http":{}}]}`: berm.Invalid,
	} {
		if err := attach(t, s, egress.Policy{JSON: []byte(document), Source: "p"}); err == nil || berm.KindOf(err) != kind {
			t.Errorf("%s: %v, want %v", document, err, kind)
		}
	}
	if s.Starts() != 1 {
		t.Errorf("%d processes", s.Starts())
	}
}

func TestServiceIsStartedAgain(t *testing.T) {
	s, ended := newService(t)
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 50 { // all at once, over one process
		wg.Go(func() {
			if err := attach(t, s, wrong); berm.KindOf(err) != berm.Invalid || err == nil {
				t.Errorf("%v", err)
			}
		})
	}
	wg.Wait()
	if s.Starts() != 1 {
		t.Fatalf("%d processes", s.Starts())
	}
	pid := s.PID()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(30 * time.Second); s.Starts() == 1; {
		err := attach(t, s, wrong)
		if s.Starts() == 1 && err != nil && berm.KindOf(err) != berm.Unavailable && berm.KindOf(err) != berm.Invalid {
			t.Errorf("while it dies: %v", err)
		}
		if time.Now().After(end) {
			t.Fatal("it was not started again")
		}
	}
	if err := attach(t, s, wrong); berm.KindOf(err) != berm.Invalid {
		t.Errorf("the second: %v", err)
	}
	pid = s.PID()
	s.Close()
	if syscall.Kill(pid, 0) == nil {
		t.Error("it outlives Close")
	}
	if err := attach(t, s, wrong); berm.KindOf(err) != berm.Unavailable {
		t.Errorf("after Close: %v", err)
	}
	if err := <-ended; !strings.Contains(err.Error(), "killed") || len(ended) != 0 {
		t.Errorf("told: %v, and %d more", err, len(ended))
	}
}
