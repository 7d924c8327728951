package capability

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Capabilities cannot be had back, so the test binary starts itself again to drop them.
const roleVariable = "BERM_CAPABILITY_TEST_DROP"

func TestMain(m *testing.M) {
	if os.Getenv(roleVariable) == "" {
		os.Exit(m.Run())
	}
	if err := drop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// drop drops capabilities with several threads running and shows what the calling
// thread, each thread, and a program started afterwards have left.
func drop() error {
	var ready, done sync.WaitGroup
	done.Add(1)
	for range 4 { // threads that run, rather than goroutines
		ready.Go(func() {
			go func() {
				runtime.LockOSThread()
				done.Wait()
			}()
		})
	}
	ready.Wait()
	defer done.Done()
	time.Sleep(10 * time.Millisecond)
	runtime.LockOSThread()
	begin := time.Now()
	if err := CutBounding(Inside); err != nil {
		return fmt.Errorf("cut the bounding set: %w", err)
	}
	if err := Drop(Inside); err != nil {
		return fmt.Errorf("drop: %w", err)
	}
	fmt.Printf("took %d\n", time.Since(begin).Microseconds())
	show("caller", "/proc/thread-self/status")
	threads, _ := filepath.Glob("/proc/self/task/*/status")
	for _, thread := range threads {
		show("thread", thread)
	}
	status, err := exec.Command("cat", "/proc/self/status").Output()
	if err != nil {
		return err
	}
	showText("program", string(status))
	return nil
}

func show(who, file string) {
	status, _ := os.ReadFile(file)
	showText(who, string(status))
}

func showText(who, status string) {
	for line := range strings.Lines(status) {
		if strings.HasPrefix(line, "Cap") {
			fmt.Print(who, " ", line)
		}
	}
}

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

// withoutCgo is a test binary in which every thread can be changed: this one, unless it
// has cgo, as with the race detector.
func withoutCgo(t *testing.T) string {
	t.Helper()
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_GETPID, 0, 0, 0); errno == 0 {
		return "/proc/self/exe"
	}
	program := filepath.Join(t.TempDir(), "capability.test")
	build := exec.Command("go", "test", "-c", "-o", program, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return program
}

func TestDrop(t *testing.T) {
	program := withoutCgo(t)
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
			cmd.Env = append(os.Environ(), roleVariable+"=1")
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
				counts[fields[0]]++
				if fields[0] == "thread" && fields[1] == "CapBnd:" {
					continue // of other threads it stays
				}
				want := Inside
				if slices.Contains([]string{"CapInh:", "CapAmb:"}, fields[1]) {
					want = 0
				}
				if fields[2] != fmt.Sprintf("%016x", uint64(want)) {
					t.Errorf("%s", line)
				}
			}
			if counts["thread"] < 5*4 || counts["caller"] != 5 || counts["program"] != 5 {
				t.Errorf("saw %v", counts)
			}
		})
	}
}

func TestCutBoundingNeedsRights(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("root has CAP_SETPCAP")
	}
	if err := CutBounding(Inside); !errors.Is(err, unix.EPERM) {
		t.Errorf("%v, want EPERM", err)
	}
}
