package launch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cleanup"
	"github.com/berm-sandbox/berm/internal/driver/namespace/plan"
	"github.com/berm-sandbox/berm/internal/failpoint"
	"github.com/berm-sandbox/berm/internal/kernel/cgroup"
	"github.com/berm-sandbox/berm/internal/kernel/claim"
	"github.com/berm-sandbox/berm/internal/kernel/mount"
	"github.com/berm-sandbox/berm/internal/kernel/notify"
	"github.com/berm-sandbox/berm/internal/kernel/rights"
	"github.com/berm-sandbox/berm/internal/monitor"
	"github.com/berm-sandbox/berm/internal/network/link"
	"github.com/berm-sandbox/berm/internal/network/link/outside"
)

// Sandbox is a running sandbox as its monitor holds it. It is a monitor.Wall.
type Sandbox struct {
	order   Order
	init    int // descriptor of init's executable
	pidfd   *os.File
	pid     int
	control *os.File // socket to init
	ready   *os.File // a byte for each agent that serves
	link    *os.File // the other end of the sandbox's link; nil when it has none

	linkSocket  *net.UnixListener
	keepSocket  *net.UnixListener
	agentSocket *net.UnixListener  // nil where the agent listens itself
	events      chan *net.UnixConn // gets stream when gVisor has connected, and is closed
	stream      *net.UnixConn      // gVisor's events; nil when nobody wants them
	kept        *os.File           // under mu; nil for none
	upper       *os.File           // root of the writable layer's mount; nil when init made it
	image       *os.File           // what that is a mount of; nil when it is of a directory
	ending      atomic.Bool
	looks       *looks // at the writable layer; nil when there is none to see
	group       *cgroup.Group
	claim       *claim.File // nil when nothing is claimed
	watchSocket *net.UnixListener
	listener    *notify.Listener // under mu; nil when there is none
	relay       *notify.Relay    // under mu; of what it tells

	// Of runsc, where that is what pid and pidfd name.
	root    *os.File        // of its stage
	carrier *carrier        // init that carries it; nil where it is the monitor's own child
	stopped bool            // by still
	ended   chan struct{}   // closed when status is set and nothing of it is left
	status  unix.WaitStatus //
	pipe    *net.UnixConn   // to the agent, which gets its connections through it
	passing sync.Mutex      // held while something is sent through it, and while memory is saved
	serving *os.File        // the write end of ready: init says which agents serve
	renewed chan struct{}   // gets what init says about its identity

	mu       sync.Mutex
	degraded []string
	failure  string // what init reported last
	onAgent  func()
}

// initUnready bounds how long init and the agent may take to start, whatever the
// creator's patience.
const initUnready = 30 * time.Second

// Start makes the sandbox of order in the current directory, with what spare has of it,
// and returns when its agent serves. It must be called on the thread that lives as long as the process:
// init dies with it. When it fails nothing is left.
func Start(ctx context.Context, order Order, spare *Spare) (_ *Sandbox, err error) {
	s := &Sandbox{order: order, init: FDInit, onAgent: func() {}, renewed: make(chan struct{}, 1)}
	cu := cleanup.Make(s.close)
	defer cu.Clean()

	// The image is copied and mounted while init is started.
	type layer struct {
		disk disk
		err  error
	}
	upper := make(chan layer, 1)
	go func() {
		var m layer
		if order.IDs.Kind == Leased { // else init makes it or clones it
			m.disk, m.err = spare.take(order.Upper)
		}
		upper <- m
	}()
	defer func() {
		if upper != nil {
			m := <-upper
			m.disk.close()
		}
	}()

	if err := s.claimIDs(); err != nil {
		return nil, err
	}
	if _, err := s.makeGroup(string(order.ID)); err != nil {
		return nil, err
	}
	cu.Add(s.removeGroup)
	monitor.Trace("control group made")
	if err := failpoint.Hit("launch.cgroup"); err != nil {
		return nil, err
	}
	fds := make([]*os.File, plan.FDCount, plan.FDCount+len(order.Trees)+1)
	defer func() {
		for _, f := range fds {
			if f != nil && f != s.upper {
				f.Close()
			}
		}
	}()
	mounted := func() error {
		m := <-upper
		upper = nil
		s.upper, s.image = m.disk.root, m.disk.image
		return m.err
	}
	if order.GVisor != nil { // init sees no mounts of the host, which have to be there before it
		if err := mounted(); err != nil {
			return nil, err
		}
		start := s.startGVisor
		if order.IDs.Kind != Leased {
			start = s.carryGVisor
		}
		if err := start(); err != nil {
			return nil, err
		}
	} else if err := s.spawn(); err != nil {
		return nil, err
	}
	cu.Add(func() { s.Kill(); s.reap() })
	monitor.Trace("init started")
	if err := failpoint.Hit("launch.spawn"); err != nil {
		return nil, err
	}
	if order.IDs.Kind != Leased && order.GVisor == nil {
		if err := s.enterAsUser(); err != nil {
			return nil, err
		}
	}
	if order.GVisor == nil {
		if err := s.makeLink(link.Default); err != nil {
			return nil, err
		}
	}
	if err := s.channels(fds); err != nil {
		return nil, err
	}
	monitor.Trace("channels")
	if order.GVisor == nil {
		if err := mounted(); err != nil {
			return nil, err
		}
		trees, err := s.trees(nil)
		fds = append(fds, trees...)
		if err != nil {
			return nil, err
		}
		monitor.Trace("mounts prepared")
		if err := failpoint.Hit("launch.mounts"); err != nil {
			return nil, err
		}
	}
	if order.GVisor != nil && order.GVisor.From != nil {
		go s.listen(make(chan struct{}))
		if err := s.renew(); err != nil {
			return nil, err
		}
		go s.countAgents()
	} else {
		if order.GVisor != nil {
			err = s.send(plan.SetUp, order.Plan, fds[plan.FDConfig:plan.FDConfig+1])
		} else {
			err = s.send(plan.SetUp, order.Plan, fds)
		}
		if err != nil {
			return nil, s.explain(err)
		}
		if err := s.awaitAgent(ctx); err != nil {
			return nil, err
		}
	}
	monitor.Trace("agent ready")
	if order.Upper.Used {
		s.fillReserve()
	}
	if order.GVisor != nil {
		if err := s.serveConnections(); err != nil {
			return nil, err
		}
	}
	if order.Link {
		if err := s.serveLink(); err != nil {
			return nil, err
		}
	}
	if err := s.serveLooks(); err != nil {
		return nil, err
	}
	if order.Watch {
		serve := s.serveWatch
		if order.GVisor != nil {
			serve = s.serveEvents
		}
		if err := serve(); err != nil {
			return nil, err
		}
	}
	if err := failpoint.Hit("launch.ready"); err != nil {
		return nil, err
	}
	cu.Release()
	return s, nil
}

// claimIDs keeps the ids from other servers also when the own one is gone. The claim
// ends in close, when no process has them any more.
func (s *Sandbox) claimIDs() (err error) {
	if s.order.Claims == "" {
		return nil
	}
	if s.claim, err = claim.Open(s.order.Claims); err != nil {
		return err
	}
	for _, r := range s.order.IDs.UIDs {
		if ours, err := s.claim.Share(berm.IDRange{Base: uint32(r.Outside), Count: uint32(r.Count)}); err != nil {
			return err
		} else if !ours {
			return berm.Errorf(berm.Unavailable, "the host ids from %d were given to another server meanwhile", r.Outside)
		}
	}
	return nil
}

// makeGroup makes the control group with its limits, and returns who manages it.
func (s *Sandbox) makeGroup(name string) (*cgroup.Manager, error) {
	manager, err := cgroup.New(cgroup.Config{Parent: s.order.CgroupParent})
	if err != nil {
		return nil, err
	}
	var disks []cgroup.Disk
	if l := s.order.Limits; l.ReadBytes > 0 || l.WriteBytes > 0 {
		disk, err := cgroup.DiskOf(".")
		if err != nil {
			return nil, err
		}
		disks = append(disks, disk)
	}
	s.group, err = manager.Create(name, s.order.Limits, disks...)
	return manager, err
}

// removeGroup removes the control group. Init has been waited for, so that nothing
// is in it; a group that stays for another reason is taken by Driver.Remove.
func (s *Sandbox) removeGroup() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = s.group.Remove(ctx)
}

// spawn starts init from its sealed executable in fresh namespaces, where it waits for
// the plan.
func (s *Sandbox) spawn() error {
	theirs, err := s.connect(true)
	if err != nil {
		return err
	}
	defer theirs.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return fault("open null device", err)
	}
	defer null.Close()
	// Well above the descriptors that init gets: ForkExec uses the numbers up to a few
	// above them before it executes.
	executable, err := unix.FcntlInt(uintptr(s.init), unix.F_DUPFD_CLOEXEC, 16+max(int(null.Fd()), int(theirs.Fd())))
	if err != nil {
		return fault("init's executable", err)
	}
	defer func() { _ = unix.Close(executable) }()
	return s.enter("/proc/self/fd/"+strconv.Itoa(executable), []string{"init"}, &syscall.ProcAttr{
		Dir:   "/",
		Env:   []string{"GOGC=off", "GOMAXPROCS=1"},
		Files: []uintptr{null.Fd(), null.Fd(), null.Fd(), theirs.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
}

// connect makes the socket to init and returns init's end of it. polled lets many
// goroutines wait for it without a thread each.
func (s *Sandbox) connect(polled bool) (*os.File, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fault("socket pair", err)
	}
	_ = unix.SetNonblock(pair[0], polled)
	s.control = os.NewFile(uintptr(pair[0]), "control")
	return os.NewFile(uintptr(pair[1]), "control"), nil
}

// enter executes init in fresh namespaces and in the control group.
func (s *Sandbox) enter(path string, argv []string, attr *syscall.ProcAttr) error {
	ids, pidfd := s.order.IDs, -1
	sys := attr.Sys
	sys.Cloneflags = unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP
	if !s.order.HostNetwork {
		sys.Cloneflags |= unix.CLONE_NEWNET
	}
	sys.Pdeathsig = unix.SIGKILL
	sys.PidFD = &pidfd
	switch {
	case ids.Kind == Subordinate:
		// The map needs a living process; these survive the execution before it.
		sys.AmbientCaps = []uintptr{unix.CAP_SETUID, unix.CAP_SETGID, unix.CAP_SYS_ADMIN}
		sys.Cloneflags |= borrow
	case ids.mapsItself():
		// The execution as another id than 0 takes all capabilities but these, mapped or not:
		// the first four are for the steps of a plan, the others are those with which
		// overlayfs works on its layers, for it has the rights of whoever mounted it.
		sys.AmbientCaps = []uintptr{
			unix.CAP_SYS_ADMIN, unix.CAP_NET_ADMIN, unix.CAP_NET_RAW, unix.CAP_SETPCAP,
			unix.CAP_DAC_OVERRIDE, unix.CAP_FOWNER, unix.CAP_CHOWN, unix.CAP_FSETID,
		}
		sys.Cloneflags |= borrow
	default:
		sys.UidMappings, sys.GidMappings = mappings(ids.UIDs), mappings(ids.GIDs)
		// An ordinary user may map the own group only without setgroups.
		sys.GidMappingsEnableSetgroups = ids.Kind == Leased
		sys.Credential = &syscall.Credential{
			Uid: uint32(ids.UIDs[0].Inside), Gid: uint32(ids.GIDs[0].Inside), NoSetGroups: ids.Kind == Single,
		}
	}
	into, err := s.group.File()
	if err != nil {
		return err
	}
	if into != nil {
		defer into.Close()
		sys.UseCgroupFD, sys.CgroupFD = true, int(into.Fd())
	}
	start := func() (err error) {
		s.pid, err = syscall.ForkExec(path, argv, attr)
		return err
	}
	err = s.group.Inside(func() error {
		if ids.Kind == Leased {
			return asOwner(ids.UIDs[0].Outside, start)
		}
		return start()
	})
	if pidfd >= 0 {
		s.pidfd = os.NewFile(uintptr(pidfd), "pidfd")
	}
	if err != nil {
		if s.pidfd != nil { // it runs, but this thread could not leave its group
			s.Kill()
			s.reap()
		}
		return fault("start init in new namespaces", err)
	}
	if ids.mapsItself() {
		if err := s.mapOwn(); err != nil {
			s.Kill()
			s.reap()
			return fault("map the own id", err)
		}
	}
	return s.exposeToOOM()
}

// borrow lets init use the memory of this process until it executes itself. Package syscall
// does so for all but user namespaces, whose maps it writes before that; here they are
// written after it. A copy costs two milliseconds: each page that either writes meanwhile
// is copied, and every processor is told.
const borrow = unix.CLONE_VM | unix.CLONE_VFORK

// mapOwn gives init the id that it has outside. An ordinary user may map the own group only
// without setgroups (user_namespaces(7)).
func (s *Sandbox) mapOwn() error {
	dir, ids := "/proc/"+strconv.Itoa(s.pid)+"/", s.order.IDs
	for _, f := range [][2]string{
		{"uid_map", ids.UIDs[0].String()}, {"setgroups", "deny"}, {"gid_map", ids.GIDs[0].String()},
	} {
		if err := os.WriteFile(dir+f[0], []byte(f[1]), 0); err != nil {
			return err
		}
	}
	return nil
}

// exposeToOOM takes back the protection from the kernel's search for memory that a
// service manager may have given to the server.
func (s *Sandbox) exposeToOOM() error {
	own, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil || !strings.HasPrefix(string(own), "-") {
		return nil
	}
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", s.pid), []byte("0"), 0); err != nil {
		return fault("expose the sandbox to the OOM killer", err)
	}
	return nil
}

func mappings(ranges []Range) []syscall.SysProcIDMap {
	var maps []syscall.SysProcIDMap
	for _, r := range ranges {
		maps = append(maps, syscall.SysProcIDMap{ContainerID: r.Inside, HostID: r.Outside, Size: r.Count})
	}
	return maps
}

// trees makes the detached mounts that the plan attaches. Those of an ordinary user are
// cloned by init. The caller closes what is returned, but for s.upper. Owners are mapped
// by userns, or by init's user namespace when it is nil.
func (s *Sandbox) trees(userns *os.File) (fds []*os.File, err error) {
	if s.order.IDs.Kind != Leased {
		return nil, nil
	}
	if userns == nil {
		if userns, err = os.Open("/proc/" + strconv.Itoa(s.pid) + "/ns/user"); err != nil {
			return nil, s.explain(err)
		}
		defer userns.Close()
	}
	for _, t := range s.order.Trees {
		tree := s.upper
		if !t.Upper {
			if tree, err = t.open(); err != nil {
				return fds, err
			}
		}
		fds = append(fds, tree)
		if t.Host && !t.Own {
			continue
		}
		err := mount.IDMap(int(tree.Fd()), int(userns.Fd()))
		if err != nil && (!t.Own || berm.KindOf(err) != berm.Unsupported) {
			return fds, err
		}
	}
	return fds, nil
}

// enterAsUser does what only an ordinary user's sandbox needs: init clones the trees,
// which the monitor may not, and gets its ids from the set-uid helpers of the system.
func (s *Sandbox) enterAsUser() error {
	var trees []byte
	for _, t := range s.order.Trees {
		kind := byte(plan.TreeRead)
		switch {
		case t.Upper:
			kind, t.Path = plan.TreeWrite, s.order.Upper.Directory
		case t.Write:
			kind = plan.TreeWrite
		}
		if t.Exact {
			kind = plan.Exact(kind)
		}
		trees = append(append(append(trees, kind), t.Path...), 0)
	}
	if err := s.send(plan.Trees, trees, nil); err != nil {
		return s.explain(err)
	}
	if s.order.IDs.Kind == Single {
		return nil
	}
	for helper, ranges := range map[string][]Range{"newuidmap": s.order.IDs.UIDs, "newgidmap": s.order.IDs.GIDs} {
		args := []string{strconv.Itoa(s.pid)}
		for _, r := range ranges {
			args = append(args, strconv.Itoa(r.Inside), strconv.Itoa(r.Outside), strconv.Itoa(r.Count))
		}
		if out, err := exec.Command(helper, args...).CombinedOutput(); err != nil {
			return berm.Errorf(berm.Unsupported, "%s: %w: %s", helper, err, strings.TrimSpace(string(out))).
				WithHint("give the user 65536 ids in /etc/subuid and /etc/subgid")
		}
	}
	return s.send(plan.Mapped, nil, nil)
}

// channels makes what connects the agent with the outside.
func (s *Sandbox) channels(fds []*os.File) error {
	var err error
	if fds[plan.FDConfig], err = memfd("config", s.order.Config); err != nil {
		return fault("agent configuration", err)
	}
	var r, w *os.File
	if r, w, err = os.Pipe(); err != nil {
		return fault("pipe", err)
	}
	if s.order.GVisor != nil { // see plan.AgentVariable
		s.ready, s.serving = r, w
		return nil
	}
	s.ready, fds[plan.FDReady] = r, w
	if fds[plan.FDListen], err = s.listenForAgent(); err != nil {
		return err
	}
	agent, err := unix.FcntlInt(FDAgent, unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fault("agent executable", err)
	}
	fds[plan.FDAgent] = os.NewFile(uintptr(agent), "agent")
	return nil
}

// listenForAgent makes the socket that the agent accepts connections from itself.
func (s *Sandbox) listenForAgent() (*os.File, error) {
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: monitor.AgentFile, Net: "unix"})
	if err != nil {
		return nil, fault("listen for the agent", err)
	}
	listener.SetUnlinkOnClose(false)
	defer func() { _ = listener.Close() }()
	f, err := listener.File()
	if err != nil {
		return nil, fault("agent socket", err)
	}
	return f, nil
}

// memfd makes an anonymous file that nobody can open again by its name in /proc.
func memfd(name string, content []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3
		fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	}
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err = f.Write(content); err == nil {
		if _, err = f.Seek(0, 0); err == nil {
			err = f.Chmod(0o600)
		}
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// send passes a message and descriptors to init.
func (s *Sandbox) send(kind byte, body []byte, files []*os.File) error {
	return s.sendTo(s.control, kind, body, files)
}

func (s *Sandbox) sendTo(control *os.File, kind byte, body []byte, files []*os.File) error {
	message := append([]byte{kind}, body...)
	if len(message) > plan.MaxMessage || len(files) > plan.MaxFDs {
		return berm.Errorf(berm.Invalid, "too many layers or paths to show: %d", len(s.order.Trees))
	}
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		rights = unix.UnixRights(fds...)
	}
	raw, err := control.SyscallConn()
	if err != nil {
		return err
	}
	var sent error
	err = raw.Write(func(fd uintptr) bool {
		sent = unix.Sendmsg(int(fd), message, rights, nil, unix.MSG_NOSIGNAL)
		return sent != unix.EAGAIN
	})
	runtime.KeepAlive(files)
	return errors.Join(err, sent)
}

// awaitAgent listens to init until the agent serves.
func (s *Sandbox) awaitAgent(ctx context.Context) error {
	ready := make(chan error, 2)
	go func() {
		var b [1]byte
		_, err := s.ready.Read(b[:])
		ready <- err
	}()
	ended := make(chan struct{})
	go s.listen(ended)
	select {
	case err := <-ready:
		if err != nil {
			return s.explain(err)
		}
	case <-ended:
		return s.explain(errors.New("init ended"))
	case <-ctx.Done():
		return berm.Errorf(berm.Unavailable, "creation was given up: %w", context.Cause(ctx))
	case <-time.After(initUnready):
		return s.explain(berm.Errorf(berm.Unavailable, "the guest agent did not start within %s", initUnready))
	}
	go s.countAgents()
	return nil
}

// OnAgent has f called for each later start of the agent.
func (s *Sandbox) OnAgent(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.onAgent = f
}

func (s *Sandbox) countAgents() {
	var b [1]byte
	for {
		if n, err := s.ready.Read(b[:]); n == 0 || err != nil {
			return
		}
		s.mu.Lock()
		f := s.onAgent
		s.mu.Unlock()
		f()
	}
}

// listen takes what init reports until it ends. Init is inside: nothing depends on
// what it says but the words of an error.
func (s *Sandbox) listen(ended chan<- struct{}) {
	defer close(ended)
	message := make([]byte, 4096)
	for {
		n, file, err := receive(s.control, message)
		if n == 0 || err != nil {
			return
		}
		text := string(message[1:n])
		s.mu.Lock()
		switch message[0] {
		case plan.LinkMade:
			if file != nil && s.link == nil {
				s.link = file
			}
		case plan.Watched:
			if s.relay == nil && s.order.Watch {
				s.relay, s.listener = notify.NewRelay(file, text)
			}
		case plan.Started:
			monitor.Trace("agent started by init")
		case plan.Ready:
			if s.serving != nil {
				_, _ = s.serving.Write(message[:1])
			}
		case plan.Renewed:
			select {
			case s.renewed <- struct{}{}:
			default:
			}
		case plan.Failed:
			s.failure = text
		case plan.AgentLost:
			s.failure = "the guest agent ended: " + text
		case plan.Lowered:
			if len(s.degraded) < 32 {
				s.degraded = append(s.degraded, "the host gives less: "+text)
			}
		}
		s.mu.Unlock()
	}
}

// receive takes one message of init, and the descriptor that came with it, if one did.
func receive(from *os.File, message []byte) (n int, came *os.File, err error) {
	raw, err := from.SyscallConn()
	if err != nil {
		return 0, nil, err
	}
	control := rights.Space(1)
	var controlLen int
	var received error
	err = raw.Read(func(fd uintptr) bool {
		for {
			n, controlLen, _, _, received = unix.Recvmsg(int(fd), message, control, unix.MSG_CMSG_CLOEXEC)
			// An end that closes with something unread resets the connection, and the kernel
			// tells that before what was sent earlier.
			if received != unix.EINTR && received != unix.ECONNRESET {
				return received != unix.EAGAIN
			}
		}
	})
	if err = errors.Join(err, received); err != nil {
		return 0, nil, err
	}
	return n, rights.File(control[:controlLen], "link"), nil
}

// makeLink makes the link of a sandbox of root, whose init may not, in init's network
// namespace.
func (s *Sandbox) makeLink(c link.Config) error {
	if !s.order.Link || s.order.IDs.Kind != Leased {
		return nil
	}
	namespace, err := os.Open("/proc/" + strconv.Itoa(s.pid) + "/ns/net")
	if err != nil {
		return s.explain(err)
	}
	defer namespace.Close()
	fd, err := outside.Make(int(namespace.Fd()), c)
	if err != nil {
		return err
	}
	s.link = os.NewFile(uintptr(fd), "link")
	return nil
}

// serveLink hands the other end of the link to whoever connects to a socket in the current
// directory, again and again: the service that had it may have died. Another socket keeps a
// descriptor for it.
func (s *Sandbox) serveLink() (err error) {
	s.mu.Lock()
	link := s.link
	s.mu.Unlock()
	if link == nil {
		return berm.Errorf(berm.Internal, "init made no link")
	}
	if s.linkSocket, err = serve(monitor.LinkFile, func(conn *net.UnixConn) {
		_, _, _ = conn.WriteMsgUnix([]byte{1}, unix.UnixRights(int(link.Fd())), nil)
	}); err != nil {
		return err
	}
	s.keepSocket, err = serve(monitor.KeepFile, s.keepFile)
	return err
}

// serve attends each connection to a socket in the current directory.
func serve(name string, attend func(*net.UnixConn)) (*net.UnixListener, error) {
	return listen(name, func(conn *net.UnixConn) {
		_ = conn.SetDeadline(time.Now().Add(10 * time.Second)) // whoever connects is the server, which may hang
		attend(conn)
		conn.Close()
	})
}

// listen hands over each connection to a socket in the current directory.
func listen(name string, attend func(*net.UnixConn)) (*net.UnixListener, error) {
	return listenOn("unix", name, attend)
}

// listenOn does so for a kind of sockets.
func listenOn(kind, name string, attend func(*net.UnixConn)) (*net.UnixListener, error) {
	listener, err := net.ListenUnix(kind, &net.UnixAddr{Name: name, Net: kind})
	if err != nil {
		return nil, fault("listen for the server", err)
	}
	go func() {
		for {
			conn, err := listener.AcceptUnix()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil { // out of descriptors: for now
				time.Sleep(50 * time.Millisecond)
				continue
			}
			attend(conn)
		}
	}()
	return listener, nil
}

// keepFile takes a descriptor in the place of the one before, or hands it out.
func (s *Sandbox) keepFile(conn *net.UnixConn) {
	op, control := make([]byte, 1), rights.Space(1)
	_, n, _, _, err := conn.ReadMsgUnix(op, control)
	if err != nil {
		return
	}
	came := rights.File(control[:n], "kept")
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []byte
	switch {
	case op[0] == monitor.KeepPut && came != nil:
		s.kept, came = came, s.kept
	case op[0] == monitor.KeepGet && s.kept != nil:
		out = unix.UnixRights(int(s.kept.Fd()))
	}
	if came != nil {
		came.Close()
	}
	_, _, _ = conn.WriteMsgUnix([]byte{1}, out, nil)
}

// explain adds what init reported to an error.
func (s *Sandbox) explain(err error) error {
	if s.carrier != nil && berm.KindOf(err) == berm.Internal { // it has ended, or is about to say why
		select {
		case <-s.carrier.ended:
		case <-time.After(stopPatience):
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failure != "" {
		return berm.Errorf(berm.Internal, "set up the sandbox: %s", s.failure)
	}
	if berm.KindOf(err) != berm.Internal {
		return err
	}
	if s.root != nil {
		if words := s.lastWords(); words != "" {
			return berm.Errorf(berm.Internal, "set up the sandbox: %w: %s", err, words)
		}
	}
	return berm.Errorf(berm.Internal, "set up the sandbox: %w", err)
}

// Freeze stops every process. Those inside gVisor it stops itself, and that is all: where a process of
// the host that carries one of them is frozen and goes on, what it carries may be killed.
func (s *Sandbox) Freeze() error {
	if s.order.GVisor != nil {
		return s.still(true)
	}
	return s.group.Freeze(context.Background())
}

// Thaw lets every process go on.
func (s *Sandbox) Thaw() error {
	if s.order.GVisor != nil {
		return s.still(false)
	}
	return s.group.Thaw(context.Background())
}

// still has gVisor stop what runs inside, or lets it go on, unless it is so. Callers take turns.
func (s *Sandbox) still(stop bool) error {
	if s.stopped == stop {
		return nil
	}
	change := s.stop
	if !stop {
		change = s.goOn
		if err := failpoint.Hit("launch.resume"); err != nil {
			return err
		}
	}
	if err := change(); err != nil {
		return err
	}
	s.stopped = stop
	if stop {
		return failpoint.Hit("launch.paused")
	}
	return nil
}

// Policy is the whole effective policy. It is decoded only when init found less than was
// ordered.
func (s *Sandbox) Policy() json.RawMessage {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.degraded) == 0 {
		return s.order.Policy
	}
	var p berm.Policy
	if err := json.Unmarshal(s.order.Policy, &p); err != nil {
		p.Degraded = []string{"the policy cannot be shown: " + err.Error()}
	}
	p.Degraded = append(p.Degraded, s.degraded...)
	raw, err := json.Marshal(p)
	if err != nil {
		return nil // the client reports it
	}
	return raw
}

// serveWatch passes what the listener tells on to whoever connected last.
func (s *Sandbox) serveWatch() (err error) {
	s.mu.Lock()
	relay := s.relay
	s.mu.Unlock()
	if relay == nil {
		return berm.Errorf(berm.Internal, "init has no listener")
	}
	s.watchSocket, err = listenOn("unixpacket", monitor.WatchFile, relay.Serve)
	return err
}

// watchPatience is how long the end waits for what the listener has still to tell, and then for
// whoever it is told.
const watchPatience = 300 * time.Millisecond

// endWatch has the last things told that the listener hears.
func (s *Sandbox) endWatch() {
	s.mu.Lock()
	relay, listener := s.relay, s.listener
	s.mu.Unlock()
	if listener != nil {
		select {
		case <-listener.Done():
		case <-time.After(watchPatience):
		}
	}
	if relay != nil {
		relay.Close(watchPatience)
	}
}

// First is init, or nil when neither its namespace can be told, as to who is not root, nor anybody
// listens.
func (s *Sandbox) First() *berm.First {
	if s.order.GVisor != nil && s.stream == nil {
		return nil
	}
	if s.order.GVisor != nil {
		return &berm.First{Watch: filepath.Join(s.order.Directory, monitor.WatchFile), Stream: true}
	}
	first := &berm.First{PID: s.pid}
	if s.watchSocket != nil {
		first.Watch = filepath.Join(s.order.Directory, monitor.WatchFile)
	}
	var namespace unix.Stat_t
	if unix.Stat("/proc/"+strconv.Itoa(s.pid)+"/ns/pid", &namespace) == nil {
		first.Namespace = uint32(namespace.Ino)
	} else if first.Watch == "" {
		return nil
	}
	return first
}

// Usage measures the sandbox.
func (s *Sandbox) Usage() (berm.Usage, error) {
	u, err := s.group.Usage()
	if err != nil {
		return u, err
	}
	if s.order.GVisor != nil {
		u.PIDs = 0 // those of the host tell nothing of those inside
	} else if u.MemoryUsed == 0 || u.PIDs == 0 || u.CPUTime == 0 {
		measure(s.pid, &u)
	}
	if s.upper != nil {
		var fs unix.Statfs_t
		if err := unix.Fstatfs(int(s.upper.Fd()), &fs); err != nil {
			return u, fault("measure the disk", err)
		}
		u.DiskTotal = int64(fs.Blocks) * fs.Bsize
		u.DiskUsed = u.DiskTotal - int64(fs.Bfree)*fs.Bsize
	}
	return u, nil
}

// Kill begins the end of every process: the kernel ends a pid namespace with its
// first process, whatever the others do.
func (s *Sandbox) Kill() {
	s.ending.Store(true)
	_ = unix.PidfdSendSignal(int(s.pidfd.Fd()), unix.SIGKILL, nil, 0)
	go func() { _ = s.group.Kill(context.Background()) }()
}

// Wait returns when every process has ended and all that the sandbox had is taken
// away, but for its directory. It must be called on the thread that called Start.
// The exit has the reason that can be seen from outside.
func (s *Sandbox) Wait(asked func() berm.Reason, keep func(berm.Exit)) berm.Exit {
	status := s.reap()
	monitor.Trace("init reaped")
	exit := berm.Exit{At: time.Now().UTC(), Code: -1}
	s.mu.Lock()
	exit.Detail = s.failure
	s.mu.Unlock()
	switch {
	case status.Exited():
		exit.Code = status.ExitStatus()
		exit.Reason = berm.ReasonCrash
		if exit.Code == 0 {
			exit.Reason = berm.ReasonExit
		}
	default:
		exit.Signal = unix.SignalName(status.Signal())
		exit.Reason = berm.ReasonCrash
	}
	// Behind runsc the kernel ends what carries the whole sandbox, and runsc then leaves.
	if exit.Signal != "" || s.order.GVisor != nil {
		if u, err := s.group.Usage(); err == nil && u.OOMKills > 0 {
			exit.Reason = berm.ReasonOOM
			exit.Detail = fmt.Sprintf("the sandbox used more than its %d MiB of memory", s.order.Limits.Memory>>20)
		}
	}
	if reason := asked(); reason != "" {
		exit.Reason = reason
		exit.Detail = ""
	}
	keep(exit)
	s.endWatch()
	s.removeGroup()
	monitor.Trace("control group removed")
	if s.looks != nil {
		s.looks.last()
	}
	if s.order.Upper.Image != "" {
		discard(s.upper)
	}
	s.close()
	monitor.Trace("closed")
	return exit
}

// reap waits for init, after which no process of its pid namespace is left.
func (s *Sandbox) reap() unix.WaitStatus {
	if s.ended != nil {
		<-s.ended
		return s.status
	}
	var status unix.WaitStatus
	for {
		_, err := unix.Wait4(s.pid, &status, 0, nil)
		if err != unix.EINTR {
			return status
		}
	}
}

// close lets every descriptor go, and with them the mounts.
func (s *Sandbox) close() {
	s.mu.Lock()
	kept := s.kept
	s.mu.Unlock()
	for _, c := range []*net.UnixConn{s.pipe, s.stream} {
		if c != nil {
			c.Close()
		}
	}
	for _, f := range []*os.File{s.control, s.ready, s.serving, s.link, s.upper, s.image, s.pidfd, s.root, kept} {
		if f != nil {
			f.Close()
		}
	}
	if s.carrier != nil {
		s.carrier.control.Close()
	}
	if s.looks != nil {
		s.looks.close()
	}
	for _, l := range []*net.UnixListener{s.linkSocket, s.keepSocket, s.agentSocket, s.watchSocket} {
		if l != nil {
			l.Close()
		}
	}
	if s.claim != nil {
		_ = s.claim.Close()
	}
}

func fault(what string, err error) error {
	return berm.Errorf(berm.Internal, "%s: %w", what, err)
}
