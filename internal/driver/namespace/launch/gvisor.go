package launch

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/failpoint"
	"github.com/berm-sandbox/berm/internal/kernel/mount"
	"github.com/berm-sandbox/berm/internal/monitor"
	"github.com/berm-sandbox/berm/internal/network/link"
)

// GVisor says how a sandbox is made whose kernel is gVisor's: init and all that it starts
// run on it, and of the host's kernel they see what runsc asks it for.
type GVisor struct {
	Runsc string   `json:"runsc"` // path of the executable
	Flags []string `json:"flags"` // such as the platform
	// Init and Agent are paths of executables, which Programs shows inside.
	Init  string          `json:"init"`
	Agent string          `json:"agent"`
	Spec  json.RawMessage `json:"spec"` // of the OCI runtime; its paths are those of Stage
	// Manifest is kept with the memory of this sandbox when that is saved.
	Manifest json.RawMessage `json:"manifest"`
	// From has the sandbox go on with memory that was saved; nil begins with init.
	From *Memory `json:"from,omitempty"`
}

// Memory is that of a sandbox that was saved.
type Memory struct {
	Directory string `json:"directory"`       // SavedMemory of a snapshot, absolute
	Renew     []byte `json:"renew,omitempty"` // steps for another identity; see plan.Renew
}

// The stage is all that runsc sees of the host: a root of its own, in memory. The paths
// here are those that a spec can name.
const (
	StageRoot     = "/rootfs"   // the layers with the writable one on top
	StagePrograms = "/programs" // init and the agent
	StageNetwork  = "/network"  // the network namespace that has the link

	stageBundle = "bundle"
	stageState  = "run"
	stageLog    = "run/log"
	stageUpper  = "tree/upper"
	stageBase   = "tree/base"
	stageMemory = "memory"
	// stageSize is room for what runsc writes: its state, and what it logs.
	stageSize = "8m"
)

// Programs is where StagePrograms is to be shown inside.
const Programs = "/dev/berm"

// stageDirs are the directories of a stage.
var stageDirs = []string{"bin", stageBundle, "dev", "etc", "proc", StagePrograms[1:], StageRoot[1:], stageState, "tmp", "tree"}

// stageBaseDirs are the lowest layer: where programs are shown inside. gVisor wants a directory
// there, and would make it in the writable layer.
var stageBaseDirs = []string{stageBase, stageBase + "/dev", stageBase + Programs}

// startGVisor starts runsc on a stage of its own, and in it init.
func (s *Sandbox) startGVisor() error {
	userns, network, err := s.namespaces()
	if err != nil {
		return err
	}
	defer userns.Close()
	defer network.Close()
	trees, err := s.trees(userns)
	defer func() {
		for _, f := range trees {
			if f != s.upper {
				f.Close()
			}
		}
	}()
	if err != nil {
		return err
	}
	monitor.Trace("mounts prepared")
	if err := failpoint.Hit("launch.mounts"); err != nil {
		return err
	}
	theirs, connections, err := s.streams()
	if err != nil {
		return err
	}
	defer theirs.Close()
	defer connections.Close()
	// Whoever ends while the monitor waits is its child from now on; else the first process
	// of the machine would have to wait for them.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fault("become the reaper", err)
	}
	group, err := s.group.File()
	if err != nil {
		return err
	}
	if group != nil {
		defer group.Close()
	}
	started, ended := make(chan error), make(chan struct{})
	go func() {
		// Never unlocked: the mount namespace is this thread's alone, and runsc gets a signal
		// when the thread ends.
		runtime.LockOSThread()
		err := s.group.Inside(func() error {
			if err := s.stage(userns, network, trees); err != nil {
				return err
			}
			if err := failpoint.Hit("launch.stage"); err != nil {
				return err
			}
			return s.runsc(theirs, connections, group)
		})
		started <- err
		if err == nil {
			<-ended
		}
	}()
	err = <-started
	if s.pidfd == nil {
		return err
	}
	s.ended = ended
	go s.await()
	if err == nil {
		err = s.exposeToOOM()
	}
	if err != nil {
		s.Kill()
		<-ended
	}
	return err
}

// namespaces makes the user namespace that layers are shown through, where what belongs to an
// id inside belongs to one that was leased, and the network namespace with the link, if there
// is to be one.
func (s *Sandbox) namespaces() (user, network *os.File, err error) {
	if err := s.spawn(); err != nil { // it waits for a plan, and never gets one
		return nil, nil, err
	}
	defer func() {
		_ = unix.PidfdSendSignal(int(s.pidfd.Fd()), unix.SIGKILL, nil, 0)
		s.reap()
		s.pidfd.Close()
		s.control.Close()
		s.pidfd, s.control = nil, nil
	}()
	if err := s.makeLink(link.Ethernet); err != nil {
		return nil, nil, err
	}
	dir := "/proc/" + strconv.Itoa(s.pid) + "/ns/"
	if user, err = os.Open(dir + "user"); err != nil {
		return nil, nil, fault("open the user namespace", err)
	}
	if network, err = os.Open(dir + "net"); err != nil {
		user.Close()
		return nil, nil, fault("open the network namespace", err)
	}
	return user, network, nil
}

// stage puts together what runsc sees, and makes it the root of this thread.
func (s *Sandbox) stage(userns, network *os.File, trees []*os.File) error {
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
		return fault("make a mount namespace", err)
	}
	if err := mount.Private("/"); err != nil {
		return err
	}
	stage, err := file(mount.New("tmpfs", "stage", mount.NoDev|mount.NoSuid, mount.Value("mode", "0755"), mount.Value("size", stageSize)))
	if err != nil {
		return err
	}
	s.root = stage
	if err := mount.Attach(int(stage.Fd()), unix.AT_FDCWD, s.order.Directory); err != nil {
		return err
	}
	if err := unix.Chdir(s.order.Directory); err != nil {
		return fault("enter the stage", err)
	}
	for _, dir := range append([]string{"old"}, stageDirs...) {
		if err := unix.Mkdir(dir, 0o755); err != nil {
			return fault("make the stage", err)
		}
	}
	if err := os.WriteFile(stageBundle+"/config.json", s.order.GVisor.Spec, 0o600); err != nil {
		return fault("write the spec", err)
	}
	proc, err := file(mount.New("proc", "proc", mount.NoSuid|mount.NoDev|mount.NoExec))
	if err != nil {
		return err
	}
	defer proc.Close()
	if err := mount.Attach(int(proc.Fd()), unix.AT_FDCWD, "proc"); err != nil {
		return err
	}
	if s.order.Watch {
		config, err := eventsConfig()
		if err == nil {
			err = os.WriteFile(stageEventsConfig, config, 0o600)
		}
		if err != nil {
			return fault("tell gVisor what to tell", err)
		}
		if err := s.takeEvents(stageEvents); err != nil {
			return err
		}
	}
	g := s.order.GVisor
	for target, source := range map[string]string{"bin/runsc": g.Runsc, "dev/null": os.DevNull, StagePrograms[1:] + "/" + filepath.Base(g.Init): g.Init, StagePrograms[1:] + "/" + filepath.Base(g.Agent): g.Agent} {
		attr, ids := uint64(mount.ReadOnly|mount.NoSuid|mount.NoDev), userns
		if !strings.HasPrefix("/"+target, StagePrograms) {
			ids = nil
		}
		if source == os.DevNull {
			attr = mount.NoSuid | mount.NoExec
		}
		if err := show(source, target, attr, ids); err != nil {
			return err
		}
	}
	if err := show(fmt.Sprintf("/proc/self/fd/%d", network.Fd()), StageNetwork[1:], 0, nil); err != nil {
		return err
	}
	if g.From != nil {
		if err := showDirectory(g.From.Directory, stageMemory); err != nil {
			return err
		}
	}
	if err := s.overlay(trees); err != nil {
		return err
	}
	monitor.Trace("stage made")
	if err := unix.PivotRoot(".", "old"); err != nil {
		return fault("enter the stage", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return fault("enter the stage", err)
	}
	if err := unix.Unmount("/old", unix.MNT_DETACH); err != nil {
		return fault("leave the host's files", err)
	}
	return nil
}

// show attaches a file of the host to a new one of the stage, with its owner mapped if
// there are ids.
func show(source, target string, attr uint64, ids *os.File) error {
	if err := os.WriteFile(target, nil, 0o600); err != nil {
		return fault("make the stage", err)
	}
	tree, err := file(mount.Clone(unix.AT_FDCWD, source, false))
	if err != nil {
		return err
	}
	defer tree.Close()
	if attr != 0 {
		if err := mount.SetAttr(int(tree.Fd()), attr, 0, false); err != nil {
			return err
		}
	}
	if ids != nil {
		if err := mount.IDMap(int(tree.Fd()), int(ids.Fd())); err != nil {
			return err
		}
	}
	return mount.Attach(int(tree.Fd()), unix.AT_FDCWD, target)
}

// showDirectory attaches a directory of the host to a new one of the stage, to be read.
func showDirectory(source, target string) error {
	if err := unix.Mkdir(target, 0o700); err != nil {
		return fault("make the stage", err)
	}
	tree, err := file(mount.Clone(unix.AT_FDCWD, source, false))
	if err != nil {
		return err
	}
	defer tree.Close()
	if err := mount.SetAttr(int(tree.Fd()), mount.ReadOnly|mount.NoSuid|mount.NoDev|mount.NoExec, 0, false); err != nil {
		return err
	}
	return mount.Attach(int(tree.Fd()), unix.AT_FDCWD, target)
}

// overlay mounts the layers and the writable one on top of each other. It is done as the
// owner of the sandbox, with whose ids overlayfs then makes its files.
func (s *Sandbox) overlay(trees []*os.File) error {
	var lower []string
	for i, t := range s.order.Trees {
		name := stageUpper
		if !t.Upper {
			name = "tree/" + strconv.Itoa(i)
			lower = append([]string{name}, lower...)
		}
		if err := unix.Mkdir(name, 0o755); err != nil {
			return fault("make the stage", err)
		}
		if err := mount.Attach(int(trees[i].Fd()), unix.AT_FDCWD, name); err != nil {
			return err
		}
	}
	for _, dir := range stageBaseDirs {
		if err := unix.Mkdir(dir, 0o755); err != nil {
			return fault("make the stage", err)
		}
		if err := unix.Chown(dir, s.order.IDs.UIDs[0].Outside, s.order.IDs.GIDs[0].Outside); err != nil {
			return fault("make the stage", err)
		}
	}
	lower = append(lower, stageBase)
	err := asOwner(s.order.IDs.UIDs[0].Outside, func() error {
		const same = ^uintptr(0)
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESGID, same, uintptr(s.order.IDs.GIDs[0].Outside), same); errno != 0 {
			return errno
		}
		defer func() { _, _, _ = unix.RawSyscall(unix.SYS_SETRESGID, same, uintptr(unix.Getgid()), same) }()
		for _, dir := range []string{"/" + upperName, "/work"} {
			if err := unix.Mkdir(stageUpper+dir, 0o755); err != nil && err != unix.EEXIST {
				return err
			}
		}
		return unix.Mount("none", StageRoot[1:], "overlay", overlayFlags, overlayOptions(lower))
	})
	if err != nil {
		return fault("mount the layers", err)
	}
	return nil
}

const overlayFlags = unix.MS_NODEV | unix.MS_NOSUID | unix.MS_NOATIME

// overlayOptions are those of the layers' mount, the top one first.
func overlayOptions(lower []string) string {
	return "lowerdir=" + strings.Join(lower, ":") + ",upperdir=" + stageUpper + "/" + upperName + ",workdir=" + stageUpper + "/work,userxattr,volatile"
}

// arguments are those of runsc.
func (s *Sandbox) arguments() []string {
	argv := append([]string{"runsc", "--root=/" + stageState, "--log=/" + stageLog}, s.order.GVisor.Flags...)
	if s.order.Watch {
		argv = append(argv, "--pod-init-config=/"+stageEventsConfig)
	}
	if s.order.GVisor.From == nil {
		argv = append(argv, "run")
	} else {
		argv = append(argv, "restore", "--image-path=/"+stageMemory)
	}
	return append(argv, "--bundle=/"+stageBundle, string(s.order.ID))
}

// runsc starts runsc in the control group. It ends with this thread, and with it all that
// it started.
func (s *Sandbox) runsc(control, connections, group *os.File) error {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return fault("open null device", err)
	}
	defer null.Close()
	pidfd := -1
	attr := &syscall.ProcAttr{
		Dir: "/", Env: []string{},
		// gVisor gives standard streams the same numbers when it goes on from memory, and so
		// finds sockets again that are such (startingStdioFD in runsc/boot).
		Files: []uintptr{control.Fd(), connections.Fd(), null.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true, Pdeathsig: unix.SIGKILL, PidFD: &pidfd},
	}
	if group != nil {
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, int(group.Fd())
	}
	s.pid, err = syscall.ForkExec("/bin/runsc", s.arguments(), attr)
	if pidfd >= 0 {
		s.pidfd = os.NewFile(uintptr(pidfd), "pidfd")
	}
	if err != nil {
		return fault("start runsc", err)
	}
	return nil
}

// await waits for runsc, ends what it may have left behind, and waits for that too.
func (s *Sandbox) await() {
	defer close(s.ended)
	for {
		if _, err := unix.Wait4(s.pid, &s.status, 0, nil); err != unix.EINTR {
			break
		}
	}
	monitor.Trace("runsc reaped")
	for end := time.Now().Add(time.Second); time.Now().Before(end); {
		pids, err := s.group.Processes()
		if err != nil || len(pids) == 0 {
			break
		}
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL) // in the sandbox's group; ours, or of one of ours
		}
		for {
			if pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); pid <= 0 && err != unix.EINTR {
				break
			}
		}
		time.Sleep(time.Millisecond)
	}
}

// streams makes those that runsc is started with: init's socket to the monitor, and the one through which
// the agent gets its connections.
func (s *Sandbox) streams() (control, connections *os.File, err error) {
	if control, err = s.connect(true); err != nil {
		return nil, nil, err
	}
	if connections, err = s.passConnections(); err != nil {
		control.Close()
		return nil, nil, err
	}
	return control, connections, nil
}

// passConnections hands each connection to the agent's socket on: the agent, which cannot
// listen to a socket of the host, receives them by theirs.
func (s *Sandbox) passConnections() (theirs *os.File, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fault("socket pair", err)
	}
	theirs = os.NewFile(uintptr(pair[1]), "connections")
	ours := os.NewFile(uintptr(pair[0]), "connections")
	pipe, err := net.FileConn(ours)
	ours.Close()
	if err != nil {
		theirs.Close()
		return nil, fault("socket pair", err)
	}
	s.pipe = pipe.(*net.UnixConn)
	return theirs, nil
}

// serveConnections begins to hand them on.
func (s *Sandbox) serveConnections() (err error) {
	s.agentSocket, err = listen(monitor.AgentFile, func(conn *net.UnixConn) {
		defer conn.Close()
		raw, err := conn.SyscallConn()
		if err != nil {
			return
		}
		s.passing.Lock()
		defer s.passing.Unlock()
		// The agent may have stopped taking them; whoever connected gives up by itself.
		_ = s.pipe.SetWriteDeadline(time.Now().Add(5 * time.Second))
		_ = raw.Control(func(fd uintptr) {
			_, _, _ = s.pipe.WriteMsgUnix([]byte{agentConnection}, unix.UnixRights(int(fd)), nil)
		})
	})
	return err
}

// lastWords are the end of what runsc logged: why it could not start.
func (s *Sandbox) lastWords() string {
	fd, err := unix.Openat(int(s.root.Fd()), stageLog, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return ""
	}
	log := os.NewFile(uintptr(fd), stageLog)
	defer log.Close()
	const most = 2048
	if info, err := log.Stat(); err == nil && info.Size() > most {
		_, _ = log.Seek(-most, io.SeekEnd)
	}
	text, _ := io.ReadAll(io.LimitReader(log, most))
	return strings.TrimSpace(string(text))
}
