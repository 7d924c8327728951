package local

import (
	"cmp"
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/local"
	"github.com/berm-sandbox/berm/internal/local/change"
	"github.com/berm-sandbox/berm/internal/local/preset"
	"github.com/berm-sandbox/berm/internal/local/session"
)

const keepCheckpoints = local.KeepCheckpoints

// What these run, they run inside the sandbox, on a view of the project without the session's
// changes: neither the project's hooks nor a repository that an agent broke concern the host.
// What git does not know there is the user's own, so nothing is cleaned.
var (
	findCommit = []string{"git", "rev-parse", "--verify", "--quiet", "--end-of-options"}
	toCommit   = []string{"git", "reset", "--quiet", "--hard"}
)

// undoToCommit makes a session's workspace a commit of the project.
func undoToCommit(cmd *cobra.Command, w *work, commit string) error {
	ctx := context.WithoutCancel(cmd.Context())
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return berm.Errorf(berm.Internal, "%w", err)
	}
	defer null.Close()
	name, project := w.session.Name, w.session.Project
	id, err := commitID(ctx, project, commit, null)
	if err != nil {
		return err
	}
	before, err := w.session.Checkpoint(ctx, "undo --git="+commit, keepCheckpoints)
	if err != nil {
		return err
	}
	if err := w.session.Empty(ctx); err != nil {
		return err
	}
	w.session.Unlock() // Do locks it
	result, err := local.Do(ctx, &local.Task{
		Argv: append(toCommit, id), Dir: project, Session: name, Preset: "default",
		Environ: os.Environ(), Streams: [3]*os.File{null, os.Stderr, os.Stderr}, Notice: func(string) {},
	})
	if err == nil && result.ExitCode != 0 {
		err = berm.Errorf(berm.Invalid, "git could not make it %s", commit)
	}
	if lockErr := w.session.Lock(); lockErr != nil {
		return cmp.Or(err, lockErr)
	}
	if err != nil {
		failed, undoErr := w.session.Restore(ctx, before.N, keepCheckpoints)
		if undoErr != nil {
			return undoErr
		}
		return errors.Join(err, w.session.RemoveCheckpoints(ctx, failed.N, before.N))
	}
	// The list of sessions tells what somebody ran, and nobody ran this.
	w.session.Runs[len(w.session.Runs)-1].Argv = []string{"berm", "undo", "--git=" + commit}
	if err := w.session.Save(); err != nil {
		return err
	}
	cli.Notice(cmd, "session %s is as commit %s; what it was is checkpoint %d", name, commit, before.N)
	hintUndone(cmd, before.N)
	if differsFromProject(ctx, w.session) {
		cli.Notice(cmd, "the project differs from that commit: berm apply would bring the commit over it, and over what is not committed there; look at berm diff")
	}
	return nil
}

// differsFromProject says whether a session has changes outside of the repository.
func differsFromProject(ctx context.Context, s *session.Session) bool {
	upper, err := s.OpenUpper() // another one than before
	if err != nil {
		return false
	}
	defer upper.Close()
	project, err := s.OpenProject()
	if err != nil {
		return false
	}
	defer project.Close()
	changes, _ := change.List(ctx, upper, project, change.Limits{})
	return slices.ContainsFunc(changes, func(c change.Change) bool { return !strings.HasPrefix(c.Path, ".git/") })
}

// commitID finds the name of a commit's object in a project.
func commitID(ctx context.Context, project, commit string, null *os.File) (string, error) {
	read, write, err := os.Pipe()
	if err != nil {
		return "", berm.Errorf(berm.Internal, "%w", err)
	}
	defer read.Close()
	result, err := local.Do(ctx, &local.Task{
		Argv: append(findCommit, commit+"^{commit}"), Dir: project, Preset: "default", Rights: preset.Rights{ReadOnly: []string{"."}},
		Environ: os.Environ(), Streams: [3]*os.File{null, write, null}, Notice: func(string) {},
	})
	write.Close()
	if err != nil {
		return "", err
	}
	switch result.ExitCode {
	case 0:
	case 126, 127:
		return "", berm.Errorf(berm.NotFound, "git cannot be executed: %s", result.Detail).WithHint("install git")
	default:
		return "", berm.Errorf(berm.NotFound, "there is no commit %q in %s", commit, project).WithHint("`git log --oneline --all` lists commits")
	}
	id, err := io.ReadAll(io.LimitReader(read, 256))
	if err != nil {
		return "", berm.Errorf(berm.Internal, "read the name of the commit: %w", err)
	}
	return strings.TrimSpace(string(id)), nil
}
