package main

import (
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm/internal/broker"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/kernel/seccomp"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/quota"
	"github.com/berm-sandbox/berm/internal/service"
)

// newBrokerCommand is the service of credentials, which berm starts for itself.
func newBrokerCommand() *cobra.Command {
	var shared bool
	cmd := &cobra.Command{
		Use:    egress.BrokerCommand,
		Short:  "Be the process that holds the credentials of sandboxes",
		Hidden: true,
		Args:   cli.UsageArgs(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			memory := quota.Memory() / 2 // the other half is the network service's
			flows, requests := broker.Room(memory)
			conn, err := service.Owner()
			if err != nil {
				return err
			}
			if err := confine(egress.BrokerCommand, seccomp.Broker(), onlyRead); err != nil {
				return err
			}
			debug.SetMemoryLimit(memory)
			s, err := broker.New(flows, requests)
			if err == nil {
				err = service.Beat(s.Pass)
			}
			switch {
			case err != nil:
			case shared:
				s.Shared = true
				err = s.Serve(conn)
			default:
				s.Attend(conn)
			}
			return confinedError(err)
		},
	}
	cmd.Flags().BoolVar(&shared, egress.Shared, false, "serve many sandboxes, whose connections come over the first")
	return cmd
}
