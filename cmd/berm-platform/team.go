package main

import (
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/store"
	"github.com/berm-sandbox/berm/internal/terminal"
)

func newTeamCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "team",
		Short: "Make teams, which share nothing, and limit them",
		Long: `Make and limit the teams of the server with the data directory given. It may be running: what
changes counts at once.

The API keys of a team share sandboxes, snapshots, templates, secrets and limits, and reach those of
no other team. A server begins with one team, "default", which is the operator's own: it alone reads
what concerns the whole server.`,
		Args: cli.UsageArgs(cobra.NoArgs),
		Example: `  berm team create blue --max-sandboxes 20 --max-memory 16GiB
  export E2B_API_KEY=$(berm key create --team blue --name laptop)
  berm team set blue --audit-keep 720h
  berm team ls`,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	with := storeOf(cmd.PersistentFlags().String("data", defaultData(), "data directory of the server"))
	cmd.AddCommand(
		newTeamLimitsCommand(with, &cobra.Command{
			Use:     "create NAME",
			Short:   "Make a team",
			Example: `  berm team create blue --max-sandboxes 20 --max-cpu 16 --max-memory 16GiB`,
		}, func(cmd *cobra.Command, db *store.DB, name berm.Team, change func(*store.TeamLimits)) (store.Team, error) {
			var limits store.TeamLimits
			change(&limits)
			return db.CreateTeam(cmd.Context(), hostUser(), name, limits)
		}),
		newTeamLimitsCommand(with, &cobra.Command{
			Use:   "set NAME",
			Short: "Give a team other limits",
			Long:  `Give a team other limits. Those that no flag names stay; what is there already stays, too.`,
			Example: `  berm team set blue --audit-keep 720h --audit-limit 5GiB
  berm team set blue --max-sandboxes 0      # any number`,
		}, func(cmd *cobra.Command, db *store.DB, name berm.Team, change func(*store.TeamLimits)) (store.Team, error) {
			return db.LimitTeam(cmd.Context(), hostUser(), name, change)
		}),
		newTeamListCommand(with),
	)
	return cmd
}

// newTeamLimitsCommand makes a command that changes the limits of a team as its flags say.
func newTeamLimitsCommand(with withStore, cmd *cobra.Command, do func(*cobra.Command, *store.DB, berm.Team, func(*store.TeamLimits)) (store.Team, error)) *cobra.Command {
	cmd.Args = cli.UsageArgs(cobra.ExactArgs(1))
	asJSON := cli.JSONFlag(cmd)
	var asked store.TeamLimits
	flags := cmd.Flags()
	flags.IntVar(&asked.Sandboxes, "max-sandboxes", 0, "sandboxes that run or keep their memory in use, at a time; 0 is\nany number")
	flags.Float64Var(&asked.CPU, "max-cpu", 0, "processors of these together; 0 is any number")
	flags.Var((*cli.SizeFlag)(&asked.Memory), "max-memory", "memory of these together (default: any amount)")
	flags.Var((*cli.SizeFlag)(&asked.Disk), "max-disk", "what all its sandboxes, paused ones too, may write together\n(default: any amount)")
	flags.DurationVar(&asked.AuditKeep, "audit-keep", 0, "how long what the audit log has of a sandbox is kept after its\nend, such as 720h, before it is erased; 0 is for ever")
	flags.Var((*cli.SizeFlag)(&asked.AuditLimit), "audit-limit", "how much the audit log keeps of its sandboxes together, such as\n5GiB; the oldest that have ended are erased (default: any amount)")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		name, err := berm.ParseTeam(args[0])
		if err == nil {
			err = checkTeamLimits(asked)
		}
		if err != nil {
			return cli.UsageError{Err: err}
		}
		return with(cmd, func(db *store.DB) error {
			team, err := do(cmd, db, name, func(l *store.TeamLimits) {
				flags.Visit(func(f *pflag.Flag) {
					switch f.Name {
					case "max-sandboxes":
						l.Sandboxes = asked.Sandboxes
					case "max-cpu":
						l.CPU = asked.CPU
					case "max-memory":
						l.Memory = asked.Memory
					case "max-disk":
						l.Disk = asked.Disk
					case "audit-keep":
						l.AuditKeep = asked.AuditKeep
					case "audit-limit":
						l.AuditLimit = asked.AuditLimit
					}
				})
			})
			switch {
			case err != nil:
				return err
			case *asJSON:
				return cli.PrintJSON(cmd.OutOrStdout(), team)
			}
			return printTeams(cmd, []store.Team{team})
		})
	}
	return cmd
}

// leastAuditKeep leaves time to look at what a sandbox did.
const leastAuditKeep = time.Hour

func checkTeamLimits(l store.TeamLimits) error {
	switch {
	case l.Sandboxes < 0:
		return berm.Errorf(berm.Invalid, "--max-sandboxes %d: it must be a number from 1, or 0 for any number", l.Sandboxes)
	case !(l.CPU >= 0):
		return berm.Errorf(berm.Invalid, "--max-cpu %g: it must be above 0, or 0 for any number", l.CPU)
	case l.AuditKeep != 0 && l.AuditKeep < leastAuditKeep:
		return berm.Errorf(berm.Invalid, "--audit-keep %s: it must be %s at least, or 0 for ever", l.AuditKeep, leastAuditKeep)
	}
	return nil
}

func newTeamListCommand(with withStore) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "ls",
		Short:   "List the teams with their limits",
		Example: `  berm team ls --json`,
		Args:    cli.UsageArgs(cobra.NoArgs),
	}
	asJSON := cli.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return with(cmd, func(db *store.DB) error {
			teams, err := db.Teams(cmd.Context())
			switch {
			case err != nil:
				return err
			case *asJSON:
				return cli.PrintJSON(cmd.OutOrStdout(), teams)
			}
			return printTeams(cmd, teams)
		})
	}
	return cmd
}

func printTeams(cmd *cobra.Command, teams []store.Team) error {
	table := terminal.NewTable(terminal.StyleFor(cmd.OutOrStdout()), "TEAM", "SANDBOXES", "CPU", "MEMORY", "DISK", "AUDIT KEEP", "AUDIT LIMIT", "CREATED")
	size := func(n int64) string {
		if n == 0 {
			return "-"
		}
		return byteSize(n)
	}
	for _, t := range teams {
		sandboxes, cpu, keep, created := "-", "-", "-", "-"
		if n := t.Limits.Sandboxes; n > 0 {
			sandboxes = fmt.Sprint(n)
		}
		if n := t.Limits.CPU; n > 0 {
			cpu = strconv.FormatFloat(n, 'f', -1, 64)
		}
		if d := t.Limits.AuditKeep; d > 0 {
			keep = d.String()
		}
		if !t.Created.IsZero() {
			created = t.Created.Local().Format(time.DateTime)
		}
		table.Row(t.Name.String(), sandboxes, cpu, size(t.Limits.Memory), size(t.Limits.Disk), keep, size(t.Limits.AuditLimit), created)
	}
	return table.Write(cmd.OutOrStdout())
}
