package local

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// services lists the processes of the network service that a process started.
func services(parent int) (pids []int) {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		stat, _ := os.ReadFile(path)
		command, _ := os.ReadFile(filepath.Dir(path) + "/cmdline")
		var pid, of int
		_, rest, _ := strings.Cut(string(stat), ") ")
		if _, err := fmt.Sscanf(rest, "%1s %d", new(string), &of); err == nil && of == parent && strings.Contains(string(command), "\x00egressd") {
			_, _ = fmt.Sscan(string(stat), &pid)
			pids = append(pids, pid)
		}
	}
	return pids
}

// The network service can gain no rights, makes its own system calls alone, and has no
// descriptor of its caller's.
func TestServiceRights(t *testing.T) {
	each(t, func(p *person) {
		r, w, err := os.Pipe()
		p.must(err)
		defer r.Close()
		defer w.Close()
		cmd := p.command("run", "-q", "--allow", "example.com", "--", "sh", "-c", "echo ready; sleep 30")
		cmd.ExtraFiles = []*os.File{w}
		p.started(cmd)
		defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
		pids := services(cmd.Process.Pid)
		if len(pids) != 1 {
			p.Fatalf("services: %v", pids)
		}
		dir := fmt.Sprintf("/proc/%d", pids[0])
		for until := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) { // it may still be starting
			threads, _ := filepath.Glob(dir + "/task/*/status")
			all, with := "", 0
			for _, path := range threads {
				status, _ := os.ReadFile(path)
				all += string(status)
				if strings.Contains(string(status), "NoNewPrivs:\t1\nSeccomp:\t2\n") {
					with++
				}
			}
			if with > 0 && with == len(threads) {
				break
			}
			if time.Now().After(until) {
				p.Fatalf("%d of %d threads: %s", with, len(threads), all)
			}
		}
		theirs, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", w.Fd()))
		p.must(err)
		fds, err := filepath.Glob(dir + "/fd/*")
		if p.must(err); os.Geteuid() == 0 && len(fds) == 0 {
			p.Error("no descriptors can be seen")
		}
		for _, fd := range fds {
			if target, _ := os.Readlink(fd); target == theirs {
				p.Errorf("%s is %s", fd, target)
			}
		}
	})
}

// A service that hangs is ended, another one takes its place, and it is told.
func TestServiceHangs(t *testing.T) {
	slow(t)
	each(t, func(p *person) {
		cmd := p.command("run", "--allow", "example.com", "--", "sh", "-c", "echo ready; sleep 60")
		output := p.started(cmd)
		pids := services(cmd.Process.Pid)
		if len(pids) != 1 {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			p.Fatalf("services: %v", pids)
		}
		p.must(syscall.Kill(pids[0], syscall.SIGSTOP))
		since := time.Now()
		left := pids
		for slices.Contains(left, pids[0]) && time.Since(since) < 60*time.Second {
			time.Sleep(100 * time.Millisecond)
			left = services(cmd.Process.Pid)
		}
		time.Sleep(2 * time.Second)
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		if text := output(); slices.Contains(left, pids[0]) || !strings.Contains(text, "the network service did not answer") || !strings.Contains(text, "another one took its place") {
			p.Errorf("after %s there is %v: %s", time.Since(since), left, text)
		}
	})
}

// The record tells what the command could write and reach, also when no sandbox could be made.
func TestRightsRecorded(t *testing.T) {
	each(t, func(p *person) {
		p.mkdir("other")
		p.sh("true", "--allow", "example.com", "--open", "10.1.0.0/16", "--rw", "~/other")
		record := p.read(".local/state/berm/audit/log.jsonl")
		for _, want := range []string{`"entries":["example.com"]`, `"open":["10.1.0.0/16"]`, `"writable":["` + p.path("other") + `"]`} {
			if !strings.Contains(record, want) {
				t.Errorf("no %s: %s", want, record)
			}
		}
	})
}
