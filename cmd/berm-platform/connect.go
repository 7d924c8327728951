package main

import (
	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
)

// shell starts bash where there is one. It replaces itself by it, so that the
// process that berm knows is the shell.
const shell = `if [ -x /bin/bash ]; then exec /bin/bash -i -l; else exec /bin/sh -i; fi`

func newConnectCommand() *cobra.Command {
	var o execOptions
	cmd := serverCommand(&cobra.Command{
		Use:   "connect SANDBOX",
		Short: "Open a shell in a sandbox",
		Long: `Open a shell in a sandbox, on a terminal of its own. When the connection is lost it
is taken up again and the shell goes on; what it printed meanwhile is missing. The
keys Enter, tilde, dot leave at once; so does Ctrl-C while the connection is down.
A shell that was left so goes on until the sandbox ends.`,
		Example: `  berm connect i0abcdefghijklmnopqrs
  berm connect --user root --cwd / i0abcdefghijklmnopqrs`,
		Args:              cli.UsageArgs(cobra.ExactArgs(1)),
		ValidArgsFunction: completeFirstSandbox(),
	})
	o.flags(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return o.run(cmd, args[0], client.Command{Path: "/bin/sh", Args: []string{"-c", shell}, PTY: &client.Size{Cols: 80, Rows: 24}})
	}
	return cmd
}
