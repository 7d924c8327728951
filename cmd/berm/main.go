// Command berm makes, serves and inspects sandboxes for AI agents.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
)

// version is set by the linker.
var version = "dev"

// commands lists every subcommand of berm in the order of its help.
func commands() []*cobra.Command {
	return []*cobra.Command{
		newServeCommand(),
		newKeyCommand(),
	}
}

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "berm",
		Short:         "Sandboxes for AI agents",
		Version:       version,
		SilenceUsage:  true, // an error is one line, not a page of flags
		SilenceErrors: true, // main prints it, with its hint
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(commands()...)
	return root
}

// usageError marks a wrong command line: exit code 2.
type usageError struct{ error }

// exitError carries the exit code of a command that ran in a sandbox; nothing is
// printed for it.
type exitError int

func (e exitError) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// usageArgs makes a wrong count of arguments a usageError.
func usageArgs(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return usageError{err}
		}
		return nil
	}
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:]))
}

func run(ctx context.Context, args []string) int {
	root := newRootCommand()
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	var exit exitError
	if errors.As(err, &exit) {
		return int(exit)
	}
	fmt.Fprintln(os.Stderr, "berm:", err)
	if hint := berm.HintOf(err); hint != "" {
		fmt.Fprintln(os.Stderr, "hint:", hint)
	}
	var usage usageError
	if errors.As(err, &usage) {
		return 2
	}
	return 1
}
