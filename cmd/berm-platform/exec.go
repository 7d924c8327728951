package main

import (
	"errors"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
)

func newExecCommand() *cobra.Command {
	var (
		o          execOptions
		input, tty bool
	)
	cmd := serverCommand(&cobra.Command{
		Use:   "exec SANDBOX [flags] -- COMMAND [ARG...]",
		Short: "Run a command in a sandbox",
		Long: `Run a command in a sandbox, with its output here and its exit code as berm's own:
128 and the signal's number when a signal ended it, 127 when there is no such
command, 124 when --timeout is over. The command is not given to a shell.

Without --tty, output that goes to a terminal is escaped, so that the sandbox cannot
act on it; files and pipes get every byte as it is. Ctrl-C (and TERM, HUP, QUIT) go
to the command and what it started; a second one kills it.`,
		Example: `  berm exec i0abcdefghijklmnopqrs -- python3 -c 'print(6 * 7)'
  berm exec i0abcdefghijklmnopqrs --user root -- sh -c 'apt-get update && apt-get install -y jq'
  tar c src | berm exec i0abcdefghijklmnopqrs -i --cwd /tmp -- tar x
  berm exec i0abcdefghijklmnopqrs -t -- top`,
		Args:              cli.UsageArgs(cobra.MinimumNArgs(1)),
		ValidArgsFunction: completeFirstSandbox(),
	})
	flags := cmd.Flags()
	flags.SetInterspersed(false) // the command's flags are not ours
	flags.BoolVarP(&input, "interactive", "i", false, "give it our stdin")
	flags.BoolVarP(&tty, "tty", "t", false, "give it a terminal, and our stdin")
	o.flags(cmd)
	flags.Var(&o.timeout, "timeout", "kill it after this time")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		id := args[0]
		// Flags may stand behind the sandbox too.
		args, err := laterFlags(cmd, args[1:])
		if help, _ := cmd.Flags().GetBool("help"); help {
			return cmd.Help()
		}
		if err != nil {
			return err
		}
		command := client.Command{Path: args[0], Args: args[1:], Stdin: input}
		if tty {
			command.PTY = &client.Size{Cols: 80, Rows: 24}
		}
		return o.run(cmd, id, command)
	}
	return cmd
}

// laterFlags parses the flags between SANDBOX and the command and returns the
// command.
func laterFlags(cmd *cobra.Command, args []string) ([]string, error) {
	if len(args) > 0 && strings.HasPrefix(args[0], "-") {
		if err := cmd.Flags().Parse(args); err != nil {
			return nil, cli.UsageError{Err: err}
		}
		args = cmd.Flags().Args()
	}
	if len(args) == 0 {
		return nil, cli.UsageError{Err: errors.New("which command? It follows the sandbox: berm exec SANDBOX -- COMMAND")}
	}
	return args, nil
}

// execOptions are what exec and connect have in common.
type execOptions struct {
	user, dir string
	env       []string
	timeout   cli.DurationFlag
}

func (o *execOptions) flags(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVarP(&o.user, "user", "u", "", "user inside (default: the template's)")
	flags.StringVarP(&o.dir, "cwd", "w", "", "directory to run it in (default: the template's)")
	flags.StringArrayVarP(&o.env, "env", "e", nil, "variable for it, KEY=VALUE; KEY alone takes the value from here")
}

func (o *execOptions) run(cmd *cobra.Command, sandbox string, command client.Command) (err error) {
	if command.Env, err = cli.Pairs("env", o.env, os.LookupEnv); err != nil {
		return err
	}
	command.Dir = o.dir
	if _, set := command.Env["TERM"]; command.PTY != nil && !set {
		command.Env["TERM"] = "xterm-256color"
		if term := os.Getenv("TERM"); term != "" && term != "dumb" {
			command.Env["TERM"] = term
		}
	}
	c, id, err := serverAndSandbox(cmd, sandbox)
	if err != nil {
		return err
	}
	agent, err := runningAgent(cmd.Context(), c, id, o.user)
	if err != nil {
		return err
	}
	a := attachment{cmd: cmd, agent: agent, command: command, timeout: time.Duration(o.timeout)}
	return a.run()
}
