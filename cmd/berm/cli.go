package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/client"
	"github.com/berm-sandbox/berm/internal/terminal"
)

// serverCommand gives a command the flag that chooses a server.
func serverCommand(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().String("context", "", "server to use, by its name (default: $BERM_URL, else the current context)")
	completeFlag(cmd, "context", completeContexts)
	return cmd
}

func loadContexts() (*client.Contexts, error) {
	path, err := client.ContextsPath()
	if err != nil {
		return nil, err
	}
	return client.LoadContexts(path)
}

// server connects a command to the server that it is to use.
func server(cmd *cobra.Command) (*client.Client, error) {
	contexts, err := loadContexts()
	if err != nil {
		return nil, err
	}
	name, err := cmd.Flags().GetString("context")
	if err != nil {
		return nil, err
	}
	config, err := contexts.Choose(name, os.Getenv)
	if err != nil {
		return nil, err
	}
	return client.New(config)
}

// serverAndSandbox is what commands on one sandbox begin with.
func serverAndSandbox(cmd *cobra.Command, arg string) (*client.Client, berm.SandboxID, error) {
	id, err := sandboxID(arg)
	if err != nil {
		return nil, "", err
	}
	c, err := server(cmd)
	return c, id, err
}

func sandboxID(arg string) (berm.SandboxID, error) {
	id, err := berm.ParseSandboxID(arg)
	if err != nil {
		return "", usageError{fmt.Errorf("%q is no sandbox id", arg)}
	}
	return id, nil
}

// runningAgent is the agent of a sandbox that can run a command now.
func runningAgent(ctx context.Context, c *client.Client, id berm.SandboxID, user string) (*client.Agent, error) {
	s, err := c.Get(ctx, id)
	if err != nil {
		return nil, err
	}
	wakes := s.Lifecycle != nil && s.Lifecycle.AutoResume
	if (s.State == berm.Paused || s.State == berm.Pausing) && !wakes {
		return nil, berm.Errorf(berm.Conflict, "sandbox %s is paused", id).WithHint("berm resume %s", id)
	}
	s.ID = id
	return c.Agent(s, user), nil
}

// forEach does one thing to many sandboxes, and goes on after an error.
func forEach(args []string, do func(berm.SandboxID) error) error {
	ids := make([]berm.SandboxID, len(args))
	for i, arg := range args {
		var err error
		if ids[i], err = sandboxID(arg); err != nil {
			return err // a typing error: nothing is done
		}
	}
	var errs []error
	for _, id := range ids {
		if err := do(id); err != nil {
			if !strings.Contains(err.Error(), string(id)) {
				err = fmt.Errorf("%s: %w", id, err)
			}
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func jsonFlag(cmd *cobra.Command) *bool {
	return cmd.Flags().Bool("json", false, "print JSON")
}

// printJSON prints a value in a form that is safe on a terminal too.
func printJSON(w io.Writer, v any) error {
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	_, err = w.Write(append(terminal.EscapeJSON(text), '\n'))
	return err
}

// printJSONLine prints a value of a stream of values.
func printJSONLine(w io.Writer, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = w.Write(append(terminal.EscapeJSON(text), '\n'))
	return err
}

// notice tells the user something beside the output.
func notice(cmd *cobra.Command, format string, args ...any) {
	_, _ = fmt.Fprintln(cmd.ErrOrStderr(), "berm:", terminal.Escape(fmt.Sprintf(format, args...)))
}

// printError prints an error, its hint, and nothing that a terminal would act on:
// servers and sandboxes put what others chose into their messages.
func printError(w io.Writer, err error) {
	style := terminal.StyleFor(w)
	for _, err := range parts(err) {
		_, _ = fmt.Fprintln(w, style.Bad("berm:"), terminal.Clip(terminal.Escape(err.Error()), maxErrorLine))
		if hint := berm.HintOf(err); hint != "" {
			_, _ = fmt.Fprintln(w, style.Dim("hint:"), terminal.Clip(terminal.Escape(hint), maxErrorLine))
		}
	}
}

// maxErrorLine bounds a printed error in columns.
const maxErrorLine = 2000

// parts takes the errors of several sandboxes apart.
func parts(err error) []error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		return joined.Unwrap()
	}
	return []error{err}
}

// printErrorJSON prints errors for a program, one object a line.
func printErrorJSON(w io.Writer, err error) {
	for _, err := range parts(err) {
		object := map[string]string{"kind": berm.KindOf(err).String(), "message": err.Error()}
		if usage := (usageError{}); errors.As(err, &usage) {
			object["kind"] = berm.Invalid.String()
		}
		if hint := berm.HintOf(err); hint != "" {
			object["hint"] = hint
		}
		_ = printJSONLine(w, map[string]any{"error": object})
	}
}

// pairs reads KEY=VALUE flags. A KEY alone takes its value from lookup, if there is
// one.
func pairs(flag string, values []string, lookup func(string) (string, bool)) (map[string]string, error) {
	m := make(map[string]string, len(values))
	for _, pair := range values {
		key, value, ok := strings.Cut(pair, "=")
		if !ok && lookup != nil {
			value, ok = lookup(key)
			if !ok {
				return nil, usageError{fmt.Errorf("--%s %s: the variable is not set here", flag, key)}
			}
		}
		if !ok || key == "" {
			return nil, usageError{fmt.Errorf("--%s %q: it must be KEY=VALUE", flag, pair)}
		}
		m[key] = value
	}
	return m, nil
}

// durationFlag takes "90s", "5m" and, like the E2B tools, a bare number of seconds.
type durationFlag time.Duration

func (d *durationFlag) String() string {
	if *d == 0 {
		return ""
	}
	return time.Duration(*d).String()
}

func (d *durationFlag) Type() string { return "duration" }

func (d *durationFlag) Set(s string) error {
	v, err := time.ParseDuration(s)
	if n, numberErr := strconv.ParseInt(s, 10, 32); numberErr == nil {
		v, err = time.Duration(n)*time.Second, nil
	}
	if err != nil || v <= 0 {
		return errors.New(`it must be a time such as "90s", "5m" or a number of seconds`)
	}
	*d = durationFlag(v)
	return nil
}

// sizeFlag takes a number of bytes, "512MiB", "1.5G" or the like. Units are powers
// of 1024.
type sizeFlag int64

func (n *sizeFlag) String() string {
	if *n == 0 {
		return ""
	}
	return size(int64(*n))
}

func (n *sizeFlag) Type() string { return "size" }

func (n *sizeFlag) Set(s string) error {
	digits := strings.TrimRight(s, "KMGTiB")
	factor, ok := map[string]float64{"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}[strings.TrimSuffix(s[len(digits):], "iB")]
	v, err := strconv.ParseFloat(digits, 64)
	if err != nil || !ok || !(v > 0) || v*factor > 1<<60 {
		return errors.New(`it must be a size such as "512MiB", "2GiB" or a number of bytes`)
	}
	*n = sizeFlag(v * factor)
	return nil
}

// span prints a time in one or two units.
func span(d time.Duration) string {
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", max(0, int(d.Seconds())))
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd", int(d.Hours())/24)
}

// size prints bytes with three digits.
func size(n int64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	v, unit := float64(n)/1024, 0
	for v >= 999.5 && unit < len(units)-1 {
		v, unit = v/1024, unit+1
	}
	digits := 0
	if v < 9.95 {
		digits = 1
	}
	return fmt.Sprintf("%.*f %ciB", digits, v, units[unit])
}

// stateCommand makes a command that does one thing to each sandbox that it is
// given and prints the id, or with --json an object of the id and what do returns.
func stateCommand(cmd *cobra.Command, do func(context.Context, *client.Client, berm.SandboxID) (map[string]any, error)) *cobra.Command {
	serverCommand(cmd)
	asJSON := jsonFlag(cmd)
	cmd.Args = usageArgs(cobra.MinimumNArgs(1))
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := server(cmd)
		if err != nil {
			return err
		}
		return forEach(args, func(id berm.SandboxID) error {
			result, err := do(cmd.Context(), c, id)
			if err != nil {
				return err
			}
			if *asJSON {
				result["sandboxID"] = id
				return printJSONLine(cmd.OutOrStdout(), result)
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), id)
			return err
		})
	}
	return cmd
}

// sleep waits, and says false when the user ends the command first.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// quietOnInterrupt drops an error that the user caused by ending the command.
func quietOnInterrupt(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}
