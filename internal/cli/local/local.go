// Package local is the commands of local mode: they run a command in a sandbox on this
// machine, without a server, and handle what it changed.
package local

import (
	"os"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/local/session"
)

// Commands returns the commands, in the order of the help.
func Commands() []*cobra.Command {
	return cli.Grouped(cli.Local, []*cobra.Command{
		newRunCommand(),
		newShellCommand(),
		newDiffCommand(),
		newApplyCommand(),
		newUndoCommand(),
		newDiscardCommand(),
		newSessionsCommand(),
	})
}

// names of the commands, for Has: making them costs more.
var names = []string{"run", "shell", "diff", "apply", "undo", "discard", "sessions"}

// Has says whether a command is of local mode.
func Has(name string) bool { return slices.Contains(names, name) }

// openStore opens the user's sessions.
func openStore() (*session.Store, error) {
	state, err := session.StateDir()
	if err != nil {
		return nil, err
	}
	return session.Open(state)
}

// sessionFlag adds the flag that names a session, with completion.
func sessionFlag(cmd *cobra.Command, usage string) *string {
	name := cmd.Flags().StringP("session", "s", "", usage)
	_ = cmd.RegisterFlagCompletionFunc("session", completeSessions)
	return name
}

// choose opens the session of a name, or the newest one of the project around the
// working directory; it says which unless there is only one and the project is here.
func choose(cmd *cobra.Command, store *session.Store, name string) (*session.Session, error) {
	if name != "" {
		return store.Get(name)
	}
	dir, err := os.Getwd()
	if err == nil {
		dir, err = filepath.EvalSymlinks(dir)
	}
	if err != nil {
		return nil, berm.Errorf(berm.Invalid, "the working directory: %w", err)
	}
	s, err := store.Latest(dir)
	if berm.KindOf(err) == berm.NotFound {
		return nil, berm.Errorf(berm.NotFound, "no session changed anything in this directory").
			WithHint("`berm sessions` lists those of other directories; --session chooses one")
	}
	if err != nil {
		return nil, err
	}
	list, err := store.List()
	if err != nil {
		return nil, err
	}
	n := 0
	for _, other := range list {
		if other.Project == s.Project {
			n++
		}
	}
	switch {
	case n > 1:
		cli.Notice(cmd, "session %s of %s, the newest of %d there; --session takes another", s.Name, s.Project, n)
	case s.Project != dir:
		cli.Notice(cmd, "session %s of %s", s.Name, s.Project)
	}
	return s, nil
}

func completeSessions(*cobra.Command, []string, string) ([]cobra.Completion, cobra.ShellCompDirective) {
	store, err := openStore()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	defer store.Close()
	list, _ := store.List()
	var found []cobra.Completion
	for _, s := range list {
		found = append(found, cobra.CompletionWithDesc(s.Name, s.Project))
	}
	return found, cobra.ShellCompDirectiveNoFileComp
}
