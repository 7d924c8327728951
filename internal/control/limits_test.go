package control

import (
	"reflect"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/control/enginetest"
)

// What a host cannot enforce is refused when somebody asked for it, and left out and
// told when it is the template's default.
func TestLimitsThatTheHostCannotEnforce(t *testing.T) {
	unlimited := map[string]string{"memory": "no controller", "cpu": "no controller", "writeBytes": "cgroup v1"}
	for _, require := range []bool{false, true} {
		w := newWorld(t, func(c *Config) {
			c.RequireLimits = require
			e := c.Engine.(*enginetest.Engine)
			e.Unlimited, e.Degraded = unlimited, []string{"one id"}
		})
		for name, ask := range map[string]func(*CreateRequest){
			"memory":     func(r *CreateRequest) { r.Limits.Memory = 1 << 30 }, // as the template's
			"cpu":        func(r *CreateRequest) { r.Limits.CPU = 1 },
			"writeBytes": func(r *CreateRequest) { r.Limits.WriteBytes = 1 << 20 },
		} {
			r := CreateRequest{Template: "base", Timeout: 60e9, Actor: tester}
			ask(&r)
			_, err := w.Create(t.Context(), r)
			wantKind(t, err, berm.Unsupported)
			if err == nil || !require && !strings.Contains(err.Error(), name) || !require && !strings.Contains(err.Error(), unlimited[name]) || berm.HintOf(err) == "" {
				t.Errorf("%s: %v (%s)", name, err, berm.HintOf(err))
			}
		}
		if len(w.engine.Specs) != 0 {
			t.Fatalf("the engine was asked for %+v", w.engine.Specs)
		}
		r := CreateRequest{Template: "base", Timeout: 60e9, Actor: tester, Limits: berm.Limits{PIDs: 50}}
		s, err := w.Create(t.Context(), r)
		if require {
			wantKind(t, err, berm.Unsupported)
			if !strings.Contains(berm.HintOf(err), "--require-limits=false") {
				t.Errorf("hint %q", berm.HintOf(err))
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		spec := w.engine.Specs[0]
		want := berm.Limits{PIDs: 50, Disk: enginetest.Base.Limits.Disk}
		if spec.Limits != want || s.Limits != want {
			t.Errorf("limits %+v, told %+v, want %+v", spec.Limits, s.Limits, want)
		}
		without := []string{
			"the template's limit memory of 1 GiB is not in force: no controller",
			"the template's limit cpu of 2 is not in force: no controller",
		}
		if !reflect.DeepEqual(spec.Degraded, without) {
			t.Errorf("left out %q, want %q", spec.Degraded, without)
		}
		if told := append([]string{"one id"}, without...); !reflect.DeepEqual(s.Degraded, told) {
			t.Errorf("told %q, want %q", s.Degraded, told)
		}
		// A server that comes back tells the same.
		w.start(t)
		if again, err := w.Get(t.Context(), s.ID); err != nil || !reflect.DeepEqual(again.Degraded, s.Degraded) {
			t.Errorf("after a restart %q, %v", again.Degraded, err)
		}
	}
}

// A limit that everybody has is not left out, whatever the server requires.
func TestLimitsInForce(t *testing.T) {
	w := newWorld(t)
	s := w.create(t)
	if s.Limits != enginetest.Base.Limits || s.Degraded != nil || w.engine.Specs[0].Degraded != nil {
		t.Errorf("%+v, %q", s.Limits, s.Degraded)
	}
}

func TestLimitsInErrorsAreWholeNumbers(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct {
		limits berm.Limits
		want   string
	}{
		{berm.Limits{Memory: 1 << 40}, "limit memory of 1 TiB is above 8 GiB"},
		{berm.Limits{Memory: -1}, "limit memory of -1 is below 32 MiB"},
		{berm.Limits{CPU: 0.01}, "limit cpu of 0.01 is below 0.05"},
		{berm.Limits{WriteBytes: 1}, "limit writeBytes of 1 is below 4 KiB"},
	} {
		_, err := w.Create(t.Context(), CreateRequest{Template: "base", Timeout: 60e9, Actor: tester, Limits: c.limits})
		wantKind(t, err, berm.Invalid)
		if err != nil && err.Error() != c.want {
			t.Errorf("got %q, want %q", err, c.want)
		}
	}
}

// A sandbox that ended without a detail has no empty field of that name in its log.
func TestLogHasNoEmptyFields(t *testing.T) {
	w := newWorld(t)
	s := w.create(t)
	if err := w.Kill(t.Context(), s.ID, tester); err != nil {
		t.Fatal(err)
	}
	lines, err := w.Logs(t.Context(), s.ID, s.CreatedAt, false, 100)
	if err != nil || len(lines) == 0 {
		t.Fatal(lines, err)
	}
	for _, l := range lines {
		if strings.Contains(l.Fields, `""`) {
			t.Errorf("%q has an empty field: %s", l.Message, l.Fields)
		}
	}
}

func TestAmount(t *testing.T) {
	for want, got := range map[string]string{
		"1 TiB": amount("memory", 1<<40), "15.62 GiB": amount("memory", 16_777_216_000), "4 KiB": amount("readBytes", 4096), "100": amount("disk", 100),
		"0.05": amount("cpu", 0.05), "32768": amount("pids", 1<<15),
	} {
		if got != want {
			t.Errorf("%s, not %s", got, want)
		}
	}
}
