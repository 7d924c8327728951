package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/index"
	"github.com/berm-sandbox/berm/internal/audit/replay"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/terminal"
)

// recordsPage is how many records are asked for at once.
const recordsPage = 1000

// queryAudit makes `berm audit` itself find records.
func queryAudit(cmd *cobra.Command) {
	var logs logFlags
	var q index.Query
	var sandbox, team, since, until, verdict string
	var asJSON, follow bool
	logs.add(cmd)
	flags := cmd.Flags()
	flags.StringVar(&sandbox, "sandbox", "", "only records of this sandbox; its id alone says the same")
	flags.StringVar(&team, "team", "", "only what is of this team's, of a log that is read without a server:\na key sees those of its team alone")
	flags.StringVar(&q.Actor, "actor", "", "only what this key, user or kind of actor caused")
	flags.StringSliceVar(&q.Types, "type", nil, "only records of these types, or of all that begin so: net.flow, exec")
	flags.StringVar(&since, "since", "", "only from then on: a time (2026-01-31 12:00), or how long ago (90m)")
	flags.StringVar(&until, "until", "", "only until then, as --since")
	flags.StringVar(&q.Path, "path", "", "only what concerns this file or program, or those below it")
	flags.StringVar(&q.Host, "host", "", "only what concerns this name or address, or names below it")
	flags.StringVar(&verdict, "verdict", "", "only what ended so: ok (allow), denied (deny) or failed")
	flags.BoolVar(&asJSON, "json", false, "print the records, one JSON object a line")
	flags.BoolVarP(&follow, "follow", "f", false, "go on printing what comes")
	completeFlag(cmd, "verdict", cobra.FixedCompletions([]cobra.Completion{"ok", "denied", "failed"}, cobra.ShellCompDirectiveNoFileComp))
	completeFlag(cmd, "type", cobra.FixedCompletions(typeNames(), cobra.ShellCompDirectiveNoFileComp))
	completeFlag(cmd, "sandbox", completeSandboxes())
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		const idLength = 21 // of ids, so that no command with a letter wrong passes for one
		if len(args) == 1 && len(args[0]) == idLength && sandbox == "" {
			sandbox = args[0]
			return nil
		}
		return cli.UnknownCommand(cmd, args)
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		now := time.Now()
		if sandbox != "" {
			if q.Sandbox, err = sandboxID(sandbox); err != nil {
				return err
			}
		}
		if team != "" {
			of, err := berm.ParseTeam(team)
			if err == nil && logs.path == "" {
				err = berm.Errorf(berm.Invalid, "--team is for a log that is read in its directory").WithHint("--log DATA/audit names that of a server, on its machine")
			}
			if err != nil {
				return cli.UsageError{Err: err}
			}
			q.Team = &of
		}
		if q.Since, err = moment("since", since, now); err == nil {
			q.Until, err = moment("until", until, now)
		}
		if err != nil {
			return err
		}
		if q.Verdict, err = index.ParseVerdict(verdict); err == nil {
			_, err = index.Parse(q.Values()) // the server would say the same
		}
		if err != nil {
			return cli.UsageError{Err: berm.Errorf(berm.KindOf(err), "%w", err).WithHint("%s", auditHint)}
		}
		for _, t := range q.Types {
			if !slices.ContainsFunc(audit.Types, func(known audit.Type) bool {
				return string(known) == t || strings.HasPrefix(string(known), t+".")
			}) {
				return cli.UsageError{Err: berm.Errorf(berm.Invalid, "--type %q: there are no such records", t).WithHint("The types are %s.", strings.Join(typeNames(), ", "))}
			}
		}
		log, err := logs.open(cmd)
		if err != nil {
			return err
		}
		defer log.close()
		out := cmd.OutOrStdout()
		style := terminal.StyleFor(out)
		found := false
		err = eachRecord(cmd.Context(), log, q, follow, func(line json.RawMessage) error {
			found = true
			if asJSON {
				_, err := out.Write(append(terminal.EscapeJSON(line), '\n'))
				return err
			}
			return printRecord(out, style, line)
		})
		if err == nil && !found && !follow {
			cli.Notice(cmd, "no records")
		}
		return quietOnInterrupt(cmd.Context(), err)
	}
}

// typeNames are all types of records.
func typeNames() []string {
	names := make([]string, len(audit.Types))
	for i, t := range audit.Types {
		names[i] = string(t)
	}
	return names
}

// eachRecord finds records page by page.
func eachRecord(ctx context.Context, log records, q index.Query, follow bool, do func(json.RawMessage) error) error {
	for q.Limit = recordsPage; ; {
		lines, next, err := log.find(ctx, q)
		if err != nil {
			return err
		}
		for _, line := range lines {
			if err := do(line); err != nil {
				return err
			}
		}
		q.After = next
		switch {
		case len(lines) == recordsPage:
		case !follow || !poll(ctx):
			return nil
		}
	}
}

// auditHint points to the flags: berm audit is a command, and has commands below it.
const auditHint = "`berm audit --help` lists the flags."

// moment reads a time, as people write one, or how long ago it was.
func moment(flag, s string, now time.Time) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	if d, err := time.ParseDuration(s); err == nil && d >= 0 {
		return now.Add(-d), nil
	}
	for _, layout := range []string{time.RFC3339Nano, time.DateTime, "2006-01-02 15:04", "2006-01-02T15:04:05", time.DateOnly} {
		if t, err := time.ParseInLocation(layout, s, time.Local); err == nil {
			return t, nil
		}
	}
	return time.Time{}, cli.UsageError{Err: berm.Errorf(berm.Invalid, "--%s %q is no time: it must be one such as 2026-01-31, 2026-01-31 12:00, 2026-01-31T12:00:00Z, or 90m for 90 minutes ago", flag, s).WithHint("%s", auditHint)}
}

// printRecord prints a record for a person. Much of it is the sandbox's choice.
func printRecord(w io.Writer, style terminal.Style, raw json.RawMessage) error {
	line := trail.Line{Raw: raw}
	if err := json.Unmarshal(raw, &line.Record); err != nil {
		_, err := fmt.Fprintln(w, style.Bad("!")+" "+terminal.Escape(err.Error()))
		return err
	}
	e, _ := replay.NewEvent(line) // data of another form is told as it is
	outcome := fmt.Sprintf("%-6s", terminal.Escape(string(line.Outcome)))
	if line.Outcome != audit.OK {
		outcome = style.Bad(outcome)
	}
	of := string(line.Sandbox)
	if of == "" {
		of = "-"
	}
	guest := ""
	if line.Trust == audit.TrustGuest {
		guest = "(guest) "
	}
	_, err := fmt.Fprintf(w, "%s %-21s %s %s %s%s\n", style.Dim(line.Time.Local().Format("2006-01-02 15:04:05.000")),
		terminal.Escape(of), outcome, style.Bold(fmt.Sprintf("%-15s", terminal.Escape(string(line.Type)))), guest,
		terminal.Clip(terminal.Escape(e.Text()), 400))
	return err
}
