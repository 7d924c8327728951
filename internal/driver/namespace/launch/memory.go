package launch

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/namespace/plan"
	"github.com/berm-sandbox/berm/internal/failpoint"
	"github.com/berm-sandbox/berm/internal/monitor"
)

// SavedMemory is the directory of a snapshot that has what gVisor saves of its kernel and of the
// memory of programs, and Manifest beside it.
const SavedMemory = "memory"

// Manifest is the file in SavedMemory with GVisor.Manifest of the sandbox that was saved.
const Manifest = "berm.json"

// The files that gVisor saves, in the order in which it takes them
// (runsc/sandbox.createSaveFiles, pkg/sentry/state/checkpointfiles).
var savedMemory = [...]string{"checkpoint.img", "pages_meta.img", "pages.img"}

// Files of a snapshot that have to be on disk before it is one, and their directories, in a
// snapshot's.
func Files(memory bool) []string {
	files := []string{SavedDisk}
	if memory {
		files = append(files, filepath.Join(SavedMemory, Manifest))
		for _, name := range savedMemory {
			files = append(files, filepath.Join(SavedMemory, name))
		}
		files = append(files, SavedMemory)
	}
	return append(files, ".")
}

// Requests to the guest agent through the socket that passes connections; see package ports.
const (
	agentConnection = 1
	agentRelease    = 2
	agentRenew      = 3
)

// How long the agent may take for one, and for the last, when all processes that were saved want to
// run at once: a desktop on a busy machine took five seconds.
const (
	agentPatience = 5 * time.Second
	renewPatience = 20 * time.Second
)

// Checkpoint saves files and memory, while gVisor lets no program run. Connections to the guest
// agent end: a descriptor of the host's that came in while it ran is nothing that gVisor can save.
func (s *Sandbox) Checkpoint(dir string) (saved berm.Saved, err error) {
	if s.order.GVisor == nil {
		return saved, berm.Errorf(berm.Unsupported, "only files are kept here: processes and their memory cannot be saved").
			WithHint("leave memory out, or use a sandbox of level %s", berm.GVisor)
	}
	memory := filepath.Join(dir, SavedMemory)
	if err = os.Mkdir(memory, 0o700); err == nil {
		err = os.WriteFile(filepath.Join(memory, Manifest), s.order.GVisor.Manifest, 0o600)
	}
	if errors.Is(err, unix.ENOSPC) {
		return saved, noRoom(err)
	}
	if err != nil {
		return saved, fault("save the memory", err)
	}
	// Those who connect from now on wait.
	s.passing.Lock()
	defer s.passing.Unlock()
	if err := s.askAgent(agentRelease, nil, agentPatience); err != nil {
		return saved, err
	}
	monitor.Trace("connections released")
	if err := failpoint.Hit("launch.released"); err != nil {
		return saved, err
	}
	begin := time.Now()
	if err := s.stop(); err != nil {
		return saved, err
	}
	var size int64
	if err = failpoint.Hit("launch.stopped"); err == nil {
		size, err = s.saveMemory(memory)
	}
	if err == nil {
		monitor.Trace("memory saved")
		err = failpoint.Hit("launch.memory")
	}
	if err == nil {
		saved, err = s.Snapshot(dir)
	}
	err = errors.Join(err, s.goOn())
	saved.Memory, saved.Size, saved.Stopped = true, saved.Size+size, time.Since(begin)
	return saved, err
}

// saveMemory has gVisor write what it is and has into a directory.
func (s *Sandbox) saveMemory(dir string) (size int64, err error) {
	var files []*os.File
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	for _, name := range savedMemory {
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return 0, fault("save the memory", err)
		}
		files = append(files, f)
	}
	// control.SaveOpts. Uncompressed, pages are written and read beside the rest.
	if err := s.call("Checkpoint", map[string]any{"metadata": map[string]string{"compression": "none"}, "have_pages_file": true, "Resume": true}, files); err != nil {
		return 0, err
	}
	for _, f := range files {
		var stat unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &stat); err != nil {
			return 0, fault("save the memory", err)
		}
		size += stat.Blocks * 512
	}
	return size, nil
}

const (
	// callPatience bounds one call to gVisor: much memory takes long to write.
	callPatience = 4 * time.Minute
	// stopPatience bounds how long gVisor may take to stop what runs inside, and then to let it go
	// on: whoever asked for it has not given up by then.
	stopPatience = 10 * time.Second
)

// kernel is a connection to gVisor's, which takes the calls on it one after the other
// (pkg/urpc.Server.handleRegistered).
type kernel struct {
	*net.UnixConn
	s       *Sandbox
	answers *json.Decoder
}

func (s *Sandbox) kernel() (*kernel, error) {
	path := fmt.Sprintf("/%s/runsc-%s.sock", stageState, s.order.ID)
	var conn *net.UnixConn
	var err error
	if s.carrier != nil {
		conn, err = s.carrier.connect(s, path)
	} else {
		conn, err = net.DialUnix("unix", nil, &net.UnixAddr{Net: "unix", Name: fmt.Sprintf("/proc/self/fd/%d%s", s.root.Fd(), path)})
	}
	if err != nil {
		return nil, s.uncalled("connect", err)
	}
	return &kernel{conn, s, json.NewDecoder(conn)}, nil
}

// uncalled is why gVisor did not do what it was to.
func (s *Sandbox) uncalled(method string, err error) error {
	if s.ending.Load() {
		return berm.Errorf(berm.NotFound, "the sandbox is dead: %s: %w", method, err)
	}
	return fault("have gVisor do "+method, err)
}

// call has gVisor's kernel do something.
func (s *Sandbox) call(method string, arg any, files []*os.File) error {
	k, err := s.kernel()
	if err != nil {
		return err
	}
	defer k.Close()
	if err := k.send(method, arg, files); err != nil {
		return err
	}
	return k.answer(method, callPatience)
}

// send is JSON, with descriptors (pkg/urpc).
func (k *kernel) send(method string, arg any, files []*os.File) error {
	raw, err := json.Marshal(map[string]any{"method": "containerManager." + method, "arg": arg})
	if err != nil {
		return k.s.uncalled(method, err)
	}
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		rights = unix.UnixRights(fds...)
	}
	_ = k.SetDeadline(time.Now().Add(stopPatience))
	if _, _, err := k.WriteMsgUnix(raw, rights, nil); err != nil {
		return k.s.uncalled(method, err)
	}
	return nil
}

// taken waits until gVisor has read what was sent: a second call that it reads together with the
// first is lost (pkg/urpc.unmarshal).
func (k *kernel) taken() error {
	raw, err := k.SyscallConn()
	if err != nil {
		return err
	}
	for end := time.Now().Add(stopPatience); ; time.Sleep(time.Millisecond) {
		left := 0
		if failed := raw.Control(func(fd uintptr) { left, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) }); failed != nil {
			return failed
		}
		if err != nil || left == 0 {
			return err
		}
		if time.Now().After(end) {
			return k.s.uncalled("anything", os.ErrDeadlineExceeded)
		}
	}
}

// answer waits for that of the first call that has none yet.
func (k *kernel) answer(method string, patience time.Duration) error {
	_ = k.SetDeadline(time.Now().Add(patience))
	var answer struct {
		Success bool
		Err     string
	}
	if err := k.answers.Decode(&answer); err != nil {
		k.answers = json.NewDecoder(io.MultiReader(k.answers.Buffered(), k.UnixConn)) // it keeps to an error
		return k.s.uncalled(method, err)
	}
	if strings.Contains(answer.Err, unix.ENOSPC.Error()) {
		return noRoom(errors.New(answer.Err))
	}
	if !answer.Success {
		return k.s.uncalled(method, errors.New(answer.Err))
	}
	return nil
}

// stop has gVisor stop what runs inside. It counts how often it was told so, and cannot be asked; so
// where it does not answer it is told to let all go on once it has stopped, and answers that, or is
// of no use to anybody.
func (s *Sandbox) stop() error {
	k, err := s.kernel()
	if err != nil {
		return err
	}
	defer k.Close()
	if err = k.send("Pause", struct{}{}, nil); err != nil {
		return err
	}
	if err = failpoint.Hit("launch.unanswered"); err == nil {
		err = k.answer("Pause", stopPatience)
	}
	if err == nil || berm.KindOf(err) == berm.NotFound {
		return err
	}
	back := k.taken()
	if back == nil {
		back = k.send("Resume", struct{}{}, nil)
	}
	for _, late := range []string{"Pause", "Resume"} {
		if back == nil {
			back = k.answer(late, stopPatience)
		}
	}
	if back != nil {
		s.Kill()
		return errors.Join(err, back)
	}
	return berm.Errorf(berm.Unavailable, "gVisor did not stop what runs inside within %s, and it goes on: %w", stopPatience, err)
}

// goOn has gVisor let go on what it stopped. Of one that does not answer nobody knows whether it did.
func (s *Sandbox) goOn() error {
	err := s.call("Resume", struct{}{}, nil)
	if err != nil && berm.KindOf(err) != berm.NotFound {
		s.Kill()
	}
	return err
}

// askAgent has the guest agent do something about its connections, and waits until it is done.
// The caller holds passing.
func (s *Sandbox) askAgent(request byte, file *os.File, patience time.Duration) error {
	var rights []byte
	if file != nil {
		rights = unix.UnixRights(int(file.Fd()))
	}
	_ = s.pipe.SetDeadline(time.Now().Add(patience))
	defer func() { _ = s.pipe.SetDeadline(time.Time{}) }()
	_, _, err := s.pipe.WriteMsgUnix([]byte{request}, rights, nil)
	for answer := []byte{0}; err == nil; {
		if _, err = s.pipe.Read(answer); err == nil && answer[0] == request {
			return nil
		}
	}
	return berm.Errorf(berm.Unavailable, "the guest agent does not do what it is asked to (%d): %w", request, err)
}

// renew gives a sandbox that goes on from memory its own identity, and its agent the
// configuration.
func (s *Sandbox) renew() error {
	if steps := s.order.GVisor.From.Renew; len(steps) > 0 {
		if err := s.send(plan.Renew, steps, nil); err != nil {
			return s.explain(err)
		}
		select {
		case <-s.renewed:
		case <-s.ended:
			return s.explain(errors.New("gVisor ended"))
		case <-time.After(initUnready):
			return s.explain(berm.Errorf(berm.Unavailable, "init does not answer"))
		}
	}
	if err := failpoint.Hit("launch.renew"); err != nil { // it goes on from memory, with the token of before
		return err
	}
	config, err := memfd("config", s.order.Config)
	if err != nil {
		return fault("agent configuration", err)
	}
	defer config.Close()
	s.passing.Lock()
	defer s.passing.Unlock()
	return s.askAgent(agentRenew, config, renewPatience)
}
