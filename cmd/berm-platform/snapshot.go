package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
	"github.com/berm-sandbox/berm/internal/terminal"
)

func newSnapshotCommand() *cobra.Command {
	var name string
	cmd := serverCommand(&cobra.Command{
		Use:   "snapshot SANDBOX",
		Short: "Save the state of a sandbox, which goes on",
		Long: `Save the state of a running sandbox, which goes on, and print what to create others from. A
name is taken from the snapshot that had it. At the namespace level files are kept, not processes; at
level gvisor both, and connections into the sandbox end.`,
		Example: `  berm snapshot i0abcdefghijklmnopqrs --name before-migration
  berm create $(berm snapshot i0abcdefghijklmnopqrs)`,
		Args:              cli.UsageArgs(cobra.ExactArgs(1)),
		ValidArgsFunction: completeSandboxes(berm.Running),
	})
	asJSON := cli.JSONFlag(cmd)
	cmd.Flags().StringVar(&name, "name", "", "`NAME` or NAME:TAG")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, id, err := serverAndSandbox(cmd, args[0])
		if err != nil {
			return err
		}
		s, err := c.Snapshot(cmd.Context(), id, name)
		if err != nil {
			return err
		}
		if *asJSON {
			return cli.PrintJSON(cmd.OutOrStdout(), s)
		}
		_, err = fmt.Fprintln(cmd.OutOrStdout(), terminal.Escape(s.ID))
		return err
	}
	return cmd
}

func newSnapshotsCommand() *cobra.Command {
	cmd := serverCommand(&cobra.Command{
		Use:   "snapshots [SANDBOX]",
		Short: "List snapshots, newest first, and delete them",
		Example: `  berm snapshots
  berm snapshots i0abcdefghijklmnopqrs --json
  berm snapshots rm before-migration`,
		Args:              cli.UsageArgs(cobra.MaximumNArgs(1)),
		ValidArgsFunction: completeSandboxes(),
	})
	asJSON := cli.JSONFlag(cmd)
	quiet := cmd.Flags().BoolP("quiet", "q", false, "print ids only")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := server(cmd)
		if err != nil {
			return err
		}
		var id berm.SandboxID
		if len(args) > 0 {
			if id, err = sandboxID(args[0]); err != nil {
				return err
			}
		}
		all, err := snapshotsOf(cmd.Context(), c, id)
		if err != nil {
			return err
		}
		out := cmd.OutOrStdout()
		switch {
		case *asJSON:
			return cli.PrintJSON(out, all)
		case *quiet:
			for _, s := range all {
				if _, err := fmt.Fprintln(out, terminal.Escape(s.ID)); err != nil {
					return err
				}
			}
			return nil
		}
		table := terminal.NewTable(terminal.StyleFor(out), "SNAPSHOT", "OF", "KEEPS", "LEVEL", "SIZE", "AGE")
		for _, s := range all {
			table.Row(s.ID, string(s.Berm.SandboxID), strings.Join(s.Berm.Keeps, ", "), string(s.Berm.Level), cli.Size(s.Berm.Size), cli.Span(time.Since(s.Berm.CreatedAt)))
		}
		return table.Write(out)
	}
	remove := serverCommand(&cobra.Command{
		Use:     "rm SNAPSHOT...",
		Short:   "Delete snapshots",
		Long:    `Delete snapshots. Without a tag all of the name go. Sandboxes that were made from them stay.`,
		Example: `  berm snapshots rm before-migration`,
		Args:    cli.UsageArgs(cobra.MinimumNArgs(1)),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			return snapshotCompletions(cmd, "", args), cobra.ShellCompDirectiveNoFileComp
		},
	})
	remove.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := server(cmd)
		if err != nil {
			return err
		}
		var errs []error
		for _, ref := range args {
			err := c.DeleteSnapshot(cmd.Context(), ref)
			if err == nil {
				_, err = fmt.Fprintln(cmd.OutOrStdout(), ref)
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	}
	cmd.AddCommand(remove)
	return cmd
}

func newForkCommand() *cobra.Command {
	var timeout cli.DurationFlag
	cmd := serverCommand(&cobra.Command{
		Use:   "fork SANDBOX",
		Short: "Make sandboxes that begin with the state of another, which goes on",
		Long: `Make sandboxes that begin with the state of a running one, which goes on, and print their ids.
They may use and reach what it may, and have their own identity. At the namespace level they
begin with its files, not its processes; at level gvisor with both.`,
		Example: `  berm fork i0abcdefghijklmnopqrs
  for id in $(berm fork i0abcdefghijklmnopqrs -n 5); do berm exec $id -- make test & done; wait`,
		Args:              cli.UsageArgs(cobra.ExactArgs(1)),
		ValidArgsFunction: completeSandboxes(berm.Running),
	})
	asJSON := cli.JSONFlag(cmd)
	count := cmd.Flags().IntP("count", "n", 1, "how many, up to 100")
	cmd.Flags().Var(&timeout, "timeout", "time to live (default 5m)")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, id, err := serverAndSandbox(cmd, args[0])
		if err != nil {
			return err
		}
		if timeout == 0 {
			timeout = cli.DurationFlag(5 * time.Minute) // the server's is too short for people
		}
		forks, err := c.Fork(cmd.Context(), id, *count, time.Duration(timeout))
		if err != nil {
			return err
		}
		if *asJSON {
			return cli.PrintJSON(cmd.OutOrStdout(), forks)
		}
		var errs []error
		for i, f := range forks {
			switch {
			case f.Sandbox != nil:
				_, err = fmt.Fprintln(cmd.OutOrStdout(), terminal.Escape(string(f.Sandbox.ID)))
			case f.Error != nil:
				err = fmt.Errorf("child %d: %s", i+1, f.Error.Message)
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	}
	return cmd
}

func newRollbackCommand() *cobra.Command {
	cmd := serverCommand(&cobra.Command{
		Use:   "rollback SANDBOX SNAPSHOT",
		Short: "Give a sandbox the state of a snapshot",
		Long: `Give a sandbox the state of a snapshot. Its processes end, what it wrote since is lost, and it
goes on with the processes of the snapshot, or starts anew where that has files alone, with the same id. Take a snapshot before to be able to come back.`,
		Example:           `  berm rollback i0abcdefghijklmnopqrs before-migration`,
		Args:              cli.UsageArgs(cobra.ExactArgs(2)),
		ValidArgsFunction: completeRollback,
	})
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, id, err := serverAndSandbox(cmd, args[0])
		if err != nil {
			return err
		}
		if err := c.Rollback(cmd.Context(), id, args[1]); err != nil {
			return err
		}
		_, err = fmt.Fprintln(cmd.OutOrStdout(), id)
		return err
	}
	return cmd
}

// event is a line of a timeline.
type event struct {
	At        time.Time      `json:"at"`
	What      string         `json:"what"` // "snapshot", "checkpoint", "missed" (one) or "fork"
	Why       string         `json:"why,omitempty"`
	Snapshot  string         `json:"snapshotID,omitempty"`
	SandboxID berm.SandboxID `json:"sandboxID,omitempty"` // of a fork
	Command   string         `json:"command,omitempty"`   // that goes on from there
}

func newTimelineCommand() *cobra.Command {
	cmd := serverCommand(&cobra.Command{
		Use:   "timeline SANDBOX",
		Short: "Show the snapshots, checkpoints and living forks of a sandbox in order",
		Long: `Show the snapshots, the checkpoints and the living forks of a sandbox, oldest first, each
with the command that goes on from there. What else happened is in berm replay.`,
		Example:           `  berm timeline i0abcdefghijklmnopqrs`,
		Args:              cli.UsageArgs(cobra.ExactArgs(1)),
		ValidArgsFunction: completeSandboxes(),
	})
	asJSON := cli.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, id, err := serverAndSandbox(cmd, args[0])
		if err != nil {
			return err
		}
		events, err := timeline(cmd.Context(), c, id)
		if err != nil {
			return err
		}
		if *asJSON {
			return cli.PrintJSON(cmd.OutOrStdout(), events)
		}
		table := terminal.NewTable(terminal.StyleFor(cmd.OutOrStdout()), "AT", "WHAT", "ID", "FORK FROM HERE")
		for _, m := range events {
			name := m.Snapshot
			if name == "" {
				name = string(m.SandboxID)
			}
			what := m.What
			if m.Why != "" {
				what += ": " + m.Why
			}
			table.Row(m.At.Local().Format(time.DateTime), what, name, m.Command)
		}
		return table.Write(cmd.OutOrStdout())
	}
	return cmd
}

// snapshotsOf lists the snapshots of a sandbox, or with "" all of them. Of a sandbox that is gone they
// stay; one that has none and that the server does not know is an error.
func snapshotsOf(ctx context.Context, c *client.Client, id berm.SandboxID) ([]client.Snapshot, error) {
	all, err := c.Snapshots(ctx, id)
	if err == nil && len(all) == 0 && id != "" {
		_, err = c.Inspect(ctx, id)
	}
	return all, err
}

func timeline(ctx context.Context, c *client.Client, id berm.SandboxID) ([]event, error) {
	events := []event{}
	snapshots, err := snapshotsOf(ctx, c, id)
	if err != nil {
		return nil, err
	}
	for _, s := range snapshots {
		e := event{At: s.Berm.CreatedAt, What: "snapshot", Snapshot: s.ID, Command: "berm create " + s.ID}
		switch s.Berm.Checkpoint {
		case "":
		case "exec":
			e.What, e.Why = "checkpoint", "before a command"
		default:
			e.What, e.Why = "checkpoint", "by the clock"
		}
		events = append(events, e)
	}
	sandbox, err := c.Inspect(ctx, id)
	switch {
	case berm.KindOf(err) == berm.NotFound && err != nil: // forgotten: snapshots stay
	case err != nil:
		return nil, err
	case sandbox.Berm != nil && sandbox.Berm.Checkpoints != nil && sandbox.Berm.Checkpoints.Missed != nil:
		missed := sandbox.Berm.Checkpoints.Missed
		events = append(events, event{At: missed.At, What: "missed", Why: fmt.Sprintf("%s (%d in all)", missed.Reason, missed.Count)})
	}
	err = c.List(ctx, client.Filter{}, func(s client.Sandbox) bool {
		if s.Berm != nil && s.Berm.Parent == id {
			events = append(events, event{At: s.StartedAt, What: "fork", SandboxID: s.ID, Command: "berm connect " + string(s.ID)})
		}
		return true
	})
	slices.SortStableFunc(events, func(a, b event) int { return a.At.Compare(b.At) })
	return events, err
}
