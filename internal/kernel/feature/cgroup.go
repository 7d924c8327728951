package feature

import (
	"context"
	"errors"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/kernel/cgroup"
)

const delegateFix = "run as root, or in a scope that systemd delegates: systemd-run --user --scope -p Delegate=yes berm …"

// Cgroups is making control groups.
func Cgroups(c cgroup.Config) *Test {
	return &Test{
		Name: "control groups", Fix: delegateFix,
		try: func(ctx context.Context) (string, error) {
			m, err := withGroup(c, func(*cgroup.Group) error { return nil })
			if err != nil {
				return "", err
			}
			return m.String(), nil
		},
	}
}

// Limit is one controller: "memory", "cpu", "pids", "io" or "freezer".
func Limit(c cgroup.Config, controller string) *Test {
	return &Test{
		Name: "control group " + controller, Fix: delegateFix,
		try: func(ctx context.Context) (string, error) {
			m, err := withGroup(c, func(*cgroup.Group) error { return nil })
			if err != nil {
				return "", err
			}
			if !slices.Contains(m.Controllers(), controller) {
				return "", berm.Errorf(berm.Unsupported, "%s", m.Missing()[controller])
			}
			return string(m.Layout()), nil
		},
	}
}

// CgroupKill is ending a group at one stroke.
func CgroupKill(c cgroup.Config) *Test {
	return &Test{
		Name: "cgroup.kill", MinVersion: "5.14", Fix: "use a newer kernel and cgroup v2",
		try: func(ctx context.Context) (string, error) {
			_, err := withGroup(c, func(g *cgroup.Group) error {
				for _, dir := range g.Dirs() {
					if unix.Access(filepath.Join(dir, "cgroup.kill"), unix.W_OK) == nil {
						return nil
					}
				}
				return berm.Errorf(berm.Unsupported, "no group has the file; processes are frozen and killed one by one")
			})
			return "", err
		},
	}
}

// withGroup makes a group, gives it to try, and takes it away again.
func withGroup(c cgroup.Config, try func(*cgroup.Group) error) (*cgroup.Manager, error) {
	m, err := cgroup.New(c)
	if err != nil {
		return nil, err
	}
	if len(m.Controllers()) == 0 {
		return nil, berm.Errorf(berm.Unsupported, "layout %s: %v", m.Layout(), m.Missing()["memory"])
	}
	defer func() { _ = m.Close() }() // removes what is empty
	g, err := m.Create("probe-"+string(berm.NewSandboxID()), berm.Limits{})
	if err != nil {
		return nil, err
	}
	err = try(g)
	return m, errors.Join(err, g.Remove(context.Background()))
}
