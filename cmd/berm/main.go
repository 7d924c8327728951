// The limit of processors of the control group that berm itself is in takes a fifth of a
// millisecond to find, and berm has next to nothing to do with more or less of them.
//
//go:debug containermaxprocs=0
//go:debug updatemaxprocs=0

// Command berm is Berm in one file. It runs the commands of local mode itself; for all others
// it executes the platform that it carries, since what that links takes four milliseconds to
// initialise.
package main

import (
	"context"
	"os"

	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/cli/local"
	"github.com/berm-sandbox/berm/internal/monitor"
)

// version is set by the linker.
var version = "dev"

func main() {
	monitor.Trace("main")
	if len(os.Args) < 2 || !local.Has(os.Args[1]) {
		err := executePlatform()
		cli.PrintError(os.Stderr, err)
		os.Exit(1)
	}
	local.Platform, local.Program = executePlatform, openPlatform
	root := cli.NewRoot(version)
	root.AddCommand(local.Commands()...)
	os.Exit(cli.Execute(context.Background(), root, os.Args[1:]))
}
