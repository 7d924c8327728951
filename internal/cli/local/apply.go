package local

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/local"
	"github.com/berm-sandbox/berm/internal/local/apply"
	"github.com/berm-sandbox/berm/internal/local/change"
	"github.com/berm-sandbox/berm/internal/terminal"
)

type applyFlags struct {
	session string
	flagged bool
	dryRun  bool
	keep    bool
	json    *bool
}

func newApplyCommand() *cobra.Command {
	f := &applyFlags{}
	cmd := &cobra.Command{
		Use:   "apply [flags] [PATH...]",
		Short: "Bring what a session changed into the project",
		Long: `Bring what a session changed into the project: all of it, or the paths given.

A file that was changed in the project meanwhile is left alone, unless it is text and both
changes can be merged. What the host, or a tool that you use on the project, would execute
or obey by itself is shown in red and left out, unless you agree to it. Each file is either
as before or as after, also when berm or the machine is stopped in between: the next apply
says which.

The exit code is 1 when something was left out.`,
		Example: `  berm apply
  berm apply src README.md
  berm apply --dry-run
  berm apply --flagged .vscode       # also what editors, git or CI obey`,
	}
	cmd.Flags().StringVarP(&f.session, "session", "s", "", "the session (default: the newest of this directory)")
	_ = cmd.RegisterFlagCompletionFunc("session", completeSessions)
	cmd.Flags().BoolVar(&f.flagged, "flagged", false, "also what the host would execute or obey by itself")
	cmd.Flags().BoolVarP(&f.dryRun, "dry-run", "n", false, "say what would be done, and do nothing")
	cmd.Flags().BoolVar(&f.keep, "keep", false, "keep the session when nothing is left in it")
	f.json = cli.JSONFlag(cmd)
	cmd.RunE = f.run
	return cmd
}

func (f *applyFlags) run(cmd *cobra.Command, args []string) error {
	ctx := cmd.Context()
	w, err := openWork(f.session, true)
	if err != nil {
		return err
	}
	defer w.close()
	paths, err := inProject(w.session.Project, args)
	if err != nil {
		return err
	}
	if err := f.recover(ctx, cmd, w); err != nil {
		return err
	}
	changes, err := w.changes(ctx)
	if err != nil {
		return err
	}
	request := apply.Request{
		Dir: w.session.Dir(), Upper: w.upper, Project: w.project, Started: w.session.Created, Recorded: w.session.Used(),
		Changes: changes, Paths: paths, Consent: f.flagged,
	}
	if base, err := w.session.Base(); err == nil {
		defer base.Close()
		request.Base = base
	} else if berm.KindOf(err) != berm.NotFound {
		cli.Notice(cmd, "changes outside are judged by time alone: %v", err)
	}
	p, err := apply.New(ctx, request)
	if err != nil {
		return err
	}
	defer func() { p.Close() }()
	results := p.Results()
	if dangerous := count(results, apply.Flagged); dangerous > 0 && !f.flagged && !f.dryRun && !*f.json && terminal.Is(cmd.InOrStdin()) && terminal.Is(cmd.ErrOrStderr()) {
		agreed, err := agree(cmd.InOrStdin(), cmd.ErrOrStderr(), results)
		if err != nil {
			return err
		}
		if agreed {
			p.Close()
			request.Consent = true
			if p, err = apply.New(ctx, request); err != nil {
				return err
			}
			results = p.Results()
		}
	}
	var runErr error
	if !f.dryRun {
		results, runErr = p.Run(ctx)
	}
	if runErr != nil && results == nil {
		return runErr // nothing was done
	}
	if err := f.show(cmd, results); err != nil {
		return err
	}
	if runErr != nil {
		return runErr
	}
	if !f.dryRun {
		if err := f.finish(ctx, cmd, w); err != nil {
			return err
		}
	}
	if left := leftOut(results); left > 0 {
		return cli.ExitError(1)
	}
	return nil
}

// recover settles an apply that was stopped in the middle.
func (f *applyFlags) recover(ctx context.Context, cmd *cobra.Command, w *work) error {
	if f.dryRun {
		return nil
	}
	results, err := local.Settle(ctx, w.session)
	if err != nil || results == nil {
		return err
	}
	cli.Notice(cmd, "an earlier apply was stopped in the middle; this is how far it came:")
	return f.show(cmd, results)
}

// finish gives up a session in which nothing is left.
func (f *applyFlags) finish(ctx context.Context, cmd *cobra.Command, w *work) error {
	left, err := w.changes(ctx)
	if err != nil || len(left) > 0 || f.keep {
		return err
	}
	if err := w.session.Remove(ctx); err != nil {
		return err
	}
	if !*f.json {
		cli.Notice(cmd, "nothing is left in session %s, which is gone", w.session.Name)
	}
	return nil
}

// agree asks whether what is dangerous is to be applied too.
func agree(in io.Reader, out io.Writer, results []apply.Result) (bool, error) {
	style := terminal.StyleFor(out)
	_, _ = fmt.Fprintln(out, style.Bad("This machine, or a tool that you use on the project, would obey these by itself:"))
	for _, r := range results {
		if r.Outcome == apply.Flagged {
			_, _ = fmt.Fprintf(out, "  %s  %s\n", style.Bad(change.Quote(r.Path)), terminal.Escape(r.Reason))
		}
	}
	_, _ = fmt.Fprint(out, "Apply these too? [y/N] ")
	answer, err := bufio.NewReader(io.LimitReader(in, 64)).ReadString('\n')
	if err != nil && err != io.EOF {
		return false, berm.Errorf(berm.Internal, "read the answer: %w", err)
	}
	switch strings.ToLower(strings.TrimSpace(answer)) {
	case "y", "yes":
		return true, nil
	}
	return false, nil
}

// show prints what became of each path, but for those of which there is nothing to say.
func (f *applyFlags) show(cmd *cobra.Command, results []apply.Result) error {
	out := cmd.OutOrStdout()
	style := terminal.StyleFor(out)
	sums := map[apply.Outcome]int{}
	for _, r := range results {
		sums[r.Outcome]++
		if *f.json {
			object := map[string]any{"path": r.Path, "outcome": r.Outcome}
			if r.Reason != "" {
				object["reason"] = r.Reason
			}
			if err := cli.PrintJSONLine(out, object); err != nil {
				return err
			}
			continue
		}
		text := fmt.Sprintf("%-11s %s", r.Outcome, change.Quote(r.Path))
		if r.Reason != "" {
			text += "  " + terminal.Escape(r.Reason)
		}
		switch r.Outcome {
		case apply.Same:
			continue
		case apply.Conflict, apply.Flagged, apply.Failed, apply.Unclear, apply.NotApplied:
			text = style.Bad(text)
		case apply.Skipped:
			text = style.Dim(text)
		}
		if _, err := fmt.Fprintln(out, text); err != nil {
			return err
		}
	}
	if *f.json {
		return nil
	}
	if len(results) == 0 {
		cli.Notice(cmd, "there is nothing to apply")
		return nil
	}
	if sums[apply.Flagged] > 0 && !f.flagged {
		_, _ = fmt.Fprintln(cmd.ErrOrStderr(), style.Dim("hint:"), "look at them with berm diff; berm apply --flagged PATH takes them")
	}
	return nil
}

func count(results []apply.Result, outcome apply.Outcome) int {
	n := 0
	for _, r := range results {
		if r.Outcome == outcome {
			n++
		}
	}
	return n
}

// leftOut counts what somebody wanted in the project and is not there.
func leftOut(results []apply.Result) int {
	n := 0
	for _, r := range results {
		switch r.Outcome {
		case apply.Conflict, apply.Flagged, apply.Skipped, apply.Failed, apply.NotApplied, apply.Unclear:
			n++
		}
	}
	return n
}
