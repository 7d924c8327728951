// Command berm-platform is the part of berm that serves sandboxes and talks to servers;
// berm carries it and executes it for every command that is not of local mode.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/cli/local"
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
		newSnapshotCommand(),
		newSnapshotsCommand(),
		newForkCommand(),
		newRollbackCommand(),
		newTimelineCommand(),
		newKillCommand(),
		newLogsCommand(),
		newMetricsCommand(),
		newInspectCommand(),
		newReplayCommand(),
		newRerunCommand(),
		newBatchCommand(),
		newNetCommand(),
		newPolicyCommand(),
		newSecretCommand(),
	}
	machine = []*cobra.Command{
		newServeCommand(),
		newAuditCommand(),
		newTeamCommand(),
		newKeyCommand(),
		newTemplateCommand(),
		newContextCommand(),
		newDoctorCommand(probeHost),
	}
	return sandboxes, machine
}

func newRootCommand() *cobra.Command {
	root := cli.NewRoot(version)
	sandboxes, machine := commands()
	root.AddCommand(local.Commands()...)
	root.AddCommand(cli.Grouped(cli.Sandboxes, sandboxes)...)
	root.AddCommand(cli.Grouped(cli.Machine, machine)...)
	root.AddCommand(newEgressCommand(), newBrokerCommand(), newAuditWriterCommand())
	return root
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := cli.Execute(ctx, newRootCommand(), os.Args[1:])
	stop()
	os.Exit(code)
}
