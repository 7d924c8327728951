package main

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
	"github.com/berm-sandbox/berm/internal/terminal"
)

// pollInterval is how often logs and metrics are asked for news.
const pollInterval = time.Second

func newLogsCommand() *cobra.Command {
	var follow bool
	var since cli.DurationFlag
	cmd := serverCommand(&cobra.Command{
		Use:   "logs SANDBOX",
		Short: "Print what happened to a sandbox",
		Long: `Print the log of a sandbox. --follow goes on until the sandbox ends. What comes out
of a sandbox is escaped, so that it cannot act on the terminal.`,
		Example: `  berm logs i0abcdefghijklmnopqrs
  berm logs --follow --since 10m i0abcdefghijklmnopqrs
  berm logs --json i0abcdefghijklmnopqrs | jq -r 'select(.level == "error").message'`,
		Args:              cli.UsageArgs(cobra.ExactArgs(1)),
		ValidArgsFunction: completeSandboxes(),
	})
	asJSON := cmd.Flags().Bool("json", false, "print one JSON object a line")
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on printing what comes")
	cmd.Flags().Var(&since, "since", "only what is not older than this")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, id, err := serverAndSandbox(cmd, args[0])
		if err != nil {
			return err
		}
		ctx, out := cmd.Context(), cmd.OutOrStdout()
		style := terminal.StyleFor(out)
		var from time.Time
		if since != 0 {
			from = time.Now().Add(-time.Duration(since))
		}
		// Entries of the last millisecond that were printed: the next call, which
		// begins at it, returns them again.
		printed := map[string]bool{}
		for {
			// Asked first, so that what is logged at the end is not missed.
			ended := false
			if follow {
				_, err := c.Get(ctx, id)
				ended = berm.KindOf(err) == berm.NotFound
			}
			entries, err := c.Logs(ctx, id, from)
			if err != nil {
				return quietOnInterrupt(ctx, err)
			}
			news := false
			for _, e := range entries {
				key := fmt.Sprint(e)
				if printed[key] {
					continue
				}
				if e.Timestamp.UnixMilli() != from.UnixMilli() {
					clear(printed)
					from = e.Timestamp
				}
				printed[key], news = true, true
				if err := printLog(out, style, e, *asJSON); err != nil {
					return err
				}
			}
			if news {
				continue // there may be another page
			}
			if len(entries) == client.MaxLogs { // all of one millisecond, printed before
				from = from.Add(time.Millisecond)
				continue
			}
			if !follow || ended {
				return nil
			}
			if !poll(ctx) {
				return nil
			}
		}
	}
	return cmd
}

func printLog(w io.Writer, style terminal.Style, e client.LogEntry, asJSON bool) error {
	if asJSON {
		return cli.PrintJSONLine(w, e)
	}
	level := fmt.Sprintf("%-5s", strings.ToUpper(terminal.Escape(e.Level)))
	if e.Level == "error" || e.Level == "warn" {
		level = style.Bad(level)
	}
	line := style.Dim(e.Timestamp.Local().Format("2006-01-02 15:04:05.000")) + " " + level + " " + terminal.Escape(e.Message)
	if fields := sortedPairs(e.Fields); fields != "" {
		line += " " + style.Dim(terminal.Escape(fields))
	}
	_, err := fmt.Fprintln(w, line)
	return err
}
