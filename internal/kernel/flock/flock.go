// Package flock takes locks that the kernel drops with their holder.
package flock

import (
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Patience waits out a holder that was killed: such a lock is the open file's (flock(2)), and what the
// holder had just forked shares that until it executes its program.
const Patience = 3 * time.Second

// Take locks f exclusively and waits for a holder as long as patience. It fails with EWOULDBLOCK when
// f is still locked then. Closing f unlocks it.
func Take(f *os.File, patience time.Duration) error {
	for end := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if busy := errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EINTR); !busy || time.Now().After(end) {
			return err
		}
	}
}
