package cgroup

import (
	"os"
	"os/exec"
	"runtime"
	"slices"
	"testing"

	"github.com/berm-sandbox/berm"
)

func TestInside(t *testing.T) {
	m := newReal(t)
	need(t, m, "pids")
	if m.Layout() == V2 {
		t.Skip("v2 has CLONE_INTO_CGROUP instead: TestCloneInto")
	}
	g := create(t, m, "inside", berm.Limits{PIDs: 50})
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	own := func() string {
		b, err := os.ReadFile("/proc/thread-self/cgroup")
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	before := own()
	child := exec.Command("sleep", "60")
	if err := g.Inside(child.Start); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = child.Process.Kill()
		_ = child.Wait()
	}()
	if after := own(); after != before {
		t.Errorf("this thread was in\n%sand is in\n%s", before, after)
	}
	for _, h := range g.hierarchies {
		if h.v2 {
			continue
		}
		alone := &Group{id: g.id, manager: m, hierarchies: []*hierarchy{h}}
		if pids, err := alone.Processes(); err != nil || !slices.Equal(pids, []int{child.Process.Pid}) {
			t.Errorf("%s has %v, %v", h.path(g.id), pids, err)
		}
	}
}
