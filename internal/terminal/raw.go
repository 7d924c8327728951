// Package terminal is the user's side of a terminal: raw mode, size, and output
// that cannot act on it.
package terminal

import (
	"context"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"golang.org/x/term"
)

// Raw puts the terminal f into raw mode and returns a function that restores it,
// which may be called more than once.
func Raw(f *os.File) (restore func(), err error) {
	state, err := term.MakeRaw(int(f.Fd()))
	if err != nil {
		return nil, err
	}
	return sync.OnceFunc(func() { _ = term.Restore(int(f.Fd()), state) }), nil
}

// Size of a terminal in characters.
type Size struct{ Cols, Rows int }

// SizeOf measures the terminal f; 80 by 24 when it does not know (a serial line
// says 0 by 0).
func SizeOf(f *os.File) Size {
	cols, rows, err := term.GetSize(int(f.Fd()))
	if err != nil || cols <= 0 || rows <= 0 {
		return Size{80, 24}
	}
	return Size{cols, rows}
}

// Resizes sends the size of the terminal f whenever it changes, until ctx ends. A
// slow reader gets the newest size only.
func Resizes(ctx context.Context, f *os.File) <-chan Size {
	signals, sizes := make(chan os.Signal, 1), make(chan Size, 1)
	signal.Notify(signals, syscall.SIGWINCH)
	go func() {
		defer signal.Stop(signals)
		for {
			select {
			case <-ctx.Done():
				return
			case <-signals:
			}
			select {
			case <-sizes: // out of date
			default:
			}
			sizes <- SizeOf(f)
		}
	}()
	return sizes
}
