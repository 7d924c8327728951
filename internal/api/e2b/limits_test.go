package e2b

import (
	"reflect"
	"testing"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/control"
)

// What the host could not give is in the answer to a create and in every later one.
func TestAnswersTellWhatIsMissing(t *testing.T) {
	w := newWorld(t, func(c *control.Config) { c.MaxLimits = berm.Limits{Memory: 4 << 30} })
	w.engine.Unlimited = map[string]string{"memory": "no controller"}
	var s sandbox
	w.want(201, "POST", "/v2/sandboxes", `{"templateID":"base"}`).into(t, &s)
	want := []string{"the template's limit memory of 1 GiB is not in force: no controller"}
	if !reflect.DeepEqual(s.Berm.Degraded, want) {
		t.Errorf("create: %q", s.Berm.Degraded)
	}
	var d detail
	w.want(200, "GET", "/sandboxes/"+string(s.SandboxID), "").into(t, &d)
	if !reflect.DeepEqual(d.Berm.Degraded, want) || d.MemoryMB != 4096 || d.CPUCount != 2 {
		t.Errorf("get: %q, %d MiB, %d cores", d.Berm.Degraded, d.MemoryMB, d.CPUCount)
	}
	var e errorBody
	w.want(501, "POST", "/v2/sandboxes", `{"templateID":"base","berm":{"limits":{"memory":536870912}}}`).into(t, &e)
	if e.Berm == nil || e.Berm.Hint == "" {
		t.Errorf("refusal: %+v", e)
	}
}
