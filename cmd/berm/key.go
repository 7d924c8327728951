package main

import (
	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
)

func newKeyCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "key",
		Short: "Make, list and revoke API keys",
		RunE: func(*cobra.Command, []string) error {
			return berm.Errorf(berm.Unsupported, "key is not built yet")
		},
	}
}
