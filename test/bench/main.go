// Command bench measures a real server over loopback and berm run, with peers in the same run,
// prints ratios and writes one JSON file for each benchmark.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/test/harness"
)

// benchmarks in the order in which they run.
var benchmarks = []struct {
	name    string
	measure measurement
}{
	{"create", served((*bench).create)},
	{"throughput", served((*bench).throughput)},
	{"exec", served((*bench).exec)},
	{"transfer", served((*bench).transfer)},
	{"memory", served((*bench).memory)},
	{"snapshot", served((*bench).snapshot)},
	{"disks", (*bench).disks},
	{"origin", pooled((*bench).origin, "namespace", "gvisor")},
	{"interpreter", (*bench).interpreter},
	{"batch", pooled((*bench).batch, "namespace")},
	{"local", (*bench).local},
	{"record", (*bench).record},
}

// measurement puts what it measures into the results of a bench.
type measurement func(*bench, context.Context) error

func main() {
	out := flag.String("out", "bench", "directory for the JSON files")
	only := flag.String("only", "", "comma-separated names of benchmarks; empty is all")
	scale := flag.Float64("scale", 1, "multiplies the number of samples")
	flag.Parse()
	if os.Geteuid() == 0 {
		// A host of its own: nobody else's processes and memory are counted.
		if _, err := harness.Isolate(); err != nil {
			fail(err)
		}
	}
	if err := os.MkdirAll(*out, 0o755); err != nil {
		fail(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 40*time.Minute)
	defer cancel()
	failed := false
	for _, benchmark := range benchmarks {
		if *only != "" && !slices.Contains(strings.Split(*only, ","), benchmark.name) {
			continue
		}
		fmt.Printf("\n== %s\n", benchmark.name)
		if err := measure(ctx, benchmark.name, benchmark.measure, *out, *scale); err != nil {
			fmt.Printf("%s failed: %v\n", benchmark.name, err)
			failed = true
		}
	}
	if failed {
		fail(errors.New("not all could be measured"))
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "bench:", err)
	os.Exit(1)
}

// bench is one benchmark.
type bench struct {
	server  *harness.Server // nil unless served
	scale   float64
	results map[string]any
}

// served gives a benchmark a server of its own.
func served(run measurement) measurement { return servedWith(run) }

// servedWith is served by a server with more flags.
func servedWith(run measurement, flags ...string) measurement {
	return func(b *bench, ctx context.Context) error {
		data, err := harness.DataDir()
		if err != nil {
			return err
		}
		defer os.RemoveAll(data)
		server, err := harness.Start(ctx, data, append([]string{"--max-sandboxes", "500", "--spares", "2"}, flags...)...)
		if err != nil {
			return err
		}
		defer func() { _ = server.Stop(context.WithoutCancel(ctx)) }()
		b.server = server
		// What is loaded once and kept is not what is measured.
		for range 3 {
			if _, err := b.once(ctx); err != nil {
				return fmt.Errorf("%w\n%s", err, server.Log())
			}
		}
		if err := run(b, ctx); err != nil {
			return fmt.Errorf("%w\n%s", err, server.Log())
		}
		return nil
	}
}

func measure(ctx context.Context, name string, run measurement, out string, scale float64) error {
	b := &bench{scale: scale, results: map[string]any{}}
	if err := run(b, ctx); err != nil {
		return err
	}
	encoded, err := json.MarshalIndent(map[string]any{
		"benchmark": name, "at": time.Now().UTC().Format(time.RFC3339), "machine": machine(), "results": b.results,
	}, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(out, name+".json"), append(encoded, '\n'), 0o644)
}

func machine() map[string]any {
	var name unix.Utsname
	_ = unix.Uname(&name)
	model := ""
	text, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "model name"); ok {
			model = strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(rest), ":"))
			break
		}
	}
	return map[string]any{
		"cpus": runtime.NumCPU(), "model": model, "kernel": unix.ByteSliceToString(name.Release[:]),
		"arch": runtime.GOARCH, "root": os.Geteuid() == 0,
	}
}

// samples scales a number of samples, at least one.
func (b *bench) samples(n int) int { return max(1, int(float64(n)*b.scale)) }

// times is a set of durations of one kind.
type times []time.Duration

// at is the time that a share q of the set does not exceed.
func (t times) at(q float64) time.Duration {
	sorted := slices.Sorted(slices.Values(t))
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func (t times) summary() map[string]any {
	return map[string]any{"n": len(t), "p50_ms": ms(t.at(0.5)), "p95_ms": ms(t.at(0.95)), "p99_ms": ms(t.at(0.99)), "min_ms": ms(t.at(0))}
}

func (t times) String() string {
	return fmt.Sprintf("p50 %7.2f  p95 %7.2f  p99 %7.2f  min %7.2f ms  (n=%d)", ms(t.at(0.5)), ms(t.at(0.95)), ms(t.at(0.99)), ms(t.at(0)), len(t))
}
