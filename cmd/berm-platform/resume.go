package main

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
)

func newResumeCommand() *cobra.Command {
	var timeout cli.DurationFlag
	var cmd *cobra.Command
	cmd = stateCommand(&cobra.Command{
		Use:   "resume SANDBOX...",
		Short: "Let paused sandboxes go on",
		Long: `Let paused sandboxes go on, with a new time to live. A sandbox that runs goes on as
it does; its time is extended if the new end is later.`,
		Example: `  berm resume i0abcdefghijklmnopqrs
  berm resume --timeout 2h i0abcdefghijklmnopqrs`,
		ValidArgsFunction: completeSandboxes(berm.Paused),
	}, func(ctx context.Context, c *client.Client, id berm.SandboxID) (map[string]any, error) {
		_, resumed, err := c.Resume(ctx, id, time.Duration(timeout))
		if err != nil {
			return nil, err
		}
		if !resumed {
			cli.Notice(cmd, "%s runs already", id)
		}
		return map[string]any{"resumed": resumed}, nil
	})
	cmd.Flags().Var(&timeout, "timeout", "time to live from now (default: the server's, 5m)")
	return cmd
}
