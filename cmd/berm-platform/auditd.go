package main

import (
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm/internal/audit/writer"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/kernel/landlock"
	"github.com/berm-sandbox/berm/internal/kernel/seccomp"
	"github.com/berm-sandbox/berm/internal/service"
)

// newAuditWriterCommand is the writer of the audit log, which berm starts for itself.
func newAuditWriterCommand() *cobra.Command {
	var settings writer.Settings
	cmd := &cobra.Command{
		Use:    service.Auditd,
		Short:  "Be the process that writes the audit log of a server",
		Hidden: true,
		Args:   cli.UsageArgs(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			w, err := writer.Inherit(settings)
			if err != nil {
				return err
			}
			network := len(settings.Witnesses) > 0
			paths := writer.Readable()
			if network {
				paths = append(paths, readable()...)
			}
			if err := confine(service.Auditd, seccomp.Log(network), func() error { return landlock.Within(w.Dir, paths...) }); err != nil {
				return err
			}
			debug.SetGCPercent(400) // it keeps little
			return confinedError(w.Serve())
		},
	}
	settings.Flags(cmd.Flags())
	return cmd
}
