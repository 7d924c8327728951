package feature

import (
	"encoding/binary"
	"errors"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// The numbers of linux/kvm.h.
const (
	kvmGetAPIVersion       = 0xae00
	kvmCreateVM            = 0xae01
	kvmGetVCPUMmapSize     = 0xae04
	kvmCreateVCPU          = 0xae41
	kvmSetUserMemoryRegion = 0x4020ae46
	kvmRun                 = 0xae80
	kvmSetRegs             = 0x4090ae82
	kvmGetSregs            = 0x8138ae83
	kvmSetSregs            = 0x4138ae84

	kvmAPIVersion = 12
	kvmExitHLT    = 5
)

// guest counts 100,000 down in real mode and halts: 200,000 instructions.
var guest = []byte{
	0x66, 0xb9, 0xa0, 0x86, 0x01, 0x00, // mov ecx, 100000
	0x66, 0x49, // dec ecx
	0x75, 0xfc, // jnz -4
	0xf4, // hlt
}

// runGuest measures how long the guest takes.
func runGuest() (time.Duration, error) {
	ioctl := func(fd uintptr, request uintptr, arg uintptr) (uintptr, error) {
		r, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, request, arg)
		if errno != 0 {
			return 0, errno
		}
		return r, nil
	}
	kvm, err := unix.Open("/dev/kvm", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, failed(err, "open /dev/kvm")
	}
	if v, err := ioctl(uintptr(kvm), kvmGetAPIVersion, 0); err != nil || v != kvmAPIVersion {
		return 0, berm.Errorf(berm.Unsupported, "KVM has API version %d", v)
	}
	vm, err := ioctl(uintptr(kvm), kvmCreateVM, 0)
	if err != nil {
		return 0, failed(err, "make a virtual machine")
	}
	memory, err := unix.Mmap(-1, 0, 0x1000, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		return 0, failed(err, "get memory for a guest")
	}
	copy(memory, guest)
	region := struct {
		slot, flags          uint32
		guestAddress, length uint64
		address              uint64
	}{length: uint64(len(memory)), address: uint64(uintptr(unsafe.Pointer(&memory[0])))}
	if _, err := ioctl(vm, kvmSetUserMemoryRegion, uintptr(unsafe.Pointer(&region))); err != nil {
		return 0, failed(err, "give memory to a guest")
	}
	cpu, err := ioctl(vm, kvmCreateVCPU, 0)
	if err != nil {
		return 0, failed(err, "make a virtual processor")
	}
	size, err := ioctl(uintptr(kvm), kvmGetVCPUMmapSize, 0)
	if err != nil {
		return 0, failed(err, "ask for the size of a virtual processor")
	}
	run, err := unix.Mmap(int(cpu), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return 0, failed(err, "map a virtual processor")
	}
	// struct kvm_sregs begins with the segment cs: base, limit, selector. The reset
	// state points it at the firmware.
	var sregs [312]byte
	if _, err := ioctl(cpu, kvmGetSregs, uintptr(unsafe.Pointer(&sregs))); err != nil {
		return 0, failed(err, "read a virtual processor")
	}
	binary.LittleEndian.PutUint64(sregs[0:], 0)
	binary.LittleEndian.PutUint16(sregs[12:], 0)
	if _, err := ioctl(cpu, kvmSetSregs, uintptr(unsafe.Pointer(&sregs))); err != nil {
		return 0, failed(err, "set up a virtual processor")
	}
	var regs [18]uint64 // 16 registers, rip, rflags
	regs[17] = 2        // the bit that is always set
	if _, err := ioctl(cpu, kvmSetRegs, uintptr(unsafe.Pointer(&regs))); err != nil {
		return 0, failed(err, "set up a virtual processor")
	}
	begin := time.Now()
	for {
		_, err := ioctl(cpu, kvmRun, 0)
		if errors.Is(err, unix.EINTR) { // a signal of the Go runtime
			continue
		}
		if err != nil {
			return 0, failed(err, "run a guest")
		}
		break
	}
	took := time.Since(begin)
	if reason := binary.LittleEndian.Uint32(run[8:]); reason != kvmExitHLT { // kvm_run.exit_reason
		return 0, berm.Errorf(berm.Unsupported, "a guest ended for reason %d instead of its halt", reason)
	}
	return took, nil
}
