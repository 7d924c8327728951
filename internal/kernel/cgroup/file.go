package cgroup

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// write writes a value to a control file. The file is never created.
func write(dir, file, value string) error {
	fd, err := unix.Open(filepath.Join(dir, file), unix.O_WRONLY|unix.O_TRUNC|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: filepath.Join(dir, file), Err: err}
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, []byte(value)); err != nil {
		return &os.PathError{Op: "write " + value + " to", Path: filepath.Join(dir, file), Err: err}
	}
	return nil
}

// read reads a control file without its trailing newline.
func read(dir, file string) (string, error) {
	b, err := os.ReadFile(filepath.Join(dir, file))
	return strings.TrimSuffix(string(b), "\n"), err
}

// readNumber reads a control file that holds one number. "max" is no limit: 0.
func readNumber(dir, file string) (int64, error) {
	s, err := read(dir, file)
	if err != nil || s == "max" {
		return 0, err
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", filepath.Join(dir, file), err)
	}
	return int64(min(n, 1<<63-1)), nil
}

// readTable reads a control file of lines "key number".
func readTable(dir, file string) (map[string]int64, error) {
	s, err := read(dir, file)
	if err != nil {
		return nil, err
	}
	table := map[string]int64{}
	for line := range strings.Lines(s) {
		if key, value, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " "); ok {
			if n, err := strconv.ParseInt(value, 10, 64); err == nil {
				table[key] = n
			}
		}
	}
	return table, nil
}
