package trace

import (
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
)

// Where the parts of an event lie, in bytes. All are in the byte order of the machine.
const (
	atKind      = 0  // u32
	atNamespace = 4  // u32
	atTime      = 8  // u64, nanoseconds of the monotonic clock
	atPID       = 16 // u32
	atHost      = 20 // u32
	atParent    = 24 // u32
	atUID       = 28 // u32
	atStatus    = 32 // u32, as wait(2) has it
	atArgLen    = 36 // u32, the whole length
	atInode     = 40 // u64
	atSize      = 48 // u64
	smallSize   = 56

	atChanged = 56  // u64, seconds; of the last change of the executed file
	atNanos   = 64  // u32
	atName    = 72  // last part of its path
	atFile    = 136 // what the caller called it
	atArgs    = 392
	nameSize  = atFile - atName
	fileSize  = atArgs - atFile
	argsSize  = 4096
	execSize  = atArgs + argsSize
)

// Where the programs keep what they read, below the frame pointer.
const (
	onKey    = -8  // inode of the pid namespace
	onTmp    = -16 // what was read last
	onUPID   = -32 // struct upid: the number and the namespace
	onLevel  = -40
	onAddr   = -48 // address of the upid in struct pid
	onHost   = -56 // number in the namespace above
	onParent = -64
	onInode  = -72 // of an execution; of a system call, its result
	onCall   = -80
)

// layout has the offsets of the running kernel.
type layout struct {
	spec *btf.Spec
	err  error
}

// at is the offset of a member, which may lie in nameless parts. Further names are those that
// other versions of the kernel have for it.
func (l *layout) at(of string, name ...string) int32 {
	var s *btf.Struct
	if err := l.spec.TypeByName(of, &s); err != nil {
		l.fail("the kernel's types have no struct %s", of)
		return 0
	}
	for _, n := range name {
		if bits, ok := member(s.Members, n); ok {
			return int32(bits / 8)
		}
	}
	l.fail("the kernel's struct %s has no %s", of, name[0])
	return 0
}

func (l *layout) fail(format string, args ...any) {
	if l.err == nil {
		l.err = fmt.Errorf(format, args...)
	}
}

func member(all []btf.Member, name string) (btf.Bits, bool) {
	for _, m := range all {
		if m.Name == name {
			return m.Offset, true
		}
		if m.Name != "" {
			continue
		}
		var inner []btf.Member
		switch t := btf.UnderlyingType(m.Type).(type) {
		case *btf.Struct:
			inner = t.Members
		case *btf.Union:
			inner = t.Members
		}
		if at, ok := member(inner, name); ok {
			return m.Offset + at, true
		}
	}
	return 0, false
}

// builder puts a program together. R6 holds the task, R7 the event, R9 the value of the
// followed namespace.
type builder struct {
	*layout
	asm.Instructions
	followed, ring *ebpf.Map
	kind           int64
	size           int64
}

func (b *builder) add(i ...asm.Instruction) { b.Instructions = append(b.Instructions, i...) }

// read copies kernel memory at a register and an offset to the stack.
func (b *builder) read(stack int32, size int32, from asm.Register, offset int32) {
	b.add(
		asm.Mov.Reg(asm.R3, from), asm.Add.Imm(asm.R3, offset),
		asm.Mov.Reg(asm.R1, asm.RFP), asm.Add.Imm(asm.R1, stack),
		asm.Mov.Imm(asm.R2, size),
		asm.FnProbeReadKernel.Call(),
	)
}

// follow reads pointers, one out of the other, into R8.
func (b *builder) follow(from asm.Register, offsets ...int32) {
	for _, o := range offsets {
		b.read(onTmp, 8, from, o)
		b.add(asm.LoadMem(asm.R8, asm.RFP, onTmp, asm.DWord))
		from = asm.R8
	}
}

// put stores a value from the stack in the event.
func (b *builder) put(at int16, stack int16, size asm.Size) {
	b.add(asm.LoadMem(asm.R1, asm.RFP, stack, size), asm.StoreMem(asm.R7, at, asm.R1, size))
}

// start loads the task that is argument n of the tracepoint.
func (b *builder) start(n int16) { b.add(asm.LoadMem(asm.R6, asm.R1, 8*n, asm.DWord)) }

// identify finds the namespace of the task, ends unless it is followed, and makes the event.
func (b *builder) identify() {
	upidSize := int32(16)
	numbers := b.at("pid", "numbers")
	b.add(asm.Mov.Imm(asm.R1, 0))
	for _, slot := range []int16{onKey, onHost, onParent} {
		b.add(asm.StoreMem(asm.RFP, slot, asm.R1, asm.DWord))
	}
	b.follow(asm.R6, b.at("task_struct", "thread_pid"))
	b.read(onLevel, 4, asm.R8, b.at("pid", "level"))
	b.add(
		asm.LoadMem(asm.R1, asm.RFP, onLevel, asm.Word),
		asm.Mul.Imm(asm.R1, upidSize), asm.Add.Reg(asm.R8, asm.R1), asm.Add.Imm(asm.R8, numbers),
		asm.StoreMem(asm.RFP, onAddr, asm.R8, asm.DWord),
	)
	b.read(onUPID, upidSize, asm.R8, 0)
	b.add(asm.LoadMem(asm.R8, asm.RFP, onUPID+8, asm.DWord))
	b.read(onKey, 4, asm.R8, b.at("pid_namespace", "ns")+b.at("ns_common", "inum"))
	b.add(
		asm.LoadMapPtr(asm.R1, b.followed.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, onKey),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "end"),
		asm.Mov.Reg(asm.R9, asm.R0),
		asm.LoadMem(asm.R8, asm.RFP, onAddr, asm.DWord),
	)
	b.read(onHost, 4, asm.R8, -upidSize)
	// The parent's number in the same namespace, if it is in it: at the same level.
	b.follow(asm.R6, b.at("task_struct", "real_parent"), b.at("task_struct", "group_leader"), b.at("task_struct", "thread_pid"))
	b.read(onTmp, 4, asm.R8, b.at("pid", "level"))
	b.add(
		asm.LoadMem(asm.R1, asm.RFP, onTmp, asm.Word), asm.LoadMem(asm.R2, asm.RFP, onLevel, asm.Word),
		asm.JLT.Reg(asm.R1, asm.R2, "reserve"),
		asm.Mul.Imm(asm.R2, upidSize), asm.Add.Reg(asm.R8, asm.R2),
	)
	b.read(onParent, 4, asm.R8, numbers)
	b.add(
		asm.LoadMapPtr(asm.R1, b.ring.FD()).WithSymbol("reserve"),
		asm.Mov.Imm(asm.R2, int32(b.size)), asm.Mov.Imm(asm.R3, 0),
		asm.FnRingbufReserve.Call(),
		asm.JNE.Imm(asm.R0, 0, "fill"),
		asm.Mov.Imm(asm.R1, 1),
		asm.StoreXAdd(asm.R9, asm.R1, asm.DWord), // one more is lost
		asm.Ja.Label("end"),
		asm.Mov.Reg(asm.R7, asm.R0).WithSymbol("fill"),
		asm.StoreImm(asm.R7, atKind, b.kind, asm.Word),
	)
	b.put(atNamespace, onKey, asm.Word)
	b.put(atPID, onUPID, asm.Word)
	b.put(atHost, onHost, asm.Word)
	b.put(atParent, onParent, asm.Word)
	b.add(
		asm.FnKtimeGetNs.Call(), asm.StoreMem(asm.R7, atTime, asm.R0, asm.DWord),
		asm.FnGetCurrentUidGid.Call(), asm.StoreMem(asm.R7, atUID, asm.R0, asm.Word),
	)
	for _, at := range []int16{atStatus, atArgLen} {
		b.add(asm.StoreImm(asm.R7, at, 0, asm.Word))
	}
	b.add(asm.Mov.Imm(asm.R1, 0))
	for _, at := range []int16{atInode, atSize} {
		b.add(asm.StoreMem(asm.R7, at, asm.R1, asm.DWord))
	}
}

// finish hands the event over. Only an execution wakes the reader, which has to look at the
// process while it is there; what else happens is read with the next one, or a moment later.
func (b *builder) finish() asm.Instructions {
	flags := int32(noWakeup)
	if Kind(b.kind) == Exec {
		flags = 0
	}
	b.add(
		asm.Mov.Reg(asm.R1, asm.R7), asm.Mov.Imm(asm.R2, flags), asm.FnRingbufSubmit.Call(),
		asm.Mov.Imm(asm.R0, 0).WithSymbol("end"), asm.Return(),
	)
	return b.Instructions
}

const noWakeup = 1 // BPF_RB_NO_WAKEUP

// exec is for sched_process_exec: the task, a number, struct linux_binprm.
func (b *builder) exec() asm.Instructions {
	b.add(asm.LoadMem(asm.R9, asm.R1, 16, asm.DWord), asm.StoreMem(asm.RFP, onInode, asm.R9, asm.DWord))
	b.start(0)
	b.identify()
	// The file that is executed: of a script, its interpreter.
	b.add(asm.LoadMem(asm.R9, asm.RFP, onInode, asm.DWord))
	b.follow(asm.R9, b.at("linux_binprm", "file"), b.at("file", "f_inode"))
	b.read(onTmp, 8, asm.R8, b.at("inode", "i_ino"))
	b.put(atInode, onTmp, asm.DWord)
	b.read(onTmp, 8, asm.R8, b.at("inode", "i_size"))
	b.put(atSize, onTmp, asm.DWord)
	seconds, nanos := b.changed()
	b.read(onTmp, 8, asm.R8, seconds)
	b.put(atChanged, onTmp, asm.DWord)
	b.read(onTmp, 4, asm.R8, nanos)
	b.put(atNanos, onTmp, asm.Word)
	b.follow(asm.R9, b.at("linux_binprm", "file"), b.at("file", "f_path")+b.at("path", "dentry"), b.at("dentry", "d_name")+b.at("qstr", "name"))
	b.text(atName, nameSize)
	b.follow(asm.R9, b.at("linux_binprm", "filename"))
	b.text(atFile, fileSize)
	// The arguments, at the top of the new stack.
	b.follow(asm.R6, b.at("task_struct", "mm"))
	b.add(asm.Mov.Reg(asm.R9, asm.R8))
	b.read(onTmp, 8, asm.R9, b.at("mm_struct", "arg_end"))
	b.add(asm.LoadMem(asm.R8, asm.RFP, onTmp, asm.DWord))
	b.read(onTmp, 8, asm.R9, b.at("mm_struct", "arg_start"))
	b.add(
		asm.LoadMem(asm.R3, asm.RFP, onTmp, asm.DWord),
		asm.Sub.Reg(asm.R8, asm.R3),
		asm.StoreMem(asm.R7, atArgLen, asm.R8, asm.Word),
		asm.Mov.Reg(asm.R2, asm.R8),
		asm.JLE.Imm(asm.R2, argsSize, "args"),
		asm.Mov.Imm(asm.R2, argsSize),
		asm.Mov.Reg(asm.R1, asm.R7).WithSymbol("args"), asm.Add.Imm(asm.R1, atArgs),
		asm.FnProbeReadUser.Call(),
		asm.JEq.Imm(asm.R0, 0, "read"),
		asm.StoreImm(asm.R7, atArgLen, 0, asm.Word),
		asm.Mov.Imm(asm.R0, 0).WithSymbol("read"),
	)
	return b.finish()
}

// changed is where an inode has the time of its last change. Linux 6.11 made two members of
// it, 6.6 another name.
func (l *layout) changed() (seconds, nanos int32) {
	var inode *btf.Struct
	if err := l.spec.TypeByName("inode", &inode); err == nil {
		if at, ok := member(inode.Members, "i_ctime_sec"); ok {
			return int32(at / 8), l.at("inode", "i_ctime_nsec")
		}
	}
	at := l.at("inode", "__i_ctime", "i_ctime")
	return at, at + 8
}

// text copies the text that R8 points to into the event.
func (b *builder) text(at, size int32) {
	b.add(
		asm.Mov.Reg(asm.R1, asm.R7), asm.Add.Imm(asm.R1, at),
		asm.StoreImm(asm.R1, 0, 0, asm.Byte),
		asm.Mov.Imm(asm.R2, size), asm.Mov.Reg(asm.R3, asm.R8),
		asm.FnProbeReadKernelStr.Call(),
	)
}

// fork is for sched_process_fork: the parent, the child.
func (b *builder) fork() asm.Instructions {
	b.start(1)
	// Threads have the number of a group that is not their own.
	b.read(onTmp, 4, asm.R6, b.at("task_struct", "pid"))
	b.read(onAddr, 4, asm.R6, b.at("task_struct", "tgid"))
	b.add(
		asm.LoadMem(asm.R1, asm.RFP, onTmp, asm.Word), asm.LoadMem(asm.R2, asm.RFP, onAddr, asm.Word),
		asm.JNE.Reg(asm.R1, asm.R2, "end"),
	)
	b.identify()
	return b.finish()
}

// call is for sys_exit: struct pt_regs, the result. It tells of some system calls alone.
func (b *builder) call(numbers []int) asm.Instructions {
	b.add(
		asm.LoadMem(asm.R6, asm.R1, 0, asm.DWord),
		asm.LoadMem(asm.R2, asm.R1, 8, asm.DWord), asm.StoreMem(asm.RFP, onInode, asm.R2, asm.DWord),
	)
	b.read(onTmp, 4, asm.R6, b.at("pt_regs", "orig_ax", "syscallno"))
	b.add(asm.LoadMem(asm.R2, asm.RFP, onTmp, asm.Word))
	for _, n := range numbers {
		b.add(asm.JEq.Imm(asm.R2, int32(n), "asked"))
	}
	b.add(
		asm.Ja.Label("end"),
		asm.StoreMem(asm.RFP, onCall, asm.R2, asm.DWord).WithSymbol("asked"),
		asm.FnGetCurrentTask.Call(),
		asm.Mov.Reg(asm.R6, asm.R0),
	)
	b.follow(asm.R6, b.at("task_struct", "group_leader"))
	b.add(asm.Mov.Reg(asm.R6, asm.R8))
	b.identify()
	b.put(atStatus, onCall, asm.Word)
	b.put(atInode, onInode, asm.DWord)
	return b.finish()
}

// exit is for sched_process_exit: the task.
func (b *builder) exit() asm.Instructions {
	const groupExit = 4 // SIGNAL_GROUP_EXIT
	b.start(0)
	// The last thread of the process takes it along.
	b.follow(asm.R6, b.at("task_struct", "signal"))
	b.read(onTmp, 4, asm.R8, b.at("signal_struct", "live"))
	b.add(asm.LoadMem(asm.R1, asm.RFP, onTmp, asm.Word), asm.JNE.Imm(asm.R1, 0, "end"))
	// The number is the group's, whichever thread ends last.
	b.follow(asm.R6, b.at("task_struct", "group_leader"))
	b.add(asm.Mov.Reg(asm.R6, asm.R8))
	b.identify()
	b.follow(asm.R6, b.at("task_struct", "signal"))
	b.read(onTmp, 4, asm.R8, b.at("signal_struct", "flags"))
	b.add(asm.LoadMem(asm.R1, asm.RFP, onTmp, asm.Word), asm.And.Imm(asm.R1, groupExit), asm.JEq.Imm(asm.R1, 0, "own"))
	b.read(onTmp, 4, asm.R8, b.at("signal_struct", "group_exit_code"))
	b.add(asm.Ja.Label("status"))
	b.add(asm.Mov.Imm(asm.R1, 0).WithSymbol("own"))
	b.read(onTmp, 4, asm.R6, b.at("task_struct", "exit_code"))
	b.add(asm.LoadMem(asm.R1, asm.RFP, onTmp, asm.Word).WithSymbol("status"), asm.StoreMem(asm.R7, atStatus, asm.R1, asm.Word))
	return b.finish()
}
