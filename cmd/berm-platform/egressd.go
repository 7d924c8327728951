package main

import (
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/kernel/seccomp"
	"github.com/berm-sandbox/berm/internal/network/dns"
	"github.com/berm-sandbox/berm/internal/network/egress"
	network "github.com/berm-sandbox/berm/internal/network/egress/server"
	"github.com/berm-sandbox/berm/internal/network/quota"
	"github.com/berm-sandbox/berm/internal/network/stack"
	"github.com/berm-sandbox/berm/internal/service"
)

// newEgressCommand is the network service, which berm starts for itself.
func newEgressCommand() *cobra.Command {
	var resolvers []string
	var shared bool
	cmd := &cobra.Command{
		Use:    egress.Command,
		Short:  "Be the network service of sandboxes",
		Hidden: true,
		Args:   cli.UsageArgs(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			memory := quota.Memory()
			c := network.Config{Flows: network.Flows(memory)}
			for _, r := range resolvers {
				resolver, err := dns.ParseResolver(r)
				if err != nil {
					return cli.UsageError{Err: err}
				}
				c.Resolvers = append(c.Resolvers, resolver)
			}
			owner, err := service.Owner()
			if err != nil {
				return err
			}
			if err := confine(egress.Command, seccomp.Egress(), onlyRead); err != nil {
				return err
			}
			stack.Tune()
			debug.SetMemoryLimit(memory)
			s, err := network.New(c)
			if err == nil {
				err = service.Beat(s.Pass)
			}
			switch {
			case err != nil:
			case shared:
				err = s.Serve(owner)
			default:
				s.Attend(owner)
			}
			return confinedError(err)
		},
	}
	cmd.Flags().StringArrayVar(&resolvers, egress.Resolver, nil, "resolver to ask")
	cmd.Flags().BoolVar(&shared, egress.Shared, false, "serve many sandboxes, whose connections come over the first")
	return cmd
}
