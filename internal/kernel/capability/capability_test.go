package capability

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestNames(t *testing.T) {
	if got, want := Of(unix.CAP_CHOWN, unix.CAP_SYS_ADMIN, 63).String(), "CAP_CHOWN CAP_SYS_ADMIN CAP_63"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if last := names[unix.CAP_LAST_CAP]; last != "CHECKPOINT_RESTORE" || len(names) != unix.CAP_LAST_CAP+1 {
		t.Errorf("%d names, the last is %s", len(names), last)
	}
}

// What lets a sandbox's root reach past its wall must not slip into the set.
func TestInside(t *testing.T) {
	for _, never := range []int{unix.CAP_SYS_ADMIN, unix.CAP_SYS_CHROOT, unix.CAP_SYS_PTRACE, unix.CAP_MKNOD, unix.CAP_SETFCAP,
		unix.CAP_NET_RAW, unix.CAP_NET_ADMIN, unix.CAP_AUDIT_WRITE, unix.CAP_AUDIT_CONTROL, unix.CAP_DAC_READ_SEARCH, unix.CAP_SYS_MODULE, unix.CAP_BPF} {
		if Inside.Has(never) {
			t.Errorf("%v is kept", Of(never))
		}
	}
}

// dropper builds the helper without cgo: with it, and so with the race detector, Go
// refuses to change every thread.
func dropper(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "drop")
	build := exec.Command("go", "build", "-o", program, "./testdata/drop")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return program
}

func TestDrop(t *testing.T) {
	program := dropper(t)
	for name, attr := range map[string]*syscall.SysProcAttr{
		"host root": {},
		"root of a user namespace": {
			Cloneflags:  syscall.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if attr.Cloneflags == 0 && os.Geteuid() != 0 {
				t.Skip("needs root: has no capability to drop")
			}
			cmd := exec.Command(program)
			cmd.SysProcAttr = attr
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			counts := map[string]int{}
			for line := range strings.Lines(string(out)) {
				fields := strings.Fields(line)
				if fields[0] == "took" {
					t.Logf("%s µs", fields[1])
					continue
				}
				want := Inside
				if slices.Contains([]string{"CapInh:", "CapAmb:"}, fields[1]) {
					want = 0
				}
				if fields[0] == "thread" && fields[1] == "CapBnd:" {
					continue // of other threads it stays
				}
				if fields[2] != fmt.Sprintf("%016x", uint64(want)) {
					t.Errorf("%s", line)
				}
				counts[fields[0]]++
			}
			if counts["thread"] < 5*4 || counts["caller"] != 5 || counts["program"] != 5 {
				t.Errorf("saw %v", counts)
			}
		})
	}
}
