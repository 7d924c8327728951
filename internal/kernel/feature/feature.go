// Package feature finds out, by trying, what this host can do for isolation.
package feature

import (
	"context"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// tryLimit bounds one try: whatever takes longer is of no use.
const tryLimit = 5 * time.Second

// A Test tries one thing on this host. It is safe for concurrent use.
type Test struct {
	Name       string
	MinVersion string // first kernel that has it, such as "5.12"; "" when the kernel is not the question
	Fix        string // what to do when it is missing, unless the error knows better
	try        func(ctx context.Context) (detail string, err error)

	mu     sync.Mutex
	done   bool
	detail string
	err    error
}

// Check tries it, once in the life of the process, and returns nil when the host has
// it. Else the error's kind says how it is missing: Unsupported (the host cannot),
// Denied (this user may not), Internal (nobody knows why).
func (t *Test) Check(ctx context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.done {
		return t.err
	}
	limited, cancel := context.WithTimeout(ctx, tryLimit)
	defer cancel()
	detail, err := t.try(limited)
	if ctx.Err() != nil {
		return berm.Errorf(berm.Unavailable, "%s: %w", t.Name, ctx.Err())
	}
	t.done, t.detail, t.err = true, detail, err
	return err
}

// Excused says whether an error of Check has a stated reason: the kernel is older than
// the feature, the host cannot, or this user may not. Without one it is a fault.
func (t *Test) Excused(err error) bool {
	if t.MinVersion != "" && !KernelSince(t.MinVersion) {
		return true
	}
	kind := berm.KindOf(err)
	return kind == berm.Unsupported || kind == berm.Denied
}

// Probe is Check for people.
func (t *Test) Probe(ctx context.Context) berm.Feature {
	err := t.Check(ctx)
	f := berm.Feature{Name: t.Name, MinVersion: t.MinVersion, Found: err == nil}
	if err != nil {
		f.Detail, f.Fix = err.Error(), t.Fix
		if hint := berm.HintOf(err); hint != "" {
			f.Fix = hint
		}
		return f
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	f.Detail = t.detail
	return f
}

// minimumKernel is the oldest kernel that Berm is tested with, that of Debian 12.
const minimumKernel = "6.1"

// Kernel is the version of the running kernel.
var Kernel = &Test{
	Name:       "kernel",
	MinVersion: minimumKernel,
	Fix:        "install a newer kernel",
	try: func(context.Context) (string, error) {
		var u unix.Utsname
		if err := unix.Uname(&u); err != nil {
			return "", berm.Errorf(berm.Internal, "read the kernel's version: %w", err)
		}
		release := unix.ByteSliceToString(u.Release[:])
		if !KernelSince(minimumKernel) {
			return "", berm.Errorf(berm.Unsupported, "Linux %s is older than %s", release, minimumKernel)
		}
		return "Linux " + release + " " + unix.ByteSliceToString(u.Machine[:]), nil
	},
}

// KernelSince says whether the running kernel is of a version, such as "5.12", or newer.
func KernelSince(version string) bool {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return false
	}
	return since(unix.ByteSliceToString(u.Release[:]), version)
}

func since(release, version string) bool {
	var have, want [2]int
	if _, err := fmt.Sscanf(release, "%d.%d", &have[0], &have[1]); err != nil {
		return false
	}
	if _, err := fmt.Sscanf(version, "%d.%d", &want[0], &want[1]); err != nil {
		return false
	}
	return have[0] > want[0] || have[0] == want[0] && have[1] >= want[1]
}
