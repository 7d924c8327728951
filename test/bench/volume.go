package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
)

const gib = 1 << 30

// zeros reads as zeros without end.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// transfer moves 1 GiB up, down and as a command's output, and watches the memory
// of the server and of the guest agent.
func (b *bench) transfer(ctx context.Context) error {
	size := int64(b.samples(gib))
	sandbox, err := b.server.Create(ctx, 30*time.Minute, nil)
	if err != nil {
		return err
	}
	agents := harness.Processes("berm-guest")
	if len(agents) == 0 {
		fmt.Println("  the guest agent's process is not to be seen from here: its memory is not measured")
	}
	for _, direction := range []struct {
		name string
		run  func() (int64, error)
	}{
		{"up", func() (int64, error) {
			return size, sandbox.Write(ctx, "user", "/home/user/big", io.LimitReader(zeros{}, size))
		}},
		{"down", func() (int64, error) {
			body, err := sandbox.Read(ctx, "user", "/home/user/big")
			if err != nil {
				return 0, err
			}
			defer body.Close()
			return io.Copy(io.Discard, body)
		}},
		{"command output", func() (int64, error) {
			result, err := sandbox.Run(ctx, harness.Command{Path: "/usr/bin/head", Args: []string{"-c", strconv.FormatInt(size, 10), "/dev/zero"}, Keep: 1})
			return result.Bytes, err
		}},
	} {
		pids := append([]int{b.server.PID()}, agents...)
		before := make([]int64, len(pids))
		for i, pid := range pids {
			before[i] = harness.RSS(pid)
			_ = harness.ResetPeakRSS(pid)
		}
		start := time.Now()
		moved, err := direction.run()
		if err != nil {
			return fmt.Errorf("%s: %w", direction.name, err)
		}
		if moved != size {
			return fmt.Errorf("%s: %d of %d bytes", direction.name, moved, size)
		}
		took := time.Since(start)
		rate := float64(size) / (1 << 20) / took.Seconds()
		row := map[string]any{"bytes": size, "seconds": took.Seconds(), "MiB_per_s": rate}
		text := ""
		for i, pid := range pids {
			name := "server"
			if i > 0 {
				name = "agent"
			}
			grown := float64(harness.PeakRSS(pid)-before[i]) / (1 << 20)
			row[name+"_rss_MiB"] = float64(before[i]) / (1 << 20)
			row[name+"_grown_MiB"] = grown
			text += fmt.Sprintf("  %s %.1f MiB, +%.1f at its peak", name, float64(before[i])/(1<<20), grown)
		}
		fmt.Printf("  %-16s %7.0f MiB/s%s\n", direction.name, rate, text)
		b.results[direction.name] = row
	}
	return nil
}

// memory measures what 100 idle sandboxes cost, monitors included, as bytes that
// the kernel charges to cgroups.
func (b *bench) memory(ctx context.Context) error {
	const n = 100
	before, cacheBefore, err := charged()
	if err != nil {
		fmt.Println("  no memory cgroup of our own here: not measured:", err)
		return nil
	}
	server := harness.RSS(b.server.PID())
	var group sync.WaitGroup
	errs := make([]error, 4)
	for worker := range 4 {
		group.Go(func() {
			for i := worker; i < n && errs[worker] == nil; i += 4 {
				_, errs[worker] = b.server.Create(ctx, 30*time.Minute, nil)
			}
		})
	}
	group.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	time.Sleep(2 * time.Second)
	after, cacheAfter, err := charged()
	if err != nil {
		return err
	}
	serverGrown := harness.RSS(b.server.PID()) - server
	all := float64(after-before) / n / (1 << 20)
	cache := float64(cacheAfter-cacheBefore) / n / (1 << 20)
	without := all - cache - float64(serverGrown)/n/(1<<20)
	perProcess := map[string]float64{}
	for _, name := range []string{"berm-monitor", "berm-init", "berm-guest"} {
		var sum int64
		pids := harness.Processes(name)
		for _, pid := range pids {
			sum += pss(pid)
		}
		if len(pids) > 0 {
			perProcess[name] = float64(sum) / float64(len(pids)) / (1 << 20)
			fmt.Printf("  %s: %.2f MiB proportional resident memory each\n", name, perProcess[name])
		}
	}
	fmt.Printf("  %d idle: %.2f MiB each without file cache and the server's share; %.2f with file cache (%.2f); server +%.2f MiB each\n",
		n, without, all, cache, float64(serverGrown)/n/(1<<20))
	b.results["sandboxes"] = n
	b.results["MiB_each"] = without
	b.results["MiB_each_with_file_cache"] = all
	b.results["server_MiB_each"] = float64(serverGrown) / n / (1 << 20)
	b.results["pss_MiB"] = perProcess
	b.results["server_descriptors_each"] = float64(harness.Descriptors(b.server.PID())) / n
	return nil
}

// charged reads how many bytes are charged to the caller's memory cgroup and all
// below it, and how many of them are file cache that the kernel can drop.
func charged() (total, cache int64, err error) {
	for _, group := range harness.Cgroups() {
		for _, version := range []struct{ usage, active, inactive string }{
			{"memory.current", "active_file ", "inactive_file "},
			{"memory.usage_in_bytes", "total_active_file ", "total_inactive_file "},
		} {
			text, err := os.ReadFile(filepath.Join(group, version.usage))
			if err != nil {
				continue
			}
			if total, err = strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err != nil {
				return 0, 0, err
			}
			stat, err := os.ReadFile(filepath.Join(group, "memory.stat"))
			if err != nil {
				return 0, 0, err
			}
			for line := range strings.Lines(string(stat)) {
				for _, prefix := range []string{version.active, version.inactive} {
					if rest, ok := strings.CutPrefix(line, prefix); ok {
						bytes, _ := strconv.ParseInt(strings.TrimSpace(rest), 10, 64)
						cache += bytes
					}
				}
			}
			return total, cache, nil
		}
	}
	return 0, 0, os.ErrNotExist
}

// pss is a process's memory with shared pages divided among those who share them.
func pss(pid int) int64 {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "Pss:"); ok {
			var kib int64
			_, _ = fmt.Sscan(rest, &kib)
			return kib << 10
		}
	}
	return 0
}
