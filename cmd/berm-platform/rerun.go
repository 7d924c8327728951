package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/replay"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
	"github.com/berm-sandbox/berm/internal/terminal"
)

// A command may take so much longer than it took.
const (
	slower     = 3
	slowerPlus = 30 * time.Second
)

// late is how much after its end a command may be recorded to have ended: whoever waited for
// it may have gone on.
const late = 50 * time.Millisecond

// settleTime is how long the record of the end of a rerun is waited for.
const settleTime = 15 * time.Second

func newRerunCommand() *cobra.Command {
	var logs logFlags
	var keep bool
	cmd := logs.add(&cobra.Command{
		Use:   "rerun SANDBOX",
		Short: "Run a sandbox's commands again in a fresh one, and compare",
		Long: `Run the commands that a sandbox was given, in the same order and beside each other as they
were, in a fresh sandbox of the same template and with the same network policy, and compare how
they ended and what they left on the disk. Exit code 1 when something differs.

A rerun is not deterministic. Time, networks, random numbers, input, credentials and the values
of variables are not those of before: they are not recorded. A difference is where to look, and
proves nothing. What the files API wrote is written again if the log still has it.`,
		Example: `  berm rerun i0abcdefghijklmnopqrs
  berm rerun --keep --json i0abcdefghijklmnopqrs`,
		Args:              cli.UsageArgs(cobra.ExactArgs(1)),
		ValidArgsFunction: completeFirstSandbox(),
	})
	cmd.Flags().BoolVar(&keep, "keep", false, "leave the fresh sandbox running; files are not compared then")
	asJSON := cli.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		id, err := sandboxID(args[0])
		if err != nil {
			return err
		}
		was, done, err := logs.timeline(cmd, id)
		if err != nil {
			return err
		}
		defer done()
		if was.Template == "" {
			e := berm.Errorf(berm.Unsupported, "%s is a run of berm run, which is not run again from its record", id)
			if len(was.Commands) > 0 {
				e = e.WithHint("berm run -- %s", replay.Argv(was.Commands[0].Argv))
			}
			return e
		}
		if len(was.Commands) == 0 {
			return berm.Errorf(berm.NotFound, "sandbox %s was given no command", id)
		}
		c, err := server(cmd)
		if err != nil {
			return err
		}
		again := &rerun{c: c, was: was, notice: func(format string, args ...any) { cli.Notice(cmd, format, args...) }}
		fresh, result, err := again.do(cmd.Context(), keep)
		if err != nil {
			return err
		}
		if *asJSON {
			err = cli.PrintJSON(cmd.OutOrStdout(), struct {
				Sandbox       berm.SandboxID `json:"sandboxID"`
				Again         berm.SandboxID `json:"againSandboxID"`
				Deterministic bool           `json:"deterministic"`
				replay.Comparison
			}{id, fresh, false, result})
		} else {
			err = printComparison(cmd.OutOrStdout(), id, fresh, result)
		}
		if err == nil && !result.Equal() {
			err = cli.ExitError(1)
		}
		return err
	}
	return cmd
}

// rerun is one rerun.
type rerun struct {
	c      *client.Client
	was    *replay.Timeline
	notice func(format string, args ...any)
	agents map[string]*client.Agent
	fresh  *client.Sandbox
	pids   map[*replay.Command]int // of the processes that run a command again; 0 of one that is refused again
}

// do runs everything again and compares.
func (r *rerun) do(ctx context.Context, keep bool) (id berm.SandboxID, result replay.Comparison, err error) {
	length := r.was.End.Sub(r.was.Start)
	r.fresh, err = r.c.Create(ctx, client.CreateOptions{
		Template: r.was.Template, Timeout: min(slower*length+10*time.Minute, 24*time.Hour), Metadata: map[string]string{"berm.rerun": string(r.was.Sandbox)},
	})
	if err != nil {
		return "", result, err
	}
	id = r.fresh.ID
	killed := keep
	defer func() {
		if !killed {
			final, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
			defer cancel()
			if failed := r.c.Kill(final, id); failed != nil && berm.KindOf(failed) != berm.NotFound {
				err = errors.Join(err, failed)
			}
		}
	}()
	if err := r.policy(ctx); err != nil {
		return id, result, err
	}
	r.agents, r.pids = map[string]*client.Agent{}, map[*replay.Command]int{}
	if err := r.run(ctx); err != nil {
		return id, result, err
	}
	if !killed {
		if err := r.c.Kill(ctx, id); err != nil {
			return id, result, err
		}
		killed = true
	}
	is, err := r.settled(ctx, id, !keep)
	if err != nil {
		return id, result, err
	}
	var pairs [][2]*replay.Command
	for _, c := range r.was.Commands {
		pair := [2]*replay.Command{c}
		for _, a := range is.Commands {
			pid, begun := r.pids[c]
			if begun && a.PID == pid && slices.Equal(a.Argv, c.Argv) && (pid != 0 || a.Result() == audit.NotStarted) {
				pair[1] = a
			}
		}
		pairs = append(pairs, pair)
	}
	return id, replay.Compare(r.was, is, pairs), nil
}

// policy gives the fresh sandbox the network policy that was in force when commands began.
func (r *rerun) policy(ctx context.Context) error {
	var document json.RawMessage
	sets := 0
	for _, e := range r.was.Of(replay.Policies, r.was.End) {
		var data struct {
			Network *struct{ Document json.RawMessage }
		}
		if json.Unmarshal(e.Raw, &data) != nil || data.Network == nil || len(data.Network.Document) == 0 {
			continue
		}
		if sets++; sets == 1 || !e.Time.After(r.was.Commands[0].Start) {
			document = data.Network.Document
		} else {
			r.notice("the network policy was changed while commands ran: the one of their start holds for all now")
			break
		}
	}
	if document == nil {
		r.notice("the network policy of before is not known: the server's default holds")
		return nil
	}
	if _, _, err := r.c.SetNetworkPolicy(ctx, r.fresh.ID, document, ""); err != nil {
		return fmt.Errorf("the network policy of before cannot be set: %w", err)
	}
	return nil
}

// step is a command, or a file that the files API wrote.
type step struct {
	at      time.Time
	command *replay.Command
	file    *audit.FileAccess
}

// run does all steps in the order of before. Each waits for the commands that had ended when
// it began.
func (r *rerun) run(ctx context.Context) error {
	var steps []step
	for _, c := range r.was.Commands {
		steps = append(steps, step{at: c.Start, command: c})
	}
	for _, e := range r.was.Of(replay.Files, r.was.End) {
		if a, ok := e.Data.(*audit.FileAccess); ok && e.Outcome == audit.OK && a.Op != "read" && a.Op != "list" {
			steps = append(steps, step{at: e.Time, file: a})
		}
	}
	slices.SortStableFunc(steps, func(a, b step) int { return a.at.Compare(b.at) })
	type run struct {
		done  chan struct{}
		until time.Time // as long as it ran before
	}
	running := map[*replay.Command]run{}
	await := func(c *replay.Command) {
		if r, ok := running[c]; ok {
			<-r.done
			delete(running, c)
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer func() { // with an error: nothing is left running
		cancel()
		for c := range running {
			await(c)
		}
	}()
	for _, s := range steps {
		for c, r := range running {
			switch {
			case !c.Ended || c.End.After(s.at.Add(late)):
			case !c.End.After(s.at):
				await(c)
			default:
				select {
				case <-r.done:
				case <-time.After(slower*c.End.Sub(c.Start) + time.Second): // it was not waited for
				}
			}
		}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case s.file != nil:
			r.file(ctx, s.file)
			continue
		case s.command.Cut:
			r.notice("command %d is not run: its arguments were not recorded in full", s.command.Number)
			continue
		}
		p, err := r.start(ctx, s.command)
		if err != nil && ctx.Err() == nil && s.command.Result() == audit.NotStarted {
			r.pids[s.command] = 0
			continue
		}
		if err != nil {
			return fmt.Errorf("command %d: %w", s.command.Number, err)
		}
		r.pids[s.command] = int(p.PID)
		done := make(chan struct{})
		running[s.command] = run{done, time.Now().Add(s.command.End.Sub(s.command.Start))}
		go func() {
			defer close(done)
			r.wait(ctx, s.command, p)
		}()
	}
	for _, c := range r.was.Commands {
		if c.Code != nil || c.Signal != "" {
			await(c)
		}
	}
	// What did not end of itself ends with the sandbox, when it has had as much time as before.
	for _, left := range running {
		select {
		case <-left.done:
		case <-time.After(time.Until(left.until)):
		case <-ctx.Done():
		}
	}
	return ctx.Err()
}

func (r *rerun) start(ctx context.Context, c *replay.Command) (*client.Process, error) {
	if len(c.Env) > 0 {
		r.notice("command %d had variables whose values are not recorded: %s", c.Number, strings.Join(c.Env, ", "))
	}
	agent := r.agents[c.User]
	if agent == nil {
		agent = r.c.Agent(r.fresh, c.User)
		r.agents[c.User] = agent
	}
	command := client.Command{Path: c.Argv[0], Args: c.Argv[1:], Dir: c.Cwd}
	if c.TTY != nil {
		command.PTY = &client.Size{Cols: c.TTY.Columns, Rows: c.TTY.Rows}
		command.Env = map[string]string{"TERM": "xterm-256color"}
	}
	return agent.Start(ctx, command)
}

// wait waits for the end of a command, which it brings about when the command takes much longer
// than it took.
func (r *rerun) wait(ctx context.Context, c *replay.Command, p *client.Process) {
	limit := slower*c.End.Sub(c.Start) + slowerPlus
	timed := time.AfterFunc(limit, func() {
		r.notice("command %d is ended: it took %s, and runs for %s now", c.Number, c.End.Sub(c.Start).Round(time.Millisecond), limit.Round(time.Second))
		_ = p.Signal(ctx, syscall.SIGKILL)
	})
	defer timed.Stop()
	_, err := p.Wait(ctx, client.Output{Stdout: io.Discard, Stderr: io.Discard})
	if err != nil && ctx.Err() == nil {
		r.notice("command %d: %v", c.Number, err)
	}
}

// file does again what the files API did, as far as the log has what that takes.
func (r *rerun) file(ctx context.Context, a *audit.FileAccess) {
	agent := r.c.Agent(r.fresh, "")
	var err error
	switch a.Op {
	case "mkdir":
		err = agent.MakeDir(ctx, a.Path)
	case "write":
		var content []byte
		if a.SHA256 == "" {
			err = berm.Errorf(berm.NotFound, "its content was not recorded")
		} else {
			content, err = r.was.Content(a.SHA256)
		}
		if err == nil {
			err = agent.Upload(ctx, a.Path, bytes.NewReader(content), int64(len(content)))
		}
	default:
		err = berm.Errorf(berm.Unsupported, "it is not done again")
	}
	if err != nil && ctx.Err() == nil {
		r.notice("%s %s by the files API: %v", a.Op, a.Path, err)
	}
}

// settled is the timeline of the rerun, once all of it is recorded.
func (r *rerun) settled(ctx context.Context, id berm.SandboxID, ended bool) (*replay.Timeline, error) {
	for end := time.Now().Add(settleTime); ; {
		is, err := replay.Load(r.c.Trail(ctx, id), id)
		if err != nil {
			return nil, err
		}
		open := slices.ContainsFunc(is.Commands, func(c *replay.Command) bool { return !c.Ended })
		if is.Ended && !open || !ended || time.Now().After(end) {
			return is, nil
		}
		if !poll(ctx) {
			return nil, ctx.Err()
		}
	}
}

// printComparison prints how a rerun differs.
func printComparison(w io.Writer, id, fresh berm.SandboxID, c replay.Comparison) error {
	style := terminal.StyleFor(w)
	if _, err := fmt.Fprintf(w, "%s again as %s. Not deterministic: a difference is where to look, and proves nothing.\n\n", id, fresh); err != nil {
		return err
	}
	table := terminal.NewTable(style, "WAS", "IS", "OUTPUT", "COMMAND")
	for _, p := range c.Commands {
		is := p.Is
		if p.Is != p.Was {
			is += " (differs)"
		}
		table.Row(p.Was, is, p.Output, replay.Argv(p.Argv))
	}
	if err := table.Write(w); err != nil {
		return err
	}
	var text strings.Builder
	if !c.FilesKnown {
		text.WriteString("\nFiles are not compared: the log does not say what both left on the disk.\n")
	} else {
		fmt.Fprintf(&text, "\nFiles: %d the same, %d differ, %d only before, %d only now.\n", c.Same, len(c.Differ), len(c.Only), len(c.OnlyAgain))
		for _, list := range []struct {
			name  string
			paths []string
		}{{"differs", c.Differ}, {"only before", c.Only}, {"only now", c.OnlyAgain}} {
			for i, path := range list.paths {
				if i == 50 {
					fmt.Fprintf(&text, "  and %d more\n", len(list.paths)-i)
					break
				}
				fmt.Fprintf(&text, "  %-11s %s\n", list.name, terminal.Clip(terminal.Escape(path), 200))
			}
		}
	}
	_, err := io.WriteString(w, text.String())
	return err
}
