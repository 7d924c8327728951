package harness

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// Main is the TestMain of packages whose tests need a host of their own: with
// BERM_TEST_ALL set and as root it runs them isolated.
func Main(m *testing.M) {
	flag.Parse()
	if os.Getenv("BERM_TEST_ALL") != "" && os.Geteuid() == 0 {
		if _, err := Isolate(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// Slow skips a test unless Main could isolate it.
func Slow(t *testing.T) {
	t.Helper()
	if os.Getenv("BERM_TEST_ALL") == "" {
		t.Skip("slow: set BERM_TEST_ALL=1")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root: namespaces and cgroups around the test")
	}
}

// Serve starts a server for one test. When the test ends every sandbox is killed,
// the server stopped, and what then differs from before fails the test.
func Serve(t *testing.T, args ...string) *Server {
	t.Helper()
	return serve(t, func(ctx context.Context, data string) (*Server, error) { return Start(ctx, data, args...) })
}

// ServeAt is Serve at an address of this machine that is free.
func ServeAt(t *testing.T, listen string, args ...string) *Server {
	t.Helper()
	return serve(t, func(ctx context.Context, data string) (*Server, error) { return StartAt(ctx, listen, data, args...) })
}

func serve(t *testing.T, start func(ctx context.Context, data string) (*Server, error)) *Server {
	t.Helper()
	before := Look(nil)
	data, err := DataDir()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(data) })
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	server, err := start(ctx, data)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := server.Stop(ctx); err != nil {
			t.Errorf("stop: %v\n%s", err, server.Log())
		}
		if left := before.Settle(nil, 5*time.Second); len(left) > 0 {
			t.Errorf("left behind:\n%s", strings.Join(left, "\n"))
		}
	})
	return server
}
