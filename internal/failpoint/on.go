//go:build failpoint

// Package failpoint lets tests break a multi-step change between two steps.
package failpoint

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"
)

var points = sync.OnceValue(func() map[string]string {
	set := map[string]string{}
	for _, entry := range strings.Split(os.Getenv("BERM_FAILPOINTS"), ",") {
		if name, action, ok := strings.Cut(entry, "="); ok {
			set[name] = action
		}
	}
	return set
})

// Hit does what BERM_FAILPOINTS asks for at the point called name.
func Hit(name string) error {
	action := points()[name]
	switch {
	case action == "":
		return nil
	case action == "crash":
		syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	case strings.HasPrefix(action, "sleep:"):
		d, err := time.ParseDuration(strings.TrimPrefix(action, "sleep:"))
		if err != nil {
			return fmt.Errorf("failpoint %s: %w", name, err)
		}
		time.Sleep(d)
		return nil
	default:
		return fmt.Errorf("failpoint %s", name)
	}
}

// Environment is what a process that is started anew has to have for the same points.
func Environment() []string { return []string{"BERM_FAILPOINTS=" + os.Getenv("BERM_FAILPOINTS")} }
