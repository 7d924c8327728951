package main

import (
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
	"github.com/berm-sandbox/berm/internal/network/policy"
	"github.com/berm-sandbox/berm/internal/terminal"
)

func newInspectCommand() *cobra.Command {
	cmd := serverCommand(&cobra.Command{
		Use:   "inspect SANDBOX",
		Short: "Print what a sandbox is and all that it is held to",
		Long: `Print what a sandbox is and its whole effective policy: isolation level, namespaces,
ids, capabilities, system calls, mounts, devices, limits, network, credentials without
their secrets, and what the host could not give. Of a sandbox that has ended, print how.`,
		Example: `  berm inspect i0abcdefghijklmnopqrs
  berm inspect --json i0abcdefghijklmnopqrs | jq .policy.limits`,
		Args:              cli.UsageArgs(cobra.ExactArgs(1)),
		ValidArgsFunction: completeSandboxes(),
	})
	asJSON := cli.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, id, err := serverAndSandbox(cmd, args[0])
		if err != nil {
			return err
		}
		s, err := c.Inspect(cmd.Context(), id)
		if err != nil {
			return err
		}
		var policy *berm.Policy // a dead sandbox has none
		if s.Exit == nil {
			p, err := c.Policy(cmd.Context(), id)
			if err != nil {
				return err
			}
			policy = &p
		}
		var network *client.NetworkPolicy // a sandbox without a network has none
		if s.Exit == nil {
			p, err := c.NetworkPolicy(cmd.Context(), id)
			if err == nil {
				network = &p
			} else if kind := berm.KindOf(err); kind != berm.NotFound && kind != berm.Unsupported {
				return err
			}
		}
		var credentials client.Credentials // a server that has none knows no such thing
		if s.Exit == nil {
			told, err := c.Credentials(cmd.Context(), id)
			if kind := berm.KindOf(err); err != nil && kind != berm.NotFound && kind != berm.Unsupported {
				return err
			}
			credentials = told
		}
		s.AgentToken, s.TrafficToken = "", "" // secrets are for programs, not for screens
		out := cmd.OutOrStdout()
		if *asJSON {
			object := map[string]any{"sandbox": s}
			if policy != nil {
				object["policy"] = policy
			}
			if network != nil {
				object["network"] = map[string]any{"revision": network.Revision, "policy": network.Document}
			}
			if len(credentials.Credentials) > 0 {
				object["credentials"] = credentials.Credentials
			}
			if len(credentials.Fields) > 0 {
				object["fields"] = credentials.Fields
			}
			return cli.PrintJSON(out, object)
		}
		page := newPage(out)
		page.sandbox(s)
		if policy != nil {
			page.degraded(policy)
		}
		if network != nil {
			if err := page.network(network); err != nil {
				return err
			}
		}
		page.credentials(credentials)
		if policy != nil {
			page.policy(policy)
		}
		return page.err
	}
	return cmd
}

// page prints headings and "name  value" lines, each value escaped, wrapped and
// aligned.
type page struct {
	w     io.Writer
	style terminal.Style
	width int // in columns
	err   error
}

const (
	pageIndent = 18
	pageWidth  = 100 // at most
)

func newPage(w io.Writer) page {
	p := page{w: w, style: terminal.StyleFor(w), width: pageWidth}
	if f, ok := w.(*os.File); ok && terminal.Is(f) {
		p.width = min(p.width, terminal.SizeOf(f).Cols)
	}
	return p
}

func (p *page) print(text string) {
	if p.err == nil {
		_, p.err = io.WriteString(p.w, text)
	}
}

func (p *page) heading(text string) { p.print(p.style.Bold(text) + "\n") }

// line prints one value; an empty one is left out.
func (p *page) line(name, value string) {
	if value != "" {
		p.list(name, value)
	}
}

// list prints values one below the other, long ones wrapped with a deeper indent, or
// "none".
func (p *page) list(name string, values ...string) {
	if len(values) == 0 {
		values = []string{"none"}
	}
	for _, v := range values {
		for i, line := range wrap(strings.Split(terminal.Escape(v), " "), p.width-pageIndent-2) {
			if i > 0 {
				name, line = "", "  "+line
			}
			p.print(fmt.Sprintf("  %-*s%s\n", pageIndent-2, name, line))
		}
		name = ""
	}
}

// pair prints a name of any length and what it is.
func (p *page) pair(name, value string) {
	p.print("  " + terminal.Escape(name) + ": " + terminal.Escape(value) + "\n")
}

// words prints values one after the other, wrapped.
func (p *page) words(name string, values []string) {
	escaped := make([]string, len(values))
	for i, v := range values {
		escaped[i] = terminal.Escape(v)
	}
	lines := wrap(escaped, p.width-pageIndent)
	if len(values) == 0 {
		lines = []string{"none"}
	}
	for _, line := range lines {
		p.print(fmt.Sprintf("  %-*s%s\n", pageIndent-2, name, line))
		name = ""
	}
}

// wrap joins words to lines of at most width columns, if no word is longer.
func wrap(words []string, width int) []string {
	var lines []string
	line := ""
	for i, word := range words {
		if i > 0 && terminal.Width(line)+1+terminal.Width(word) > width {
			lines = append(lines, line)
			line = word
			continue
		}
		if i > 0 {
			line += " "
		}
		line += word
	}
	return append(lines, line)
}

func (p *page) sandbox(s *client.Sandbox) {
	const clock = "2006-01-02 15:04:05 -0700"
	p.heading("Sandbox " + terminal.Escape(string(s.ID)))
	p.line("template", s.Template())
	p.line("state", string(s.State))
	if !s.StartedAt.IsZero() {
		p.line("started", s.StartedAt.Local().Format(clock))
	}
	if !s.EndAt.IsZero() && s.State == berm.Running {
		p.line("ends", s.EndAt.Local().Format(clock))
	}
	if s.Lifecycle != nil {
		then := string(s.Lifecycle.OnTimeout)
		if s.Lifecycle.AutoResume {
			then += ", resumed by traffic"
		}
		p.line("at the end", then)
	}
	if s.Berm != nil && s.Berm.Checkpoints != nil {
		p.line("checkpoints", (*checkpointFlag)(s.Berm.Checkpoints).String())
	}
	if e := s.Exit; e != nil {
		how := string(e.Reason)
		switch {
		case e.Signal != "":
			how += ", " + e.Signal
		case e.Reason == berm.ReasonExit:
			how += fmt.Sprintf(", code %d", e.Code)
		}
		p.line("ended", e.At.Local().Format(clock))
		p.line("reason", how)
		p.line("", e.Detail)
	}
	p.line("metadata", sortedPairs(s.Metadata))
	p.line("guest agent", s.AgentVersion)
}

func (p *page) policy(v *berm.Policy) {
	p.heading("Policy")
	p.line("level", string(v.Level))
	p.line("network", v.Network)
	p.words("namespaces", v.Namespaces)
	p.line("ids", v.IDMap)
	p.words("capabilities", v.Capabilities)
	p.line("new privileges", map[bool]string{true: "never", false: "by set-uid programs (inside ids only)"}[v.NoNewPrivs])
	p.line("landlock", v.Landlock)

	p.heading("Limits")
	p.list("memory", limit(v.Limits.Memory, cli.Size))
	p.list("cpu", limit(v.Limits.CPU, func(n float64) string { return fmt.Sprintf("%g cores", n) }))
	p.list("processes", limit(v.Limits.PIDs, func(n int64) string { return fmt.Sprint(n) }))
	p.list("disk", limit(v.Limits.Disk, cli.Size))
	perSecond := func(n int64) string { return cli.Size(n) + "/s" }
	p.list("disk reads", limit(v.Limits.ReadBytes, perSecond))
	p.list("disk writes", limit(v.Limits.WriteBytes, perSecond))
	p.list("rlimits", v.Rlimits...)
	p.line("cgroup", v.Cgroup)

	p.heading("Files")
	p.list("mounts", v.Mounts...)
	p.words("masked", v.Masked)
	p.words("read-only", v.ReadOnly)
	p.words("devices", v.Devices)

	p.heading("System calls")
	p.line("profile", v.Seccomp.Profile)
	p.line("unlisted calls", v.Seccomp.Default)
	p.list("in part", v.Seccomp.Rules...)
	p.words("allowed", v.Seccomp.Allowed)
}

func (p *page) degraded(v *berm.Policy) {
	if len(v.Degraded) > 0 {
		p.heading("What the host could not give")
		for _, d := range v.Degraded {
			p.print("  " + p.style.Bad(terminal.Escape(d)) + "\n")
		}
	}
}

// credentials prints what requests get, by the hosts that they are for.
func (p *page) credentials(c client.Credentials) {
	if len(c.Credentials) > 0 {
		p.heading("Credentials")
	}
	for _, one := range c.Credentials {
		to := one.Hosts
		if one.Service != "" {
			to = append([]string{one.Service}, to...)
		}
		p.pair(one.Name, one.Secret+", for requests to "+strings.Join(to, ", "))
	}
	if len(c.Fields) > 0 {
		p.heading("Fields of requests that network.rules set")
	}
	for _, host := range slices.Sorted(maps.Keys(c.Fields)) {
		p.pair(host, strings.Join(c.Fields[host], ", "))
	}
}

// network prints the policy as the lines of a policy file.
func (p *page) network(n *client.NetworkPolicy) error {
	document, err := policy.DecodeJSON("policy", n.Document)
	if err != nil {
		return berm.Errorf(berm.Internal, "the network policy that the server told: %w", err)
	}
	p.heading("Network policy, revision " + terminal.Escape(n.Revision))
	for line := range strings.Lines(string(document.YAML())) {
		p.print("  " + terminal.Escape(strings.TrimRight(line, "\n")) + "\n")
	}
	return nil
}

func limit[N int64 | float64](n N, text func(N) string) string {
	if n == 0 {
		return "no limit"
	}
	return text(n)
}
