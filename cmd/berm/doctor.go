package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/kernel/cgroup"
	"github.com/berm-sandbox/berm/internal/kernel/feature"
	"github.com/berm-sandbox/berm/internal/terminal"
)

func newDoctorCommand(probe func(context.Context) ([]berm.Probe, error)) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say what this host can isolate, and what is missing",
		Long: `Say which isolation levels this host can give, with each feature of the kernel and
of the system found or missing, the first kernel that has it, and how to get it. It
looks at this machine, as the user who runs it; a server may run as another one.

The exit code is 0 when the namespace level is usable, else 1.`,
		Example: `  berm doctor
  sudo berm doctor --fix-hints
  berm doctor --json | jq '.[].features[] | select(.found | not)'`,
		Args: usageArgs(cobra.NoArgs),
	}
	asJSON := jsonFlag(cmd)
	fixes := cmd.Flags().Bool("fix-hints", false, "say how to get what is missing but not required, too")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		probes, err := probe(cmd.Context())
		if err != nil {
			return err
		}
		out := cmd.OutOrStdout()
		if *asJSON {
			if err := printJSON(out, append([]berm.Probe{}, probes...)); err != nil {
				return err
			}
		} else if err := printProbes(out, probes, *fixes); err != nil {
			return err
		}
		for _, p := range probes {
			if p.Level == berm.Namespace && p.Usable {
				return nil
			}
		}
		if *asJSON {
			return exitError(1)
		}
		return errors.New("the namespace level cannot be used here")
	}
	return cmd
}

func printProbes(w io.Writer, probes []berm.Probe, fixes bool) error {
	style := terminal.StyleFor(w)
	var out strings.Builder
	line := func(format string, args ...any) { out.WriteString(fmt.Sprintf(format, args...) + "\n") }
	for i, p := range probes {
		usable := style.Good("usable")
		if !p.Usable {
			usable = style.Bad("not usable")
		}
		if i > 0 {
			line("")
		}
		line("%s  %s", style.Bold("Level "+terminal.Escape(string(p.Level))), usable)
		widest := 0
		for _, f := range p.Features {
			widest = max(widest, terminal.Width(terminal.Escape(f.Name)))
		}
		for _, f := range p.Features {
			mark, detail := style.Good("ok     "), f.Detail
			if !f.Found {
				mark = style.Bad("missing")
				if !f.Required {
					mark = style.Dim("absent ")
				}
				if f.MinVersion != "" {
					detail = join(detail, "needs Linux "+f.MinVersion)
				}
				if f.Required {
					detail = join(detail, "required")
				}
			}
			name := terminal.Escape(f.Name)
			if detail != "" {
				detail = fmt.Sprintf("%*s%s", widest-terminal.Width(name)+2, "", terminal.Escape(detail))
			}
			line("  %s  %s%s", mark, name, detail)
			if !f.Found && f.Fix != "" && (f.Required || fixes) {
				line("           fix: %s", terminal.Escape(f.Fix))
			}
		}
	}
	_, err := io.WriteString(w, out.String())
	return err
}

// join puts two remarks into one.
func join(a, b string) string {
	if a == "" {
		return b
	}
	return a + "; " + b
}

// probeHost asks the drivers and tries the features that they build on. The drivers
// get a data directory of their own: one of a server might be in use, or might not be
// theirs to write.
func probeHost(ctx context.Context) ([]berm.Probe, error) {
	data, err := os.MkdirTemp("", "berm-doctor-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(data)
	var probes []berm.Probe
	all, err := drivers(data)
	if err != nil {
		cause := berm.Feature{Name: "driver", Required: true, Detail: err.Error(), Fix: berm.HintOf(err)}
		probes = []berm.Probe{{Level: berm.Namespace, Features: []berm.Feature{cause}}}
	}
	for _, d := range all {
		probes = append(probes, d.Probe(ctx))
	}
	for i := range probes {
		if probes[i].Level == berm.Namespace {
			addFeatures(ctx, &probes[i], namespaceNeeds(existing(defaultData())))
		}
	}
	return probes, nil
}

// need is a feature that a level can use.
type need struct {
	test     *feature.Test
	required bool
}

// namespaceNeeds lists what the namespace level can use, for data below dir.
func namespaceNeeds(dir string) []need {
	root := os.Geteuid() == 0
	groups := cgroup.Config{}
	return []need{
		{feature.Kernel, true},
		{feature.UserNamespaces, true},
		{feature.UnprivilegedUserNamespaces, !root},
		{feature.SubordinateIDs, false},
		{feature.AllNamespaces, true},
		{feature.MountAPI, true},
		{feature.Overlay, true},
		{feature.IDMappedMounts(dir), root},
		{feature.Seccomp, true},
		{feature.Landlock, false},
		{feature.Pidfd, true},
		{feature.MemfdExec, true},
		{feature.Cgroups(groups), false},
		{feature.Limit(groups, "memory"), false},
		{feature.Limit(groups, "cpu"), false},
		{feature.Limit(groups, "pids"), false},
		{feature.Limit(groups, "io"), false},
		{feature.Limit(groups, "freezer"), false},
		{feature.CgroupKill(groups), false},
		{feature.LoopDevices, false},
		{feature.DiskLimit, false},
		{feature.TmpfsAttributes, false},
		{feature.Reflink(dir), false},
		{feature.RaiseLimits, false},
		{feature.SecurityModules, false},
	}
}

// addFeatures tries what a driver has not told of itself. A required feature that is
// missing makes the level unusable.
func addFeatures(ctx context.Context, p *berm.Probe, needs []need) {
	for _, n := range needs {
		told := func(f berm.Feature) bool { return f.Name == n.test.Name }
		if slices.ContainsFunc(p.Features, told) {
			continue
		}
		f := n.test.Probe(ctx)
		f.Required = n.required
		p.Features = append(p.Features, f)
		p.Usable = p.Usable && (f.Found || !f.Required)
	}
}

// existing is a directory, or its nearest parent that exists.
func existing(dir string) string {
	for {
		if _, err := os.Stat(dir); err == nil || dir == filepath.Dir(dir) {
			return dir
		}
		dir = filepath.Dir(dir)
	}
}
