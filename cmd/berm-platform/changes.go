package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/terminal"
)

func newAuditChangesCommand() *cobra.Command {
	cmd := serverCommand(&cobra.Command{
		Use:   "changes SANDBOX",
		Short: "Record what a sandbox has written until now",
		Long: `Have the server compare what a sandbox wrote with its template now, as it does when the sandbox
pauses or ends, write that to the audit log, and print it. The sandbox goes on meanwhile: what it
writes at that moment may be seen or not.`,
		Example: `  berm audit changes i0abcdefghijklmnopqrs
  berm audit changes i0abcdefghijklmnopqrs --json | jq -r '.data.changes[].path'`,
		Args:              cli.UsageArgs(cobra.ExactArgs(1)),
		ValidArgsFunction: completeSandboxes(berm.Running, berm.Paused),
	})
	asJSON := cli.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, id, err := serverAndSandbox(cmd, args[0])
		if err != nil {
			return err
		}
		looked, err := c.Changes(cmd.Context(), id)
		if err != nil {
			return err
		}
		if *asJSON {
			return cli.PrintJSON(cmd.OutOrStdout(), looked)
		}
		for _, change := range looked.Data.Changes {
			if _, err := fmt.Fprintf(cmd.OutOrStdout(), "%-6s %-6s /%s\n", change.Op, change.Kind, terminal.Escape(change.Path)); err != nil {
				return err
			}
		}
		if looked.Data.More > 0 {
			cli.Notice(cmd, "%d more are in the log: berm replay %s", looked.Data.More, id)
		}
		if looked.Outcome != audit.OK {
			cli.Notice(cmd, "%s", terminal.Escape(looked.Reason))
		}
		return nil
	}
	return cmd
}
