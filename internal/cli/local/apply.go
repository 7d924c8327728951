package local

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
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

	overwrite bool
}

func newApplyCommand() *cobra.Command {
	f := &applyFlags{}
	cmd := &cobra.Command{
		Use:   "apply [flags] [PATH...]",
		Short: "Bring what a session changed into the project",
		Long: `Bring what a session changed into the project: all of it, or the paths given.

A file that was changed in the project meanwhile is left alone, unless it is text and both
changes can be merged, or you name it with --overwrite. What the host, or a tool that you use
on the project, would execute or obey by itself is shown in red and left out, unless you agree
to it; so is the deletion of a repository or of most of the project. A .git is applied as a
whole or not at all. Each file is either as before or as after, also when berm or the machine
is stopped in between: the next apply says which.

What was applied cannot be taken back: look at berm diff before. The exit code is 1 when
something was left out, but for sockets, fifos and devices, which never come.`,
		Example: `  berm apply
  berm apply src README.md
  berm apply --dry-run
  berm apply --flagged .vscode       # also what editors, git or CI obey`,
	}
	cmd.Flags().StringVarP(&f.session, "session", "s", "", "the session (default: the newest of this directory)")
	_ = cmd.RegisterFlagCompletionFunc("session", completeSessions)
	cmd.Flags().BoolVar(&f.flagged, "flagged", false, "also what the host would execute or obey by itself, and large deletions")
	cmd.Flags().BoolVar(&f.overwrite, "overwrite", false, "take the session's side of the paths given where the project changed too")
	cmd.Flags().BoolVarP(&f.dryRun, "dry-run", "n", false, "say what would be done, and do nothing")
	cmd.Flags().BoolVar(&f.keep, "keep", false, "keep the session when nothing is left in it")
	f.json = cli.JSONFlag(cmd)
	cmd.RunE = f.run
	return cmd
}

func (f *applyFlags) run(cmd *cobra.Command, args []string) error {
	ctx := cmd.Context()
	if f.overwrite && len(args) == 0 {
		return cli.UsageError{Err: errors.New("--overwrite needs the paths to overwrite")}
	}
	w, err := openWork(cmd, f.session, true)
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
	changes, unread := w.changes(ctx)
	if unread != nil {
		if berm.KindOf(unread) != berm.Denied {
			return unread
		}
		cli.Notice(cmd, "what cannot be read is left out: %v", unread)
	}
	request := w.request(changes, paths)
	request.Base, request.Consent, request.Overwrite = w.base(cmd), f.flagged, f.overwrite
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
	if err := f.show(cmd, w.session.Name, results); err != nil {
		return err
	}
	if runErr != nil {
		return runErr
	}
	if !f.dryRun {
		if err := f.finish(ctx, cmd, w, results); err != nil {
			return err
		}
	}
	if leftOut(results) > 0 || unread != nil && len(paths) == 0 {
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
	return f.show(cmd, w.session.Name, results)
}

// finish gives up a session in which nothing is left that could ever be applied.
func (f *applyFlags) finish(ctx context.Context, cmd *cobra.Command, w *work, results []apply.Result) error {
	changes, unread := w.changes(ctx)
	if unread != nil && berm.KindOf(unread) != berm.Denied {
		return unread
	}
	skipped := map[string]bool{}
	for _, r := range results {
		skipped[r.Path] = r.Outcome == apply.Skipped
	}
	left := 0
	for _, c := range changes {
		if !skipped[c.Path] {
			left++
		}
	}
	text := "nothing is left in session %s of %s"
	switch {
	case left > 0 || unread != nil:
		text = "what was not applied is still in session %s of %s"
	case !f.keep:
		if err := w.session.Remove(ctx); err != nil {
			return err
		}
		text += ", which is gone"
	}
	if !*f.json {
		cli.Notice(cmd, text, w.session.Name, w.session.Project)
	}
	return nil
}

// line is what is told of one path, or once of all that share an outcome or went with their
// directory.
type line struct {
	apply.Result
	paths int
}

func lines(results []apply.Result) []line {
	alone := map[string]bool{}
	for _, r := range results {
		if r.Unit == "" {
			alone[r.Path] = true
		}
	}
	var list []line
	type key struct {
		unit    string
		outcome apply.Outcome
	}
	shared := map[key]int{}
	dir := -1 // the last directory that was deleted as a whole
	for _, r := range results {
		k := key{r.Unit, r.Outcome}
		i, told := shared[k]
		switch {
		case dir >= 0 && r.Deleted && r.Outcome == list[dir].Outcome && r.Reason == "" && strings.HasPrefix(r.Path, list[dir].Path+"/"):
			list[dir].paths++
		case r.Unit == "" && r.Deleted && r.Reason == "" && (r.Outcome == apply.Applied || r.Outcome == apply.Apply):
			dir = len(list)
			list = append(list, line{r, 1})
		case r.Unit == "":
			list = append(list, line{r, 1})
		case told:
			list[i].paths++
		case !alone[r.Unit]:
			shared[k] = len(list)
			r.Path, r.Deleted = r.Unit, false // the reason says what is deleted
			list = append(list, line{r, 1})
		}
	}
	return list
}

// verb is what is done, or was, in one word.
func (l line) verb() string {
	switch {
	case l.Deleted && l.Outcome == apply.Applied:
		return "deleted"
	case l.Deleted && l.Outcome == apply.Apply:
		return "delete"
	}
	return string(l.Outcome)
}

func (l line) text() string {
	text := change.Quote(l.Path)
	if l.Path == "." {
		text = "the project"
	}
	reason := l.Reason
	if l.Deleted && l.Outcome == apply.Flagged {
		reason = deleted + reason
	}
	if reason != "" {
		text += "  " + terminal.Escape(reason)
	}
	if l.paths > 1 {
		text += fmt.Sprintf(" (%d paths)", l.paths)
	}
	return text
}

// agree asks whether what is dangerous is to be applied too.
func agree(in io.Reader, out io.Writer, results []apply.Result) (bool, error) {
	style := terminal.StyleFor(out)
	_, _ = fmt.Fprintln(out, style.Bad("This machine, or a tool that you use on the project, would obey these by itself, or much is deleted:"))
	for _, l := range lines(results) {
		if l.Outcome == apply.Flagged {
			_, _ = fmt.Fprintln(out, " ", style.Bad(l.text()))
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
func (f *applyFlags) show(cmd *cobra.Command, session string, results []apply.Result) error {
	out := cmd.OutOrStdout()
	style := terminal.StyleFor(out)
	if *f.json {
		for _, r := range results {
			object := map[string]any{"path": r.Path, "outcome": r.Outcome, "deleted": r.Deleted}
			for name, text := range map[string]string{"reason": r.Reason, "unit": r.Unit} {
				if text != "" {
					object[name] = text
				}
			}
			if err := cli.PrintJSONLine(out, object); err != nil {
				return err
			}
		}
		return nil
	}
	for _, l := range lines(results) {
		text := fmt.Sprintf("%-11s %s", l.verb(), l.text())
		switch l.Outcome {
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
	if len(results) == 0 {
		cli.Notice(cmd, "there is nothing to apply")
	}
	style = terminal.StyleFor(cmd.ErrOrStderr())
	for _, hint := range hints(session, results) {
		_, _ = fmt.Fprintln(cmd.ErrOrStderr(), style.Dim("hint:"), terminal.Escape(hint))
	}
	return nil
}

// hints are the ways on from what was left out, each once.
func hints(session string, results []apply.Result) []string {
	var list []string
	if count(results, apply.Flagged) > 0 {
		path := "PATH"
		if !slices.ContainsFunc(results, func(r apply.Result) bool { return r.Outcome == apply.Flagged && r.Unit != "." }) {
			path = "."
		}
		list = append(list, fmt.Sprintf("look at them with berm diff; berm apply --flagged %s takes them", path))
	}
	file, repo := false, ""
	for _, r := range results {
		switch {
		case r.Outcome != apply.Conflict:
		case r.Unit == "":
			file = true
		case repo == "" && !slices.ContainsFunc(results, func(h apply.Result) bool { return h.Deleted && h.Path == r.Unit+"/HEAD" }):
			repo = r.Unit
		}
	}
	if file {
		list = append(list, fmt.Sprintf("to keep the project's side, do nothing; berm apply -s %s --overwrite PATH takes the session's; berm diff -s %s PATH shows the difference, to bring it over by hand", session, session))
	}
	if repo != "" {
		dir := path.Dir(repo)
		list = append(list, fmt.Sprintf("to fetch the session's commits: berm run -s %s -- git -C %s bundle create session.bundle --all; berm apply -s %s %s; git -C %s fetch session.bundle",
			session, change.Quote(dir), session, change.Quote(path.Join(dir, "session.bundle")), change.Quote(dir)))
	}
	return list
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

// leftOut counts what somebody wanted in the project and is not there. What never comes does
// not count.
func leftOut(results []apply.Result) int {
	n := 0
	for _, r := range results {
		switch r.Outcome {
		case apply.Conflict, apply.Flagged, apply.Failed, apply.NotApplied, apply.Unclear:
			n++
		}
	}
	return n
}
