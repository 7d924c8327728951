// Package writertest has tests be the writer of the logs that they open.
package writertest

import (
	"fmt"
	"os"

	"github.com/spf13/pflag"

	"github.com/berm-sandbox/berm/internal/audit/writer"
	"github.com/berm-sandbox/berm/internal/service"
)

// Main is called first in TestMain: a test that was started as a writer is one, without confinement, which
// a program with cgo cannot have.
func Main() {
	if len(os.Args) < 2 || os.Args[1] != service.Auditd {
		return
	}
	var settings writer.Settings
	flags := pflag.NewFlagSet(service.Auditd, pflag.ContinueOnError)
	settings.Flags(flags)
	err := flags.Parse(os.Args[2:])
	if err == nil {
		var w *writer.Writer
		if w, err = writer.Inherit(settings); err == nil {
			err = w.Serve()
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Program opens the test.
func Program() (*os.File, error) { return os.Open("/proc/self/exe") }
