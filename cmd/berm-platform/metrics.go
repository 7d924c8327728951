package main

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
)

func newMetricsCommand() *cobra.Command {
	var follow bool
	var since cli.DurationFlag
	cmd := serverCommand(&cobra.Command{
		Use:   "metrics SANDBOX",
		Short: "Print what a sandbox uses",
		Long:  `Print the last measurement of a sandbox, or those of a time, or each new one.`,
		Example: `  berm metrics i0abcdefghijklmnopqrs
  berm metrics --follow i0abcdefghijklmnopqrs
  berm metrics --since 1m --json i0abcdefghijklmnopqrs | jq .memUsed`,
		Args:              cli.UsageArgs(cobra.ExactArgs(1)),
		ValidArgsFunction: completeSandboxes(),
	})
	asJSON := cmd.Flags().Bool("json", false, "print one JSON object a line")
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on printing each new measurement")
	cmd.Flags().Var(&since, "since", "all that are not older than this")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, id, err := serverAndSandbox(cmd, args[0])
		if err != nil {
			return err
		}
		ctx, out := cmd.Context(), cmd.OutOrStdout()
		var from, last time.Time
		if since != 0 {
			from = time.Now().Add(-time.Duration(since))
		}
		header := !*asJSON
		for first := true; ; first = false {
			metrics, err := c.Metrics(ctx, id, from)
			if berm.KindOf(err) == berm.NotFound && !first {
				return nil // it ended
			}
			if err != nil {
				return quietOnInterrupt(ctx, err)
			}
			if first && since == 0 && len(metrics) > 1 {
				metrics = metrics[len(metrics)-1:]
			}
			for _, m := range metrics {
				if !m.Timestamp.After(last) {
					continue
				}
				last, from = m.Timestamp, m.Timestamp
				if *asJSON {
					err = cli.PrintJSONLine(out, m)
				} else {
					err = printMetric(out, m, header)
					header = false
				}
				if err != nil {
					return err
				}
			}
			if !follow {
				if last.IsZero() {
					cli.Notice(cmd, "there is no measurement yet")
				}
				return nil
			}
			if !poll(ctx) {
				return nil
			}
		}
	}
	return cmd
}

func printMetric(w io.Writer, m client.Metric, header bool) error {
	line := ""
	if header {
		line = fmt.Sprintf("%-19s  %6s  %4s  %8s  %8s  %8s  %8s\n", "TIME", "CPU %", "CPUS", "MEMORY", "OF", "DISK", "OF")
	}
	_, err := fmt.Fprintf(w, "%s%-19s  %6.1f  %4d  %8s  %8s  %8s  %8s\n", line, m.Timestamp.Local().Format(time.DateTime),
		m.CPUUsedPct, m.CPUCount, cli.Size(m.MemUsed), cli.Size(m.MemTotal), cli.Size(m.DiskUsed), cli.Size(m.DiskTotal))
	return err
}
