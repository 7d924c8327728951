package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/client"
)

func newKillCommand() *cobra.Command {
	return stateCommand(&cobra.Command{
		Use:   "kill SANDBOX...",
		Short: "End sandboxes with all that is in them",
		Example: `  berm kill i0abcdefghijklmnopqrs
  berm kill $(berm ls --quiet --metadata user=ann)`,
		ValidArgsFunction: completeSandboxes(),
	}, func(ctx context.Context, c *client.Client, id berm.SandboxID) (map[string]any, error) {
		return map[string]any{"killed": true}, c.Kill(ctx, id)
	})
}
