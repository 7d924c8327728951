// Package trace follows the processes of pid namespaces through BPF programs on the
// scheduler's tracepoints: every fork, execution and end, seen by the kernel itself, and on request
// some system calls.
//
// The programs are assembled here, for the layout that the running kernel describes in its BTF.
// They never wait: what finds no room in the ring is counted as lost.
package trace

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"

	"github.com/berm-sandbox/berm"
)

// Kind says what a process did.
type Kind uint32

// The kinds.
const (
	Exec Kind = iota + 1
	Fork
	Exit
	Call // a system call returned
)

// Event is one thing that one process did.
type Event struct {
	Kind      Kind
	Namespace uint32        // inode of the pid namespace
	At        time.Duration // of the monotonic clock
	PID       int           // in the namespace; of a fork, the child's
	Parent    int           // in the namespace; 0 when it is outside
	Host      int           // in the namespace above, that of whoever made the followed one
	UID       uint32        // in the first user namespace
	Status    uint32        // of an end, as wait(2) has it
	// Of a system call.
	Number int
	Result int64 // as the kernel has it: of a failure, the negative number of the error
	// Of an execution.
	Inode   uint64 // of the file that the kernel executes: of a script, the interpreter
	Size    int64
	Changed int64  // when it was changed last, in nanoseconds since 1970
	Name    string // last part of that file's path
	File    string // what the caller executed; at most 255 bytes
	Args    []byte // arguments, a NUL after each; at most 4096 bytes
	ArgLen  int    // what they took; 0 when they could not be read
}

// ringSize is how many bytes of events may wait for the reader: some thousand executions.
const ringSize = 16 << 20

// patience is how long an event that wakes nobody may lie in the ring.
const patience = 100 * time.Millisecond

// maxNamespaces is how many can be followed at a time.
const maxNamespaces = 16384

// Tracer follows namespaces. Read is for one caller at a time; the other methods are safe for
// concurrent use.
type Tracer struct {
	followed *ebpf.Map
	ring     *ebpf.Map
	reader   *ringbuf.Reader
	links    []link.Link
	ended    ends // of the caller of Read
}

// New loads the programs. Kind Unsupported names what the host lacks: rights, BTF, or a kernel
// that knows the ring (5.8).
//
// Of the system calls with these numbers the returns are told too: also of those that a seccomp filter
// refuses, and not of those that do not return. Every system call of the machine is a little slower
// then.
func New(calls ...int) (_ *Tracer, err error) {
	if os.Geteuid() != 0 {
		return nil, missing("root", errors.New("the caller is an ordinary user"))
	}
	spec, err := btf.LoadKernelSpec()
	if err != nil {
		return nil, missing("the kernel's BTF (CONFIG_DEBUG_INFO_BTF)", err)
	}
	t := &Tracer{}
	defer func() {
		if err != nil {
			_ = t.Close()
		}
	}()
	if t.followed, err = ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: 8, MaxEntries: maxNamespaces, Flags: noPrealloc}); err != nil {
		return nil, missing("the right to use BPF (CAP_BPF and CAP_PERFMON)", err)
	}
	if t.ring, err = ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.RingBuf, MaxEntries: ringSize}); err != nil {
		return nil, missing("a BPF ring buffer (Linux 5.8)", err)
	}
	l := &layout{spec: spec}
	build := func(kind Kind, size int64) *builder {
		return &builder{layout: l, followed: t.followed, ring: t.ring, kind: int64(kind), size: size}
	}
	programs := map[string]asm.Instructions{
		"sched_process_exec": build(Exec, execSize).exec(),
		"sched_process_fork": build(Fork, smallSize).fork(),
		"sched_process_exit": build(Exit, smallSize).exit(),
	}
	if len(calls) > 0 {
		programs["sys_exit"] = build(Call, smallSize).call(calls)
	}
	for name, code := range programs {
		if l.err != nil {
			return nil, missing("a known layout", l.err)
		}
		program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: name, Type: ebpf.RawTracepoint, Instructions: code, License: "GPL"})
		if err != nil {
			return nil, missing("the right to load BPF programs", err)
		}
		attached, err := link.AttachRawTracepoint(link.RawTracepointOptions{Name: name, Program: program})
		_ = program.Close() // the link keeps it
		if err != nil {
			return nil, missing("the tracepoint "+name, err)
		}
		t.links = append(t.links, attached)
	}
	if t.reader, err = ringbuf.NewReader(t.ring); err != nil {
		return nil, berm.Errorf(berm.Internal, "read the BPF ring buffer: %w", err)
	}
	t.reader.SetDeadline(time.Now())
	return t, nil
}

// noPrealloc takes memory for namespaces that are followed only.
const noPrealloc = 1 // BPF_F_NO_PREALLOC

func missing(what string, err error) error {
	return berm.Errorf(berm.Unsupported, "processes cannot be followed by BPF without %s: %w", what, err)
}

// Follow begins to follow a namespace.
func (t *Tracer) Follow(namespace uint32) error {
	if err := t.followed.Put(namespace, uint64(0)); err != nil {
		return berm.Errorf(berm.Exhausted, "follow a pid namespace: %w", err)
	}
	return nil
}

// Forget ends it.
func (t *Tracer) Forget(namespace uint32) { _ = t.followed.Delete(namespace) }

// Lost is how many events of a namespace found no room since it is followed.
func (t *Tracer) Lost(namespace uint32) (n uint64) {
	_ = t.followed.Lookup(namespace, &n)
	return n
}

// ErrFlushed is what Read returns once all is read that came before a Flush.
var ErrFlushed = ringbuf.ErrFlushed

// Flush has Read return ErrFlushed when there is nothing more to read.
func (t *Tracer) Flush() error { return t.reader.Flush() }

// Read waits for the next event. It fails with os.ErrClosed after Close.
func (t *Tracer) Read() (Event, error) {
	for {
		record, err := t.reader.Read()
		if errors.Is(err, os.ErrDeadlineExceeded) { // nothing came
			t.reader.SetDeadline(time.Now().Add(patience))
			continue
		}
		if err != nil {
			return Event{}, err
		}
		if e, ok := parse(record.RawSample); ok && t.ended.first(e) {
			return e, nil
		}
	}
}

// ends are processes that have ended: the last ones, and those before.
//
// Before its tracepoint a thread that ends takes itself off the number of living ones (do_exit in the
// kernel's exit.c), so the last two of a process can both find there that none is left, and the
// programs tell of its end twice. Its number goes to no other process before both are past it.
type ends struct{ last, before map[process]struct{} }

// process is one that others are not taken for: the number of a namespace goes to the next one, in
// which processes that were there before it was followed have numbers of those in the one before.
type process struct {
	namespace uint32
	pid, host int
}

// maxEnds bounds either part. What lies between both ends of one process is far less.
const maxEnds = 10_000

// first is false for the second end of a process.
func (s *ends) first(e Event) bool {
	p := process{e.Namespace, e.PID, e.Host}
	if e.Kind == Call {
		return true
	}
	if e.Kind != Exit { // a new process of this number
		delete(s.last, p)
		delete(s.before, p)
		return true
	}
	_, last := s.last[p]
	_, before := s.before[p]
	if last || before {
		return false
	}
	if s.last == nil || len(s.last) == maxEnds {
		s.before, s.last = s.last, map[process]struct{}{}
	}
	s.last[p] = struct{}{}
	return true
}

// parse reads an event as the programs lay it out.
func parse(raw []byte) (e Event, ok bool) {
	if len(raw) < smallSize {
		return e, false
	}
	u32 := func(at int) uint32 { return binary.NativeEndian.Uint32(raw[at:]) }
	u64 := func(at int) uint64 { return binary.NativeEndian.Uint64(raw[at:]) }
	e = Event{
		Kind: Kind(u32(atKind)), Namespace: u32(atNamespace), At: time.Duration(u64(atTime)),
		PID: int(u32(atPID)), Parent: int(u32(atParent)), Host: int(u32(atHost)), UID: u32(atUID), Status: u32(atStatus),
	}
	switch e.Kind {
	case Call:
		e.Number, e.Result, e.Status = int(e.Status), int64(u64(atInode)), 0
		return e, true
	case Fork, Exit:
		return e, true
	case Exec:
	default:
		return e, false
	}
	if len(raw) < execSize {
		return e, false
	}
	e.Inode, e.Size = u64(atInode), int64(u64(atSize))
	// Its highest bit says that somebody has asked for the time (Linux 6.13).
	e.Changed = int64(u64(atChanged))*1e9 + int64(u32(atNanos)&^(1<<31))
	e.Name, e.File = text(raw[atName:atFile]), text(raw[atFile:atArgs])
	e.ArgLen = int(u32(atArgLen))
	e.Args = bytes.Clone(raw[atArgs : atArgs+min(max(e.ArgLen, 0), argsSize)])
	return e, true
}

func text(raw []byte) string {
	s, _, _ := bytes.Cut(raw, []byte{0})
	return string(s)
}

// Close ends all of it.
func (t *Tracer) Close() error {
	var errs []error
	for _, l := range t.links {
		errs = append(errs, l.Close())
	}
	if t.reader != nil {
		errs = append(errs, t.reader.Close())
	}
	for _, m := range []*ebpf.Map{t.ring, t.followed} {
		if m != nil {
			errs = append(errs, m.Close())
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("stop following processes: %w", err)
	}
	return nil
}
