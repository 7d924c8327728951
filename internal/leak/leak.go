// Package leak finds what a test left behind: processes, mounts, loop devices,
// control groups, descriptors and files. Other work on the same machine does not
// count: a Scope says what is the test's own.
package leak

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// Scope is what belongs to a test.
type Scope struct {
	Dirs    []string     // directories of its own
	Cgroups []string     // names of control groups of its own, as directories are called
	IDs     berm.IDRange // user ids that only its sandboxes use
}

// Snapshot is what there is of a Scope at one moment, one line each.
type Snapshot map[string]bool

// Check takes a snapshot and fails the test at its end when there is more then. What
// the kernel takes away a little late gets ten seconds.
func Check(t testing.TB, scope Scope) {
	t.Helper()
	before := Take(scope)
	t.Cleanup(func() {
		var left []string
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			left = Take(scope).Since(before)
			if len(left) == 0 {
				return
			}
			if time.Now().After(end) {
				break
			}
		}
		t.Errorf("left behind:\n  %s", strings.Join(left, "\n  "))
	})
}

// Since lists, sorted, what is in s and was not before.
func (s Snapshot) Since(before Snapshot) []string {
	var more []string
	for line := range s {
		if !before[line] {
			more = append(more, line)
		}
	}
	slices.Sort(more)
	return more
}

// Take looks at the machine.
func Take(scope Scope) Snapshot {
	s := Snapshot{}
	s.processes(scope)
	s.mounts(scope)
	s.loops(scope)
	s.cgroups(scope)
	s.files(scope)
	s.descriptors()
	return s
}

func (s Snapshot) add(format string, args ...any) { s[fmt.Sprintf(format, args...)] = true }

// inside says whether a path lies in one of the scope's directories.
func (scope Scope) inside(path string) bool {
	return slices.ContainsFunc(scope.Dirs, func(dir string) bool {
		return path == dir || strings.HasPrefix(path, dir+"/")
	})
}

// processes are those that work in the scope's directories or run as its ids, and the
// children of this process with all that descends from them.
func (s Snapshot) processes(scope Scope) {
	parents, names, mine := map[int]int{}, map[int]string{}, map[int]bool{os.Getpid(): true}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		dir := "/proc/" + e.Name() + "/"
		stat, err := os.ReadFile(dir + "stat")
		if err != nil {
			continue
		}
		// "pid (name) state ppid …": the name may hold anything.
		line := string(stat)
		end := strings.LastIndexByte(line, ')')
		fields := strings.Fields(line[end+1:])
		if parents[pid], _ = strconv.Atoi(fields[1]); fields[0] == "Z" && parents[pid] != os.Getpid() {
			continue // dead; its parent, such as a slow process 1, is to blame
		}
		names[pid] = line[strings.IndexByte(line, '('):end+1] + " " + fields[0]
		if cwd, err := os.Readlink(dir + "cwd"); err == nil && scope.inside(cwd) {
			mine[pid] = true
		}
		var info unix.Stat_t
		if unix.Stat(dir, &info) == nil && info.Uid >= scope.IDs.Base && info.Uid-scope.IDs.Base < scope.IDs.Count {
			mine[pid] = true
		}
	}
	for pid := range parents {
		for up := pid; up > 1; up = parents[up] {
			if mine[up] && pid != os.Getpid() {
				s.add("process %d %s", pid, names[pid])
				break
			}
		}
	}
}

func (s Snapshot) mounts(scope Scope) {
	table, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(table)) {
		if fields := strings.Fields(line); len(fields) > 4 && scope.inside(fields[4]) {
			s.add("mount %s", strings.TrimSpace(line))
		}
	}
}

func (s Snapshot) loops(scope Scope) {
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range files {
		if path, err := os.ReadFile(f); err == nil && scope.inside(strings.TrimSpace(string(path))) {
			s.add("loop device of %s", strings.TrimSpace(string(path)))
		}
	}
}

func (s Snapshot) cgroups(scope Scope) {
	if len(scope.Cgroups) == 0 {
		return
	}
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && slices.Contains(scope.Cgroups, filepath.Base(filepath.Dir(path))) {
			s.add("control group %s", path)
		}
		return nil
	})
}

func (s Snapshot) files(scope Scope) {
	for _, dir := range scope.Dirs {
		_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			s.add("file %s", path)
			return nil
		})
	}
}

// descriptors counts by what they are, since numbers change.
func (s Snapshot) descriptors() {
	entries, _ := os.ReadDir("/proc/self/fd")
	count := map[string]int{}
	for _, e := range entries {
		target, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err != nil || strings.HasPrefix(target, "/proc/") {
			continue
		}
		if kind, _, ok := strings.Cut(target, ":["); ok {
			target = kind // a socket or pipe
		}
		count[target]++
		s.add("descriptor %s, number %d", target, count[target])
	}
}
