package harness

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"syscall"
)

// Holds says whether the memory that a process can write, where its secrets are, has one of
// these texts. Of a process that has ended it is false.
func Holds(pid int, texts ...string) (bool, error) {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil || len(maps) == 0 {
		return false, nil //nolint:nilerr // it has ended meanwhile
	}
	memory, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	if err != nil {
		return false, nil //nolint:nilerr // the same
	}
	defer memory.Close()
	read := 0
	const piece = 1 << 20
	buf := make([]byte, piece+64) // past the end, for what lies across
	for line := range strings.Lines(string(maps)) {
		var from, to uint64
		var rights string
		if _, err := fmt.Sscanf(line, "%x-%x %s", &from, &to, &rights); err != nil || rights[:2] != "rw" {
			continue
		}
		for at := from; at < to; at += piece {
			n, _ := memory.ReadAt(buf[:min(uint64(len(buf)), to-at)], int64(at))
			read += n
			for _, text := range texts {
				if bytes.Contains(buf[:n], []byte(text)) {
					return true, nil
				}
			}
		}
	}
	if read == 0 && syscall.Kill(pid, 0) == nil {
		return false, fmt.Errorf("nothing of process %d can be read", pid)
	}
	return false, nil
}
