package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/driver/gvisor"
	"github.com/berm-sandbox/berm/internal/driver/namespace"
	"github.com/berm-sandbox/berm/internal/embedded"
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
		Args: cli.UsageArgs(cobra.NoArgs),
	}
	asJSON := cli.JSONFlag(cmd)
	fixes := cmd.Flags().Bool("fix-hints", false, "say how to get what is missing but not required, too")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		probes, err := probe(cmd.Context())
		if err != nil {
			return err
		}
		out := cmd.OutOrStdout()
		if *asJSON {
			if err := cli.PrintJSON(out, append([]berm.Probe{}, probes...)); err != nil {
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
			return cli.ExitError(1)
		}
		return errors.New("the namespace level cannot be used here")
	}
	return cmd
}

func printProbes(w io.Writer, probes []berm.Probe, fixes bool) error {
	style := terminal.StyleFor(w)
	var out strings.Builder
	unsaid := false
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
					detail = join(detail, "in Linux since "+f.MinVersion)
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
			switch {
			case f.Found || f.Fix == "":
			case f.Required || fixes:
				line("           fix: %s", terminal.Escape(f.Fix))
			default:
				unsaid = true
			}
		}
	}
	if unsaid {
		line("\n%s", style.Dim("berm doctor --fix-hints says how to get what is absent."))
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

// probeHost asks the level about this host, and this build about the level: a build
// without the helper programs has all that it needs of the host and still can do
// nothing.
func probeHost(ctx context.Context) ([]berm.Probe, error) {
	p := namespace.Probe(ctx, namespace.Config{Data: existing(defaultData())})
	helpers := berm.Feature{Name: "helper programs", Found: true, Required: true}
	for _, name := range []string{embedded.Monitor, embedded.Init, embedded.Guest} {
		if _, err := embedded.Binary(name); err != nil {
			helpers.Found, helpers.Detail, helpers.Fix = false, err.Error(), berm.HintOf(err)
			p.Usable = false
		}
	}
	p.Features = append(p.Features, helpers)
	second := gvisor.Probe(ctx, p, gvisor.Config{Runsc: os.Getenv("BERM_RUNSC"), Platform: os.Getenv("BERM_GVISOR_PLATFORM")})
	return []berm.Probe{p, second}, nil
}

// existing is a directory, or its nearest parent that exists: what matters is the file
// system.
func existing(dir string) string {
	for {
		if _, err := os.Stat(dir); err == nil || dir == filepath.Dir(dir) {
			return dir
		}
		dir = filepath.Dir(dir)
	}
}
