package main

import (
	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
)

func newServeCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "serve",
		Short: "Run the server",
		RunE: func(*cobra.Command, []string) error {
			return berm.Errorf(berm.Unsupported, "serve is not built yet")
		},
	}
}
