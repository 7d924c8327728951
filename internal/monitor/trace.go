package monitor

import (
	"fmt"
	"os"
	"time"
)

var tracing = os.Getenv("BERM_TRACE") != ""

// Trace writes when a step was done, if BERM_TRACE is set: to see where the time of a
// creation goes, over all the processes that take part in it.
func Trace(step string) {
	if tracing {
		fmt.Fprintf(os.Stderr, "%s %-8d %s\n", time.Now().Format("05.000000"), os.Getpid(), step)
	}
}
