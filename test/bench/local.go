package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/kernel/seccomp"
)

// ordinary is the id of a user whom no account has.
const ordinary = 1987653

// localFiles is how many files the project for `git status` has.
const localFiles = 10_000

// local measures whole commands: bare, in bubblewrap and in berm run, in turns, as the
// caller and, as root, as an ordinary user too.
func (b *bench) local(ctx context.Context) error {
	top, err := os.MkdirTemp("/var/tmp", "berm-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(top)
	if err := os.Chmod(top, 0o755); err != nil { // the ordinary user's home lies in it
		return err
	}
	if out, err := exec.CommandContext(ctx, "cp", "bin/berm", top+"/berm").CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return err
	}
	users := []*user{{name: "self", id: -1}}
	if os.Geteuid() == 0 {
		users = []*user{{name: "ordinary", id: ordinary}, {name: "root", id: -1}}
	}
	for _, u := range users {
		fmt.Printf("as %s\n", u.name)
		u.top, u.home = top, filepath.Join(top, u.name)
		results := map[string]any{}
		if err := u.lay(ctx); err != nil {
			return err
		}
		for _, w := range workloads {
			row, err := b.compare(ctx, u, w)
			if err != nil {
				return fmt.Errorf("%s as %s: %w", w.name, u.name, err)
			}
			results[w.name] = row
		}
		row, err := u.memory(ctx)
		if err != nil {
			return fmt.Errorf("memory as %s: %w", u.name, err)
		}
		results["memory"] = row
		b.results[u.name] = results
	}
	return nil
}

// workload is a command in a project.
type workload struct {
	name    string
	project string   // below home
	argv    []string // the program by its path: a search would use the PATH of the benchmark
	undo    string   // makes the project as it was, where it was written to; not measured
	samples int
}

var workloads = []workload{
	{name: "true", project: "empty", argv: []string{"/usr/bin/true"}, samples: 100},
	{name: "python3", project: "empty", argv: []string{"/usr/bin/python3", "-c", "pass"}, samples: 60},
	{name: "make", project: "c", argv: []string{"/usr/bin/make", "-s", "-j2"}, undo: "make -s clean", samples: 15},
	{name: "git status", project: "git", argv: []string{"/usr/bin/git", "status", "--porcelain"}, samples: 30},
}

// user is who runs the commands.
type user struct {
	name, top, home string
	id              int // -1 is the caller
}

func (u *user) command(ctx context.Context, project string, argv ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = filepath.Join(u.home, project)
	cmd.Env = []string{"HOME=" + u.home, "PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8"}
	if u.id >= 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(u.id), Gid: uint32(u.id)}}
	}
	return cmd
}

// lay makes the user's home and the projects in it.
func (u *user) lay(ctx context.Context) error {
	write := func(path, content string) error {
		path = filepath.Join(u.home, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		return os.WriteFile(path, []byte(content), 0o644)
	}
	if err := os.MkdirAll(u.home+"/empty", 0o755); err != nil {
		return err
	}
	for i := range localFiles {
		if err := write(fmt.Sprintf("git/%03d/%05d.txt", i/100, i), fmt.Sprintf("file %d\n", i)); err != nil {
			return err
		}
	}
	objects := ""
	for i := range 20 {
		objects += fmt.Sprintf(" f%d.o", i)
		code := "#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n"
		for j := range 20 {
			code += fmt.Sprintf("int f%d_%d(int n) { char s[64]; snprintf(s, sizeof s, \"%%d\", n); return (int)strlen(s) + abs(n); }\n", i, j)
		}
		if err := write(fmt.Sprintf("c/f%d.c", i), code); err != nil {
			return err
		}
	}
	if err := write("c/main.c", "int f0_0(int n);\nint main(void) { return f0_0(1) != 2; }\n"); err != nil {
		return err
	}
	if err := write("c/Makefile", "CFLAGS = -O2\nall: main\nmain: main.o"+objects+"\nclean:\n\trm -f main *.o\n"); err != nil {
		return err
	}
	if u.id >= 0 {
		if out, err := exec.CommandContext(ctx, "chown", "-R", fmt.Sprintf("%d:%d", u.id, u.id), u.home).CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
	}
	const commit = "git init -q && git add . && git -c user.name=bench -c user.email=bench@localhost commit -q -m files"
	if out, err := u.command(ctx, "git", "sh", "-c", commit).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	// git does not trust the times of files as new as its index: without this every status
	// would read them all, and write the index.
	time.Sleep(1100 * time.Millisecond)
	if out, err := u.command(ctx, "git", "sh", "-c", "touch .git/index && git status").CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// way is one way to run a command.
type way struct {
	name  string
	argv  []string // before the command
	file  string   // its descriptor is 3
	fresh []string // directories that are empty at the start of each run; not measured
	peer  string   // the way that it is compared with, beside the bare command; "" is none
}

// What berm run is compared with.
const (
	walledPeer  = "bwrap, as berm run"
	overlayPeer = "bwrap, as berm run, overlay"
)

func (u *user) ways(ctx context.Context, project string) ([]way, error) {
	berm := u.top + "/berm"
	ways := []way{{name: "bare"}}
	copied := "" // the peer of a copy on write
	if bwrap, err := exec.LookPath("bwrap"); err == nil {
		dir := filepath.Join(u.home, project)
		ways = append(ways, way{name: "bwrap, all of / read-only", argv: []string{
			bwrap, "--ro-bind", "/", "/", "--bind", dir, dir, "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--unshare-all", "--die-with-parent",
		}})
		peers := []string{"bwrap, host as berm run", walledPeer}
		copied = walledPeer
		// Since bubblewrap 0.11.
		if help, _ := exec.CommandContext(ctx, bwrap, "--help").CombinedOutput(); bytes.Contains(help, []byte("--overlay ")) {
			peers, copied = append(peers, overlayPeer), overlayPeer
		}
		for _, name := range peers {
			walled, err := u.walled(ctx, bwrap, project, name)
			if err != nil {
				return nil, err
			}
			ways = append(ways, walled)
		}
	}
	return append(ways,
		way{name: "berm run --rw .", argv: []string{berm, "run", "-q", "--rw", ".", "--"}, peer: walledPeer},
		way{name: "berm run", argv: []string{berm, "run", "-q", "--"}, peer: copied}), nil
}

// walled is bubblewrap with the namespaces, the view of the host and the filter of system
// calls that `berm run --rw .` has; as walledPeer with its hidden and read-only parts of /proc and
// files of identity too, and as overlayPeer with the copy on write of `berm run`, in directories
// that are made for it. It lacks Landlock, limits and the id-mapped mounts that root gets.
func (u *user) walled(ctx context.Context, bwrap, project, name string) (way, error) {
	proc := name == walledPeer || name == overlayPeer
	out, err := u.command(ctx, project, u.top+"/berm", "run", "--print-policy", "--json", "--rw", ".", "--", "true").Output()
	if err != nil {
		return way{}, fmt.Errorf("print the policy: %w", err)
	}
	var printed struct {
		Policy struct {
			Mounts           []string // TARGET TYPE OPTIONS, and more in parentheses
			Masked, ReadOnly []string
		}
	}
	if err := json.Unmarshal(out, &printed); err != nil {
		return way{}, err
	}
	dir := filepath.Join(u.home, project)
	argv := []string{
		bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--hostname", "berm", "--cap-drop", "ALL",
		"--tmpfs", "/tmp", "--tmpfs", "/var/tmp", "--tmpfs", "/run", "--tmpfs", u.home, "--dev", "/dev", "--proc", "/proc",
	}
	for _, mount := range printed.Policy.Mounts {
		switch fields := strings.Fields(mount); fields[1] {
		case "host":
			argv = append(argv, "--ro-bind", fields[0], fields[0])
		case "link":
			argv = append(argv, "--symlink", strings.Trim(fields[2], "()"), fields[0])
		}
	}
	for _, path := range printed.Policy.Masked {
		info, err := os.Stat(path)
		switch {
		case err != nil || strings.HasPrefix(path, "/proc/") && !proc:
		case info.IsDir():
			argv = append(argv, "--tmpfs", path)
		default:
			argv = append(argv, "--ro-bind", "/dev/null", path)
		}
	}
	if proc {
		for _, path := range printed.Policy.ReadOnly {
			argv = append(argv, "--ro-bind", path, path)
		}
		argv = append(argv, "--tmpfs", "/sys", "--ro-bind", "/sys/devices/system/cpu", "/sys/devices/system/cpu")
		for _, path := range []string{"/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/etc/machine-id"} {
			if _, err := os.Stat(path); err == nil {
				argv = append(argv, "--ro-bind", "/etc/hostname", path)
			}
		}
	}
	profile, err := seccomp.Lookup(seccomp.Default)
	if err != nil {
		return way{}, err
	}
	filter, err := profile.Assemble("")
	if err != nil {
		return way{}, err
	}
	file := filepath.Join(u.top, "filter")
	program := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(filter))), len(filter)*int(unsafe.Sizeof(filter[0])))
	if err := os.WriteFile(file, program, 0o644); err != nil {
		return way{}, err
	}
	w := way{name: name, file: file}
	if name == overlayPeer {
		upper, work := filepath.Join(u.home, "upper"), filepath.Join(u.home, "work")
		argv = append(argv, "--overlay-src", dir, "--overlay", upper, work, dir)
		w.fresh = []string{upper, work}
	} else {
		argv = append(argv, "--bind", dir, dir)
	}
	argv = append(argv, "--chdir", dir, "--remount-ro", "/", "--seccomp", "3")
	w.argv = argv
	return w, nil
}

// prepare is the command of a workload in a way; done closes what it holds open.
func (u *user) prepare(ctx context.Context, w way, project string, argv []string) (cmd *exec.Cmd, done func(), err error) {
	cmd = u.command(ctx, project, append(append([]string(nil), w.argv...), argv...)...)
	done = func() {}
	for _, dir := range w.fresh {
		if err := os.RemoveAll(dir); err != nil {
			return nil, nil, err
		}
		if err := os.Mkdir(dir, 0o755); err != nil {
			return nil, nil, err
		}
		if u.id >= 0 {
			if err := os.Chown(dir, u.id, u.id); err != nil {
				return nil, nil, err
			}
		}
	}
	if w.file != "" {
		f, err := os.Open(w.file)
		if err != nil {
			return nil, nil, err
		}
		cmd.ExtraFiles, done = []*os.File{f}, func() { f.Close() }
	}
	return cmd, done, nil
}

// run runs a workload once and takes back what it made. It returns the time from start to end,
// and the processor time of all processes of it.
func (u *user) run(ctx context.Context, w way, load workload) (took, processor time.Duration, err error) {
	cmd, done, err := u.prepare(ctx, w, load.project, load.argv)
	if err != nil {
		return 0, 0, err
	}
	defer done()
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	before, start := ofChildren(), time.Now()
	err = cmd.Run()
	took = time.Since(start)
	if err != nil {
		return 0, 0, fmt.Errorf("%s: %w: %s", w.name, err, output.Bytes())
	}
	// bubblewrap does not wait for the first process in its sandbox: as a subreaper this process
	// has become its parent.
	for {
		if _, err := unix.Wait4(-1, nil, 0, nil); err == unix.ECHILD {
			break
		}
	}
	processor = ofChildren() - before
	undo := []string{"sh", "-c", load.undo}
	if entries, _ := os.ReadDir(u.home + "/.local/state/berm/sessions"); w.name == "berm run" && len(entries) > 0 {
		undo = []string{u.top + "/berm", "discard", "--all"}
	}
	if out, err := u.command(ctx, load.project, undo...).CombinedOutput(); err != nil {
		return 0, 0, fmt.Errorf("%s: undo: %w: %s", w.name, err, out)
	}
	return took, processor, nil
}

// ofChildren is the processor time of all descendants that were waited for.
func ofChildren() time.Duration {
	var usage unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_CHILDREN, &usage)
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// compare measures a workload in every way, in turns that begin with another way each.
func (b *bench) compare(ctx context.Context, u *user, load workload) (map[string]any, error) {
	ways, err := u.ways(ctx, load.project)
	if err != nil {
		return nil, err
	}
	runs, processor := make([]times, len(ways)), make([]times, len(ways))
	const warm = 2 // rounds for caches, not counted
	for round := range b.samples(load.samples) + warm {
		for i := range ways {
			i = (i + round) % len(ways)
			took, used, err := u.run(ctx, ways[i], load)
			if err != nil {
				return nil, err
			}
			if round >= warm {
				runs[i], processor[i] = append(runs[i], took), append(processor[i], used)
			}
		}
	}
	fmt.Printf("  %s\n", load.name)
	table := map[string]any{}
	for i, w := range ways {
		row := runs[i].summary()
		row["processor_p50_ms"] = ms(processor[i].at(0.5))
		text := ""
		for j, other := range ways {
			if j != i && (j == 0 || other.name == w.peer) {
				ratio := float64(runs[i].at(0.5)) / float64(runs[j].at(0.5))
				row["ratio_p50: "+other.name] = ratio
				text += fmt.Sprintf("  %.2f× %s", ratio, other.name)
			}
		}
		fmt.Printf("    %-27s p50 %8.2f  p95 %8.2f  min %8.2f ms  processor %8.2f%s\n", w.name, ms(runs[i].at(0.5)), ms(runs[i].at(0.95)), ms(runs[i].at(0)), ms(processor[i].at(0.5)), text)
		table[w.name] = row
	}
	switch ways[len(ways)-1].peer {
	case "":
		fmt.Println("    bubblewrap is not installed: not compared")
	case walledPeer:
		fmt.Println("    this bubblewrap makes no overlay (since 0.11): berm run, which copies on write, is compared with one that writes in place")
	}
	return table, nil
}

// memory is what all processes of a waiting Python hold, with shared pages divided among
// those who share them.
func (u *user) memory(ctx context.Context) (map[string]any, error) {
	if os.Geteuid() != 0 {
		fmt.Println("  memory: only root sees that of the sandbox's init")
		return nil, nil
	}
	ways, err := u.ways(ctx, "empty")
	if err != nil {
		return nil, err
	}
	fmt.Println("  memory of a waiting python3 and all around it")
	table := map[string]any{}
	for _, w := range ways {
		cmd, done, err := u.prepare(ctx, w, "empty", []string{"/usr/bin/python3", "-c", "print(1, flush=True); input()"})
		if err != nil {
			return nil, err
		}
		defer done()
		in, err := cmd.StdinPipe()
		if err != nil {
			return nil, err
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			return nil, err
		}
		if err := cmd.Start(); err != nil {
			return nil, err
		}
		_, err = bufio.NewReader(out).ReadString('\n')
		var sum int64
		processes := family(cmd.Process.Pid)
		for _, pid := range processes {
			sum += pss(pid)
		}
		if err == nil {
			_, err = io.WriteString(in, "\n")
		}
		in.Close()
		if wait := cmd.Wait(); err == nil {
			err = wait
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", w.name, err)
		}
		mib := float64(sum) / (1 << 20)
		fmt.Printf("    %-27s %6.2f MiB in %d processes\n", w.name, mib, len(processes))
		table[w.name] = map[string]any{"pss_MiB": mib, "processes": len(processes)}
	}
	return table, nil
}

// family is a process and all that descend from it.
func family(pid int) []int {
	children := map[int][]int{}
	entries, _ := os.ReadDir("/proc")
	for _, entry := range entries {
		child, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		status, _ := os.ReadFile("/proc/" + entry.Name() + "/status")
		for line := range strings.Lines(string(status)) {
			if parent, ok := strings.CutPrefix(line, "PPid:"); ok {
				n, _ := strconv.Atoi(strings.TrimSpace(parent))
				children[n] = append(children[n], child)
			}
		}
	}
	all := []int{pid}
	for i := 0; i < len(all); i++ {
		all = append(all, children[all[i]]...)
	}
	return all
}
