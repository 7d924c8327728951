// Package load makes and ends many sandboxes, alone and at once, with processes
// dying at random moments, and checks that nothing is left.
package load

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }

// cycle makes a sandbox, runs a command in it and kills it.
func cycle(ctx context.Context, server *harness.Server) error {
	sandbox, err := server.Create(ctx, time.Minute, nil)
	if err != nil {
		return fmt.Errorf("create: %w", err)
	}
	result, err := sandbox.Run(ctx, harness.Shell("user", "echo $((6*7))"))
	if err == nil && result.Stdout != "42\n" {
		err = fmt.Errorf("answered %+v", result)
	}
	if killed := sandbox.Kill(ctx); killed != nil {
		err = errors.Join(err, fmt.Errorf("kill: %w", killed))
	}
	return err
}

// cycles runs n cycles, some at once, and fails when any failed or the host then
// differs from before.
func cycles(t *testing.T, server *harness.Server, n, atOnce int) {
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Minute)
	defer cancel()
	// The first cycles fill what is kept for later ones.
	for range atOnce {
		if err := cycle(ctx, server); err != nil {
			t.Fatal(err)
		}
	}
	before, start := harness.Look(server), time.Now()
	var next atomic.Int64
	var group sync.WaitGroup
	var mu sync.Mutex
	var failed []error
	for range atOnce {
		group.Go(func() {
			for next.Add(1) <= int64(n) {
				if err := cycle(ctx, server); err != nil {
					mu.Lock()
					failed = append(failed, err)
					mu.Unlock()
				}
			}
		})
	}
	group.Wait()
	took := time.Since(start)
	t.Logf("%d cycles, %d at once: %.1f a second", n, atOnce, float64(n)/took.Seconds())
	if len(failed) > 0 {
		t.Errorf("%d of %d cycles failed, the first: %v\n%s", len(failed), n, failed[0], server.Log())
	}
	if left := before.Settle(server, 30*time.Second); len(left) > 0 {
		t.Errorf("left behind:\n%s", strings.Join(left, "\n"))
	}
}

func TestThousandCycles(t *testing.T) {
	harness.Slow(t)
	cycles(t, harness.Serve(t), 1000, 1)
}

func TestTwoHundredCyclesAtOnce(t *testing.T) {
	harness.Slow(t)
	cycles(t, harness.Serve(t), 200, 20)
}

// TestDescriptors bounds what one sandbox in use costs the server.
func TestDescriptors(t *testing.T) {
	harness.Slow(t)
	server := harness.Serve(t)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	if err := cycle(ctx, server); err != nil {
		t.Fatal(err)
	}
	// Its root and its pid namespace, its monitor's process, streams of the monitor and of the network
	// service, and some to its agent.
	const sandboxes, most = 20, 9
	before := harness.Descriptors(server.PID())
	var group sync.WaitGroup
	for range sandboxes {
		sandbox, err := server.Create(ctx, 5*time.Minute, nil)
		if err != nil {
			t.Fatal(err)
		}
		// Ten commands at once: the connections of a burst must not stay open.
		for range 10 {
			group.Go(func() {
				if _, err := sandbox.Run(ctx, harness.Shell("user", "sleep 0.2")); err != nil {
					t.Error(err)
				}
			})
		}
		group.Wait()
	}
	time.Sleep(500 * time.Millisecond)
	// The client's own connections are the same few all the time.
	used := float64(harness.Descriptors(server.PID())-before) / sandboxes
	t.Logf("%.1f server descriptors a sandbox", used)
	if used > most {
		t.Errorf("%.1f server descriptors a sandbox, at most %d are allowed", used, most)
	}
}

// TestRandomDeaths lets clients, agents, monitors and the server die at random
// moments of the life of sandboxes. What lives must work, and at the end nothing
// is left.
func TestRandomDeaths(t *testing.T) {
	harness.Slow(t)
	server := harness.Serve(t)
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Minute)
	defer cancel()
	for range 4 {
		if err := cycle(ctx, server); err != nil {
			t.Fatal(err)
		}
	}
	before := harness.Look(nil)
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)

	counts := map[string]int{}
	for round := range 120 {
		victim := []string{"client", "client", "agent", "monitor", "server"}[random.IntN(5)]
		counts[victim]++
		delay := time.Duration(random.IntN(40_000)) * time.Microsecond

		// Three sandboxes at work; the client of each may be cut off.
		work, stop := context.WithCancel(ctx)
		var group sync.WaitGroup
		for range 3 {
			group.Go(func() {
				sandbox, err := server.Create(work, time.Minute, nil)
				if err != nil {
					return
				}
				sandbox.Run(work, harness.Shell("user", "for i in $(seq 50); do echo $i; sleep 0.005; done"))
				sandbox.Kill(work)
			})
		}
		time.Sleep(delay)
		switch victim {
		case "client":
			stop()
		case "agent", "monitor":
			name := map[string]string{"agent": "berm-guest", "monitor": "berm-monitor"}[victim]
			if pids := harness.Processes(name); len(pids) > 0 {
				syscall.Kill(pids[random.IntN(len(pids))], syscall.SIGKILL)
			}
		case "server":
			server.Crash()
			stop()
			if err := server.Restart(ctx); err != nil {
				t.Fatalf("round %d: restart: %v", round, err)
			}
		}
		group.Wait()
		stop()
		if !server.Alive() {
			t.Fatalf("round %d: the server died after a dead %s:\n%s", round, victim, server.Log())
		}
		if round%10 == 9 {
			if err := server.KillAll(ctx); err != nil {
				t.Fatalf("round %d: %v", round, err)
			}
			if err := cycle(ctx, server); err != nil {
				t.Fatalf("round %d: a new sandbox does not work after a dead %s: %v\n%s", round, victim, err, server.Log())
			}
		}
	}
	t.Logf("deaths: %v", counts)
	if err := server.KillAll(ctx); err != nil {
		t.Fatal(err)
	}
	if left := before.Settle(nil, 30*time.Second); len(left) > 0 {
		// The server itself was started again, and its services: their processes differ, but not their number.
		more := map[string]int{}
		left = slices.DeleteFunc(left, func(line string) bool {
			for _, name := range []string{"(egressd)", "(auditd)"} {
				if strings.Contains(line, name) {
					more[name] += strings.Count(line, "+ process") - strings.Count(line, "- process")
					return true
				}
			}
			return strings.Contains(line, "(berm-platform") || strings.Contains(line, fmt.Sprint("process ", server.PID(), "."))
		})
		for name, n := range more {
			if n != 0 {
				left = append(left, fmt.Sprintf("%+d %s", n, name))
			}
		}
		if len(left) > 0 {
			t.Errorf("left behind:\n%s", strings.Join(left, "\n"))
		}
	}
	entries, err := os.ReadDir(server.Data + "/sandboxes")
	if err != nil || len(entries) > 0 {
		t.Errorf("%d directories left in the data directory (%v)", len(entries), err)
	}
}
