// Package reexec makes a program that links it the init of its own sandboxes: launch.Run
// executes the program again, and this package takes over before main and before most
// other packages are initialised.
package reexec

import (
	"os"

	"github.com/berm-sandbox/berm/internal/driver/namespace/inside"
)

// Name is the name under which the program is executed again.
const Name = "berm-init"

func init() {
	if len(os.Args) > 1 && os.Args[0] == Name {
		inside.Command(os.Args[1:], os.Environ()[runtimeSettings:])
	}
}

// runtimeSettings is how many variables come first that are for init's own runtime.
const runtimeSettings = 2
