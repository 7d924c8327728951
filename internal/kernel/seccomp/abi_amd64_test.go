package seccomp

import (
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

const arch = "amd64"

// i386Program is a 64-bit program that asks for its user id through the i386 ABI and
// exits with the error number of the answer.
func i386Program() []byte {
	code := []byte{
		0xb8, 199, 0, 0, 0, // mov eax, 199 (getuid32)
		0xcd, 0x80, // int 0x80
		0x89, 0xc7, // mov edi, eax
		0xf7, 0xdf, // neg edi
		0xb8, 60, 0, 0, 0, // mov eax, 60 (exit)
		0x0f, 0x05, // syscall
	}
	const base, header = 0x400000, 64 + 56
	elf := []byte{0x7f, 'E', 'L', 'F', 2, 1, 1, 15: 0}
	put := func(size int, v uint64) { elf = append(elf, binary.LittleEndian.AppendUint64(nil, v)[:size]...) }
	put(2, 2) // executable
	put(2, 62)
	put(4, 1)
	put(8, base+header) // entry
	put(8, 64)          // program headers
	put(8, 0)
	put(4, 0)
	put(2, 64)
	put(2, 56)
	put(2, 1)
	put(6, 0)
	put(4, 1) // load
	put(4, 5) // readable, executable
	put(8, 0)
	put(8, base)
	put(8, base)
	put(8, uint64(header+len(code)))
	put(8, uint64(header+len(code)))
	put(8, 0x1000)
	return append(elf, code...)
}

func TestI386ABI(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: the program tells its user id, 0, from an error")
	}
	path := filepath.Join(t.TempDir(), "i386")
	if err := os.WriteFile(path, i386Program(), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := exec.Command(path).Run(); err != nil {
		t.Skipf("the kernel has no i386 ABI to close: %v", err)
	}
	cmd := again("exec default", path)
	if err := cmd.Run(); cmd.ProcessState.ExitCode() != int(unix.ENOSYS) {
		t.Errorf("exit code %d (%v), want ENOSYS", cmd.ProcessState.ExitCode(), err)
	}
}
