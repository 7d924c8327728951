package main

import (
	"context"
	"fmt"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
)

// snapshot measures snapshots, what begins with them, pauses without memory and forks against
// the bytes that a sandbox has written.
func (b *bench) snapshot(ctx context.Context) error {
	var cold times
	for range b.samples(10) {
		begin := time.Now()
		sandbox, err := b.server.Create(ctx, 5*time.Minute, nil)
		if err != nil {
			return err
		}
		cold = append(cold, time.Since(begin))
		if err := sandbox.Kill(ctx); err != nil {
			return err
		}
	}
	fmt.Printf("  create from the template     %s\n", cold)
	b.results["create"] = cold.summary()
	for _, dirty := range []struct {
		name string
		size int
	}{{"0", 0}, {"100 MB", 100}, {"1 GB", 1000}} {
		row, err := b.snapshotOf(ctx, dirty.size)
		if err != nil {
			return fmt.Errorf("%s: %w", dirty.name, err)
		}
		all := map[string]any{}
		for _, step := range []string{"stopped", "snapshot", "create", "pause", "resume", "fork of 10"} {
			fmt.Printf("  %-7s %-20s %s\n", dirty.name, step, row[step])
			all[step] = row[step].summary()
		}
		b.results[dirty.name] = all
	}
	return nil
}

// snapshotOf measures with so many megabytes written.
func (b *bench) snapshotOf(ctx context.Context, megabytes int) (map[string]times, error) {
	sandbox, err := b.server.Create(ctx, 30*time.Minute, map[string]any{"berm": map[string]any{"limits": map[string]any{"disk": 2 << 30}}})
	if err != nil {
		return nil, err
	}
	defer func() { _ = sandbox.Kill(context.WithoutCancel(ctx)) }()
	if _, err := sandbox.Run(ctx, harness.Shell("root", fmt.Sprintf("head -c %d /dev/urandom >/big; sync", megabytes*1_000_000))); err != nil {
		return nil, err
	}
	row := map[string]times{}
	timed := func(step string, call func() error) error {
		begin := time.Now()
		err := call()
		row[step] = append(row[step], time.Since(begin))
		return err
	}
	for range b.samples(5) {
		var taken struct {
			SnapshotID string
			Berm       struct{ StoppedMS float64 }
		}
		if err := timed("snapshot", func() error {
			return b.server.Call(ctx, "POST", "/sandboxes/"+sandbox.ID+"/snapshots", map[string]any{}, &taken)
		}); err != nil {
			return nil, err
		}
		row["stopped"] = append(row["stopped"], time.Duration(taken.Berm.StoppedMS*float64(time.Millisecond)))
		var child *harness.Sandbox
		if err := timed("create", func() (err error) {
			child, err = b.server.Create(ctx, 5*time.Minute, map[string]any{"templateID": taken.SnapshotID})
			return err
		}); err != nil {
			return nil, err
		}
		if err := child.Kill(ctx); err != nil {
			return nil, err
		}
		if err := b.server.Call(ctx, "DELETE", "/templates/"+taken.SnapshotID, nil, nil); err != nil {
			return nil, err
		}
		if err := timed("pause", func() error {
			return b.server.Call(ctx, "POST", "/sandboxes/"+sandbox.ID+"/pause", map[string]any{"memory": false}, nil)
		}); err != nil {
			return nil, err
		}
		if err := timed("resume", func() error {
			return b.server.Call(ctx, "POST", "/sandboxes/"+sandbox.ID+"/connect", map[string]any{"timeout": 1800}, nil)
		}); err != nil {
			return nil, err
		}
	}
	for range b.samples(2) {
		var forks []struct{ Sandbox struct{ SandboxID string } }
		if err := timed("fork of 10", func() error {
			return b.server.Call(ctx, "POST", "/sandboxes/"+sandbox.ID+"/fork", map[string]any{"count": 10, "timeout": 300}, &forks)
		}); err != nil {
			return nil, err
		}
		for i, f := range forks {
			if f.Sandbox.SandboxID == "" {
				return nil, fmt.Errorf("child %d was not made", i)
			}
			if err := b.server.Call(ctx, "DELETE", "/sandboxes/"+f.Sandbox.SandboxID, nil, nil); err != nil {
				return nil, err
			}
		}
	}
	return row, nil
}
