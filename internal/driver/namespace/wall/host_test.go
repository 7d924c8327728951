package wall

import (
	"strings"
	"testing"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/namespace/launch"
	"github.com/berm-sandbox/berm/internal/driver/namespace/plan"
)

// The names of the sandbox's machine are never written into files of the host, also where
// those lie over a template.
func TestIdentityIsNotTheHosts(t *testing.T) {
	layers := []berm.Layer{{DiffID: "sha256:0", Path: "/layer"}}
	for _, test := range []struct {
		host    Host
		written bool // /etc/hosts
	}{
		{Host{Layers: layers}, true},
		{Host{Layers: layers, Shown: []Shown{{Path: "/etc/ssl", Write: true}}}, true},
		{Host{Layers: layers, Shown: []Shown{{Path: "/etc", Write: true}}}, false},
		{Host{Layers: layers, Shown: []Shown{{Path: "/etc"}}}, false},
		{Host{Layers: layers, Shown: []Shown{{Path: "/etc/hosts", File: true, Write: true}}}, false},
		{Host{Shown: []Shown{{Path: "/etc"}}}, false},
	} {
		test.host.Home, test.host.Workspace = "/home/a", Workspace{Path: "/home/a/project", Write: true}
		s, err := Plan(Config{Root: test.host, IDs: launch.IDs{Kind: launch.Single}})
		if err != nil {
			t.Fatal(err)
		}
		written, covered := false, false
		for _, step := range s.Steps {
			if strings.HasSuffix(step.Target, "/etc/hosts") {
				written = written || step.Op == plan.File && step.Data != ""
				covered = covered || step.Op == plan.Cover
			}
		}
		if written != test.written || covered == test.written {
			t.Errorf("%+v: written %t, covered %t", test.host.Shown, written, covered)
		}
	}
}
