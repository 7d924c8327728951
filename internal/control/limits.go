package control

import (
	"context"
	"fmt"
	"math"
	"strconv"

	"github.com/berm-sandbox/berm"
)

// checkLimits refuses what no request may ask for here.
func (m *Manager) checkLimits(l berm.Limits) error {
	for _, bound := range []struct {
		name         string
		value        float64
		lowest, most float64
	}{
		{"memory", float64(l.Memory), 32 << 20, float64(m.MaxLimits.Memory)},
		{"cpu", l.CPU, 0.05, m.MaxLimits.CPU},
		{"pids", float64(l.PIDs), 16, float64(m.MaxLimits.PIDs)},
		{"disk", float64(l.Disk), 16 << 20, float64(m.MaxLimits.Disk)},
		{"readBytes", float64(l.ReadBytes), 4096, 0},
		{"writeBytes", float64(l.WriteBytes), 4096, 0},
	} {
		switch {
		case bound.value == 0:
		case !(bound.value >= bound.lowest):
			return berm.Errorf(berm.Invalid, "limit %s of %s is below %s", bound.name, amount(bound.name, bound.value), amount(bound.name, bound.lowest))
		case bound.most > 0 && bound.value > bound.most:
			return berm.Errorf(berm.Invalid, "limit %s of %s is above %s", bound.name, amount(bound.name, bound.value), amount(bound.name, bound.most))
		}
	}
	return nil
}

// amount writes what a limit of a name is as people do, without an exponent.
func amount(name string, n float64) string {
	unit := ""
	if name != "cpu" && name != "pids" {
		for _, next := range []string{"KiB", "MiB", "GiB", "TiB"} {
			if n < 1024 {
				break
			}
			n, unit = math.Floor(n/1024*100)/100, " "+next
		}
	}
	return strconv.FormatFloat(n, 'f', -1, 64) + unit
}

// over returns the limits l with zero fields taken from base.
func over(base, l berm.Limits) berm.Limits {
	pick := func(a, b int64) int64 {
		if a != 0 {
			return a
		}
		return b
	}
	cpu := l.CPU
	if cpu == 0 {
		cpu = base.CPU
	}
	return berm.Limits{
		Memory: pick(l.Memory, base.Memory), CPU: cpu, PIDs: pick(l.PIDs, base.PIDs), Disk: pick(l.Disk, base.Disk),
		ReadBytes: pick(l.ReadBytes, base.ReadBytes), WriteBytes: pick(l.WriteBytes, base.WriteBytes),
	}
}

// limits joins what a request asks for with its template's defaults. What cannot be
// enforced is refused as Unsupported, with one exception: a default, on a server that
// does not require limits, is left out and named in without.
func (m *Manager) limits(asked, defaults berm.Limits, unlimited map[string]string) (limits berm.Limits, without []string, err error) {
	limits = over(defaults, asked)
	for _, l := range []struct {
		name            string
		asked, together float64
		leaveOut        func()
	}{
		{"memory", float64(asked.Memory), float64(limits.Memory), func() { limits.Memory = 0 }},
		{"cpu", asked.CPU, limits.CPU, func() { limits.CPU = 0 }},
		{"pids", float64(asked.PIDs), float64(limits.PIDs), func() { limits.PIDs = 0 }},
		{"disk", float64(asked.Disk), float64(limits.Disk), func() { limits.Disk = 0 }},
		{"readBytes", float64(asked.ReadBytes), float64(limits.ReadBytes), func() { limits.ReadBytes = 0 }},
		{"writeBytes", float64(asked.WriteBytes), float64(limits.WriteBytes), func() { limits.WriteBytes = 0 }},
	} {
		why, missing := unlimited[l.name]
		switch {
		case !missing || l.together == 0:
		case l.asked != 0:
			return limits, nil, berm.Errorf(berm.Unsupported, "limit %s cannot be enforced on this host: %s", l.name, why).
				WithHint("berm doctor --fix-hints, on that host, says how to get it")
		case m.RequireLimits:
			return limits, nil, berm.Errorf(berm.Unsupported, "the template's limit %s of %s cannot be enforced on this host: %s", l.name, amount(l.name, l.together), why).
				WithHint("berm doctor --fix-hints, on that host, says how to get it; berm serve --require-limits=false goes without it")
		default:
			l.leaveOut()
			without = append(without, fmt.Sprintf("the template's limit %s of %s is not in force: %s", l.name, amount(l.name, l.together), why))
		}
	}
	return limits, without, nil
}

// probe is what the engine found at the level that it would choose for the one asked.
func (m *Manager) probe(level berm.Level) berm.Probe {
	for _, p := range m.Engine.Probe(context.Background()) {
		if p.Usable && (level == p.Level || (level == berm.Auto || level == "") && !p.ByName) {
			return p
		}
	}
	return berm.Probe{Level: level} // which it refuses
}
