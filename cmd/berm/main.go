// Command berm makes, serves and inspects sandboxes for AI agents.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
)

// version is set by the linker.
var version = "dev"

// commands lists every subcommand of berm, by group and in the order of its help.
func commands() (sandboxes, machine []*cobra.Command) {
	sandboxes = []*cobra.Command{
		newCreateCommand(),
		newListCommand(),
		newExecCommand(),
		newConnectCommand(),
		newCopyCommand(),
		newPauseCommand(),
		newResumeCommand(),
		newKillCommand(),
		newLogsCommand(),
		newMetricsCommand(),
		newInspectCommand(),
	}
	machine = []*cobra.Command{
		newServeCommand(),
		newKeyCommand(),
		newTemplateCommand(),
		newContextCommand(),
		newDoctorCommand(probeHost),
	}
	return sandboxes, machine
}

func newRootCommand() *cobra.Command {
	cobra.EnableCommandSorting = false // the order below is one of use
	root := &cobra.Command{
		Use:           "berm",
		Short:         "Sandboxes for AI agents",
		Version:       version,
		SilenceUsage:  true, // an error is one line, not a page of flags
		SilenceErrors: true, // main prints it, with its hint
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.SuggestionsMinimumDistance = 2
	root.Args = unknownCommand
	root.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	root.AddGroup(&cobra.Group{ID: "sandboxes", Title: "Sandboxes:"}, &cobra.Group{ID: "machine", Title: "Servers and hosts:"})
	sandboxes, machine := commands()
	for _, cmd := range sandboxes {
		cmd.GroupID = "sandboxes"
	}
	for _, cmd := range machine {
		cmd.GroupID = "machine"
	}
	root.AddCommand(sandboxes...)
	root.AddCommand(machine...)
	return root
}

// unknownCommand refuses what is no subcommand.
func unknownCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	err := berm.Errorf(berm.Invalid, "unknown command %q for %q", args[0], cmd.CommandPath())
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		err = err.WithHint("Did you mean %s?", strings.Join(near, " or "))
	}
	return usageError{err}
}

// usageError marks a wrong command line: exit code 2.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// usageHint says how a command is called.
func usageHint(cmd *cobra.Command) string {
	if cmd.HasSubCommands() {
		return fmt.Sprintf("`%s --help` lists the commands.", cmd.CommandPath())
	}
	return fmt.Sprintf("Usage: %s. More: `%s --help`.", cmd.UseLine(), cmd.CommandPath())
}

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
	code := run(ctx, os.Args[1:])
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string) int {
	root := newRootCommand()
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return 0
	}
	var exit exitError
	if errors.As(err, &exit) {
		return int(exit)
	}
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return 128 + int(syscall.SIGINT) // the user ended it, and knows
	}
	var usage usageError
	if errors.As(err, &usage) && berm.HintOf(err) == "" {
		err = usageError{berm.Errorf(berm.Invalid, "%w", err).WithHint("%s", usageHint(cmd))}
	}
	if json := cmd.Flags().Lookup("json"); json != nil && json.Changed {
		printErrorJSON(os.Stderr, err)
	} else {
		printError(os.Stderr, err)
	}
	if usage.error != nil {
		return 2
	}
	return 1
}
