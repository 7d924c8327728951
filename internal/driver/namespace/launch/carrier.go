package launch

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/cleanup"
	"github.com/berm-sandbox/berm/internal/driver/namespace/plan"
	"github.com/berm-sandbox/berm/internal/failpoint"
	"github.com/berm-sandbox/berm/internal/monitor"
)

// carrier is init of an ordinary user's sandbox with a kernel of its own. The monitor of such a one
// may mount nothing, nor enter init's user namespace, as it has more than one thread
// (setns(2)): so init makes the stage, with all rights in its namespaces, starts runsc there, and stays.
type carrier struct {
	control *os.File
	asking  sync.Mutex
	answers chan connection
	begun   chan struct{} // closed when runsc is started
	ended   chan struct{} // closed when init has
}

// connection is an answer to plan.Connect.
type connection struct {
	file *os.File // nil when there is none
	why  string
}

// carryGVisor starts runsc on a stage of its own below init.
func (s *Sandbox) carryGVisor() error {
	if err := s.spawn(); err != nil {
		return err
	}
	cu := cleanup.Make(func() { s.Kill(); s.reap() })
	defer cu.Clean()
	g := s.order.GVisor
	for _, path := range []string{g.Runsc, g.Init, g.Agent} {
		s.order.Trees = append(s.order.Trees, Tree{Path: path, Host: true})
	}
	if s.order.Watch {
		if err := s.takeEvents(eventsFile); err != nil {
			return err
		}
		// Only this user gets to the directory; gVisor has none of this user's ids.
		if err := os.Chmod(eventsFile, 0o666); err != nil {
			return fault("listen for gVisor's events", err)
		}
		s.order.Trees = append(s.order.Trees, Tree{Path: filepath.Join(s.order.Directory, eventsFile), Host: true})
	}
	steps, err := s.stageSteps()
	if err != nil {
		return err
	}
	if err := s.enterAsUser(); err != nil {
		return err
	}
	c := &carrier{control: s.control, answers: make(chan connection, 1), begun: make(chan struct{}), ended: make(chan struct{})}
	s.carrier, s.control = c, nil
	theirs, connections, err := s.streams()
	if err != nil {
		return err
	}
	defer theirs.Close()
	defer connections.Close()
	if err := failpoint.Hit("launch.stage"); err != nil {
		return err
	}
	go c.listen(s)
	message := strings.Join(s.arguments(), "\x00") + "\x00\x00" + string(plan.Encode(steps))
	if err := s.sendTo(c.control, plan.Kernel, []byte(message), []*os.File{theirs, connections}); err != nil {
		return s.explain(err)
	}
	select {
	case <-c.begun:
	case <-c.ended:
		return s.explain(errors.New("init ended"))
	case <-time.After(initUnready):
		return s.explain(errors.New("init does not answer"))
	}
	monitor.Trace("stage made")
	// Of what is gone, nothing is to be read.
	s.root, _ = os.OpenFile("/proc/"+strconv.Itoa(s.pid)+"/root", unix.O_PATH|unix.O_DIRECTORY, 0)
	cu.Release()
	return nil
}

// eventsFile is the socket for gVisor's events, in the sandbox's directory.
const eventsFile = "events"

// stageSteps puts together what runsc sees, from the trees in the order that they have now. It is what
// stage does as root.
func (s *Sandbox) stageSteps() (steps []plan.Step, err error) {
	add := func(all ...plan.Step) { steps = append(steps, all...) }
	dirs := func(names ...string) {
		for _, name := range names {
			add(plan.Step{Op: plan.Mkdir, Target: name, Flags: 0o755})
		}
	}
	tree := 0
	attach := func(target string) {
		add(plan.Step{Op: plan.Move, Target: target, FD: tree})
		tree++
	}
	file := func(target string, content []byte) {
		add(plan.Step{Op: plan.File, Target: target, Data: string(content), Flags: 0o600})
	}
	g := s.order.GVisor
	add(plan.Step{Op: plan.Stage, Data: "mode=0755,size=" + stageSize})
	dirs(stageDirs...)
	file(stageBundle+"/config.json", g.Spec)
	add(plan.Step{Op: plan.Mount, Target: "proc", Source: "proc", Flags: unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC})
	file("dev/null", nil)
	add(plan.Step{Op: plan.Bind, Source: os.DevNull, Target: "dev/null", Flags: unix.MS_NOSUID | unix.MS_NOEXEC})
	if s.order.Link {
		add(plan.Step{Op: plan.Link, Flags: 1})
	}
	file(StageNetwork[1:], nil)
	add(plan.Step{Op: plan.Bind, Source: "/proc/self/ns/net", Target: StageNetwork[1:]})

	dirs(stageUpper)
	inMemory := true
	var lower []string
	for _, t := range s.order.Trees {
		switch {
		case t.Upper:
			inMemory = false
			attach(stageUpper)
		case !t.Host:
			name := "tree/" + strconv.Itoa(tree)
			lower = append([]string{name}, lower...)
			dirs(name)
			attach(name)
		}
	}
	if inMemory {
		add(plan.Step{Op: plan.Mount, Target: stageUpper, Source: "tmpfs", Flags: unix.MS_NODEV, Data: "mode=0755,size=" + strconv.FormatInt(s.order.Limits.Disk, 10)})
	}
	dirs(stageBaseDirs...)
	dirs(stageUpper+"/"+upperName, stageUpper+"/work")
	add(plan.Step{Op: plan.Mount, Target: StageRoot[1:], Source: "overlay", Flags: overlayFlags, Data: overlayOptions(append(lower, stageBase))})

	for _, target := range []string{"bin/runsc", StagePrograms[1:] + "/" + filepath.Base(g.Init), StagePrograms[1:] + "/" + filepath.Base(g.Agent)} {
		file(target, nil)
		attach(target)
	}
	if s.order.Watch {
		config, err := eventsConfig()
		if err != nil {
			return nil, fault("tell gVisor what to tell", err)
		}
		file(stageEventsConfig, config)
		file(stageEvents, nil)
		attach(stageEvents)
	}
	add(plan.Step{Op: plan.Enter, Target: "."})
	return steps, nil
}

// listen takes what init reports until it ends.
func (c *carrier) listen(s *Sandbox) {
	defer close(c.ended)
	message := make([]byte, 4096)
	for {
		n, file, err := receive(c.control, message)
		if n == 0 || err != nil {
			return
		}
		text := string(message[1:n])
		switch message[0] {
		case plan.LinkMade:
			s.mu.Lock()
			if file != nil && s.link == nil {
				s.link = file
			}
			s.mu.Unlock()
		case plan.Started:
			close(c.begun)
		case plan.Failed:
			s.mu.Lock()
			s.failure = text
			s.mu.Unlock()
		case plan.Connected:
			select {
			case c.answers <- connection{file, text}:
			default:
				if file != nil {
					file.Close()
				}
			}
		}
	}
}

// connect connects to a socket of the stage.
func (c *carrier) connect(s *Sandbox, path string) (*net.UnixConn, error) {
	c.asking.Lock()
	defer c.asking.Unlock()
	if err := s.sendTo(c.control, plan.Connect, []byte(path), nil); err != nil {
		return nil, err
	}
	select {
	case answer := <-c.answers:
		if answer.file == nil {
			return nil, errors.New(answer.why)
		}
		defer answer.file.Close()
		conn, err := net.FileConn(answer.file)
		if err != nil {
			return nil, err
		}
		return conn.(*net.UnixConn), nil
	case <-c.ended:
		return nil, errors.New("init ended")
	case <-time.After(stopPatience):
		return nil, os.ErrDeadlineExceeded
	}
}
