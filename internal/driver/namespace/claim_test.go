package namespace

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/drivertest"
	"github.com/berm-sandbox/berm/internal/kernel/claim"
)

// The ids of a sandbox stay claimed when the server that leased them is gone, until the
// sandbox is.
func TestSandboxesKeepTheirClaim(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: only root leases ids")
	}
	config := Config{Data: dataDir(t)}
	config.CgroupParent = "/berm-test-" + filepath.Base(config.Data)
	config.Claims = filepath.Join(config.Data, "ids")
	d := newDriver(t, config)
	t.Cleanup(func() { _ = d.groups.Close() })
	root := drivertest.Root(t, t.TempDir(), 0)
	other, err := claim.Open(config.Claims)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = other.Close() })
	for name, end := range map[string]func(*testing.T, berm.Sandbox){
		"killed": func(t *testing.T, s berm.Sandbox) {
			if _, err := s.Kill(t.Context(), berm.ReasonKilled); err != nil {
				t.Error(err)
			}
		},
		"monitor killed": func(t *testing.T, s berm.Sandbox) {
			_ = unix.Kill(drivertest.Monitor(t, s.ID()), unix.SIGKILL)
		},
	} {
		t.Run(name, func(t *testing.T) {
			server, err := claim.Open(config.Claims)
			if err != nil {
				t.Fatal(err)
			}
			spec := berm.Spec{
				ID: berm.NewSandboxID(), Level: berm.Namespace, Hostname: "box", IDs: lease(),
				Layers: []berm.Layer{{DiffID: "sha256:test", Path: root}},
			}
			if ok, err := server.Take(spec.IDs); err != nil || !ok {
				t.Fatal(ok, err)
			}
			s, err := d.Create(t.Context(), spec)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if _, err := s.Kill(context.Background(), berm.ReasonKilled); err != nil {
					t.Error(err)
				}
			})
			if err := server.Close(); err != nil { // as its death does
				t.Fatal(err)
			}
			if ok, err := other.Take(spec.IDs); err != nil || ok {
				t.Errorf("the ids of a living sandbox were given away: %v, %v", ok, err)
			}
			end(t, s)
			for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
				ok, err := other.Take(spec.IDs)
				if err != nil {
					t.Fatal(err)
				}
				if ok {
					break
				}
				if time.Now().After(deadline) {
					t.Fatal("the ids of a dead sandbox stay claimed")
				}
			}
			if err := other.Drop(spec.IDs); err != nil {
				t.Error(err)
			}
		})
	}
	// Who comes second is told so, and leaves nothing.
	spec := berm.Spec{ID: berm.NewSandboxID(), Level: berm.Namespace, Hostname: "box", IDs: lease(), Layers: []berm.Layer{{DiffID: "sha256:test", Path: root}}}
	fd, err := os.OpenFile(config.Claims, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer fd.Close()
	l := unix.Flock_t{Type: unix.F_WRLCK, Start: int64(spec.IDs.Base), Len: int64(spec.IDs.Count)}
	if err := unix.FcntlFlock(fd.Fd(), unix.F_OFD_SETLK, &l); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Create(t.Context(), spec); err == nil || berm.KindOf(err) != berm.Unavailable {
		t.Errorf("ids of another server: %v", err)
	}
	if ids, err := d.List(t.Context()); err != nil || len(ids) > 0 {
		t.Errorf("left: %v, %v", ids, err)
	}
}
