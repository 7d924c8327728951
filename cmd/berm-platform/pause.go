package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/client"
)

func newPauseCommand() *cobra.Command {
	return stateCommand(&cobra.Command{
		Use:   "pause SANDBOX...",
		Short: "Stop sandboxes where they are, with all state kept",
		Long: `Stop every process of sandboxes where it is. Memory, files, environment and open
ports stay; berm resume lets them go on. A paused sandbox has no deadline.`,
		Example: `  berm pause i0abcdefghijklmnopqrs
  berm pause $(berm ls --quiet --state running)`,
		ValidArgsFunction: completeSandboxes(berm.Running),
	}, func(ctx context.Context, c *client.Client, id berm.SandboxID) (map[string]any, error) {
		return map[string]any{"paused": true}, c.Pause(ctx, id)
	})
}
