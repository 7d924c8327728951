package main

import (
	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm/internal/broker"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

// newBrokerCommand is the service of credentials, which berm starts for itself.
func newBrokerCommand() *cobra.Command {
	return &cobra.Command{
		Use:    egress.BrokerCommand,
		Short:  "Be the process that holds the credentials of a sandbox",
		Hidden: true,
		Args:   cli.UsageArgs(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			if err := confine(egress.BrokerCommand); err != nil {
				return err
			}
			conn, err := owner()
			if err != nil {
				return err
			}
			if err := egress.Beat(func() {}); err != nil {
				return err
			}
			return broker.Attend(conn)
		},
	}
}
