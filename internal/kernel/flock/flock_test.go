package flock

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func open(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// A process that shares the file of a dead holder keeps it locked: who waits has it when that ends.
func TestHolderLeavesAChild(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	holder := open(t, path)
	if err := Take(holder, 0); err != nil {
		t.Fatal(err)
	}
	child := exec.CommandContext(t.Context(), "sleep", "0.3")
	child.ExtraFiles = []*os.File{holder}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	holder.Close()
	next := open(t, path)
	if err := Take(next, 0); !errors.Is(err, unix.EWOULDBLOCK) {
		t.Errorf("at once: %v", err)
	}
	if err := Take(next, time.Minute); err != nil {
		t.Errorf("with patience: %v", err)
	}
	if err := child.Wait(); err != nil {
		t.Error(err)
	}
}
