package fake

import (
	"testing"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/drivertest"
)

func TestDriver(t *testing.T) {
	drivertest.Run(t, func(t *testing.T) drivertest.Harness {
		host := &Host{}
		const why = "nothing runs in a fake"
		return drivertest.Harness{
			Driver: host.Driver(),
			Reopen: func(*testing.T) berm.Driver { return host.Driver() },
			Spec: func() berm.Spec {
				return berm.Spec{ID: berm.NewSandboxID(), Level: berm.Namespace, Hostname: "box",
					Layers: []berm.Layer{{DiffID: "sha256:test", Path: "/"}}, Limits: berm.Limits{Memory: 64 << 20}}
			},
			Missing: map[drivertest.Feature]string{
				drivertest.Exec: why, drivertest.Ports: why, drivertest.MemoryLimit: why, drivertest.PIDLimit: why,
				drivertest.CPULimit: why, drivertest.DiskLimit: why, drivertest.Processes: why, drivertest.Users: why, drivertest.Kernel: why, drivertest.Link: why,
			},
		}
	})
}
