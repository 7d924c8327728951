package local

import (
	"context"
	"os"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/local"
)

const keepCheckpoints = local.KeepCheckpoints

// toCommit runs inside the sandbox, on a view of the project without the session's changes:
// neither the project's hooks nor a repository that an agent broke concern the host. What
// git ignores goes too, since an agent may have written it.
const toCommit = `git reset -q --hard "$1" && git clean -qffdx`

// undoToCommit makes a session's workspace a commit of the project.
func undoToCommit(cmd *cobra.Command, w *work, commit string) error {
	ctx := context.WithoutCancel(cmd.Context())
	before, err := w.session.Checkpoint(ctx, "undo --git="+commit, keepCheckpoints)
	if err != nil {
		return err
	}
	if err := w.session.Empty(ctx); err != nil {
		return err
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return berm.Errorf(berm.Internal, "%w", err)
	}
	defer null.Close()
	name, project := w.session.Name, w.session.Project
	w.session.Unlock() // Do locks it
	result, err := local.Do(ctx, &local.Task{
		Argv: []string{"sh", "-c", toCommit, "sh", commit}, Dir: project, Session: name, Preset: "default",
		Environ: os.Environ(), Streams: [3]*os.File{null, os.Stderr, os.Stderr}, Notice: func(string) {},
	})
	if err == nil && result.ExitCode != 0 {
		err = berm.Errorf(berm.Invalid, "git could not make it %s", commit)
	}
	if err != nil {
		if lockErr := w.session.Lock(); lockErr != nil {
			return lockErr
		}
		if _, undoErr := w.session.Restore(ctx, before.N, keepCheckpoints); undoErr != nil {
			return undoErr
		}
		return err
	}
	cli.Notice(cmd, "session %s is as commit %s; what it was is checkpoint %d", name, commit, before.N)
	return nil
}
