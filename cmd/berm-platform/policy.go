package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/local/session"
	"github.com/berm-sandbox/berm/internal/network/address"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/egress/compile"
	"github.com/berm-sandbox/berm/internal/network/policy"
	"github.com/berm-sandbox/berm/internal/terminal"
)

// Exit codes of `berm policy check`, beside those of all commands.
const (
	exitDenied = 3
	exitAsks   = 4
)

func newPolicyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policy",
		Short: "Try, explain and draft network policies",
	}
	cmd.AddCommand(newPolicyCheckCommand(), newPolicyExplainCommand(), newPolicyLearnCommand(), newPolicyImportCommand(), newPolicySchemaCommand())
	return cmd
}

// policySource is where a command takes a policy from: flags as berm run has them, a file, or
// a sandbox.
type policySource struct {
	file  string
	allow []string
	open  []string
}

func (f *policySource) add(cmd *cobra.Command) {
	cmd.Flags().SortFlags = false
	f.addPolicy(cmd, "the policy of this `FILE`, as berm run takes it", "and this `HOST[:PORT]`, as berm run takes it")
	cmd.Flags().StringArrayVar(&f.open, "open", nil, "with this private address `RANGE` opened, as by berm run and berm serve;\nof a sandbox what its server has opened is known")
}

// addPolicy adds the flags that name a policy alone.
func (f *policySource) addPolicy(cmd *cobra.Command, file, allow string) {
	cmd.Flags().StringVar(&f.file, "policy", "", file)
	cmd.Flags().StringArrayVarP(&f.allow, "allow", "a", nil, allow)
	completeFlag(cmd, "allow", func(*cobra.Command, []string, string) ([]cobra.Completion, cobra.ShellCompDirective) {
		return policy.Groups(), cobra.ShellCompDirectiveNoFileComp
	})
}

// given says whether flags name a policy.
func (f *policySource) given() bool { return f.file != "" || len(f.allow) > 0 }

// maxPolicyFile bounds what is read of a policy in bytes; its readers are stricter.
const maxPolicyFile = 1 << 20

func readBounded(path string, limit int64) ([]byte, error) {
	in := io.Reader(os.Stdin)
	if path != "-" {
		file, err := os.Open(path)
		if errors.Is(err, os.ErrNotExist) {
			return nil, berm.Errorf(berm.NotFound, "there is no file %s", path)
		}
		if err != nil {
			return nil, berm.Errorf(berm.Invalid, "%w", err)
		}
		defer file.Close()
		in = file
	}
	content, err := io.ReadAll(io.LimitReader(in, limit+1))
	if err != nil {
		return nil, berm.Errorf(berm.Invalid, "%s: %w", path, err)
	}
	if int64(len(content)) > limit {
		return nil, berm.Errorf(berm.Invalid, "%s is larger than %s", path, cli.Size(limit))
	}
	return content, nil
}

// document is read in JSON.
func (f *policySource) document() (json.RawMessage, error) {
	p, err := f.read()
	if err != nil {
		return nil, err
	}
	return json.Marshal(p)
}

// read makes the policy that the flags name.
func (f *policySource) read() (*policy.Policy, error) {
	p := egress.Policy{Entries: f.allow, Source: f.file}
	if f.file != "" {
		content, err := readBounded(f.file, maxPolicyFile)
		if err != nil {
			return nil, err
		}
		if p.YAML = string(content); len(content) == 0 {
			return nil, berm.Errorf(berm.Invalid, "the policy %s is empty", f.file)
		}
	}
	return compile.Policy(p)
}

func newPolicyCheckCommand() *cobra.Command {
	var source policySource
	var method string
	cmd := serverCommand(&cobra.Command{
		Use:   "check [flags] [SANDBOX|FILE] URL|HOST[:PORT]",
		Short: "Say whether a policy allows a destination or request, and why",
		Long: `Say whether a policy allows a destination or request, by which rule, and what would
allow it. The policy is that of a sandbox or a file, or what --policy and --allow would let a
command of berm run reach. Names are not resolved: one whose addresses may not be reached is denied when
it is connected to. A port without more is TCP; HOST:PORT/udp is UDP. Private addresses count
as opened where the sandbox's server has, or --open says so.

The exit code is 0 when it is allowed, 3 when it is denied, 4 when the rule asks.`,
		Example: `  berm policy check --policy policy.yaml https://api.example.com/repos/shop/issues --method POST
  berm policy check --allow pypi files.pythonhosted.org
  berm policy check i0abcdefghijklmnopqrs db.example.com:5432`,
		Args:              cli.UsageArgs(cobra.RangeArgs(1, 2)),
		ValidArgsFunction: completeFirstSandbox(),
	})
	source.add(cmd)
	cmd.Flags().StringVarP(&method, "method", "X", "", "the method of the request (default GET)")
	asJSON := cli.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		q, err := policy.ParseQuestion(args[len(args)-1], method, time.Now())
		if err != nil {
			return cli.UsageError{Err: err}
		}
		// As explain takes it: what is no id of a sandbox is a file.
		if len(args) == 2 && !source.given() {
			if _, err := berm.ParseSandboxID(args[0]); err != nil {
				source.file, args = args[0], args[1:]
			}
		}
		var a policy.Answer
		switch {
		case len(args) == 2 && (source.given() || len(source.open) > 0):
			return cli.UsageError{Err: fmt.Errorf("the policy is that of a sandbox, or what --policy, --allow and --open say")}
		case len(args) == 2:
			c, id, err := serverAndSandbox(cmd, args[0])
			if err != nil {
				return err
			}
			answer, err := c.CheckNetwork(cmd.Context(), id, args[1], method)
			if err != nil {
				return err
			}
			if err := json.Unmarshal(answer, &a); err != nil {
				return berm.Errorf(berm.Internal, "what the server answers: %w", err)
			}
		case !source.given():
			return cli.UsageError{Err: berm.Errorf(berm.Invalid, "which policy is meant is missing").WithHint("name a sandbox before the destination, or --policy FILE or --allow HOST")}
		default:
			p, err := source.read()
			if err != nil {
				return err
			}
			table, err := address.NewTableHere(source.open)
			if err != nil {
				return err
			}
			e, err := policy.NewEvaluator(p, nil, table)
			if err != nil {
				return err
			}
			a = e.Answer(q).Answer()
			for _, w := range p.Warnings(table) {
				cli.Notice(cmd, "warning: rule %s: %s", w.Rule, w.Text)
			}
		}
		if *asJSON {
			err = cli.PrintJSON(cmd.OutOrStdout(), a)
		} else {
			err = printAnswer(cmd.OutOrStdout(), a)
		}
		switch {
		case err != nil:
			return err
		case a.Action == policy.Ask:
			return cli.ExitError(exitAsks)
		case a.Action != policy.Allow:
			return cli.ExitError(exitDenied)
		}
		return nil
	}
	return cmd
}

func printAnswer(w io.Writer, a policy.Answer) error {
	lines := strings.Split(a.Explanation, "\n")
	for i := range lines {
		lines[i] = terminal.Escape(lines[i])
	}
	text := strings.Join(lines, "\n")
	if a.Action == policy.Deny {
		style := terminal.StyleFor(w)
		if rest, ok := strings.CutPrefix(text, "Denied"); ok {
			text = style.Bad("Denied") + rest
		}
	}
	if a.Inspected {
		text += " Its requests are looked into."
	}
	if len(a.Credentials) > 0 {
		text += " They may have the credential " + terminal.Escape(strings.Join(a.Credentials, ", ")) + "."
	}
	_, err := fmt.Fprintln(w, text)
	return err
}

func newPolicyExplainCommand() *cobra.Command {
	var source policySource
	cmd := serverCommand(&cobra.Command{
		Use:   "explain [flags] [SANDBOX|FILE]",
		Short: "Say in plain words what a policy allows, and what in it is wrong",
		Long: `Say in plain words what the policy of a sandbox or a file allows, with warnings: rules that
can never matter, wildcards over strangers, ranges that stay closed.`,
		Example: `  berm policy explain policy.yaml
  berm policy explain i0abcdefghijklmnopqrs
  berm policy explain --allow github --policy policy.yaml   # as berm run has them together`,
		Args: cli.UsageArgs(cobra.MaximumNArgs(1)),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return sandboxCompletions(cmd, nil, nil, ""), cobra.ShellCompDirectiveDefault
		},
	})
	source.add(cmd)
	asJSON := cli.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) == 1 && source.file != "" || len(args) == 0 && !source.given() {
			return cli.UsageError{Err: berm.Errorf(berm.Invalid, "explain wants one policy").WithHint("a sandbox, a file, or --allow HOST")}
		}
		var d policy.Description
		title := "Policy"
		id, err := berm.ParseSandboxID(strings.Join(args, ""))
		switch {
		case err == nil && (source.given() || len(source.open) > 0):
			return cli.UsageError{Err: fmt.Errorf("the policy is that of a sandbox, or what --policy, --allow and --open say")}
		case err == nil:
			c, err := server(cmd)
			if err != nil {
				return err
			}
			told, err := c.ExplainNetwork(cmd.Context(), id)
			if err != nil {
				return err
			}
			if err := json.Unmarshal(told.Document, &d); err != nil {
				return berm.Errorf(berm.Internal, "what the server answers: %w", err)
			}
			title += " of " + string(id) + ", revision " + told.Revision
		default:
			if len(args) == 1 {
				source.file = args[0]
			}
			p, err := source.read()
			if err != nil {
				return err
			}
			if source.file != "" {
				title += " " + source.file
			}
			table, err := address.NewTableHere(source.open)
			if err != nil {
				return err
			}
			if _, err := policy.NewEvaluator(p, nil, table); err != nil {
				return err
			}
			d = p.Describe(table, time.Now())
		}
		if *asJSON {
			return cli.PrintJSON(cmd.OutOrStdout(), d)
		}
		return printDescription(cmd.OutOrStdout(), title, d)
	}
	return cmd
}

func printDescription(w io.Writer, title string, d policy.Description) error {
	style := terminal.StyleFor(w)
	var b strings.Builder
	line := func(text string) { b.WriteString(text + "\n") }
	line(style.Bold(terminal.Escape(title)))
	for i, r := range d.Rules {
		at := terminal.Escape(r.ID)
		if r.Line > 0 {
			at += fmt.Sprintf(", line %d", r.Line)
		}
		line(fmt.Sprintf("%3d. %s %s", i+1, terminal.Escape(r.Text), style.Dim("("+at+")")))
		for _, text := range r.Requests {
			line("       requests: " + terminal.Escape(text))
		}
		for _, text := range r.Warnings {
			line("       " + style.Bad("warning:") + " " + terminal.Escape(text))
		}
	}
	line("  -  " + d.Default)
	for _, text := range d.Also {
		line("     " + terminal.Escape(text))
	}
	for _, text := range d.Warnings {
		line(style.Bad("warning:") + " " + terminal.Escape(text))
	}
	line(style.Dim("The first rule that matches decides. Denied whatever rules say: this host, metadata services, private and reserved\naddresses that are not opened."))
	_, err := io.WriteString(w, b.String())
	return err
}

func newPolicyLearnCommand() *cobra.Command {
	var source policySource
	var all bool
	cmd := serverCommand(&cobra.Command{
		Use:   "learn [flags] [SANDBOX|LOG|DIRECTORY]",
		Short: "Draft a policy that allows what was denied",
		Long: `Print a policy that allows what was denied to the last berm run in this directory, to a
sandbox, or in a log (an audit log or its directory, or what berm net log --json prints; "-" is
standard input): the policy that was in force with rules for exactly those names, ports and
requests, and with groups where they fit. Of a log it is the rules alone, or with --policy those
of a file too. What stays denied is named with its reason: no policy can allow it, or a rule of
yours denies it.

It is a draft: read it before you use it. A program that is led astray asks for what it
should not get.`,
		Example: `  berm run --policy policy.yaml -- npm ci ; berm policy learn > next.yaml
  berm policy learn i0abcdefghijklmnopqrs
  berm net log --json i0abcdefghijklmnopqrs | berm policy learn --policy policy.yaml -`,
		Args: cli.UsageArgs(cobra.MaximumNArgs(1)),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return sandboxCompletions(cmd, nil, nil, ""), cobra.ShellCompDirectiveDefault
		},
	})
	flags := cmd.Flags()
	flags.StringVar(&source.file, "policy", "", "extend the policy of this `FILE`")
	flags.BoolVar(&all, "all", false, "learn from all runs in this directory, not the last alone")
	asJSON := cli.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if all && len(args) > 0 {
			return cli.UsageError{Err: fmt.Errorf("--all is about the runs in this directory")}
		}
		base, denials, err := learned(cmd, args, all)
		if err != nil {
			return err
		}
		if source.file != "" {
			if base, err = source.read(); err != nil {
				return err
			}
		}
		draft, err := base.Extend(denials)
		if err != nil {
			return err
		}
		if *asJSON {
			return cli.PrintJSON(cmd.OutOrStdout(), map[string]any{
				"denials": draft.Learned, "changed": draft.Changed, "left": draft.Left, "policy": draft.Policy,
			})
		}
		switch {
		case len(draft.Changed) == 0 && draft.Learned > 0:
			cli.Notice(cmd, "the policy allows what was denied already")
		case len(draft.Changed) == 0:
			cli.Notice(cmd, "nothing was denied that a rule could allow")
		default:
			if _, err := cmd.OutOrStdout().Write(draft.Policy.YAML()); err != nil {
				return err
			}
			cli.Notice(cmd, "drafted from %d denials: %s; read it before you use it", draft.Learned, strings.Join(draft.Changed, ", "))
		}
		if len(draft.Left) > 0 {
			cli.Notice(cmd, "still denied: %s", leftText(draft.Left))
		}
		return nil
	}
	return cmd
}

// leftText names what a draft leaves denied, and why.
func leftText(left []policy.Left) string {
	const most = 20
	var list []string
	for _, l := range left[:min(len(left), most)] {
		list = append(list, terminal.Escape(l.What)+" ("+terminal.Escape(string(l.Reason))+")")
	}
	text := strings.Join(list, ", ")
	if more := len(left) - len(list); more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// learned returns denials, with the policy that was in force if that is known.
func learned(cmd *cobra.Command, args []string, all bool) (*policy.Policy, []policy.Denial, error) {
	if len(args) == 0 {
		return lastRun(all)
	}
	base := &policy.Policy{}
	var denials []policy.Denial
	add := func(line []byte) {
		if d, _, ok := policy.ParseDenial(line); ok && len(denials) < maxDenials {
			denials = append(denials, d)
		}
	}
	if id, err := berm.ParseSandboxID(args[0]); err == nil {
		c, err := server(cmd)
		if err != nil {
			return nil, nil, err
		}
		told, err := c.NetworkPolicy(cmd.Context(), id)
		if err != nil {
			return nil, nil, err
		}
		if base, err = policy.DecodeJSON("policy", told.Document); err != nil {
			return nil, nil, berm.Errorf(berm.Internal, "the network policy that the server told: %w", err)
		}
		events, err := c.NetworkLog(cmd.Context(), id, 0)
		if err != nil {
			return nil, nil, err
		}
		for _, e := range events {
			line, err := json.Marshal(e)
			if err != nil {
				return nil, nil, err
			}
			add(line)
		}
		return base, denials, nil
	}
	if info, err := os.Stat(args[0]); err == nil && info.IsDir() {
		return base, denials, eachLogLine(args[0], add)
	}
	err := eachLine(args[0], add)
	return base, denials, err
}

// eachLogLine reads the lines of an audit log in a directory, or in that of a server.
func eachLogLine(dir string, do func([]byte)) error {
	logs := func() []string {
		found, _ := filepath.Glob(filepath.Join(dir, "log*.jsonl*")) // the pattern is well-formed but for dir
		return found
	}
	if len(logs()) == 0 {
		if dir = filepath.Join(dir, "audit"); len(logs()) == 0 {
			return berm.Errorf(berm.NotFound, "there is no audit log in %s", filepath.Dir(dir)).
				WithHint("a log is a directory with log.jsonl, such as audit in the data directory of a server")
		}
	}
	for line, err := range trail.Dir(dir).Records(0) {
		if err != nil && len(line.Raw) == 0 {
			return err
		}
		do(line.Raw)
	}
	return nil
}

// maxDenials bounds those that are learned from.
const maxDenials = 100_000

// eachLine reads the lines of a file; "-" is standard input.
func eachLine(path string, do func([]byte)) error {
	in := io.Reader(os.Stdin)
	if path != "-" {
		file, err := os.Open(path)
		if errors.Is(err, os.ErrNotExist) {
			return berm.Errorf(berm.NotFound, "there is no file %s", path)
		}
		if err != nil {
			return berm.Errorf(berm.Invalid, "%w", err)
		}
		defer file.Close()
		in = file
	}
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 2*audit.MaxLine)
	for lines.Scan() {
		do(lines.Bytes())
	}
	if err := lines.Err(); err != nil {
		return berm.Errorf(berm.Invalid, "%s: %w", path, err)
	}
	return nil
}

// lastRun finds what was denied to the last berm run of the project around the working
// directory that had a network, or to all of them, and the last one's policy.
func lastRun(all bool) (*policy.Policy, []policy.Denial, error) {
	var last *egress.Policy
	ours := map[berm.SandboxID]bool{}
	var denials []policy.Denial
	err := eachRun(func(id berm.SandboxID, p *egress.Policy) {
		if p == nil {
			return
		}
		if last = p; !all {
			clear(ours)
			denials = nil
		}
		ours[id] = true
	}, func(line []byte) {
		if d, id, ok := policy.ParseDenial(line); ok && ours[id] && len(denials) < maxDenials {
			denials = append(denials, d)
		}
	})
	if err != nil {
		return nil, nil, err
	}
	if last == nil {
		return nil, nil, berm.Errorf(berm.NotFound, "no berm run in this directory had a network that denies something").
			WithHint("run it with --allow or --policy; a policy of the one line `version: 1` denies everything, and tells what was wanted")
	}
	p, err := compile.Policy(*last)
	return p, denials, err
}

// eachRun reads the log of berm run, if there is one: do gets the runs of the project around the
// working directory, with the policy of those that had a network, and other all other records.
func eachRun(do func(berm.SandboxID, *egress.Policy), other func(line []byte)) error {
	state, err := session.StateDir()
	if err != nil {
		return err
	}
	dir, err := os.Getwd()
	if err == nil {
		dir, err = filepath.EvalSymlinks(dir)
	}
	if err != nil {
		return berm.Errorf(berm.Invalid, "the working directory: %w", err)
	}
	type begin struct {
		Sandbox berm.SandboxID
		Type    audit.Type
		Data    struct {
			Workspace string
			Policy    *egress.Policy
		}
	}
	err = eachLine(filepath.Join(state, "audit", "log.jsonl"), func(line []byte) {
		if !bytes.Contains(line, []byte(`"`+audit.SandboxCreate+`"`)) {
			other(line)
			return
		}
		var b begin
		if json.Unmarshal(line, &b) == nil && b.Type == audit.SandboxCreate && inside(dir, b.Data.Workspace) {
			do(b.Sandbox, b.Data.Policy)
		}
	})
	if berm.KindOf(err) == berm.NotFound {
		return nil
	}
	return err
}

// inside says whether a directory is a project or lies in it.
func inside(dir, project string) bool {
	return dir == project || strings.HasPrefix(dir, strings.TrimSuffix(project, "/")+"/")
}

func newPolicyImportCommand() *cobra.Command {
	var from string
	cmd := &cobra.Command{
		Use:   "import FILE",
		Short: "Turn the policy of another system into one of Berm",
		Long: `Print as a policy of Berm what a file of another system says: the settings of Anthropic's
sandbox-runtime (network.allowedDomains, deniedDomains), the networkPolicy of a Vercel sandbox,
the allowNet of a Deno sandbox or the permissions of a deno.json. "-" is standard input. What
cannot be said in the same way is an error, never left out.`,
		Example: `  berm policy import ~/.srt-settings.json > policy.yaml
  echo '{"allowNet": ["api.example.com:443"]}' | berm policy import -`,
		Args: cli.UsageArgs(cobra.ExactArgs(1)),
	}
	cmd.Flags().StringVar(&from, "from", "", "whose form it is: "+strings.Join(policy.Forms, ", ")+" (default: told by its keys)")
	completeFlag(cmd, "from", func(*cobra.Command, []string, string) ([]cobra.Completion, cobra.ShellCompDirective) {
		return policy.Forms, cobra.ShellCompDirectiveNoFileComp
	})
	asJSON := cli.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		content, err := readBounded(args[0], maxPolicyFile)
		if err != nil {
			return err
		}
		p, err := policy.Import(from, content)
		if err != nil {
			return err
		}
		if *asJSON {
			return cli.PrintJSON(cmd.OutOrStdout(), p)
		}
		_, err = cmd.OutOrStdout().Write(p.YAML())
		return err
	}
	return cmd
}

func newPolicySchemaCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "schema",
		Short: "Print the JSON schema of a policy, for editors",
		Example: `  berm policy schema > policy.schema.json
  # in a policy: # yaml-language-server: $schema=policy.schema.json`,
		Args: cli.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := cmd.OutOrStdout().Write(policy.Schema())
			return err
		},
	}
}
