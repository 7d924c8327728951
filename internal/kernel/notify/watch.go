package notify

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// How long after it was asked for it is looked whether an execution was done: most are by the first
// time.
var patience = [...]time.Duration{5 * time.Millisecond, 25 * time.Millisecond}

// gathered is how long ends of processes wait for each other.
const gathered = 25 * time.Millisecond

// lastPatience is how long the end of all waits to be told how each process ended.
const lastPatience = 100 * time.Millisecond

// ask is an execution that a process asked for.
type ask struct {
	Event
	process *process
	before  Version // what the process ran
	line    []byte  // and with which arguments
	target  int     // descriptor of the file that it asked for; -1 for none
	file    Version // which that is
	absent  bool    // there was no such file: libraries try all directories of a PATH
	unread  bool    // the memory of the process may not be read
	name    string  // of the file, as the kernel gives it to the interpreter of a script
	number  uint32  // how many the process has asked for
	looked  int     // how often
}

// watch keeps what processes asked for until it is told, and awaits their ends.
type watch struct {
	told func(Event)
	lost atomic.Uint64
	// What all processes inside have in common.
	root      int // descriptor of the root directory; -1 before there is one
	namespace namespace
	ids       []idRange

	poll   *os.File // epoll of processes
	pollFD int      // its descriptor: asked for it, the file would block
	work   sync.WaitGroup

	telling  sync.Mutex // held while events are told
	mu       sync.Mutex
	living   map[int]*process // by their number on this side
	replaced []*process       // whose number another got before their end was told
	files    map[Version]bool // that were handed over
	pending  []*ask
	timer    *time.Timer
	over     bool
}

type idRange struct{ inside, outside, count int }

func (w *watch) start(told func(Event)) {
	w.told, w.root, w.namespace, w.living = told, -1, -1, map[int]*process{}
	if fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC); err == nil {
		_ = unix.SetNonblock(fd, true) // the runtime waits for it
		w.poll, w.pollFD = os.NewFile(uintptr(fd), "processes"), fd
		w.work.Go(w.awaitEnds)
	}
}

// stop tells all that is left, and how processes ended.
func (w *watch) stop() {
	for end := time.Now().Add(lastPatience); time.Now().Before(end); time.Sleep(time.Millisecond) {
		w.mu.Lock()
		n := len(w.living)
		w.mu.Unlock()
		if n == 0 {
			break
		}
		w.settle(false)
	}
	w.settle(true)
	if w.poll != nil {
		w.poll.Close()
		w.work.Wait()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.timer != nil {
		w.timer.Stop()
	}
	if w.root >= 0 {
		_ = unix.Close(w.root)
		_ = unix.Close(int(w.namespace))
	}
}

func now() time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t)
	return time.Duration(t.Nano())
}

// look reads what is gone once the process goes on. It is called by the goroutine that answers, whose
// time is that of the process.
func (w *watch) look(n *notification) *ask {
	a := &ask{target: -1}
	a.At, a.Asked = now(), true
	thread := int(n.pid)
	p := w.known(thread)
	if p == nil {
		var ok bool
		if p, ok = openProcess(thread); !ok {
			return nil
		}
		if before := w.known(p.host); before != nil { // of another thread
			p.close()
			p = before
		}
	}
	a.process, a.Host, a.number = p, p.host, p.asked.Add(1)
	dir := "/proc/" + strconv.Itoa(thread) + "/"
	if w.root < 0 {
		w.enter(dir)
	}
	if p.inside == 0 {
		p.inside = w.namespace.inside(p.host)
	}
	parent, uid := p.parent()
	a.PID, a.Parent, a.UID = p.inside, w.inside(parent), w.user(uid)
	a.before, a.line = versionOf(dir+"exe"), readSmall(dir+"cmdline")
	a.Cwd, _ = os.Readlink(dir + "cwd")
	name, argv, at := n.args[0], n.args[1], int32(unix.AT_FDCWD)
	if n.nr == unix.SYS_EXECVEAT {
		at, name, argv = int32(n.args[0]), n.args[1], n.args[2]
	}
	m := &memory{pid: thread}
	text, known := m.text(name, maxPath)
	if a.unread = !known; a.unread {
		return a
	}
	a.Exe, a.name = string(text), string(text)
	a.Argv, a.Cut = m.argv(argv)
	switch {
	case strings.HasPrefix(a.Exe, "/"):
	case at == unix.AT_FDCWD:
		if a.Exe != "" {
			a.Exe = join(a.Cwd, a.Exe)
		}
	case a.Exe == "": // of a descriptor, which may be closed by the execution
		a.name = "/dev/fd/" + strconv.Itoa(int(at)) // execveat(2), NOTES
		a.hold(dir + "fd/" + strconv.Itoa(int(at)))
	default:
		a.name = "/dev/fd/" + strconv.Itoa(int(at)) + "/" + a.Exe
		of, _ := os.Readlink(dir + "fd/" + strconv.Itoa(int(at)))
		a.Exe = join(of, a.Exe)
	}
	for _, own := range []string{"/proc/self/", "/dev/"} { // which mean the process, not this one
		if rest, ok := strings.CutPrefix(a.Exe, own); ok && (strings.HasPrefix(rest, "fd/") || rest == "exe") {
			a.hold(dir + rest)
		}
	}
	if a.target < 0 && a.Exe != "" {
		w.find(a)
	}
	return a
}

// known is the process of this number if it has asked before, whose end is not told until answered.
func (w *watch) known(host int) *process {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.living[host]
	if p == nil || !p.lives() {
		return nil
	}
	p.asking = true
	return p
}

// join is a relative name in a directory. It is not made shorter: a link may be on the way.
func join(dir, name string) string {
	return strings.TrimSuffix(dir, "/") + "/" + strings.TrimPrefix(name, "./")
}

// hold opens what a link of /proc leads to.
func (a *ask) hold(link string) {
	fd, err := unix.Open(link, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	a.target = fd
}

// answered goes on with what was asked for, when the process does.
func (w *watch) answered(a *ask, goesOn bool) {
	if a == nil {
		w.lost.Add(1)
		return
	}
	p := a.process
	w.mu.Lock()
	defer w.mu.Unlock()
	p.asking = false
	known := w.living[p.host] == p
	if !goesOn {
		if a.close(); !known {
			p.close()
		}
		return
	}
	p.uid = a.UID
	if !known {
		w.follow(p)
	}
	if len(w.pending) >= maxPending { // whoever is told does not keep up
		w.lost.Add(1)
		a.close()
		return
	}
	w.pending = append(w.pending, a)
	switch {
	case a.unread: // all that is known of it is what it becomes
		w.wake(time.Millisecond)
	case len(w.pending) == 1:
		w.wake(patience[0])
	}
}

// follow awaits the end of a process. It is called with mu held.
func (w *watch) follow(p *process) {
	if before := w.living[p.host]; before != nil {
		before.ended.Store(true)
		w.replaced = append(w.replaced, before)
		delete(w.living, p.host)
	}
	if len(w.living) >= maxLiving || p.fd < 0 || w.poll == nil {
		p.close()
		w.lost.Add(1) // its end
		return
	}
	event := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET, Fd: int32(p.host)}
	if err := unix.EpollCtl(w.pollFD, unix.EPOLL_CTL_ADD, p.fd, &event); err != nil {
		p.close()
		w.lost.Add(1)
		return
	}
	w.living[p.host] = p
}

// enter finds out what all processes inside have in common from the directory of one in /proc.
func (w *watch) enter(dir string) {
	open := func(name string, flags int) int {
		fd, err := unix.Open(dir+name, flags|unix.O_CLOEXEC, 0)
		if err != nil {
			return -1 // its memory may not be read
		}
		return fd
	}
	if w.root = open("root", unix.O_PATH|unix.O_DIRECTORY); w.root >= 0 {
		w.namespace = namespace(open("ns/pid", unix.O_RDONLY))
	}
	if w.ids != nil {
		return
	}
	for lines := bufio.NewScanner(bytes.NewReader(readSmall(dir + "uid_map"))); lines.Scan(); {
		var r idRange
		if _, err := fmt.Sscan(lines.Text(), &r.inside, &r.outside, &r.count); err == nil {
			w.ids = append(w.ids, r)
		}
	}
}

// inside is the number inside of a process that lives.
func (w *watch) inside(host int) int {
	w.mu.Lock()
	p := w.living[host]
	w.mu.Unlock()
	if p != nil {
		return p.inside
	}
	return w.namespace.inside(host)
}

// user turns a user id of this side into that inside, if it has one.
func (w *watch) user(uid int) int {
	for _, r := range w.ids {
		if uid >= r.outside && uid-r.outside < r.count {
			return r.inside + uid - r.outside
		}
	}
	return uid
}

// find opens the file that was asked for, which is looked up as inside.
func (w *watch) find(a *ask) {
	if w.root < 0 {
		return
	}
	fd, err := unix.Openat2(w.root, a.Exe, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS})
	if err != nil {
		a.absent = (err == unix.ENOENT || err == unix.ENOTDIR) && !strings.HasPrefix(a.Exe, "/proc/")
		return
	}
	a.target = fd
}

// resolve tells what the file that was asked for is.
func (a *ask) resolve() {
	if a.target < 0 || a.file != (Version{}) {
		return
	}
	path := "/proc/self/fd/" + strconv.Itoa(a.target)
	a.file = versionOf(path)
	if name, err := os.Readlink(path); err == nil {
		a.Exe = name
	}
}

func (a *ask) close() {
	if a.target >= 0 {
		_ = unix.Close(a.target)
		a.target = -1
	}
}

// wake has pending executions looked at. It is called with mu held.
func (w *watch) wake(after time.Duration) {
	if w.over {
		return
	}
	if w.timer == nil {
		w.timer = time.AfterFunc(after, func() { w.settle(false) })
		return
	}
	w.timer.Reset(after)
}

// settle tells executions of which all is known that can be, and the ends of processes. all tells
// the rest too.
func (w *watch) settle(all bool) {
	w.telling.Lock()
	defer w.telling.Unlock()
	w.mu.Lock()
	over := w.over
	w.over = w.over || all
	w.mu.Unlock()
	if over {
		return
	}
	w.takeEnds()
	w.mu.Lock()
	asks := w.pending
	w.pending = nil
	w.mu.Unlock()

	next := make([]*ask, len(asks)) // what the same process asked for after it
	last := map[*process]*ask{}
	for i := len(asks) - 1; i >= 0; i-- {
		next[i], last[asks[i].process] = last[asks[i].process], asks[i]
	}
	var left []*ask
	due := time.Duration(1<<63 - 1)
	waits := map[*process]bool{}
	for i, a := range asks {
		if verdict := w.judge(a, next[i]); verdict == undecided && !all || waits[a.process] {
			left, waits[a.process] = append(left, a), true
			due = min(due, a.At+patience[min(a.looked, len(patience)-1)])
		} else if verdict != dropped {
			w.tell(a)
		} else {
			a.close()
		}
	}
	w.mu.Lock()
	w.pending = append(left, w.pending...)
	if len(w.pending) > len(left) {
		due = min(due, w.pending[len(left)].At+patience[0])
	}
	if len(w.pending) > 0 {
		w.wake(max(due-now(), time.Millisecond))
	}
	busy := map[*process]bool{}
	for _, a := range w.pending {
		busy[a.process] = true
	}
	var ends []*process
	for host, p := range w.living {
		if (p.over || all) && !busy[p] && !p.asking {
			ends = append(ends, p)
			delete(w.living, host)
		}
	}
	ends = append(ends, w.replaced...)
	w.replaced = nil
	w.mu.Unlock()
	for _, p := range ends {
		w.end(p)
	}
}

// verdict is what is known of an execution.
type verdict int

const (
	undecided verdict = iota
	decided
	dropped // there was none
)

// judge finds out whether an execution was done, and drops one whose file was not there and that
// changed nothing. next is what the process asked for after it.
func (w *watch) judge(a, next *ask) verdict {
	refused := decided
	if a.absent {
		refused = dropped
	}
	if next != nil {
		if next.before == a.before || next.before == (Version{}) {
			return refused // or of the same file
		}
		a.resolve()
		a.Asked = next.before != a.file
		return decided
	}
	ended := a.process.ended.Load()
	dir := "/proc/" + strconv.Itoa(a.Host) + "/"
	ran := versionOf(dir + "exe")
	if a.process.asked.Load() != a.number {
		return undecided // it has asked again meanwhile
	}
	if ended {
		return decided
	}
	if ran != (Version{}) && (ran != a.before || a.shows(dir)) {
		w.confirm(a, dir, ran)
		return decided
	}
	for a.looked < len(patience) && now() >= a.At+patience[a.looked] {
		a.looked++
	}
	if a.looked < len(patience) {
		return undecided
	}
	if ran == a.before {
		return refused
	}
	return decided
}

// shows says whether the arguments of a process became those of an execution, or those that the kernel
// makes of them for the interpreter of a script. That they are is not enough: those of a program that
// runs another one end in the other's.
func (a *ask) shows(dir string) bool {
	if a.unread || a.absent {
		return false
	}
	line := readSmall(dir + "cmdline")
	if bytes.Equal(line, a.line) {
		return false
	}
	is := func(line []byte, name string) bool {
		for i, arg := range a.Argv {
			if i == 0 {
				arg = name
			}
			rest, ok := bytes.CutPrefix(line, append([]byte(arg), 0))
			if !ok {
				return a.Cut && (bytes.HasPrefix(line, []byte(arg)) || bytes.HasPrefix([]byte(arg), line))
			}
			line = rest
		}
		return len(line) == 0 || a.Cut
	}
	if len(a.Argv) == 0 || is(line, a.Argv[0]) {
		return len(a.Argv) > 0
	}
	for range 2 { // the interpreter, and what the script's first line has after it
		_, line, _ = bytes.Cut(line, []byte{0})
		if is(line, a.name) {
			return true
		}
	}
	return false
}

// arguments are those in a file cmdline, which is empty once the process has let its memory go.
func arguments(line []byte) []string {
	if len(line) == 0 {
		return nil
	}
	return strings.Split(strings.TrimSuffix(string(line), "\x00"), "\x00")
}

// confirm takes what the process runs now for what it asked for, which can be the interpreter of it.
func (w *watch) confirm(a *ask, dir string, ran Version) {
	exe, err := os.Readlink(dir + "exe")
	var file *os.File
	if !w.seen(ran) {
		file = open(dir + "exe")
	}
	var argv []string
	var cwd string
	if a.unread {
		cwd, _ = os.Readlink(dir + "cwd")
		argv = arguments(readSmall(dir + "cmdline"))
	}
	if err != nil || !a.process.lives() { // its number may be another's
		if file != nil {
			file.Close()
		}
		return
	}
	w.handed(ran, file)
	a.Exe, a.Version, a.File, a.Asked = exe, ran, file, false
	if a.unread {
		a.Cwd = cwd
		a.Argv, a.Cut = argv, len(argv) > 0
		if size := len(strings.Join(argv, " ")); size < maxArgs-1 {
			a.Cut = false
		}
	}
}

// tell tells an execution.
func (w *watch) tell(a *ask) {
	if a.Version == (Version{}) {
		a.resolve()
		if a.Version = a.file; a.target >= 0 && !w.seen(a.file) {
			a.File = open("/proc/self/fd/" + strconv.Itoa(a.target))
			w.handed(a.file, a.File)
		}
	}
	a.close()
	w.told(a.Event)
}

// maxHanded bounds the files that are remembered.
const maxHanded = 10_000

// seen says whether a file was handed over, and can be known by its version.
func (w *watch) seen(v Version) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.files[v]
}

func (w *watch) handed(v Version, file *os.File) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.files == nil || len(w.files) > maxHanded {
		w.files = map[Version]bool{}
	}
	if file != nil {
		w.files[v] = true
	}
}

// end tells how a process ended, as far as the kernel does.
func (w *watch) end(p *process) {
	e := Event{Exit: true, At: p.at, Host: p.host, PID: p.inside, UID: p.uid}
	if e.At == 0 {
		e.At = now()
	}
	e.Status, e.Known = p.status, p.known
	p.close()
	w.told(e)
}

// awaitEnds has the ends of processes told until poll is closed.
func (w *watch) awaitEnds() {
	raw, err := w.poll.SyscallConn()
	if err != nil {
		return
	}
	for {
		if raw.Read(func(uintptr) bool { return w.takeEnds() }) != nil {
			return // closed
		}
		w.settle(false)
		time.Sleep(gathered)
	}
}

// takeEnds looks which processes ended, if some did.
func (w *watch) takeEnds() (some bool) {
	if w.poll == nil {
		return false
	}
	var events [64]unix.EpollEvent
	for {
		n, err := unix.EpollWait(w.pollFD, events[:], 0)
		if n <= 0 || err != nil {
			return some
		}
		some = true
		at := now()
		w.mu.Lock()
		for _, e := range events[:n] {
			p := w.living[int(e.Fd)]
			if p == nil {
				continue
			}
			if !p.ended.Swap(true) {
				p.at = at
			}
			// It is told once the parent has waited for it.
			p.status, p.known = p.exit()
			p.over = p.known || !TellsExits()
		}
		w.mu.Unlock()
	}
}
