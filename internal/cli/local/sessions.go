package local

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/local"
	"github.com/berm-sandbox/berm/internal/local/apply"
	"github.com/berm-sandbox/berm/internal/local/session"
	"github.com/berm-sandbox/berm/internal/terminal"
)

func newSessionsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "sessions",
		Aliases: []string{"session"},
		Short:   "List the sessions whose changes wait for a decision",
		Long:    "List the sessions of all projects: what ran in them last, and whether it still runs.",
		Example: `  berm sessions
  berm sessions --json | jq -r 'select(.state == "changed").session'`,
		Args: cli.UsageArgs(cobra.NoArgs),
	}
	asJSON := cli.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		store, err := openStore()
		if err != nil {
			return err
		}
		defer store.Close()
		list, err := store.List()
		if err != nil {
			return err
		}
		out := cmd.OutOrStdout()
		table := terminal.NewTable(terminal.StyleFor(out), "SESSION", "PROJECT", "STATE", "RUNS", "LAST", "COMMAND")
		for _, s := range list {
			state := stateOf(s)
			last := session.Run{}
			if len(s.Runs) > 0 {
				last = s.Runs[len(s.Runs)-1]
			}
			if *asJSON {
				object := map[string]any{"session": s.Name, "project": s.Project, "state": state, "created": s.Created, "preset": s.Preset, "runs": s.Runs}
				if s.Broken != nil {
					object["error"] = s.Broken.Error()
				}
				if err := cli.PrintJSONLine(out, object); err != nil {
					return err
				}
				continue
			}
			used := "?"
			if s.Broken == nil {
				used = cli.Span(time.Since(s.Used())) + " ago"
			}
			table.Row(s.Name, s.Project, state, fmt.Sprint(len(s.Runs)), used, strings.Join(last.Argv, " "))
		}
		if *asJSON {
			return nil
		}
		if len(list) == 0 {
			cli.Notice(cmd, "there are no sessions: no berm run left changes")
			return nil
		}
		return table.Write(out)
	}
	return cmd
}

// The states of a session.
const (
	stateBroken      = "broken"
	stateRunning     = "running"
	stateInterrupted = "apply stopped" // an apply did not come to its end
	stateChanged     = "changed"
	stateEmpty       = "unchanged"
)

func stateOf(s *session.Session) string {
	if s.Broken != nil {
		return stateBroken
	}
	if s.Running() {
		return stateRunning
	}
	if apply.Interrupted(s.Dir()) {
		return stateInterrupted
	}
	if changed, err := s.Changed(); err == nil && !changed {
		return stateEmpty
	}
	return stateChanged
}

func newDiscardCommand() *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "discard [SESSION...]",
		Short: "Give up what a session changed",
		Long:  "Give up what sessions changed, with their checkpoints. The project is not touched.",
		Example: `  berm discard                 # the newest session of this directory
  berm discard shop-1 shop-2
  berm discard --all           # of all projects`,
		ValidArgsFunction: completeSessions,
	}
	name := sessionFlag(cmd, "the session (default: the newest of this directory)")
	cmd.Flags().BoolVar(&all, "all", false, "all sessions that do not run")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if all && (len(args) > 0 || *name != "") {
			return cli.UsageError{Err: errors.New("--all and names of sessions exclude each other")}
		}
		if *name != "" {
			args = append(args, *name)
		}
		store, err := openStore()
		if err != nil {
			return err
		}
		defer store.Close()
		switch {
		case all:
			list, err := store.List()
			if err != nil {
				return err
			}
			for _, s := range list {
				if !s.Running() {
					args = append(args, s.Name)
				}
			}
		case len(args) == 0:
			s, err := choose(cmd, store, "")
			if err != nil {
				return err
			}
			args = []string{s.Name}
		}
		var errs []error
		for _, name := range args {
			if err := discard(cmd, store, name); err != nil {
				errs = append(errs, err)
				continue
			}
			if _, err := fmt.Fprintln(cmd.OutOrStdout(), name); err != nil {
				return err
			}
		}
		return errors.Join(errs...)
	}
	return cmd
}

// discard gives a session up. What an apply that was stopped left in the project goes with it.
func discard(cmd *cobra.Command, store *session.Store, name string) error {
	ctx := cmd.Context()
	s, err := store.Get(name)
	if err != nil || s.Broken != nil || s.Lock() != nil {
		return store.Remove(ctx, name) // which says why it cannot
	}
	defer s.Unlock()
	switch _, err := local.Settle(ctx, s); {
	case err == nil, berm.KindOf(err) == berm.NotFound: // the project may be gone
	case ctx.Err() != nil, berm.KindOf(err) == berm.Conflict: // until another apply to the project has ended
		return err
	default: // which must not keep the session for ever
		cli.Notice(cmd, "temporary files of an apply that was stopped may be left in %s: %v", s.Project, err)
	}
	return s.Remove(ctx)
}

func newUndoCommand() *cobra.Command {
	var list bool
	var to int
	cmd := &cobra.Command{
		Use:   "undo [flags]",
		Short: "Make a session's workspace what it was before its last command",
		Long: `Make a session's workspace what it was before its last command, of which --checkpoint
kept a copy; before its first one it was the project, which needs no copy. With --git it
becomes a commit of the project instead; files that git does not know are as in the project
then, and what is not committed there is not in it. The project is not touched, and what the
workspace was is a checkpoint itself: undo can be undone. What was applied is in the project,
and undo does not take it back.`,
		Example: `  berm undo
  berm undo --list
  berm undo --to 3
  berm undo --git              # as the last commit
  berm undo --git=v1.2`,
		Args: cli.UsageArgs(cobra.NoArgs),
	}
	name := sessionFlag(cmd, "the session (default: the newest of this directory)")
	cmd.Flags().BoolVar(&list, "list", false, "list the checkpoints")
	cmd.Flags().IntVar(&to, "to", 0, "the `NUMBER` of a checkpoint (default: the newest)")
	cmd.Flags().String("git", "", "make it this `COMMIT` of the project")
	cmd.Flags().Lookup("git").NoOptDefVal = "HEAD"
	asJSON := cli.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		w, err := openWork(cmd, *name, !list)
		if err != nil {
			return err
		}
		defer w.close()
		if !list {
			if _, err := local.Settle(cmd.Context(), w.session); err != nil {
				return err
			}
		}
		checkpoints, err := w.session.Checkpoints()
		if err != nil {
			return err
		}
		if list {
			return listCheckpoints(cmd, w.session, checkpoints, *asJSON)
		}
		if commit := cmd.Flags().Lookup("git"); commit.Changed {
			return undoToCommit(cmd, w, commit.Value.String())
		}
		if to == 0 {
			if undoesFirst(w.session, checkpoints) {
				return undoFirst(cmd, w, *asJSON)
			}
			if len(checkpoints) == 0 {
				return berm.Errorf(berm.NotFound, "session %s has no checkpoints", w.session.Name).
					WithHint("berm run --checkpoint makes one before each command; berm discard gives up all changes")
			}
			to = checkpoints[len(checkpoints)-1].N
		}
		before, err := w.session.Restore(cmd.Context(), to, keepCheckpoints)
		if err != nil {
			return err
		}
		if *asJSON {
			return cli.PrintJSON(cmd.OutOrStdout(), map[string]any{"session": w.session.Name, "restored": to, "before": before.N})
		}
		cli.Notice(cmd, "session %s is as at checkpoint %d; what it was is checkpoint %d", w.session.Name, to, before.N)
		hintUndone(cmd, before.N)
		return nil
	}
	return cmd
}

// undoesFirst says whether the session is undone without a checkpoint: before its first command it
// was the project.
func undoesFirst(s *session.Session, checkpoints []session.Checkpoint) bool {
	return len(checkpoints) == 0 && len(s.Runs) <= 1
}

// undoFirst takes back all that the first command of a session did.
func undoFirst(cmd *cobra.Command, w *work, asJSON bool) error {
	ctx := context.WithoutCancel(cmd.Context())
	before, err := w.session.Checkpoint(ctx, "before going back to the project", keepCheckpoints)
	if err != nil {
		return err
	}
	if err := w.session.Empty(ctx); err != nil {
		return err
	}
	if asJSON {
		return cli.PrintJSON(cmd.OutOrStdout(), map[string]any{"session": w.session.Name, "restored": 0, "before": before.N})
	}
	cli.Notice(cmd, "session %s is as before its first command; what it was is checkpoint %d", w.session.Name, before.N)
	hintUndone(cmd, before.N)
	return nil
}

// hintUndone tells how an undo is taken back.
func hintUndone(cmd *cobra.Command, checkpoint int) {
	_, _ = fmt.Fprintln(cmd.ErrOrStderr(), terminal.StyleFor(cmd.ErrOrStderr()).Dim("hint:"), fmt.Sprintf("berm undo --to %d takes this back", checkpoint))
}

func listCheckpoints(cmd *cobra.Command, s *session.Session, checkpoints []session.Checkpoint, asJSON bool) error {
	out := cmd.OutOrStdout()
	table := terminal.NewTable(terminal.StyleFor(out), "NUMBER", "MADE", "ENTRIES", "HOW", "BEFORE")
	for _, c := range checkpoints {
		if asJSON {
			if err := cli.PrintJSONLine(out, map[string]any{"number": c.N, "time": c.Time, "entries": c.Entries, "how": c.How, "before": c.Reason}); err != nil {
				return err
			}
			continue
		}
		table.Row(fmt.Sprint(c.N), cli.Span(time.Since(c.Time))+" ago", fmt.Sprint(c.Entries), c.How, c.Reason)
	}
	if asJSON {
		return nil
	}
	if len(checkpoints) == 0 {
		text := "session %s has no checkpoints"
		if undoesFirst(s, checkpoints) {
			text += "; undo takes its only command back all the same"
		}
		cli.Notice(cmd, text, s.Name)
		return nil
	}
	return table.Write(out)
}
