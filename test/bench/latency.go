package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
)

// steps are the times of one sandbox's short life, as its client sees them.
type steps struct {
	create time.Duration // request to answer of the create call
	first  time.Duration // start of the command to its first output
	total  time.Duration // create request to first output
	kill   time.Duration // request to answer of the kill call
	server []harness.Step
}

// once makes a sandbox, runs a command until its first output and kills it.
func (b *bench) once(ctx context.Context) (steps, error) {
	var s steps
	start := time.Now()
	sandbox, err := b.server.Create(ctx, 5*time.Minute, nil)
	if err != nil {
		return s, fmt.Errorf("create: %w", err)
	}
	s.create, s.server = time.Since(start), sandbox.Steps
	begun := time.Now()
	_, err = sandbox.Run(ctx, harness.Command{
		Path: "/bin/echo", Args: []string{"ok"},
		First: func() { s.first, s.total = time.Since(begun), time.Since(start) },
	})
	if err == nil && s.total == 0 {
		err = errors.New("no output")
	}
	begun = time.Now()
	err = errors.Join(err, sandbox.Kill(ctx))
	s.kill = time.Since(begun)
	return s, err
}

// many runs n lives, some at once.
func (b *bench) many(ctx context.Context, n, atOnce int) ([]steps, error) {
	all := make([]steps, n)
	var next atomic.Int64
	var group sync.WaitGroup
	errs := make([]error, atOnce)
	for worker := range atOnce {
		group.Go(func() {
			for i := next.Add(1) - 1; i < int64(n); i = next.Add(1) - 1 {
				if all[i], errs[worker] = b.once(ctx); errs[worker] != nil {
					return
				}
			}
		})
	}
	group.Wait()
	return all, errors.Join(errs...)
}

func column(all []steps, of func(steps) time.Duration) times {
	var t times
	for _, s := range all {
		t = append(t, of(s))
	}
	return t
}

// create measures API create → first output of a command, at 1, 10 and 50 at
// once; at 1 interleaved with the peers.
func (b *bench) create(ctx context.Context) error {
	if err := b.peers(ctx); err != nil {
		return err
	}
	for _, level := range []struct{ atOnce, n int }{{1, 100}, {10, 200}, {50, 300}} {
		all, err := b.many(ctx, b.samples(level.n), level.atOnce)
		if err != nil {
			return err
		}
		fmt.Printf("%d at once\n", level.atOnce)
		row := map[string]any{}
		for _, step := range []struct {
			name string
			of   func(steps) time.Duration
		}{
			{"create to first output", func(s steps) time.Duration { return s.total }},
			{"  create", func(s steps) time.Duration { return s.create }},
			{"  first output", func(s steps) time.Duration { return s.first }},
			{"kill", func(s steps) time.Duration { return s.kill }},
		} {
			t := column(all, step.of)
			fmt.Printf("  %-24s %v\n", step.name, t)
			row[step.name] = t.summary()
		}
		// What the server says that each step inside of its create took.
		for i, step := range all[0].server {
			t := column(all, func(s steps) time.Duration {
				if i < len(s.server) {
					return s.server[i].Took
				}
				return 0
			})
			fmt.Printf("    in create: %-12s %v\n", step.Name, t)
			row["in create: "+step.Name] = t.summary()
		}
		b.results[fmt.Sprintf("at_once_%d", level.atOnce)] = row
	}
	return nil
}

// peer is another way to run a command, measured from start to its end.
type peer struct {
	name string
	args []string
}

// noSpares is Berm itself with --spares 0.
const noSpares = "berm --spares 0"

func peers() []peer {
	all := []peer{{"fork and exec", []string{"/bin/echo", "ok"}}}
	if path, err := exec.LookPath("bwrap"); err == nil {
		all = append(all, peer{"bubblewrap", []string{
			path, "--new-session", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev", "--tmpfs", "/tmp",
			"--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
			"--proc", "/proc", "/bin/echo", "ok",
		}})
	}
	return all
}

// peers compares one sandbox's whole way to first output with other ways to run
// the same command on the same machine, in turns.
func (b *bench) peers(ctx context.Context) error {
	// The same server without monitors that wait in advance.
	data, err := harness.DataDir()
	if err != nil {
		return err
	}
	defer os.RemoveAll(data)
	server, err := harness.Start(ctx, data, "--spares", "0")
	if err != nil {
		return err
	}
	defer func() { _ = server.Stop(context.WithoutCancel(ctx)) }()
	cold := &bench{server: server}
	if _, err := cold.once(ctx); err != nil { // formats the disk
		return err
	}
	runs := map[string]times{}
	var berm times
	list := peers()
	for range b.samples(60) {
		s, err := b.once(ctx)
		if err != nil {
			return err
		}
		berm = append(berm, s.total)
		if s, err = cold.once(ctx); err != nil {
			return err
		}
		runs[noSpares] = append(runs[noSpares], s.total)
		for _, p := range list {
			start := time.Now()
			if out, err := exec.CommandContext(ctx, p.args[0], p.args[1:]...).CombinedOutput(); err != nil {
				return fmt.Errorf("%s: %w: %s", p.name, err, out)
			}
			runs[p.name] = append(runs[p.name], time.Since(start))
		}
	}
	fmt.Println("in turns with peers (they run a command and end; Berm answers a network API, with limits, layers and an agent)")
	fmt.Printf("  %-24s %v\n", "berm", berm)
	table := map[string]any{"berm": berm.summary()}
	for _, p := range append(list, peer{name: noSpares}) {
		t := runs[p.name]
		ratio := float64(berm.at(0.5)) / float64(t.at(0.5))
		fmt.Printf("  %-24s %v  berm is %.2f×\n", p.name, t, ratio)
		row := t.summary()
		row["berm_ratio_p50"] = ratio
		table[p.name] = row
	}
	if len(list) == 1 {
		fmt.Println("  bubblewrap is not installed: not compared")
	}
	b.results["peers"] = table
	return nil
}

// throughput counts whole lives a second at 1, 8 and 32 at once.
func (b *bench) throughput(ctx context.Context) error {
	for _, atOnce := range []int{1, 8, 32} {
		n := b.samples(300)
		start := time.Now()
		all, err := b.many(ctx, n, atOnce)
		if err != nil {
			return err
		}
		rate := float64(n) / time.Since(start).Seconds()
		var creating time.Duration
		for _, s := range all {
			creating += s.create
		}
		creates := float64(n) * float64(atOnce) / creating.Seconds()
		fmt.Printf("  %2d at once: %6.1f create+exec+kill a second; %6.1f creates a second while creating\n", atOnce, rate, creates)
		b.results[fmt.Sprintf("at_once_%d", atOnce)] = map[string]any{"cycles_per_s": rate, "creates_per_s": creates}
	}
	// Creates alone.
	const atOnce = 8
	n := b.samples(160)
	var next atomic.Int64
	var group sync.WaitGroup
	errs := make([]error, atOnce)
	start := time.Now()
	for worker := range atOnce {
		group.Go(func() {
			for next.Add(1) <= int64(n) {
				if _, errs[worker] = b.server.Create(ctx, 5*time.Minute, nil); errs[worker] != nil {
					return
				}
			}
		})
	}
	group.Wait()
	took := time.Since(start)
	if err := errors.Join(errs...); err != nil {
		return err
	}
	rate := float64(n) / took.Seconds()
	fmt.Printf("  creates alone, 8 at once: %.1f a second\n", rate)
	b.results["creates_alone_8_at_once_per_s"] = rate
	start = time.Now()
	if err := b.server.KillAll(ctx); err != nil {
		return err
	}
	b.results["kills_one_after_the_other_per_s"] = float64(n) / time.Since(start).Seconds()
	return nil
}

// exec measures `true` in a running sandbox, beside fork and exec on the host.
func (b *bench) exec(ctx context.Context) error {
	sandbox, err := b.server.Create(ctx, 10*time.Minute, nil)
	if err != nil {
		return err
	}
	var inside, outside times
	for range b.samples(300) {
		start := time.Now()
		if _, err := sandbox.Run(ctx, harness.Command{Path: "/bin/true"}); err != nil {
			return err
		}
		inside = append(inside, time.Since(start))
		start = time.Now()
		if err := exec.CommandContext(ctx, "/bin/true").Run(); err != nil {
			return err
		}
		outside = append(outside, time.Since(start))
	}
	ratio := float64(inside.at(0.5)) / float64(outside.at(0.5))
	fmt.Printf("  %-24s %v\n  %-24s %v  ratio %.2f×\n", "true inside", inside, "true on the host", outside, ratio)
	b.results["inside"], b.results["host"], b.results["ratio_p50"] = inside.summary(), outside.summary(), ratio
	return nil
}
