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
// working directory.
func choose(store *session.Store, name string) (*session.Session, error) {
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
	return s, err
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
