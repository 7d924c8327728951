// Package cli is what the commands of both parts of berm share: errors for people and
// programs, exit codes, and flags of common kinds.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/terminal"
)

// The groups of commands in the help.
const (
	Local     = "local"
	Sandboxes = "sandboxes"
	Machine   = "machine"
)

// NewRoot returns the command `berm` without subcommands.
func NewRoot(version string) *cobra.Command {
	cobra.EnableCommandSorting = false // the order is one of use
	root := &cobra.Command{
		Use:           "berm",
		Short:         "Sandboxes for AI agents",
		Version:       version,
		SilenceUsage:  true, // an error is one line, not a page of flags
		SilenceErrors: true, // Execute prints it, with its hint
		Args:          UnknownCommand,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return UsageError{Err: err} })
	root.SuggestionsMinimumDistance = 2
	root.SetHelpCommand(newHelpCommand(root))
	root.AddGroup(&cobra.Group{ID: Local, Title: "On this machine, without a server:"},
		&cobra.Group{ID: Sandboxes, Title: "Sandboxes of a server:"}, &cobra.Group{ID: Machine, Title: "Servers and hosts:"})
	return root
}

// newHelpCommand returns a `help` that refuses what is no command.
func newHelpCommand(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use:   "help [COMMAND]",
		Short: "Help about a command",
		RunE: func(_ *cobra.Command, args []string) error {
			cmd, rest, err := root.Find(args)
			if err != nil || len(rest) > 0 {
				return UnknownCommand(cmd, rest)
			}
			cmd.InitDefaultHelpFlag()
			return cmd.Help()
		},
	}
}

// Grouped puts commands into a group of the help.
func Grouped(group string, commands []*cobra.Command) []*cobra.Command {
	for _, cmd := range commands {
		cmd.GroupID = group
	}
	return commands
}

// UnknownCommand refuses what is no subcommand.
func UnknownCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	err := berm.Errorf(berm.Invalid, "unknown command %q for %q", args[0], cmd.CommandPath())
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		err = err.WithHint("Did you mean %s?", strings.Join(near, " or "))
	} else if args[0] == "version" {
		err = err.WithHint("berm --version")
	} else {
		err = err.WithHint("%s", usageHint(cmd))
	}
	return UsageError{Err: err}
}

// UsageError marks a wrong command line: exit code 2.
type UsageError struct{ Err error }

func (e UsageError) Error() string { return e.Err.Error() }

// Unwrap returns what was wrong.
func (e UsageError) Unwrap() error { return e.Err }

// usageHint says how a command is called.
func usageHint(cmd *cobra.Command) string {
	if cmd.HasSubCommands() {
		return fmt.Sprintf("`%s --help` lists the commands.", cmd.CommandPath())
	}
	return fmt.Sprintf("Usage: %s. More: `%s --help`.", cmd.UseLine(), cmd.CommandPath())
}

// ExitError carries the exit code of a command that ran in a sandbox; nothing is
// printed for it.
type ExitError int

func (e ExitError) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// CodeError is an error with an exit code of its own.
type CodeError struct {
	Code int
	Err  error
}

func (e CodeError) Error() string { return e.Err.Error() }

// Unwrap returns what went wrong.
func (e CodeError) Unwrap() error { return e.Err }

// UsageArgs makes a wrong count of arguments a UsageError, which names the argument.
func UsageArgs(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		err := check(cmd, args)
		if err == nil {
			return nil
		}
		if needed := neededArgs(cmd); len(args) < len(needed) {
			return UsageError{Err: fmt.Errorf("%s: %s is missing", cmd.Name(), needed[len(args)])}
		}
		for i := range args {
			if check(cmd, args[:i+1]) != nil {
				return UsageError{Err: unexpected(cmd, args[i])}
			}
		}
		return UsageError{Err: err}
	}
}

// neededArgs are the arguments that a command must have, as its usage names them.
func neededArgs(cmd *cobra.Command) (names []string) {
	for _, word := range strings.Fields(cmd.Use)[1:] {
		if word[0] != '[' && word != "--" {
			names = append(names, strings.TrimSuffix(word, "..."))
		}
	}
	return names
}

// unexpected is the error of an argument that a command has no use for.
func unexpected(cmd *cobra.Command, arg string) error {
	err := berm.Errorf(berm.Invalid, "%s: unexpected argument %q", cmd.Name(), arg)
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if f.NoOptDefVal != "" && f.Value.Type() == "string" { // its value is only taken after "="
			err = err.WithHint("--%s=%s", f.Name, arg)
		}
	})
	return err
}

// JSONFlag adds --json to a command and returns its value.
func JSONFlag(cmd *cobra.Command) *bool {
	return cmd.Flags().Bool("json", false, "print JSON")
}

// PrintJSON prints a value in a form that is safe on a terminal too.
func PrintJSON(w io.Writer, v any) error {
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	_, err = w.Write(append(terminal.EscapeJSON(text), '\n'))
	return err
}

// PrintJSONLine prints a value of a stream of values.
func PrintJSONLine(w io.Writer, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = w.Write(append(terminal.EscapeJSON(text), '\n'))
	return err
}

// Notice tells the user something beside the output.
func Notice(cmd *cobra.Command, format string, args ...any) {
	_, _ = fmt.Fprintln(cmd.ErrOrStderr(), "berm:", terminal.Escape(fmt.Sprintf(format, args...)))
}

// PrintError prints an error, its hint, and nothing that a terminal would act on:
// servers and sandboxes put what others chose into their messages.
func PrintError(w io.Writer, err error) {
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

// PrintErrorJSON prints errors for a program, one object a line.
func PrintErrorJSON(w io.Writer, err error) {
	for _, err := range parts(err) {
		object := map[string]string{"kind": berm.KindOf(err).String(), "message": err.Error()}
		if usage := (UsageError{}); errors.As(err, &usage) {
			object["kind"] = berm.Invalid.String()
		}
		if hint := berm.HintOf(err); hint != "" {
			object["hint"] = hint
		}
		_ = PrintJSONLine(w, map[string]any{"error": object})
	}
}

// Pairs reads KEY=VALUE flags. A KEY alone takes its value from lookup, if there is
// one.
func Pairs(flag string, values []string, lookup func(string) (string, bool)) (map[string]string, error) {
	m := make(map[string]string, len(values))
	for _, pair := range values {
		key, value, ok := strings.Cut(pair, "=")
		if !ok && lookup != nil {
			value, ok = lookup(key)
			if !ok {
				return nil, UsageError{Err: fmt.Errorf("--%s %s: the variable is not set here", flag, key)}
			}
		}
		if !ok || key == "" {
			return nil, UsageError{Err: fmt.Errorf("--%s %q: it must be KEY=VALUE", flag, pair)}
		}
		m[key] = value
	}
	return m, nil
}

// DurationFlag takes "90s", "5m" and, like the E2B tools, a bare number of seconds.
type DurationFlag time.Duration

func (d *DurationFlag) String() string {
	if *d == 0 {
		return ""
	}
	return time.Duration(*d).String()
}

// Type is what help calls the value.
func (d *DurationFlag) Type() string { return "duration" }

// Set takes a duration as Go writes it, or a number of seconds.
func (d *DurationFlag) Set(s string) error {
	v, err := time.ParseDuration(s)
	if n, numberErr := strconv.ParseInt(s, 10, 32); numberErr == nil {
		v, err = time.Duration(n)*time.Second, nil
	}
	if err != nil || v <= 0 {
		return errors.New(`it must be a time such as "90s", "5m" or a number of seconds`)
	}
	*d = DurationFlag(v)
	return nil
}

// SizeFlag takes a number of bytes, "512MiB", "1.5G" or the like. Units are powers
// of 1024.
type SizeFlag int64

func (n *SizeFlag) String() string {
	if *n == 0 {
		return ""
	}
	return Size(int64(*n))
}

// Type is what help calls the value.
func (n *SizeFlag) Type() string { return "size" }

// Set takes a number with a unit or none.
func (n *SizeFlag) Set(s string) error {
	digits := strings.TrimRight(s, "KMGTiB")
	factor, ok := map[string]float64{"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}[strings.TrimSuffix(s[len(digits):], "iB")]
	v, err := strconv.ParseFloat(digits, 64)
	if err != nil || !ok || !(v > 0) || v*factor > 1<<60 {
		return errors.New(`it must be a size such as "512MiB", "2GiB" or a number of bytes`)
	}
	*n = SizeFlag(v * factor)
	return nil
}

// Span prints a time in one or two units.
func Span(d time.Duration) string {
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

// Size prints bytes with three digits.
func Size(n int64) string {
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

// Execute runs the command that args name, prints its error, and returns the exit code:
// 2 after a wrong command line.
func Execute(ctx context.Context, root *cobra.Command, args []string) int {
	cmd, err := execute(ctx, root, args)
	if err == nil {
		return 0
	}
	var exit ExitError
	if errors.As(err, &exit) {
		return int(exit)
	}
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return 128 + int(syscall.SIGINT) // the user ended it, and knows
	}
	var usage UsageError
	if errors.As(err, &usage) && berm.HintOf(err) == "" {
		err = UsageError{Err: berm.Errorf(berm.Invalid, "%w", err).WithHint("%s", usageHint(cmd))}
	}
	if json := cmd.Flags().Lookup("json"); json != nil && json.Changed {
		PrintErrorJSON(os.Stderr, err)
	} else {
		PrintError(os.Stderr, err)
	}
	if usage.Err != nil {
		return 2
	}
	if code := (CodeError{}); errors.As(err, &code) {
		return code.Code
	}
	return 1
}

func execute(ctx context.Context, root *cobra.Command, args []string) (*cobra.Command, error) {
	root.SetArgs(args)
	if len(args) > 0 && args[0] == "completion" { // which would answer whatever follows with its help
		root.InitDefaultCompletionCmd(args...)
		if cmd, _, err := root.Find(args[:1]); err == nil && cmd != root {
			cmd.Args, cmd.RunE = UnknownCommand, func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		}
	}
	return root.ExecuteContextC(ctx)
}
