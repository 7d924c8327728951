// Package metadata keeps what users attach to files, in extended attributes.
package metadata

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// Prefix is what the name of every attribute begins with.
const Prefix = "user.e2b."

const (
	maxKey   = 255 - len(Prefix) // the kernel's XATTR_NAME_MAX
	maxTotal = 4096              // names and values: one block of ext4

	maxList  = 64 << 10 // the kernel's XATTR_LIST_MAX
	maxValue = 64 << 10 // the kernel's XATTR_SIZE_MAX
)

// Validate says whether Write can keep m: printable ASCII, within what file systems
// hold.
func Validate(m map[string]string) error {
	total := 0
	for k, v := range m {
		switch {
		case k == "":
			return errors.New("metadata key is empty")
		case len(k) > maxKey:
			return fmt.Errorf("metadata key %.32q… is longer than %d bytes", k, maxKey)
		case !printable(k):
			return fmt.Errorf("metadata key %q is not printable ASCII", k)
		case !printable(v):
			return fmt.Errorf("metadata value of key %q is not printable ASCII", k)
		}
		total += len(Prefix) + len(k) + len(v)
	}
	if total > maxTotal {
		return fmt.Errorf("metadata takes %d bytes, more than %d", total, maxTotal)
	}
	return nil
}

func printable(s string) bool {
	for i := range len(s) {
		if s[i] < 0x20 || s[i] > 0x7e {
			return false
		}
	}
	return true
}

// Read returns the metadata of a file; nil when it has none or cannot have any. It
// follows symbolic links. Programs inside may have put anything there: what is not
// UTF-8 is left out, since no protocol of ours can carry it.
func Read(path string) map[string]string {
	names := list(func(buf []byte) (int, error) { return unix.Listxattr(path, buf) })
	var m map[string]string
	for _, name := range names {
		value, ok := get(path, name)
		key := name[len(Prefix):]
		if !ok || !utf8.ValidString(key) || !utf8.ValidString(value) {
			continue
		}
		if m == nil {
			m = map[string]string{}
		}
		m[key] = value
	}
	return m
}

// Write replaces the metadata of a file. It does nothing on file systems without
// extended attributes when there is nothing to keep.
func Write(f *os.File, m map[string]string) error {
	fd := int(f.Fd())
	for _, name := range list(func(buf []byte) (int, error) { return unix.Flistxattr(fd, buf) }) {
		if _, keep := m[name[len(Prefix):]]; !keep {
			if err := unix.Fremovexattr(fd, name); err != nil && !errors.Is(err, unix.ENODATA) {
				return os.NewSyscallError("fremovexattr", err)
			}
		}
	}
	for k, v := range m {
		if err := unix.Fsetxattr(fd, Prefix+k, []byte(v), 0); err != nil {
			return os.NewSyscallError("fsetxattr", err)
		}
	}
	return nil
}

// list returns the names of our attributes.
func list(call func([]byte) (int, error)) []string {
	var small [512]byte
	buf := small[:]
	n, err := call(buf)
	if err == unix.ERANGE {
		buf = make([]byte, maxList)
		n, err = call(buf)
	}
	if err != nil || n <= 0 {
		return nil
	}
	var names []string
	for name := range strings.SplitSeq(string(buf[:n]), "\x00") {
		if strings.HasPrefix(name, Prefix) && len(name) > len(Prefix) {
			names = append(names, name)
		}
	}
	return names
}

func get(path, name string) (string, bool) {
	var small [512]byte
	buf := small[:]
	n, err := unix.Getxattr(path, name, buf)
	if err == unix.ERANGE {
		buf = make([]byte, maxValue)
		n, err = unix.Getxattr(path, name, buf)
	}
	if err != nil {
		return "", false
	}
	return string(buf[:n]), true
}
