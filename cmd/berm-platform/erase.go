package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm/internal/cli"
)

func newAuditEraseCommand() *cobra.Command {
	cmd := serverCommand(&cobra.Command{
		Use:   "erase SANDBOX --reason TEXT",
		Short: "Erase what the log has of a sandbox",
		Long: `Have the server take all records of a sandbox that has ended, and the content that no other record
names, out of its audit log. Nobody can bring them back. Their hashes stay, and a record tells who
erased how many, when and why: ` + "`berm audit verify`" + ` proves that nothing else was changed.

The API key must be one of ` + "`berm key create --erase`" + `. A sandbox that is held is refused. Exports
and what was sent to other systems are not reached, nor the sandbox's snapshots and forks, nor
files that somebody copied.`,
		Example: `  berm audit erase i0abcdefghijklmnopqrs --dry-run
  berm audit erase i0abcdefghijklmnopqrs --reason "request 2026-31"`,
		Args: cli.UsageArgs(cobra.ExactArgs(1)),
	})
	asJSON := cli.JSONFlag(cmd)
	var reason string
	var dry bool
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the record")
	cmd.Flags().BoolVar(&dry, "dry-run", false, "only say what would be erased")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if reason == "" && !dry || len(reason) > maxReason {
			return cli.UsageError{Err: fmt.Errorf("--reason TEXT is needed, of at most %d bytes", maxReason)}
		}
		c, id, err := serverAndSandbox(cmd, args[0])
		if err != nil {
			return err
		}
		done, err := c.Erase(cmd.Context(), id, reason, dry)
		if err != nil {
			return err
		}
		if *asJSON {
			return cli.PrintJSON(cmd.OutOrStdout(), done)
		}
		out := cmd.OutOrStdout()
		what := "erased were"
		if dry {
			what = "erased would be"
		}
		_, err = fmt.Fprintf(out, "%s %d records (%s to %s) and %d pieces of content, %d bytes; what others name too stays\n", what, done.Records,
			done.First.Local().Format(time.DateTime), done.Last.Local().Format(time.DateTime), done.Contents, done.Bytes)
		if !dry {
			_, told := fmt.Fprintf(out, "record %d tells so\n", done.By)
			err = errors.Join(err, told)
		}
		if done.Named > 0 {
			cli.Notice(cmd, "%d records of others name this sandbox, and stay: a fork's, say", done.Named)
		}
		return err
	}
	return cmd
}
