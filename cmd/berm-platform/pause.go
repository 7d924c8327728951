package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/client"
)

func newPauseCommand() *cobra.Command {
	var filesOnly bool
	cmd := stateCommand(&cobra.Command{
		Use:   "pause SANDBOX...",
		Short: "Stop sandboxes where they are, with all state kept",
		Long: `Stop every process of sandboxes where it is. Memory, files, environment and open
ports stay; berm resume lets them go on. A paused sandbox has no deadline. At level gvisor its memory
is put on disk, and freed.

With --files-only their processes end and give their memory back: files stay, on disk, and berm
resume starts the sandboxes anew.`,
		Example: `  berm pause i0abcdefghijklmnopqrs
  berm pause $(berm ls --quiet --state running)`,
		ValidArgsFunction: completeSandboxes(berm.Running),
	}, func(ctx context.Context, c *client.Client, id berm.SandboxID) (map[string]any, error) {
		pause := c.Pause
		if filesOnly {
			pause = c.PauseToFiles
		}
		return map[string]any{"paused": true}, pause(ctx, id)
	})
	cmd.Flags().BoolVar(&filesOnly, "files-only", false, "keep files alone: end the processes")
	return cmd
}
