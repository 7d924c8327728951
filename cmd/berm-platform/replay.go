package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit/replay"
	"github.com/berm-sandbox/berm/internal/audit/replay/view"
	"github.com/berm-sandbox/berm/internal/audit/replay/web"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/terminal"
)

func newReplayCommand() *cobra.Command {
	var logs logFlags
	var only []string
	var from, html, cast string
	var speed float64
	cmd := logs.add(&cobra.Command{
		Use:   "replay [SANDBOX]",
		Short: "Show what happened in a sandbox, also after its end",
		Long: `Show what the audit log tells of a sandbox on one clock: the terminals of its commands, its
processes, files with what changed in them, connections with the verdict on each, and uses of
credentials. The keys are shown; ? lists all. Without SANDBOX it is the last berm run in this directory.

When the output is no terminal, an account of it is printed: what was run, what changed, what
was contacted, what was denied and why, and then all events in order. --html writes a page
that shows the same without a server, --json the events and the output, one object a line, --cast
a recording of each command's terminal for asciinema.

Output of commands is shown by a terminal that does nothing but show: no title, clipboard,
link or query of a program in the sandbox reaches yours.`,
		Example: `  berm replay
  berm replay i0abcdefghijklmnopqrs
  berm replay --from 2m30s --speed 4 i0abcdefghijklmnopqrs
  berm replay --only net,credential i0abcdefghijklmnopqrs | less
  berm replay --html session.html --log session.zip i0abcdefghijklmnopqrs
  berm replay --cast casts i0abcdefghijklmnopqrs
  berm replay --json i0abcdefghijklmnopqrs | jq 'select(.outcome == "denied")'`,
		Args:              cli.UsageArgs(cobra.MaximumNArgs(1)),
		ValidArgsFunction: completeFirstSandbox(),
	})
	flags := cmd.Flags()
	flags.StringSliceVar(&only, "only", nil, "only these lanes: "+strings.Join(replay.Lanes, ", "))
	flags.StringVar(&from, "from", "", "begin there: a time since the start (2m30s) or a time (2026-01-31 12:00)")
	flags.Float64Var(&speed, "speed", 1, "how many times as fast as it was")
	asJSON := flags.Bool("json", false, "print events and output, one JSON object a line")
	flags.StringVar(&html, "html", "", "write a page for a browser to this file (- for stdout)")
	flags.StringVar(&cast, "cast", "", "write what each command printed to N.cast in this `DIRECTORY`,\nas asciicast v2")
	completeFlag(cmd, "only", cobra.FixedCompletions(replay.Lanes, cobra.ShellCompDirectiveNoFileComp))
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		id, err := replayed(cmd, &logs, args)
		if err != nil {
			return err
		}
		for _, lane := range only {
			if !slices.Contains(replay.Lanes, lane) {
				return cli.UsageError{Err: berm.Errorf(berm.Invalid, "--only %q: the lanes are %s", lane, strings.Join(replay.Lanes, ", "))}
			}
		}
		if *asJSON && html != "" || cast != "" && (*asJSON || html != "" || len(only) > 0 || from != "") {
			return cli.UsageError{Err: berm.Errorf(berm.Invalid, "--json, --html and --cast are three forms of the output; a cast is of all that was printed, without --only and --from")}
		}
		if !(speed > 0 && speed <= 1000) {
			return cli.UsageError{Err: berm.Errorf(berm.Invalid, "--speed must be above 0 and at most 1000")}
		}
		t, done, err := logs.timeline(cmd, id)
		if err != nil {
			return quietOnInterrupt(cmd.Context(), err)
		}
		defer done()
		part := replay.Part{Lanes: only}
		if part.From, err = begin(from, t); err != nil {
			return err
		}
		out := cmd.OutOrStdout()
		switch {
		case *asJSON:
			return replay.Entries(t, part, func(e replay.Entry) error { return cli.PrintJSONLine(out, e) })
		case cast != "":
			return writeCasts(cmd, cast, t)
		case html == "-":
			return web.Write(out, t, part)
		case html != "":
			if err := writeWhole(html, func(w io.Writer) error { return web.Write(w, t, part) }); err != nil {
				return err
			}
			cli.Notice(cmd, "open %s in a browser", html)
			return nil
		case terminal.Is(out) && terminal.Is(cmd.InOrStdin()) && os.Getenv("TERM") != "dumb":
			return view.Run(cmd.Context(), t, view.Options{From: part.From, Speed: speed, Lanes: only})
		}
		return replay.Account(out, t, part, terminal.StyleFor(out))
	}
	return cmd
}

// replayed is the sandbox that is meant: that of the last berm run here, whose log is read then,
// when none is named.
func replayed(cmd *cobra.Command, logs *logFlags, args []string) (id berm.SandboxID, err error) {
	if len(args) > 0 {
		return sandboxID(args[0])
	}
	if logs.path != "" || cmd.Flags().Changed("context") {
		return "", cli.UsageError{Err: berm.Errorf(berm.Invalid, "SANDBOX is missing").
			WithHint("the last berm run in this directory is replayed without --log and --context; berm audit finds the ids in a log")}
	}
	logs.local = true
	if err := eachRun(func(run berm.SandboxID, _ *egress.Policy) { id = run }, func([]byte) {}); err != nil {
		return "", err
	}
	if id == "" {
		return "", berm.Errorf(berm.NotFound, "there was no berm run in this directory").
			WithHint("`berm audit --local` finds the ids of runs elsewhere, `berm ls` and `berm audit` those of a server's sandboxes")
	}
	return id, nil
}

// writeCasts writes an asciicast for each command whose output was kept.
func writeCasts(cmd *cobra.Command, dir string, t *replay.Timeline) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return berm.Errorf(berm.KindOf(err), "%w", err)
	}
	n := 0
	for _, c := range t.Commands {
		if !c.HasOutput() {
			continue
		}
		path := filepath.Join(dir, fmt.Sprintf("%d.cast", c.Number))
		if err := writeWhole(path, func(w io.Writer) error { return replay.Cast(w, t, c) }); err != nil {
			return err
		}
		n++
	}
	if n == 0 {
		return berm.Errorf(berm.NotFound, "no output of a command of sandbox %s was kept", t.Sandbox)
	}
	cli.Notice(cmd, "%d casts are in %s; what plays one lets the programs' output act on its terminal", n, dir)
	return nil
}

// begin is where a replay begins: after a time since the start, or at a time.
func begin(s string, t *replay.Timeline) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	var at time.Time
	if d, err := time.ParseDuration(s); err == nil {
		at = t.Start.Add(d)
	} else if at, err = moment("from", s, t.Start); err != nil {
		return time.Time{}, cli.UsageError{Err: fmt.Errorf("--from %q: it must be a time since the start such as 2m30s, or a time such as 2026-01-31 12:00", s)}
	}
	if at.After(t.End) {
		return time.Time{}, berm.Errorf(berm.Invalid, "--from %s is after the last record, which is at %s (%s)", s, t.Clock(t.End), t.End.Local().Format(time.DateTime))
	}
	return at, nil
}
