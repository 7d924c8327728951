package local

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/kernel/seccomp"
)

// forbidding returns a command that runs what follows it where system calls fail with
// EPERM, as in a container: each call is its number, or for clone(2) a flag of it.
func forbidding(calls ...string) []string {
	return []string{"/proc/self/exe", "forbid", strings.Join(calls, ",")}
}

// actor is another part that this program plays, when it is started with one.
func actor() {
	if len(os.Args) >= 4 && os.Args[1] == "internet" {
		code, err := internet(os.Args[2], os.Args[3:])
		if err != nil {
			fmt.Fprintln(os.Stderr, "internet:", err)
			code = 99
		}
		os.Exit(code)
	}
	if len(os.Args) < 4 || os.Args[1] != "forbid" {
		return
	}
	err := forbid(strings.Split(os.Args[2], ","))
	if err == nil {
		err = syscall.Exec(os.Args[3], os.Args[3:], os.Environ())
	}
	fmt.Fprintln(os.Stderr, "forbid:", err)
	os.Exit(99)
}

// namespaces forbids new user namespaces.
const namespaces = "namespaces"

func forbid(calls []string) error {
	const deny = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
	var program []bpf.Instruction
	for _, call := range calls {
		if call == namespaces {
			// clone3 has its flags in memory, so that container engines answer ENOSYS.
			program = append(program,
				bpf.LoadAbsolute{Off: 0, Size: 4},
				bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.SYS_CLONE3, SkipTrue: 1},
				bpf.RetConstant{Val: unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)},
				bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.SYS_CLONE, SkipTrue: 1},
				bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.SYS_UNSHARE, SkipTrue: 3},
				bpf.LoadAbsolute{Off: 16, Size: 4}, // the low half of the first argument
				bpf.JumpIf{Cond: bpf.JumpBitsNotSet, Val: unix.CLONE_NEWUSER, SkipTrue: 1},
				bpf.RetConstant{Val: deny},
			)
			continue
		}
		number, err := strconv.ParseUint(call, 10, 32)
		if err != nil {
			return err
		}
		program = append(program,
			bpf.LoadAbsolute{Off: 0, Size: 4},
			bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: uint32(number), SkipTrue: 1},
			bpf.RetConstant{Val: deny},
		)
	}
	program = append(program, bpf.RetConstant{Val: unix.SECCOMP_RET_ALLOW})
	raw, err := bpf.Assemble(program)
	if err != nil {
		return err
	}
	filter := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		filter[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	return seccomp.Load(filter)
}
