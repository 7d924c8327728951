package main

import (
	"fmt"
	"os/user"
	"path/filepath"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/store"
	"github.com/berm-sandbox/berm/internal/terminal"
)

func newAuditHoldCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "hold",
		Short: "Keep what the log has of a sandbox from being removed",
		Long: `Hold sandboxes of the server with the data directory given, which may be running: the files of
its log that have a record of one, and the content that they name, stay whatever berm serve
--audit-keep and --audit-limit say. Both the beginning and the end of a hold are records.

An API key cannot do it: run it as the server's user.`,
		Args: cli.UsageArgs(cobra.NoArgs),
		Example: `  berm audit hold add i0abcdefghijklmnopqrs --reason "case 2026-17"
  berm audit hold list`,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	data := cmd.PersistentFlags().String("data", defaultData(), "data directory of the server")
	with := storeOf(data)
	cmd.AddCommand(newHoldAddCommand(with, data), newHoldListCommand(with), newHoldRemoveCommand(with, data))
	return cmd
}

// maxReason bounds the reason of a hold in bytes.
const maxReason = 1024

// holdCommand is a command that changes the hold of a sandbox, which has to be given a reason.
func holdCommand(with withStore, cmd *cobra.Command, do func(*cobra.Command, *store.DB, store.Hold) error) *cobra.Command {
	var reason string
	cmd.Args = cli.UsageArgs(cobra.ExactArgs(1))
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the record")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		id, err := sandboxID(args[0])
		if err != nil {
			return err
		}
		if reason == "" || len(reason) > maxReason {
			return cli.UsageError{Err: fmt.Errorf("--reason TEXT is needed, of at most %d bytes", maxReason)}
		}
		return with(cmd, func(db *store.DB) error {
			return do(cmd, db, store.Hold{Sandbox: id, Reason: reason, User: hostUser()})
		})
	}
	return cmd
}

// hostUser is the name of who runs this.
func hostUser() string {
	if me, err := user.Current(); err == nil {
		return me.Username
	}
	return ""
}

func newHoldAddCommand(with withStore, data *string) *cobra.Command {
	return holdCommand(with, &cobra.Command{
		Use:     "add SANDBOX --reason TEXT",
		Short:   "Keep what the log has of a sandbox",
		Example: `  berm audit hold add i0abcdefghijklmnopqrs --reason "case 2026-17"`,
	}, func(cmd *cobra.Command, db *store.DB, h store.Hold) error {
		var err error
		if h.Team, err = trail.Dir(filepath.Join(*data, "audit")).Team(h.Sandbox); err == nil {
			return db.SetHold(cmd.Context(), h)
		}
		if berm.KindOf(err) == berm.NotFound {
			err = berm.Errorf(berm.NotFound, "%w", err).WithHint("the log of another server is named by its data directory: --data")
		}
		return err
	})
}

func newHoldRemoveCommand(with withStore, data *string) *cobra.Command {
	return holdCommand(with, &cobra.Command{
		Use:     "remove SANDBOX --reason TEXT",
		Short:   "End a hold",
		Example: `  berm audit hold remove i0abcdefghijklmnopqrs --reason "case 2026-17 is closed"`,
	}, func(cmd *cobra.Command, db *store.DB, h store.Hold) error {
		h.Team, _ = trail.Dir(filepath.Join(*data, "audit")).Team(h.Sandbox) // a hold can be ended without a log
		return db.EndHold(cmd.Context(), h)
	})
}

func newHoldListCommand(with withStore) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "List the sandboxes that are held",
		Example: `  berm audit hold list --json`,
		Args:    cli.UsageArgs(cobra.NoArgs),
	}
	asJSON := cli.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return with(cmd, func(db *store.DB) error {
			holds, err := db.Holds(cmd.Context())
			if err != nil {
				return err
			}
			if *asJSON {
				return cli.PrintJSON(cmd.OutOrStdout(), holds)
			}
			table := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
			_, _ = fmt.Fprintln(table, "SANDBOX\tSINCE\tBY\tREASON")
			for _, h := range holds {
				_, _ = fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", h.Sandbox, h.Since.Local().Format(time.DateTime), terminal.Escape(h.User), terminal.Escape(h.Reason))
			}
			return table.Flush()
		})
	}
	return cmd
}
