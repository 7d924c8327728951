package harness

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"
)

func TestMain(m *testing.M) { Main(m) }

// TestIsolated checks the outer wall that Main put around this test.
func TestIsolated(t *testing.T) {
	Slow(t)
	if links, err := net.Interfaces(); err != nil || len(links) != 1 {
		t.Errorf("links %v, %v: not only the loopback", links, err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Errorf("the loopback is down: %v", err)
	} else {
		listener.Close()
	}
	if _, err := os.OpenFile("/proc/sys/kernel/printk", os.O_WRONLY, 0); !errors.Is(err, syscall.EROFS) {
		t.Errorf("/proc/sys is not read-only: %v", err)
	}
	if entries := Processes(""); len(entries) > 3 {
		t.Errorf("processes of others are to be seen: %v", entries)
	}
	if out, err := exec.Command("unshare", "-Urpmf", "--mount-proc", "true").CombinedOutput(); err != nil {
		t.Errorf("a user namespace cannot mount its own /proc: %v: %s", err, out)
	}
	if left := Look(nil).Diff(Look(nil)); len(left) > 0 {
		t.Errorf("two looks differ: %v", left)
	}
}
