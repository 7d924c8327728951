package gvisor

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/drivertest"
	"github.com/berm-sandbox/berm/internal/driver/namespace"
	"github.com/berm-sandbox/berm/internal/leak"
)

var leases atomic.Uint32

// ownIDs are ids that neither another test process nor a server on this machine uses.
func ownIDs() berm.IDRange {
	const each = 8 * berm.IDsPerSandbox
	return berm.IDRange{Base: 0x68000000 + uint32(os.Getpid()%256)*each, Count: each}
}

// runsc is what `make runsc` built. The tests need it; so does what runs all of them.
func runsc(t testing.TB) string {
	t.Helper()
	if dir := os.Getenv(drivertest.DirVariable); dir != "" {
		return filepath.Join(dir, Program)
	}
	path, err := filepath.Abs("../../../bin/" + Program)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		if os.Getenv("BERM_TEST_ALL") != "" {
			t.Fatal("bin/runsc is missing: run `make runsc`")
		}
		t.Skip("bin/runsc is missing: run `make runsc`")
	}
	return path
}

func harness(t *testing.T, root, runsc string) drivertest.Harness {
	user := os.Geteuid() != 0
	data, err := os.MkdirTemp("", "berm-gvisor-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(data) })
	config := namespace.Config{Data: data}
	if !user {
		config.CgroupParent = "/berm-test-" + filepath.Base(data)
	}
	open := func(t *testing.T) berm.Driver {
		host, err := namespace.New(config)
		if err != nil {
			t.Fatalf("%v (%s)", err, berm.HintOf(err))
		}
		t.Cleanup(func() { host.Close() })
		d, err := New(host, Config{Runsc: runsc})
		if err != nil {
			t.Fatal(err)
		}
		d.probed = probed(d)
		return d
	}
	h := drivertest.Harness{
		Driver: open(t),
		Reopen: open,
		Missing: map[drivertest.Feature]string{
			drivertest.Kernel:      "programs inside call gVisor's kernel",
			drivertest.SurvivesOOM: "the host may end the kernel inside, and with it the sandbox",
		},
		Scope:   leak.Scope{Dirs: []string{filepath.Join(data, "sandboxes")}},
		Monitor: drivertest.Monitor,
		Init: func(t *testing.T, id berm.SandboxID) int {
			// Any thread may have started it.
			pid := drivertest.Monitor(t, id)
			lists, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
			if err != nil {
				t.Fatal(err)
			}
			for _, list := range lists {
				children, _ := os.ReadFile(list)
				for field := range strings.FieldsSeq(string(children)) {
					// Of an ordinary user it is init, which carries runsc.
					if name, _ := os.ReadFile("/proc/" + field + "/cmdline"); user || strings.HasPrefix(string(name), "runsc\x00") {
						pid, err := strconv.Atoi(field)
						if err != nil {
							t.Fatal(err)
						}
						return pid
					}
				}
			}
			t.Fatalf("monitor %d has not started runsc", pid)
			return 0
		},
	}
	limits := berm.Limits{Memory: 512 << 20, CPU: 2, PIDs: 256, Disk: 256 << 20}
	if user {
		h.Missing[drivertest.Snapshot] = "the disks of an ordinary user's sandboxes are no file systems of their own"
		h.Missing[drivertest.Writable] = "what an ordinary user's sandbox writes within a limit is in memory that only it sees"
		missing := h.Driver.(*Driver).Missing()
		if why := missing["memory"]; why != "" {
			h.Missing[drivertest.MemoryLimit], limits.Memory = why, 0
		}
		if why := missing["cpu"]; why != "" {
			h.Missing[drivertest.CPULimit], limits.CPU = why, 0
		}
	} else {
		h.Scope.IDs, h.Scope.Cgroups = ownIDs(), []string{filepath.Base(config.CgroupParent)}
	}
	h.Spec = func() berm.Spec {
		spec := berm.Spec{
			ID: berm.NewSandboxID(), Level: berm.GVisor, Hostname: "box", Limits: limits,
			Layers: []berm.Layer{{DiffID: "sha256:test", Path: root}},
		}
		if !user {
			spec.IDs = berm.IDRange{Base: ownIDs().Base + leases.Add(1)%8*berm.IDsPerSandbox, Count: berm.IDsPerSandbox}
		}
		return spec
	}
	return h
}

var first atomic.Pointer[func() found]

// probed looks at the host once for all drivers of a test run.
func probed(d *Driver) func() found {
	first.CompareAndSwap(nil, &d.probed)
	return *first.Load()
}

// TestDriver runs the conformance suite.
func TestDriver(t *testing.T) {
	path := runsc(t)
	root := os.Getenv(drivertest.RootVariable)
	if root == "" {
		root = drivertest.Root(t, t.TempDir(), 0)
	}
	drivertest.Run(t, func(t *testing.T) drivertest.Harness { return harness(t, root, path) })
}

// What runsc logged of a start that failed is told: an image can have what gVisor cannot start.
func TestSaysWhyItDoesNotStart(t *testing.T) {
	path := runsc(t)
	root := os.Getenv(drivertest.RootVariable)
	if root == "" {
		root = drivertest.Root(t, t.TempDir(), 0)
	}
	h := harness(t, root, path)
	spec, odd := h.Spec(), t.TempDir()
	if err := os.Mkdir(filepath.Join(odd, "dev"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc", filepath.Join(odd, "dev/berm")); err != nil {
		t.Fatal(err)
	}
	spec.Layers = append(spec.Layers, berm.Layer{DiffID: "sha256:odd", Path: odd})
	s, err := h.Driver.Create(t.Context(), spec)
	if err == nil {
		_, _ = s.Kill(t.Context(), berm.ReasonKilled)
		_ = s.Close()
	}
	if err == nil || !strings.Contains(err.Error(), "/dev/berm/berm-init") {
		t.Errorf("%v", err)
	}
}

// TestOrdinaryUser runs it again as a user without any rights but subordinate ids.
func TestOrdinaryUser(t *testing.T) {
	path := runsc(t)
	if os.Geteuid() != 0 || os.Getenv("BERM_TEST_ALL") == "" {
		t.Skip("slow: root's BERM_TEST_ALL=1 runs it")
	}
	drivertest.GrantIDs(t)
	drivertest.AsUser(t, drivertest.SubordinateIDs, "^(TestDriver|TestSaysWhyItDoesNotStart)$", path)
}

// TestVersion: what is built is what is asked for.
func TestVersion(t *testing.T) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Version}}", "gvisor.dev/gvisor").Output()
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(string(out)); got != Version {
		t.Errorf("go.mod has gVisor %s, this package is for %s", got, Version)
	}
}

// A runsc that is missing, of another version, or that runs nothing is refused, with what
// to do about it.
func TestUnusable(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: an ordinary user is refused before")
	}
	script := func(content string) string {
		path := filepath.Join(t.TempDir(), Program)
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+content), 0o755); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for name, config := range map[string]Config{
		"missing":       {Runsc: "/does/not/exist"},
		"other version": {Runsc: script("echo runsc version v0.0.0-other")},
		"no program":    {Runsc: script("exit 3")},
		"runs nothing":  {Runsc: script("case $1 in --version) echo runsc version " + Version + ";; *) echo no seccomp >&2; exit 128;; esac")},
	} {
		f := look(t.Context(), config)
		p := probe(berm.Probe{Usable: true}, f)
		if berm.KindOf(f.err) != berm.Unsupported || berm.HintOf(f.err) == "" || p.Usable {
			t.Errorf("%s: %v (%s), usable: %v", name, f.err, berm.HintOf(f.err), p.Usable)
		}
		for _, feature := range p.Features {
			if feature.Required && !feature.Found && feature.Fix == "" {
				t.Errorf("%s: %+v says nothing to do", name, feature)
			}
		}
		host, err := namespace.New(namespace.Config{Data: t.TempDir(), CgroupParent: "/berm-test-unusable"})
		if err != nil {
			t.Fatal(err)
		}
		d, err := New(host, config)
		if err == nil {
			_, err = d.Create(t.Context(), berm.Spec{Level: berm.GVisor})
		}
		if berm.KindOf(err) != berm.Unsupported {
			t.Errorf("%s: create: %v", name, err)
		}
		_ = host.Close()
	}
	if p := probe(berm.Probe{}, found{}); p.Usable || !p.ByName {
		t.Errorf("without the namespace level: %+v", p)
	}
}
