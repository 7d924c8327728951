package seccomp

import (
	"runtime"
	"slices"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// Offsets in struct seccomp_data. Both architectures are little endian, so the low
// half of an argument comes first.
const (
	offsetNumber = 0
	offsetArch   = 4
	offsetArgs   = 16
)

// auditArch is the value of seccomp_data.arch for calls of the native ABI.
var auditArch = map[string]uint32{
	"amd64": unix.AUDIT_ARCH_X86_64,
	"arm64": unix.AUDIT_ARCH_AARCH64,
}

// Assemble translates the profile for an architecture (a GOARCH; "" is this one) into
// a filter for Load. It fails with Unsupported for an unknown architecture.
//
// Loading costs about 2 µs for each instruction, so the calls are grouped into runs
// of numbers with the same policy, found by binary search. At run time the kernel
// (since 5.11) knows by itself which numbers are allowed whatever the arguments.
func (p Profile) Assemble(arch string) ([]unix.SockFilter, error) {
	if arch == "" {
		arch = runtime.GOARCH
	}
	audit, ok := auditArch[arch]
	if !ok {
		return nil, berm.Errorf(berm.Unsupported, "no seccomp filter for architecture %s", arch)
	}
	b := program{actions: map[action]target{}}
	foreign := p.unlisted.compile(&b)
	b.search(p.runs(arch))
	number := b.emit(bpf.LoadAbsolute{Off: offsetNumber, Size: 4})
	b.jump(audit, bpf.JumpEqual, number, foreign)
	b.emit(bpf.LoadAbsolute{Off: offsetArch, Size: 4})
	slices.Reverse(b.reversed)

	raw, err := bpf.Assemble(b.reversed)
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "assemble seccomp profile %s: %w", p.name, err)
	}
	filter := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		filter[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	return filter, nil
}

// A run is a set of adjacent numbers with one policy: those from first up to the
// first of the next run.
type run struct {
	first  uint32
	policy policy
}

// runs cuts all numbers of an architecture into runs, in order. The first begins at
// 0; the last goes on for ever, which covers the x32 numbers from 0x40000000 up.
func (p Profile) runs(arch string) []run {
	var byNumber []policy
	for _, c := range calls {
		policy, listed := p.policies[c.name]
		n := c.number(arch)
		if n < 0 || !listed {
			continue
		}
		for len(byNumber) <= n {
			byNumber = append(byNumber, p.unlisted)
		}
		byNumber[n] = policy
	}
	byNumber = append(byNumber, p.unlisted)
	var runs []run
	for n, policy := range byNumber {
		if a, plain := policy.(action); plain && n > 0 && byNumber[n-1] == a {
			continue
		}
		runs = append(runs, run{uint32(n), policy})
	}
	return runs
}

// A program is assembled from its end, so that the targets of jumps, which only go
// forward in BPF, are known when the jump is emitted.
type program struct {
	reversed []bpf.Instruction
	actions  map[action]target // where each action's return stands
}

// A target is the place of an instruction, counted from the end of the program.
type target int

func (b *program) emit(i bpf.Instruction) target {
	b.reversed = append(b.reversed, i)
	return target(len(b.reversed) - 1)
}

// jump emits a test of the accumulator. A conditional jump reaches 255 instructions;
// what is farther gets a long jump in between.
func (b *program) jump(value uint32, test bpf.JumpTest, yes, no target) target {
	next := func() target { return target(len(b.reversed) - 1) } // the instruction after the one to be emitted
	near := func(t target, reserve int) target {
		if int(next()-t) > 255-reserve {
			return b.emit(bpf.Jump{Skip: uint32(next() - t)})
		}
		return t
	}
	no = near(no, 1)
	yes = near(yes, 0)
	return b.emit(bpf.JumpIf{Cond: test, Val: value, SkipTrue: uint8(next() - yes), SkipFalse: uint8(next() - no)})
}

// search emits the binary search for the number in the accumulator.
func (b *program) search(runs []run) target {
	if len(runs) == 1 {
		return runs[0].policy.compile(b)
	}
	middle := len(runs) / 2
	upper := b.search(runs[middle:])
	lower := b.search(runs[:middle])
	return b.jump(runs[middle].first, bpf.JumpGreaterOrEqual, upper, lower)
}

func (a action) compile(b *program) target {
	t, ok := b.actions[a]
	if !ok {
		t = b.emit(bpf.RetConstant{Val: uint32(a)})
		b.actions[a] = t
	}
	return t
}

func (p byArg) compile(b *program) target {
	next := p.rest.compile(b)
	targets := make([]target, len(p.cases))
	for i, c := range p.cases {
		targets[i] = c.then.compile(b)
	}
	for i, c := range slices.Backward(p.cases) {
		for _, v := range slices.Backward(c.values) {
			next = b.jump(v, bpf.JumpEqual, targets[i], next)
		}
	}
	if p.mask != 0 {
		b.emit(bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: p.mask})
	}
	return b.emit(bpf.LoadAbsolute{Off: uint32(offsetArgs + 8*p.arg), Size: 4})
}

func (p nullArg) compile(b *program) target {
	rest := p.rest.compile(b)
	null := p.null.compile(b)
	b.jump(0, bpf.JumpEqual, null, rest)
	high := b.emit(bpf.LoadAbsolute{Off: uint32(offsetArgs + 8*p.arg + 4), Size: 4})
	b.jump(0, bpf.JumpEqual, high, rest)
	return b.emit(bpf.LoadAbsolute{Off: uint32(offsetArgs + 8*p.arg), Size: 4})
}

// Load puts the filter in force for every thread of the process and all that they
// start, for ever. The caller needs no_new_privs or CAP_SYS_ADMIN in its user
// namespace; without either it fails with Denied.
func Load(filter []unix.SockFilter) error {
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: unsafe.SliceData(filter)}
	stray, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER,
		unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&prog)))
	switch {
	case errno == unix.EACCES:
		return berm.Errorf(berm.Denied, "load seccomp filter: %w", errno).
			WithHint("set no_new_privs first, or load it with CAP_SYS_ADMIN in the user namespace")
	case errno == unix.ENOSYS || errno == unix.EINVAL:
		return berm.Errorf(berm.Unsupported, "load seccomp filter: %w", errno).
			WithHint("the kernel needs CONFIG_SECCOMP_FILTER")
	case errno != 0:
		return berm.Errorf(berm.Internal, "load seccomp filter: %w", errno)
	case stray != 0: // the id of a thread that has a filter of its own
		return berm.Errorf(berm.Internal, "load seccomp filter: thread %d has another one", stray)
	}
	return nil
}
