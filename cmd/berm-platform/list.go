package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
	"github.com/berm-sandbox/berm/internal/terminal"
)

func newListCommand() *cobra.Command {
	var (
		states, metadata []string
		filter           client.Filter
	)
	cmd := serverCommand(&cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List sandboxes, newest first",
		Example: `  berm ls
  berm ls --state paused --metadata user=ann
  berm ls --json | jq -r '.[].sandboxID'
  berm kill $(berm ls --quiet)`,
		Args: cli.UsageArgs(cobra.NoArgs),
	})
	asJSON := cli.JSONFlag(cmd)
	flags := cmd.Flags()
	flags.StringSliceVar(&states, "state", nil, "only these: running, paused (default: both)")
	flags.StringArrayVarP(&metadata, "metadata", "m", nil, "only those with KEY=VALUE")
	flags.StringVar(&filter.Template, "template", "", "only those made from this template")
	quiet := flags.BoolP("quiet", "q", false, "print ids only")
	completeFlag(cmd, "state", cobra.FixedCompletions([]string{"running", "paused"}, cobra.ShellCompDirectiveNoFileComp))
	completeFlag(cmd, "template", completeTemplates)
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		for _, s := range states {
			if state := berm.State(s); state != berm.Running && state != berm.Paused {
				return cli.UsageError{Err: fmt.Errorf("--state %q: it must be running or paused", s)}
			}
			filter.States = append(filter.States, berm.State(s))
		}
		if filter.Metadata, err = cli.Pairs("metadata", metadata, nil); err != nil {
			return err
		}
		c, err := server(cmd)
		if err != nil {
			return err
		}
		all := []client.Sandbox{} // "[]" and not "null"
		err = c.List(cmd.Context(), filter, func(s client.Sandbox) bool {
			all = append(all, s)
			return true
		})
		if err != nil {
			return err
		}
		out := cmd.OutOrStdout()
		switch {
		case *asJSON:
			return cli.PrintJSON(out, all)
		case *quiet:
			for _, s := range all {
				if _, err := fmt.Fprintln(out, terminal.Escape(string(s.ID))); err != nil {
					return err
				}
			}
			return nil
		}
		if len(all) == 0 && terminal.Is(out) {
			cli.Notice(cmd, "no sandboxes")
			return nil
		}
		table := terminal.NewTable(terminal.StyleFor(out), "SANDBOX", "TEMPLATE", "STATE", "LEVEL", "CPU", "MEMORY", "AGE", "ENDS IN", "METADATA")
		for _, s := range all {
			ends := "-"
			if s.State == berm.Running && !s.EndAt.IsZero() {
				ends = cli.Span(time.Until(s.EndAt))
			}
			table.Row(string(s.ID), s.Template(), string(s.State), string(s.Level()), fmt.Sprint(s.CPUCount), cli.Size(s.MemoryMB<<20),
				cli.Span(time.Since(s.StartedAt)), ends, sortedPairs(own(s.Metadata)))
		}
		return table.Write(out)
	}
	return cmd
}

// own is the metadata that is a user's: by what begins with "berm." the server knows what a sandbox
// is for.
func own(metadata map[string]string) map[string]string {
	rest := maps.Clone(metadata)
	maps.DeleteFunc(rest, func(key, _ string) bool { return strings.HasPrefix(key, "berm.") })
	return rest
}

// sortedPairs prints a map as "a=1 b=2".
func sortedPairs(m map[string]string) string {
	list := make([]string, 0, len(m))
	for k, v := range m {
		list = append(list, k+"="+v)
	}
	slices.Sort(list)
	return strings.Join(list, " ")
}
