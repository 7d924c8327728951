package template

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/template/arrival"
)

// ids is how the ids of an image are mapped to ids of this host.
type ids struct {
	// own maps image id 0 to the caller and has no other id: an ordinary user
	// without subordinate ids.
	own bool
	// uids and gids are the host ranges that image ids 0 … Count-1 are stored as:
	// an ordinary user's subordinate ids. Zero for root, which stores image ids as
	// they are.
	uids, gids berm.IDRange
}

// shifted says whether the store's files belong to subordinate ids.
func (i ids) shifted() bool { return i.uids.Count > 0 }

// builderIDs is the range that packages' maintainer scripts run as when root
// builds a template: the last below those that sandboxes lease. Every file of
// the result passes through a tar stream, so nothing on disk keeps these ids.
var builderIDs = berm.IDRange{Base: 0x70000000 - berm.IDsPerSandbox, Count: berm.IDsPerSandbox}

// hostIDs finds out what this process may map.
func hostIDs() ids {
	if os.Geteuid() == 0 {
		return ids{}
	}
	names := []string{strconv.Itoa(os.Geteuid())}
	if me, err := user.LookupId(names[0]); err == nil {
		names = append(names, me.Username)
	}
	uids, gids := subordinate("/etc/subuid", names), subordinate("/etc/subgid", names)
	_, err := exec.LookPath("newuidmap")
	if err != nil || uids.Count < berm.IDsPerSandbox || gids.Count < berm.IDsPerSandbox {
		return ids{own: true}
	}
	uids.Count, gids.Count = berm.IDsPerSandbox, berm.IDsPerSandbox
	return ids{uids: uids, gids: gids}
}

// subordinate returns the first range that a file such as /etc/subuid gives one of
// names.
func subordinate(file string, names []string) berm.IDRange {
	f, err := os.Open(file)
	if err != nil {
		return berm.IDRange{}
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		name, rest, _ := strings.Cut(lines.Text(), ":")
		base, count, _ := strings.Cut(rest, ":")
		b, errBase := strconv.ParseUint(base, 10, 32)
		c, errCount := strconv.ParseUint(count, 10, 32)
		if slices.Contains(names, name) && errBase == nil && errCount == nil {
			return berm.IDRange{Base: uint32(b), Count: uint32(c)}
		}
	}
	return berm.IDRange{}
}

// idMap holds the lines of a process's uid_map and gid_map.
type idMap struct{ uids, gids []mapping }

type mapping struct{ inside, outside, count uint32 }

// storageMap maps the caller to 0 and the stored range from 1 on: a process in
// it owns the store's directories and may give files to every image id.
func (i ids) storageMap() idMap {
	return idMap{
		uids: []mapping{{0, uint32(os.Geteuid()), 1}, {1, i.uids.Base, i.uids.Count}},
		gids: []mapping{{0, uint32(os.Getegid()), 1}, {1, i.gids.Base, i.gids.Count}},
	}
}

// buildMap maps the range that maintainer scripts run as. The caller is not in
// it, root neither.
func (i ids) buildMap() idMap {
	if !i.shifted() {
		i.uids, i.gids = builderIDs, builderIDs
	}
	return idMap{
		uids: []mapping{{0, i.uids.Base, i.uids.Count}},
		gids: []mapping{{0, i.gids.Base, i.gids.Count}},
	}
}

// The names under which this program runs again inside a user namespace: first
// to wait for its id map, then, as uid 0 in there, to do a task.
const (
	argMapped = "berm-template-map"
	argTask   = "berm-template-task"
)

// firstFile is the first descriptor of those that a task was given.
const firstFile = 5

// tasks is what a helper process can do. Output is one JSON value on descriptor 4.
var tasks = map[string]func(ctx context.Context, args []byte) (any, error){
	"bootstrap": func(ctx context.Context, args []byte) (any, error) { return nil, runBootstrap(ctx, args) },
	"layer":     runAddLayer,
	"pack":      runPack,
	"own":       func(_ context.Context, args []byte) (any, error) { return nil, runOwn(args) },
	"remove":    func(_ context.Context, args []byte) (any, error) { return nil, runRemove(args) },
}

// RunHelper does the work of a helper process and ends it, when this program was
// started as one; otherwise it returns. A program that uses the package calls it
// before anything else.
func RunHelper() {
	switch os.Args[0] {
	case argMapped:
		fatal(becomeRoot())
	case argTask:
		fatal(runTask())
		os.Exit(0)
	case argKeeper:
		fatal(runKeeper())
		os.Exit(0)
	case argFetcher:
		fatal(arrival.Work())
		os.Exit(0)
	}
}

func fatal(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "berm:", err)
		os.Exit(1)
	}
}

// becomeRoot waits until the parent has written the id map (descriptor 3 ends),
// takes uid 0 and executes this program again: as uid 0 it gets every capability
// over its namespace. Until then it has the ambient ones alone.
func becomeRoot() error {
	gate := os.NewFile(3, "gate")
	if n, _ := gate.Read(make([]byte, 1)); n != 1 {
		return errors.New("the parent ended before it mapped the ids")
	}
	gate.Close()
	if err := syscall.Setgroups(nil); err != nil {
		return fmt.Errorf("drop groups: %w", err)
	}
	if err := syscall.Setresgid(0, 0, 0); err != nil {
		return fmt.Errorf("become gid 0: %w", err)
	}
	if err := syscall.Setresuid(0, 0, 0); err != nil {
		return fmt.Errorf("become uid 0: %w", err)
	}
	return syscall.Exec("/proc/self/exe", append([]string{argTask}, os.Args[1:]...), os.Environ())
}

// reply is what a task answers.
type reply struct {
	Value json.RawMessage `json:"value,omitempty"`
	Kind  berm.Kind       `json:"kind"`
	Err   string          `json:"err,omitempty"`
	Hint  string          `json:"hint,omitempty"`
}

func runTask() error {
	// A change of uid clears the parent death signal that the clone set.
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return err
	}
	value, err := tasks[os.Args[1]](context.Background(), []byte(os.Args[2]))
	var r reply
	if err != nil {
		r = reply{Kind: berm.KindOf(err), Err: err.Error(), Hint: berm.HintOf(err)}
	} else if r.Value, err = json.Marshal(value); err != nil {
		return err
	}
	return json.NewEncoder(os.NewFile(4, "reply")).Encode(r)
}

// inNamespace runs a task as uid 0 of new user, mount, pid, ipc and uts
// namespaces with the map given. stdin, stdout and the files, from descriptor firstFile on, are the
// task's. It fails with the task's own error.
func inNamespace(ctx context.Context, maps idMap, task string, args, result any, dir string, stdin io.Reader, stdout, stderr io.Writer, files ...*os.File) error {
	// The parent death signal comes when the thread that cloned ends, not the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	params, err := json.Marshal(args)
	if err != nil {
		return err
	}
	gateR, gateW, err := os.Pipe()
	if err != nil {
		return err
	}
	defer gateW.Close()
	replyR, replyW, err := os.Pipe()
	if err != nil {
		gateR.Close()
		return err
	}
	defer replyR.Close()

	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Args = []string{argMapped, task, string(params)}
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/", "LC_ALL=C.UTF-8"}
	for _, name := range []string{"BERM_FAILPOINTS", "http_proxy", "https_proxy", "no_proxy"} {
		if v, ok := os.LookupEnv(name); ok {
			cmd.Env = append(cmd.Env, name+"="+v)
		}
	}
	for _, v := range os.Environ() {
		if strings.HasPrefix(v, "PIP_") {
			cmd.Env = append(cmd.Env, v)
		}
	}
	cmd.Dir, cmd.Stdin, cmd.Stdout, cmd.Stderr = dir, stdin, stdout, stderr
	cmd.ExtraFiles = append([]*os.File{gateR, replyW}, files...)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS,
		// The maps need newuidmap, which wants a living process; these survive the
		// execution that comes before.
		AmbientCaps: []uintptr{unix.CAP_SETUID, unix.CAP_SETGID},
		Pdeathsig:   syscall.SIGKILL,
	}
	err = cmd.Start()
	gateR.Close()
	replyW.Close()
	if err != nil {
		return berm.Errorf(berm.Unsupported, "make a user namespace: %w", err).WithHint("`berm doctor` says what this host lacks.")
	}
	if err := writeMaps(ctx, cmd.Process.Pid, maps); err != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		return err
	}
	_, _ = gateW.Write([]byte{1})

	var r reply
	decodeErr := json.NewDecoder(replyR).Decode(&r)
	waitErr := cmd.Wait()
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case decodeErr != nil:
		return berm.Errorf(berm.Internal, "the helper for %q ended early: %w", task, waitErr)
	case r.Err != "":
		return &berm.Error{Kind: r.Kind, Msg: r.Err, Hint: r.Hint}
	case result == nil:
		return nil
	}
	return json.Unmarshal(r.Value, result)
}

// writeMaps gives a process in a new user namespace its ids: root writes them,
// others ask newuidmap and newgidmap, which check /etc/subuid and /etc/subgid.
func writeMaps(ctx context.Context, pid int, maps idMap) error {
	for _, m := range []struct {
		file, tool string
		lines      []mapping
	}{{"uid_map", "newuidmap", maps.uids}, {"gid_map", "newgidmap", maps.gids}} {
		var fields []string
		for _, l := range m.lines {
			fields = append(fields, fmt.Sprint(l.inside), fmt.Sprint(l.outside), fmt.Sprint(l.count))
		}
		if os.Geteuid() == 0 {
			var lines strings.Builder
			for f := range slices.Chunk(fields, 3) {
				fmt.Fprintln(&lines, strings.Join(f, " "))
			}
			if err := os.WriteFile(fmt.Sprintf("/proc/%d/%s", pid, m.file), []byte(lines.String()), 0); err != nil {
				return fmt.Errorf("map ids: %w", err)
			}
			continue
		}
		out, err := exec.CommandContext(ctx, m.tool, append([]string{strconv.Itoa(pid)}, fields...)...).CombinedOutput()
		if err != nil {
			return berm.Errorf(berm.Unsupported, "%s: %s", m.tool, strings.TrimSpace(string(out))).
				WithHint("Your user needs a range of 65536 ids in /etc/subuid and /etc/subgid: `usermod --add-subuids … --add-subgids …` sets one.")
		}
	}
	return nil
}
