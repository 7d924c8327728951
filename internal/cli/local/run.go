package local

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/local"
	"github.com/berm-sandbox/berm/internal/local/preset"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/terminal"
)

// Templates finds a template by its name. What it takes is not linked into the program
// that runs commands: that leaves it nil and sets Platform, which executes the one that has
// it.
var (
	Templates func(ctx context.Context, name string) (berm.Template, error)
	Platform  func() error
	// TemplateNames lists templates for completion, in the program that has them.
	TemplateNames func(ctx context.Context) []string
	// Groups lists the groups that --allow takes, for completion.
	Groups func(ctx context.Context) []string
	// Program opens the program that has the network service.
	Program func() (*os.File, error)
)

// noCommand is the exit code when the sandbox could not be made, as docker run and
// env(1) have it: those of the command are below.
const noCommand = 125

// runFlags are the flags that run and shell share.
type runFlags struct {
	task        local.Task
	cow         bool
	memory      cli.SizeFlag
	timeout     cli.DurationFlag
	cpus        float64
	pids        int64
	network     string
	policy      string
	open        []string
	template    string
	checkpoint  bool
	printPolicy bool
	json        bool
	quiet       bool
	proxy       string
	authorities string
}

func newRunCommand() *cobra.Command {
	f := &runFlags{}
	cmd := &cobra.Command{
		Use:   "run [flags] [--] COMMAND [ARG...]",
		Short: "Run a command in a sandbox around this directory",
		Long: `Run a command in a sandbox around this directory.

The command sees this directory at its own path and can write to it, but what it writes
lies beside the project until you look at it: berm diff, then berm apply or berm discard.
It sees the programs of this machine read-only. It does not see your home directory, other
projects, or the sockets of agents and services, gets no environment but what is named, and
has no network but what --allow and --policy name, or all that this machine has with --network host.

The exit code is the command's own; 124 after --timeout; 125 when the sandbox could not be
made; 126 and 127 when the command cannot be executed or is not there.`,
		Example: `  berm run -- npm test
  berm run --preset claude-code -- claude
  berm run --rw . --timeout 10m -- make        # straight into this directory
  berm run --allow pypi -- pip install -r requirements.txt
  berm run --allow github --cred github=env:GITHUB_TOKEN -- gh pr list
  berm run --session shop-1 -- git status      # go on in an earlier session
  berm run --print-policy -- true              # what would be allowed`,
		Args: cli.UsageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			f.task.Argv = args
			return f.run(cmd)
		},
	}
	f.add(cmd)
	return cmd
}

func newShellCommand() *cobra.Command {
	f := &runFlags{}
	cmd := &cobra.Command{
		Use:   "shell [flags]",
		Short: "Open a shell in a sandbox around this directory",
		Long:  "Open your shell in a sandbox around this directory: `berm run` with $SHELL.",
		Example: `  berm shell
  berm shell --session shop-1     # look at what an agent left, from inside`,
		Args: cli.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			f.task.Argv = []string{local.Shell(os.Environ())}
			return f.run(cmd)
		},
	}
	f.add(cmd)
	return cmd
}

func (f *runFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.SetInterspersed(false) // what follows the command is its own
	flags.SortFlags = false
	flags.StringVarP(&f.task.Preset, "preset", "p", "", "rights for a kind of program: readonly, build, codex, claude-code, or one of the configuration file")
	flags.StringVarP(&f.task.Session, "session", "s", "", "go on in this session, one that berm sessions lists; the names of new ones are berm's to choose")
	flags.BoolVar(&f.cow, "cow", false, "write beside the project, also when the preset says otherwise")
	rights := &f.task.Rights
	flags.StringArrayVar(&rights.ReadWrite, "rw", nil, "let it write to this `PATH`; \".\" is the project itself")
	flags.StringArrayVar(&rights.ReadOnly, "ro", nil, "show it this `PATH`, read-only")
	flags.StringArrayVar(&rights.Hide, "hide", nil, "hide this `PATH` from it")
	flags.StringArrayVarP(&rights.Env, "env", "e", nil, "pass a variable: `NAME[=VALUE]`, PREFIX* or, to take one away, -NAME")
	flags.StringVarP(&f.template, "template", "t", "", "use the programs of this template instead of the host's")
	flags.StringVarP(&f.task.Dir, "workdir", "C", "", "the project, instead of the working directory")
	flags.Var(&f.timeout, "timeout", "end it after this time")
	flags.VarP(&f.memory, "memory", "m", "how much memory it may use, such as 2GiB")
	flags.Float64Var(&f.cpus, "cpus", 0, "how many processors it may use, such as 1.5")
	flags.Int64Var(&f.pids, "pids", 0, "how many processes and threads it may have")
	flags.StringVar(&rights.Profile, "profile", "", "system calls that it may use: default or strict")
	flags.StringVar(&f.network, "network", "", "none (the default), or host: all that this machine reaches")
	flags.StringArrayVarP(&rights.Allow, "allow", "a", nil, "let it reach this `HOST[:PORT]`: a name, *.name, address range, or group such as pypi or github")
	flags.StringVar(&f.policy, "policy", "", "let it reach what this `FILE` allows")
	flags.StringArrayVar(&f.open, "open", nil, "let rules name this private address `RANGE`, such as 10.1.0.0/16; an address of this machine is opened only by itself")
	flags.StringVar(&f.proxy, "upstream-proxy", "", "reach what is allowed through this proxy: the `URL` of an HTTP, HTTPS or SOCKS5 proxy, or the word env for that of HTTPS_PROXY")
	flags.StringVar(&f.authorities, "upstream-ca", "", "trust servers and proxies by the authorities in this `FILE` too")
	flags.StringArrayVar(&rights.Credentials, "cred", nil, "let requests have a secret that it never sees: `NAME=SOURCE`[,KEY=VALUE...], such as github=env:GITHUB_TOKEN")
	flags.BoolVar(&f.task.Keyless, "keyless", false, "give the preset's program no key: its requests get it on their way")
	flags.BoolVar(&f.checkpoint, "checkpoint", false, "keep the session as it was before each command, for berm undo")
	flags.BoolVar(&f.task.Unwatched, "no-process-records", false, "keep what it executes out of the audit log")
	flags.BoolVar(&f.task.AllowWeaker, "allow-weaker", false, "where no user namespaces can be had: hold it by Landlock and seccomp alone")
	flags.BoolVar(&f.printPolicy, "print-policy", false, "print what it would be held to, and run nothing")
	flags.BoolVar(&f.json, "json", false, "print the result as JSON, on standard error")
	flags.BoolVarP(&f.quiet, "quiet", "q", false, "print nothing but errors")
	f.complete(cmd)
}

// complete completes the values of flags.
func (f *runFlags) complete(cmd *cobra.Command) {
	words := func(list func(ctx context.Context) []string) cobra.CompletionFunc {
		return func(cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			if list == nil {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return list(cmd.Context()), cobra.ShellCompDirectiveNoFileComp
		}
	}
	for flag, complete := range map[string]cobra.CompletionFunc{
		"session": completeSessions,
		"preset": words(func(context.Context) []string {
			config, _ := local.LoadConfig(os.Environ())
			names, _ := preset.Names(config)
			return names
		}),
		"profile": words(func(context.Context) []string { return preset.Profiles() }),
		"network": words(func(context.Context) []string {
			return []string{string(preset.NetworkNone), string(preset.NetworkHost)}
		}),
		"allow":    words(Groups),
		"template": words(TemplateNames),
	} {
		_ = cmd.RegisterFlagCompletionFunc(flag, complete)
	}
	_ = cmd.MarkFlagDirname("workdir")
}

func (f *runFlags) run(cmd *cobra.Command) error {
	t := &f.task
	t.Environ = os.Environ()
	t.Streams = [3]*os.File{os.Stdin, os.Stdout, os.Stderr}
	t.Rights.Limits = berm.Limits{Memory: int64(f.memory), CPU: f.cpus, PIDs: f.pids}
	t.Rights.Timeout = time.Duration(f.timeout)
	t.Rights.Network = preset.Network(f.network)
	if f.cow {
		t.Rights.Workspace = preset.WorkspaceCopyOnWrite
	}
	if cmd.Flags().Changed("checkpoint") {
		t.Rights.Checkpoint = &f.checkpoint
	}
	if err := f.check(cmd.Flags().Changed); err != nil {
		return err
	}
	config, err := local.LoadConfig(t.Environ)
	if err != nil {
		return cli.CodeError{Code: noCommand, Err: err}
	}
	t.Config = config
	if f.proxy == "" {
		f.proxy = config.UpstreamProxy
	}
	if f.authorities == "" {
		f.authorities = config.UpstreamCA
	}
	if err := f.networkOf(t); err != nil {
		return err
	}
	if f.template != "" {
		if Templates == nil {
			return Platform()
		}
		template, err := Templates(cmd.Context(), f.template)
		if err != nil {
			return cli.CodeError{Code: noCommand, Err: err}
		}
		t.Template = &template
	}
	var notices []string
	t.Notice = func(text string) {
		notices = append(notices, text)
		if !f.quiet && !f.json {
			cli.Notice(cmd, "%s", text)
		}
	}
	if f.printPolicy {
		return f.print(cmd)
	}
	signals := make(chan os.Signal, 16)
	// Beside the rest, for the runtime takes its time over each. Until then a signal ends
	// berm, and with it the sandbox.
	passed := []os.Signal{syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGCONT}
	for _, s := range []os.Signal{syscall.SIGHUP, syscall.SIGINT} {
		if !signal.Ignored(s) { // by nohup, or a shell that starts it in the background
			passed = append(passed, s)
		}
	}
	go signal.Notify(signals, passed...)
	tty := openTTY()
	t.Signals = tty.filter(signals)
	// The signals are the command's to obey.
	result, err := local.Do(context.WithoutCancel(cmd.Context()), t)
	tty.restore()
	if err != nil {
		return cli.CodeError{Code: noCommand, Err: err}
	}
	f.report(cmd, result, notices)
	if result.Signal != 0 {
		die(result.Signal)
	}
	if result.ExitCode != 0 {
		return cli.ExitError(result.ExitCode)
	}
	return nil
}

// networkOf sets what the command may reach.
func (f *runFlags) networkOf(t *local.Task) error {
	if (len(t.Rights.Allow) > 0 || f.policy != "") && f.network == string(preset.NetworkHost) {
		return cli.UsageError{Err: fmt.Errorf("--network host reaches everything: leave it out, or --allow and --policy")}
	}
	n := local.Network{Policy: egress.Policy{Revision: "1"}, Open: f.open}
	if f.policy != "" {
		content, err := readPolicy(f.policy)
		if err != nil {
			return cli.CodeError{Code: noCommand, Err: err}
		}
		n.Policy.YAML, n.Policy.Source = content, f.policy
	}
	var err error
	if n.Upstream, err = egress.ReadUpstream(f.proxy, f.authorities, os.Getenv); err != nil {
		return cli.CodeError{Code: noCommand, Err: err}
	}
	service := func(start func(*os.File, func(error)) (*net.UnixConn, error)) func(func(error)) (*net.UnixConn, error) {
		return func(ended func(error)) (*net.UnixConn, error) {
			program, err := Program()
			if err != nil {
				return nil, err
			}
			defer program.Close()
			return start(program, ended)
		}
	}
	n.Start, n.StartBroker = service(egress.Start), service(egress.StartBroker)
	t.Network = n
	return nil
}

// maxPolicy bounds a policy file in bytes; its reader is stricter.
const maxPolicy = 1 << 20

func readPolicy(path string) (string, error) {
	file, err := os.Open(path)
	if err != nil {
		return "", berm.Errorf(berm.NotFound, "the policy: %w", err)
	}
	defer file.Close()
	content, err := io.ReadAll(io.LimitReader(file, maxPolicy))
	if err != nil {
		return "", berm.Errorf(berm.Invalid, "the policy %s: %w", path, err)
	}
	if len(content) == 0 {
		return "", berm.Errorf(berm.Invalid, "the policy %s is empty", path)
	}
	return string(content), nil
}

// check refuses wrong values of flags; set says whether a flag was given.
func (f *runFlags) check(set func(flag string) bool) error {
	r := &f.task.Rights
	for _, e := range r.Env {
		if err := preset.CheckEnv(e); err != nil {
			return cli.UsageError{Err: fmt.Errorf("--env %q: %w", e, err)}
		}
	}
	for _, a := range r.Allow {
		if err := preset.CheckAllow(a); err != nil {
			return cli.UsageError{Err: fmt.Errorf("--allow %q: %w", a, err)}
		}
	}
	for _, c := range r.Credentials {
		if err := preset.CheckCredential(c); err != nil {
			return cli.UsageError{Err: fmt.Errorf("--cred: %w", err)}
		}
	}
	for flag, paths := range map[string][]string{"rw": r.ReadWrite, "ro": r.ReadOnly, "hide": r.Hide} {
		for _, p := range paths {
			if err := preset.CheckPath(p); err != nil {
				return cli.UsageError{Err: fmt.Errorf("--%s %q: %w", flag, p, err)}
			}
		}
	}
	for i, o := range f.open {
		if addr, err := netip.ParseAddr(o); err == nil {
			f.open[i] = netip.PrefixFrom(addr, addr.BitLen()).String()
		} else if _, err := netip.ParsePrefix(o); err != nil {
			return cli.UsageError{Err: fmt.Errorf(`--open %q: it must be an address range such as "10.1.0.0/16", or an address`, o)}
		}
	}
	switch {
	case set("memory") && f.memory < local.LeastMemory:
		return cli.UsageError{Err: fmt.Errorf("--memory %d bytes: it must be 8MiB at least; a number without a unit is bytes, so write it as 512MiB or 2GiB", f.memory)}
	case set("cpus") && !(f.cpus > 0):
		return cli.UsageError{Err: fmt.Errorf("--cpus %g: it must be more than 0", f.cpus)}
	case set("pids") && f.pids < local.LeastPIDs:
		return cli.UsageError{Err: fmt.Errorf("--pids %d: it must be %d at least: the sandbox has some threads of its own", f.pids, local.LeastPIDs)}
	case f.network != "" && f.network != string(preset.NetworkNone) && f.network != string(preset.NetworkHost):
		return cli.UsageError{Err: fmt.Errorf("--network %q: it must be none or host", f.network)}
	}
	return nil
}

// print shows what the command would be held to.
func (f *runFlags) print(cmd *cobra.Command) error {
	r, err := local.Prepare(&f.task)
	if err != nil {
		return err
	}
	p, err := local.Policy(r)
	if err != nil {
		return err
	}
	for _, n := range r.Grant.Notices {
		f.task.Notice(n)
	}
	if f.json {
		return cli.PrintJSON(cmd.OutOrStdout(), map[string]any{
			"preset": r.Grant.Preset, "workspace": r.Place.Workspace, "workspaceAccess": r.Grant.Workspace, "timeout": r.Grant.Timeout.String(),
			"environment": variables(r.Env), "allow": r.Grant.Allow, "credentials": credentials(r.Grant), "upstream": f.task.Network.Upstream.String(), "notices": r.Grant.Notices, "policy": p,
		})
	}
	w := cmd.OutOrStdout()
	style := terminal.StyleFor(w)
	line := func(name, format string, args ...any) {
		_, _ = fmt.Fprintf(w, "%s %s\n", style.Bold(fmt.Sprintf("%-12s", name)), terminal.Escape(fmt.Sprintf(format, args...)))
	}
	list := func(name string, lines []string) {
		for i, text := range lines {
			line(map[bool]string{true: name}[i == 0], "%s", text)
		}
	}
	line("command", "%s", strings.Join(f.task.Argv, " "))
	line("preset", "%s", r.Grant.Preset)
	line("level", "%s: %s", p.Level, strings.Join(p.Namespaces, ", ")+" namespaces")
	line("ids", "%s", p.IDMap)
	line("network", "%s", p.Network)
	if r.Network {
		line("", "%s", strings.Join(r.Grant.Allow, " "))
	}
	if upstream := f.task.Network.Upstream.String(); r.Network && upstream != "" {
		line("", "%s", upstream)
	}
	list("credentials", credentials(r.Grant))
	line("system calls", "profile %s: %d allowed, %d in part, others %s", p.Seccomp.Profile, len(p.Seccomp.Allowed), len(p.Seccomp.Rules), p.Seccomp.Default)
	line("landlock", "%s", p.Landlock)
	capabilities := "none"
	if len(p.Capabilities) > 0 {
		capabilities = strings.Join(p.Capabilities, ", ")
	}
	line("capabilities", "%s", capabilities)
	line("environment", "%s", strings.Join(variables(r.Env), " "))
	line("limits", "%s", limits(p.Limits, r.Grant.Timeout))
	list("rlimits", p.Rlimits) // or less, where this process has less
	list("mounts", p.Mounts)
	line("hidden", "%s", strings.Join(p.Masked, " "))
	line("devices", "%s", strings.Join(p.Devices, " "))
	return nil
}

// credentials are what requests get, without their secrets.
func credentials(g preset.Grant) []string {
	list := make([]string, len(g.Credentials))
	for i, c := range g.Credentials {
		list[i] = c.String()
	}
	return list
}

// limits says what a command is held to.
func limits(l berm.Limits, timeout time.Duration) string {
	memory, cpus, pids, end := "no limit", "no limit", "no limit", "none"
	if l.Memory > 0 {
		memory = cli.Size(l.Memory)
	}
	if l.CPU > 0 {
		cpus = fmt.Sprintf("%g", l.CPU)
	}
	if l.PIDs > 0 {
		pids = fmt.Sprint(l.PIDs)
	}
	if timeout > 0 {
		end = timeout.String()
	}
	return fmt.Sprintf("memory: %s, processors: %s, processes and threads: %s, timeout: %s", memory, cpus, pids, end)
}

// variables leaves the values of variables out: they may be secrets.
func variables(env []string) []string {
	list := make([]string, len(env))
	for i, e := range env {
		list[i], _, _ = strings.Cut(e, "=")
	}
	return list
}

// maxRequests bounds how many different requests are told of what was denied for one reason.
const maxRequests = 5

// denied tells what the command could not reach, each destination and reason once.
func (f *runFlags) denied(cmd *cobra.Command, r local.Result) {
	type denial struct {
		to, reason string
		events     []egress.Event
	}
	var denials []*denial
	for _, e := range r.Denied {
		to := destination(e)
		i := slices.IndexFunc(denials, func(d *denial) bool { return d.to == to && d.reason == e.Reason })
		if i < 0 {
			i, denials = len(denials), append(denials, &denial{to: to, reason: e.Reason})
		}
		denials[i].events = append(denials[i].events, e)
	}
	for _, d := range denials {
		// A flow and the requests in it are denied for one reason; a look-up is several queries.
		requests := slices.DeleteFunc(slices.Clone(d.events), func(e egress.Event) bool { return e.Method == "" })
		counted := slices.DeleteFunc(slices.Clone(d.events), func(e egress.Event) bool {
			return e.Kind == "dns" || e.Method == "" && len(requests) > 0
		})
		n := 0
		for _, e := range counted {
			n += max(e.Count, 1)
		}
		text := fmt.Sprintf("denied: %s (%s)", d.to, d.reason) + times(n)
		if len(requests) < 2 {
			told := d.events[0]
			if len(requests) == 1 {
				told = requests[0]
			}
			cli.Notice(cmd, "%s", text+remedy(told, d.to, f.task.Rights.Allow))
			continue
		}
		cli.Notice(cmd, "%s", text+":")
		for _, e := range requests[:min(len(requests), maxRequests)] {
			what := e.Method + " " + e.Path
			why := strings.TrimPrefix(strings.TrimPrefix(remedy(e, d.to, f.task.Rights.Allow), ": "), what+" at "+d.to+" is not allowed: ")
			cli.Notice(cmd, "  %s%s: %s", what, times(e.Count), why)
		}
		if more := len(requests) - maxRequests; more > 0 {
			cli.Notice(cmd, "  and %d more: berm audit --local --sandbox %s --type net", more, r.Sandbox)
		}
	}
	if slices.ContainsFunc(r.Denied, func(e egress.Event) bool { return e.Reason == "not_listed" || e.Reason == "port" }) {
		_, _ = fmt.Fprintln(cmd.ErrOrStderr(), terminal.StyleFor(cmd.ErrOrStderr()).Dim("hint:"), "berm policy learn drafts a policy that allows what was denied")
	}
}

// times says how often something happened that was more than once.
func times(n int) string {
	if n < 2 {
		return ""
	}
	return fmt.Sprintf(", %d times", n)
}

// unreached tells what the network did not get to, each destination once: inside, it looks
// like a server that breaks connections. A flow and its requests fail for one reason.
func unreached(cmd *cobra.Command, events []egress.Event) {
	seen := map[string]bool{}
	for _, e := range events {
		why, _, _ := strings.Cut(e.Detail, "\n")
		if to := destination(e); !seen[to] {
			seen[to] = true
			cli.Notice(cmd, "%s", "not reached: "+to+": "+why)
		}
	}
}

// destination is where a flow was to go.
func destination(e egress.Event) string {
	to := e.Name
	if to == "" {
		to = e.Address
	}
	if to == "" && e.Kind == "dns" {
		to = "queries for names"
	}
	if e.Port != 0 {
		to += fmt.Sprintf(":%d", e.Port)
	}
	return to
}

// remedy says why something was denied, or which flag lets it through beside those of allow.
func remedy(e egress.Event, what string, allow []string) string {
	opened := func(addr netip.Addr) string {
		if slices.Contains(allow, what) || slices.Contains(allow, cmp.Or(e.Name, e.Address)) {
			return fmt.Sprintf("--open %s lets it through", addr)
		}
		return fmt.Sprintf("--allow %s with --open %s lets it through", what, addr)
	}
	why, _, _ := strings.Cut(strings.TrimPrefix(e.Detail, "Denied ("+e.Reason+"): "), "\n")
	if _, rule, ok := strings.Cut(e.Detail, "\n  - "); ok && e.Protocol == "udp" { // --allow is about TCP
		return "; a policy with the rule " + rule + " lets it through (--policy FILE)"
	}
	switch e.Reason {
	case "not_listed", "port":
		return "; --allow " + what + " lets it through"
	case "private", "host", "reserved":
		if addr, err := netip.ParseAddr(e.Address); err == nil {
			return fmt.Sprintf(": %s is closed whatever is allowed; %s", addr, opened(addr))
		}
	case "dns_private_answer":
		_, rest, _ := strings.Cut(why, "its address ")
		closed, _, _ := strings.Cut(rest, " is not public")
		if addr, err := netip.ParseAddr(closed); err == nil {
			return fmt.Sprintf(": its address %s is not public; %s", addr, opened(addr))
		}
	}
	if why == "" {
		return ""
	}
	return ": " + why
}

// offline says whether a command failed that may have missed a network.
func (f *runFlags) offline(r local.Result) bool {
	if r.ExitCode == 0 || r.Reason != berm.ReasonExit || !r.Started {
		return false
	}
	request, err := local.Prepare(&f.task)
	return err == nil && !request.Network && request.Grant.Network != preset.NetworkHost
}

// report tells what a person or program needs to go on.
func (f *runFlags) report(cmd *cobra.Command, r local.Result, notices []string) {
	if f.json {
		object := map[string]any{
			"sandbox": r.Sandbox, "exitCode": r.ExitCode, "reason": r.Reason, "level": r.Level, "preset": r.Preset, "workspace": r.Workspace,
			"durationMS": r.Duration.Milliseconds(), "started": r.Started,
		}
		for name, list := range map[string][]string{"weaker": r.Weaker, "notices": notices} {
			if len(list) > 0 {
				object[name] = list
			}
		}
		if r.Signal != 0 {
			object["signal"] = unix.SignalName(r.Signal)
		}
		if r.Detail != "" {
			object["detail"] = r.Detail
		}
		if r.Session != "" {
			object["session"] = r.Session
		}
		if len(r.Denied) > 0 {
			object["denied"] = r.Denied
		}
		if len(r.Unreached) > 0 {
			object["unreached"] = r.Unreached
		}
		_ = cli.PrintJSONLine(cmd.ErrOrStderr(), object)
		return
	}
	if r.Detail != "" {
		cli.Notice(cmd, "%s", r.Detail)
	}
	if f.quiet {
		return
	}
	f.denied(cmd, r)
	unreached(cmd, r.Unreached)
	// A shell ends with the code of whatever was last typed into it.
	if cmd.Name() == "run" && terminal.Is(cmd.ErrOrStderr()) && f.offline(r) {
		_, _ = fmt.Fprintln(cmd.ErrOrStderr(), terminal.StyleFor(cmd.ErrOrStderr()).Dim("hint:"), "the command has no network; --allow HOST gives it")
	}
	if r.Session != "" {
		style := terminal.StyleFor(cmd.ErrOrStderr())
		of := ""
		if f.task.Session != "" || f.task.Dir != "" {
			of = " -s " + r.Session
		}
		cli.Notice(cmd, "changes are in session %s", r.Session)
		_, _ = fmt.Fprintln(cmd.ErrOrStderr(), style.Dim("hint:"), fmt.Sprintf("berm diff%s, then berm apply%s or berm discard%s", of, of, of))
	}
}
