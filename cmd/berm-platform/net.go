package main

import (
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
	"github.com/berm-sandbox/berm/internal/terminal"
)

func newNetCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "net",
		Short: "See what sandboxes do on networks, change what they may, and answer what they ask",
	}
	cmd.AddCommand(newNetLogCommand(), newNetSetCommand(), newNetAskCommand())
	return cmd
}

func newNetSetCommand() *cobra.Command {
	var source policySource
	var revision string
	cmd := serverCommand(&cobra.Command{
		Use:   "set SANDBOX --policy FILE | --allow HOST[:PORT]",
		Short: "Replace the network policy of a sandbox",
		Long: `Replace the network policy of a sandbox by what --policy and --allow say, and print the new
revision. It is in force when the command ends, and flows that it does not allow have been
reset. A policy that is wrong changes nothing. What rules of E2B's API set in requests, and
credentials, stay.

With --revision it is replaced only if nobody else changed it since: berm inspect tells the
revision in force.`,
		Example: `  berm net set i0abcdefghijklmnopqrs --allow pypi --allow api.example.com
  berm net set i0abcdefghijklmnopqrs --policy policy.yaml --revision 3
  berm policy learn i0abcdefghijklmnopqrs > next.yaml   # then read it
  echo "version: 1" | berm net set i0abcdefghijklmnopqrs --policy -   # nothing`,
		Args:              cli.UsageArgs(cobra.ExactArgs(1)),
		ValidArgsFunction: completeFirstSandbox(),
	})
	source.addPolicy(cmd, "the policy of this `FILE` (\"-\" is stdin)", "this `HOST[:PORT]`, or group such as github; may be repeated; comes\nbefore the rules of --policy")
	cmd.Flags().StringVar(&revision, "revision", "", "only if the policy in force is that of this number")
	asJSON := cli.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !source.given() {
			return cli.UsageError{Err: berm.Errorf(berm.Invalid, "which policy is meant is missing").WithHint("give --policy FILE or --allow HOST")}
		}
		if n, err := strconv.Atoi(revision); revision != "" && (err != nil || n < 1 || strconv.Itoa(n) != revision) {
			return cli.UsageError{Err: fmt.Errorf("--revision %q: it is a number from 1 on", revision)}
		}
		id, err := sandboxID(args[0])
		if err != nil {
			return err
		}
		document, err := source.document()
		if err != nil {
			return err
		}
		c, err := server(cmd)
		if err != nil {
			return err
		}
		next, warnings, err := c.SetNetworkPolicy(cmd.Context(), id, document, revision)
		if err != nil {
			return err
		}
		if *asJSON {
			return cli.PrintJSON(cmd.OutOrStdout(), map[string]any{"sandboxID": id, "revision": next, "warnings": warnings})
		}
		for _, text := range warnings {
			cli.Notice(cmd, "warning: %s", terminal.Escape(text))
		}
		_, err = fmt.Fprintln(cmd.OutOrStdout(), terminal.Escape(next))
		return err
	}
	return cmd
}

func newNetLogCommand() *cobra.Command {
	var follow bool
	cmd := serverCommand(&cobra.Command{
		Use:   "log SANDBOX",
		Short: "Print the flows of a sandbox and what was denied",
		Long: `Print the flows of a sandbox that ended, what was denied with the reason, and names that
were not resolved: the last thousand while the server runs. They are told a tenth of a second
later at most. --follow goes on until the sandbox ends. The server's audit log has all of them,
for good.`,
		Example: `  berm net log i0abcdefghijklmnopqrs
  berm net log --follow i0abcdefghijklmnopqrs
  berm net log --json i0abcdefghijklmnopqrs | jq -r 'select(.action == "deny").reason'`,
		Args:              cli.UsageArgs(cobra.ExactArgs(1)),
		ValidArgsFunction: completeSandboxes(),
	})
	asJSON := cmd.Flags().Bool("json", false, "print one JSON object a line")
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on printing what comes")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, id, err := serverAndSandbox(cmd, args[0])
		if err != nil {
			return err
		}
		ctx, out := cmd.Context(), cmd.OutOrStdout()
		style := terminal.StyleFor(out)
		for after, first := uint64(0), true; ; first = false {
			events, err := c.NetworkLog(ctx, id, after)
			switch {
			case berm.KindOf(err) == berm.NotFound && !first: // it ended
				return nil
			case berm.KindOf(err) == berm.NotFound:
				return berm.Errorf(berm.NotFound, "%w", err).WithHint("of one that has ended, its server's audit log tells: berm audit --sandbox %s --type net", id)
			case err != nil:
				return quietOnInterrupt(ctx, err)
			}
			if len(events) > 0 && !first && events[0].Seq > after+1 {
				_, _ = fmt.Fprintf(cmd.ErrOrStderr(), "%d events came too fast; the audit log has them\n", events[0].Seq-after-1)
			}
			for _, e := range events {
				if after = e.Seq; *asJSON {
					err = cli.PrintJSONLine(out, e)
				} else {
					err = printFlow(out, style, e)
				}
				if err != nil {
					return err
				}
			}
			if !follow {
				if len(events) == 0 && !*asJSON {
					cli.Notice(cmd, "no flow has ended, and nothing was denied, or not long enough ago to be told")
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

// printFlow prints one event. Names in it are the sandbox's choice.
func printFlow(w io.Writer, style terminal.Style, e client.FlowEvent) error {
	to := e.Name
	if to == "" {
		to = e.Address
	}
	if e.Port != 0 {
		to = net.JoinHostPort(to, strconv.Itoa(int(e.Port)))
	}
	action := fmt.Sprintf("%-5s", terminal.Escape(e.Action))
	if e.Action != "allow" {
		action = style.Bad(action)
	}
	what := e.Protocol
	if e.Kind != "flow" {
		what = e.Kind
	}
	if e.Method != "" {
		to = e.Method + " " + to + e.Path
	}
	line := style.Dim(e.Time.Local().Format("2006-01-02 15:04:05.000")) + " " + action + " " + fmt.Sprintf("%-5s ", terminal.Escape(what)) + terminal.Escape(to)
	add := func(name, value string) {
		if value != "" {
			line += " " + style.Dim(name+"="+terminal.Escape(value))
		}
	}
	if e.Status != 0 {
		add("status", strconv.Itoa(e.Status))
	}
	add("credential", e.Credential)
	add("reason", e.Reason)
	add("rule", e.Rule)
	if e.Action == "allow" || e.Up+e.Down > 0 { // also of one that was cut: it had passed until then
		if e.Name != "" {
			add("address", e.Address)
		}
		if !strings.HasPrefix(e.Kind, "credential.") {
			add("up", cli.Size(e.Up))
			add("down", cli.Size(e.Down))
		}
		add("took", time.Duration(e.Seconds*float64(time.Second)).Round(time.Millisecond).String())
	}
	if e.Count > 1 {
		add("times", strconv.Itoa(e.Count))
	}
	if e.Detail != "" {
		line += " " + terminal.Escape(strings.Join(strings.Fields(e.Detail), " ")) // it may have lines
	}
	_, err := fmt.Fprintln(w, line)
	return err
}
