package egress_test

import (
	"context"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/egress/server"
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
	hub, err := net.FileConn(os.NewFile(egress.ServiceFD, "owner"))
	if err != nil || s.Serve(hub.(*net.UnixConn)) != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

func newService(t *testing.T) *egress.Service {
	s := egress.NewService(func() (*os.File, error) { return os.Open("/proc/self/exe") })
	t.Cleanup(s.Close)
	return s
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
	_, _, err = s.Attach(ctx, "i0test", link, p, nil, func(egress.Event) {})
	return err
}

var wrong = egress.Policy{JSON: []byte(`{"version":2}`), Source: "p"}

func TestServiceRefusesWhatItCannotKeep(t *testing.T) {
	s := newService(t)
	for document, kind := range map[string]berm.Kind{
		`{"version":2}`:                       berm.Invalid,
		`{"version":1,"limits":{"flows":3}}`:  berm.Unsupported,
		`{"version":1,"dns":{"mode":"real"}}`: berm.Unsupported,
		`{"version":1,"rules":[{"to":["example.com"],"limits":{"flows":3}}]}`:          berm.Unsupported,
		`{"version":1,"rules":[{"to":["example.com"],"dns_types":["TXT"]}]}`:           berm.Unsupported,
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
	s := newService(t)
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
	for end := time.Now().Add(5 * time.Second); s.Starts() == 1; {
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
}
