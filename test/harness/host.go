package harness

import (
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Host is what can be seen of a machine from outside every sandbox: one string
// for each process, mount, namespace, cgroup and so on.
type Host map[string]string

// Look takes a snapshot. server is the server whose descriptors, mounts and data
// directory are watched, or nil. What it says is only as narrow as the
// namespaces and cgroups of the caller: see Isolate.
func Look(server *Server) Host {
	host := Host{}
	processes(host)
	mounts(host, "self")
	cgroups(host)
	loops(host)
	sysctls(host)
	list(host, "shm", "/dev/shm")
	if server != nil {
		list(host, "data", filepath.Join(server.Data, "sandboxes"))
		if server.Alive() {
			pid := strconv.Itoa(server.PID())
			mounts(host, pid)
			descriptors(host, pid)
		}
	}
	return host
}

// Diff lists what b has and a has not, with "+", what it lacks, with "-", and
// what changed. A descriptor that is closed since is no difference: a server looks at what
// sandboxes of before have executed, for a moment.
func (a Host) Diff(b Host) []string {
	var diff []string
	for _, key := range slices.Sorted(maps.Keys(b)) {
		if was, ok := a[key]; !ok {
			diff = append(diff, "+ "+key+" "+b[key])
		} else if was != b[key] {
			diff = append(diff, fmt.Sprintf("~ %s %s, was %s", key, b[key], was))
		}
	}
	for _, key := range slices.Sorted(maps.Keys(a)) {
		if _, ok := b[key]; !ok && !strings.HasPrefix(key, "descriptor ") {
			diff = append(diff, "- "+key+" "+a[key])
		}
	}
	return diff
}

// Settle looks until nothing differs from before any more, for at most limit, and
// returns the last difference.
func (a Host) Settle(server *Server, limit time.Duration) []string {
	for deadline := time.Now().Add(limit); ; time.Sleep(20 * time.Millisecond) {
		diff := a.Diff(Look(server))
		if len(diff) == 0 || time.Now().After(deadline) {
			return diff
		}
	}
}

// processes records every process and every namespace that one is in.
func processes(host Host) {
	entries, _ := os.ReadDir("/proc")
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		dir := "/proc/" + entry.Name()
		stat, err := os.ReadFile(dir + "/stat")
		if err != nil {
			continue
		}
		// The command is in parentheses and may hold any byte; fields count from the
		// last one: state is 3, the parent 4, the start time 22.
		text := string(stat)
		end := strings.LastIndexByte(text, ')')
		fields := strings.Fields(text[end+1:])
		if len(fields) < 20 || fields[1] == "2" || pid == 2 { // kernel threads
			continue
		}
		command := text[strings.IndexByte(text, '(') : end+1]
		host[fmt.Sprintf("process %d.%s", pid, fields[19])] = command
		spaces, _ := os.ReadDir(dir + "/ns")
		for _, space := range spaces {
			if name, err := os.Readlink(dir + "/ns/" + space.Name()); err == nil {
				host["namespace "+name] = ""
			}
		}
	}
}

func mounts(host Host, pid string) {
	text, _ := os.ReadFile("/proc/" + pid + "/mountinfo")
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) > 5 {
			host["mount of "+pid+" "+fields[0]] = fields[4]
		}
	}
}

// descriptors records what a process has open, and how often: numbers are used again.
func descriptors(host Host, pid string) {
	entries, _ := os.ReadDir("/proc/" + pid + "/fd")
	count := map[string]int{}
	for _, entry := range entries {
		target, err := os.Readlink("/proc/" + pid + "/fd/" + entry.Name())
		// A client's idle connection is no leak of a sandbox, nor is one more
		// connection to the database, of which there are a few at most.
		if err != nil || strings.HasPrefix(target, "socket:") || strings.Contains(target, "/berm.db") {
			continue
		}
		count[target]++
		host[fmt.Sprintf("descriptor %s, number %d", target, count[target])] = ""
	}
}

// Sockets counts the socket descriptors of a process.
func Sockets(pid int) int {
	n := 0
	entries, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	for _, entry := range entries {
		if target, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, entry.Name())); strings.HasPrefix(target, "socket:") {
			n++
		}
	}
	return n
}

// Descriptors counts the descriptors of a process.
func Descriptors(pid int) int {
	entries, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	return len(entries)
}

// Cgroups lists the caller's own group in every hierarchy, as directories.
func Cgroups() []string {
	roots := map[string]string{} // controllers → mount point; "" for version 2
	text, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(text)) {
		before, after, ok := strings.Cut(line, " - ")
		if !ok {
			continue
		}
		left, right := strings.Fields(before), strings.Fields(after)
		switch right[0] {
		case "cgroup2":
			roots[""] = left[4]
		case "cgroup":
			for option := range strings.SplitSeq(right[2], ",") {
				roots[option] = left[4]
			}
		}
	}
	var groups []string
	own, _ := os.ReadFile("/proc/self/cgroup")
	for line := range strings.Lines(string(own)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 {
			continue
		}
		controller, _, _ := strings.Cut(parts[1], ",")
		if root, ok := roots[controller]; ok {
			groups = append(groups, filepath.Join(root, parts[2]))
		}
	}
	return groups
}

func cgroups(host Host) {
	for _, group := range Cgroups() {
		_ = filepath.WalkDir(group, func(path string, entry fs.DirEntry, err error) error {
			// The group "berm" itself holds the sandboxes of every server and stays.
			if err == nil && entry.IsDir() && path != group && path != filepath.Join(group, "berm") {
				host["cgroup "+path] = ""
			}
			return nil
		})
	}
}

// loops records the loop devices whose file lies in a directory of this test: other
// users of the machine, other tests among them, have theirs.
func loops(host Host) {
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, file := range files {
		backing, err := os.ReadFile(file)
		if err == nil && strings.Contains(string(backing), dataPrefix) {
			host["loop device of "+strings.TrimSpace(string(backing))] = ""
		}
	}
}

// dataPrefix begins the name of every data directory that DataDir makes. It is this
// process's own; its number is not, since tests have process namespaces.
var dataPrefix = fmt.Sprintf("berm-test-%08x-", rand.Uint32())

// DataDir makes a directory for a server's data, to be removed by the caller.
func DataDir() (string, error) { return os.MkdirTemp("", dataPrefix) }

// volatile lists settings that the kernel changes by itself.
var volatile = []string{
	"random/", "ns_last_pid", "file-nr", "inode-nr", "inode-state", "dentry-state", "aio-nr", "pty/nr",
	"perf_event_max_sample_rate", "sched_domain", "tainted", "epoll/", "quota/",
}

func sysctls(host Host) {
	for _, root := range []string{"/proc/sys/kernel", "/proc/sys/fs"} {
		_ = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return nil
			}
			for _, name := range volatile {
				if strings.Contains(path, name) {
					return nil
				}
			}
			if value, err := os.ReadFile(path); err == nil {
				host["sysctl "+path] = strings.TrimSpace(string(value))
			}
			return nil
		})
	}
}

func list(host Host, kind, dir string) {
	entries, _ := os.ReadDir(dir)
	for _, entry := range entries {
		host[kind+" "+entry.Name()] = ""
	}
}
