package control

import (
	"context"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/store"
)

// share is what a sandbox takes of what its team may have.
type share struct {
	team   berm.Team
	limits berm.Limits
	rests  bool // its disk is there already, and counts
}

// TeamOf says whose a sandbox is that lives or died a short time ago. NotFound when there is none.
func (m *Manager) TeamOf(ctx context.Context, id berm.SandboxID) (berm.Team, error) {
	if s, err := m.session(id); err == nil {
		return s.info.Team, nil // never changes
	}
	info, err := m.Inspect(ctx, id)
	return info.Team, err
}

// fitsTeam refuses a sandbox for which its team has no room. The caller holds m.mu.
func (m *Manager) fitsTeam(s share, most store.TeamLimits) error {
	for _, l := range []struct {
		name      string
		most, own float64
	}{
		{"cpu", most.CPU, s.limits.CPU}, {"memory", float64(most.Memory), float64(s.limits.Memory)}, {"disk", float64(most.Disk), float64(s.limits.Disk)},
	} {
		if l.most > 0 && l.own == 0 {
			return berm.Errorf(berm.Unsupported, "the %s of team %s is limited, and that of this sandbox is not", l.name, s.team).
				WithHint("give it a limit, where the host can enforce one: berm doctor, on that host, tells")
		}
	}
	if s.rests {
		s.limits.Disk = 0
	}
	has := m.takenBy(s.team)
	if most.Sandboxes > 0 && has.Sandboxes >= most.Sandboxes {
		return berm.Errorf(berm.Exhausted, "you have reached the maximum number of concurrent sandboxes (%d) of team %s", most.Sandboxes, s.team).
			WithHint("kill a sandbox; paused ones that keep their memory count")
	}
	for _, l := range []struct {
		name           string
		most, has, own float64
	}{
		{"cpu", most.CPU, has.CPU, s.limits.CPU},
		{"memory", float64(most.Memory), float64(has.Memory), float64(s.limits.Memory)},
		{"disk", float64(most.Disk), float64(has.Disk), float64(s.limits.Disk)},
	} {
		if l.most > 0 && l.has+l.own > l.most {
			return berm.Errorf(berm.Exhausted, "the sandboxes of team %s have %s of %s %s: there is no room for %s more",
				s.team, amount(l.name, l.has), amount(l.name, l.most), l.name, amount(l.name, l.own)).WithHint("kill a sandbox, or ask for less")
		}
	}
	return nil
}

// takenBy sums what the sandboxes of a team have. The caller holds m.mu.
func (m *Manager) takenBy(team berm.Team) (has store.TeamLimits) {
	add := func(l berm.Limits) {
		has.Sandboxes++
		has.CPU += l.CPU
		has.Memory += l.Memory
	}
	for _, s := range m.creating {
		if s.team == team {
			add(s.limits)
			if !s.rests {
				has.Disk += s.limits.Disk
			}
		}
	}
	for id, s := range m.sessions {
		if s.info.Team != team { // never changes
			continue
		}
		info := s.snapshot()
		has.Disk += info.Limits.Disk
		if _, waking := m.creating[id]; !waking && info.SavedAs == "" { // else it takes disk alone
			add(info.Limits)
		}
	}
	return has
}
