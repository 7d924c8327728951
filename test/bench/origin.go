package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
)

// most is the largest number of sandboxes that begin at once.
const most = 50

// otherwise is what no pool has: a create that asks for it is a cold one.
var otherwise = map[string]any{"pids": 777}

// pooled runs a measurement for each level, with a server that has a pool of most of them.
func pooled(run func(*bench, context.Context, string) error, levels ...string) measurement {
	return func(b *bench, ctx context.Context) error {
		for _, level := range levels {
			data, err := harness.DataDir()
			if err != nil {
				return err
			}
			defer os.RemoveAll(data)
			b.server, err = harness.Start(ctx, data, "--max-sandboxes", "500", "--spares", "2", "--pool", fmt.Sprintf("base@%s=%d", level, most))
			if err != nil {
				return err
			}
			err = run(b, ctx, level)
			if err != nil {
				err = fmt.Errorf("%s: %w\n%s", level, err, b.server.Log())
			}
			if err = errors.Join(err, b.server.Stop(context.WithoutCancel(ctx))); err != nil {
				return err
			}
		}
		return nil
	}
}

// filled waits until n sandboxes of the one pool wait.
func (b *bench) filled(ctx context.Context, n int) error {
	for {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, b.server.URL+"/metrics", nil)
		if err != nil {
			return err
		}
		request.Header.Set("X-API-Key", b.server.Key)
		answer, err := http.DefaultClient.Do(request)
		if err != nil {
			return err
		}
		text, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(text)) {
			if strings.HasPrefix(line, "berm_pool_waiting{") && strings.HasSuffix(strings.TrimSpace(line), " "+strconv.Itoa(n)) {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// origin measures create → first output from the template, a pool and a snapshot, in turns, at 1, 10
// and 50 at once, and forks of 10 and 100.
func (b *bench) origin(ctx context.Context, level string) error {
	parent, err := b.server.Create(ctx, time.Hour, map[string]any{"berm": map[string]any{"level": level, "limits": otherwise}})
	if err != nil {
		return err
	}
	var taken struct{ SnapshotID string }
	if err := b.server.Call(ctx, "POST", "/sandboxes/"+parent.ID+"/snapshots", map[string]any{}, &taken); err != nil {
		return err
	}
	ways := []struct {
		name    string
		options map[string]any
	}{
		{"cold", map[string]any{"berm": map[string]any{"level": level, "limits": otherwise}}},
		{"pool", map[string]any{"berm": map[string]any{"level": level}}},
		{"snapshot", map[string]any{"templateID": taken.SnapshotID}},
	}
	row := map[string]any{}
	for _, at := range []struct{ once, rounds int }{{1, 10}, {10, 3}, {most, 2}} {
		found := make([]times, len(ways))
		for range b.samples(at.rounds) {
			for i, way := range ways {
				if err := b.filled(ctx, most); err != nil {
					return err
				}
				took, err := b.burst(ctx, at.once, way.options)
				if err != nil { // a machine may be too slow for so many
					fmt.Printf("  %s, %d at once: %d began; %.300v\n", way.name, at.once, len(took), err)
				}
				found[i] = append(found[i], took...)
			}
		}
		for i, way := range ways {
			fmt.Printf("  %-9s %2d at once, %-8s %s  %.2f of cold\n", level, at.once, way.name, found[i], float64(found[i].at(0.5))/float64(max(found[0].at(0.5), 1)))
			row[fmt.Sprintf("%s at_once_%d", way.name, at.once)] = found[i].summary()
		}
	}
	for _, count := range []int{10, 100} {
		var took times
		for range b.samples(2) {
			var forks []struct{ Sandbox struct{ SandboxID string } }
			begin := time.Now()
			if err := b.server.Call(ctx, "POST", "/sandboxes/"+parent.ID+"/fork", map[string]any{"count": count, "timeout": 600}, &forks); err != nil {
				return err
			}
			took = append(took, time.Since(begin))
			for i, f := range forks {
				if f.Sandbox.SandboxID == "" {
					return fmt.Errorf("child %d was not made", i)
				}
				if err := b.server.Call(ctx, "DELETE", "/sandboxes/"+f.Sandbox.SandboxID, nil, nil); err != nil {
					return err
				}
			}
		}
		fmt.Printf("  %-9s fork of %-3d               %s\n", level, count, took)
		row[fmt.Sprintf("fork of %d", count)] = took.summary()
	}
	b.results[level] = row
	return nil
}

// burst begins n sandboxes at once and returns how long those took to their first output that did not fail.
func (b *bench) burst(ctx context.Context, n int, options map[string]any) (times, error) {
	took, errs := make(times, n), make([]error, n)
	var group sync.WaitGroup
	for i := range n {
		group.Go(func() {
			begin := time.Now()
			sandbox, err := b.server.Create(ctx, 10*time.Minute, options)
			if err != nil {
				errs[i] = err
				return
			}
			_, err = sandbox.Run(ctx, harness.Command{Path: "/bin/echo", Args: []string{"ok"}, First: func() { took[i] = time.Since(begin) }})
			errs[i] = errors.Join(err, sandbox.Kill(ctx))
		})
	}
	group.Wait()
	var began times
	for i, err := range errs {
		if err == nil {
			began = append(began, took[i])
		}
	}
	return began, errors.Join(errs...)
}

// batch measures jobs a second of `berm batch`, whose jobs run `true`, cold and from a pool.
func (b *bench) batch(ctx context.Context, level string) error {
	binary, err := harness.Binary()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "berm-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	n := b.samples(300)
	for _, way := range []struct{ name, limits string }{{"cold", `,"limits":{"pids":777}`}, {"pool", ""}} {
		if err := b.filled(ctx, most); err != nil {
			return err
		}
		var jobs bytes.Buffer
		for i := range n {
			fmt.Fprintf(&jobs, `{"id":"%d","level":"%s","command":["true"]%s}`+"\n", i, level, way.limits)
		}
		file := filepath.Join(dir, way.name+".jsonl")
		if err := os.WriteFile(file, jobs.Bytes(), 0o600); err != nil {
			return err
		}
		cmd := exec.CommandContext(ctx, binary, "batch", "--json", "--results", file+".results.jsonl", file)
		cmd.Env = append(os.Environ(), "BERM_URL="+b.server.URL, "BERM_API_KEY="+b.server.Key)
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		if err != nil {
			return err
		}
		var told struct{ Passed, JobsPerSecond float64 }
		if err := json.Unmarshal(out, &told); err != nil {
			return err
		}
		results, err := os.ReadFile(file + ".results.jsonl")
		if err != nil {
			return err
		}
		warm := bytes.Count(results, []byte(`"warm":true`))
		fmt.Printf("  %-9s %-4s %3.0f of %d jobs passed, %d from the pool: %.1f a second\n", level, way.name, told.Passed, n, warm, told.JobsPerSecond)
		b.results[level+" "+way.name] = map[string]any{"jobs": n, "passed": told.Passed, "warm": warm, "per_s": told.JobsPerSecond}
	}
	return nil
}
