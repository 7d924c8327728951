package namespace

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/drivertest"
)

// What the kernel limits by user is charged to the owner of a user namespace too: it
// must be nobody else, or one sandbox could use up what root and all others may have.
func TestSandboxIsChargedToItsOwnUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: an ordinary user's sandboxes belong to that user")
	}
	h := harness(t, drivertest.Root(t, t.TempDir(), 0))
	for range 2 {
		spec := h.Spec()
		s, err := h.Driver.Create(t.Context(), spec)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if _, err := s.Kill(t.Context(), berm.ReasonKilled); err != nil {
				t.Error(err)
			}
		})
		ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", h.Init(t, spec.ID)))
		if err != nil {
			t.Fatal(err)
		}
		defer ns.Close()
		owner := ^uint32(0)
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, ns.Fd(), unix.NS_GET_OWNER_UID, uintptr(unsafe.Pointer(&owner))); errno != 0 {
			t.Fatal(errno)
		}
		if owner != spec.IDs.Base {
			t.Errorf("the namespace belongs to %d, its ids begin at %d", owner, spec.IDs.Base)
		}
		// The monitor is root again, with all rights.
		monitor, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", drivertest.Monitor(t, spec.ID)))
		if err != nil {
			t.Fatal(err)
		}
		own, err := os.ReadFile("/proc/self/status")
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"Uid:", "CapEff:", "CapPrm:"} {
			if field(string(monitor), name) != field(string(own), name) {
				t.Errorf("the monitor has %s%s", name, field(string(monitor), name))
			}
		}
	}
}

// field is what follows a name in a file of lines.
func field(text, name string) string {
	_, rest, _ := strings.Cut(text, "\n"+name)
	value, _, _ := strings.Cut(rest, "\n")
	return value
}
