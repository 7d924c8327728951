package credential

import (
	"errors"
	"io"
	"strings"
)

const (
	maxPacket   = 65520     // gitprotocol-common
	maxCommands = 1000      // refs that one push writes
	maxSection  = 256 << 10 // bytes before the pack
)

// command is what a push does with one ref.
type command struct {
	ref     string
	deletes bool
}

// readCommands reads the first section of a push (gitprotocol-pack, "Reference Update
// Request"), and returns the bytes of it, to be sent on, too.
func readCommands(r io.Reader) (commands []command, read []byte, err error) {
	for first := true; ; {
		line, err := readPacket(r, &read)
		if err != nil {
			return nil, nil, err
		}
		if line == nil {
			return commands, read, nil
		}
		text := strings.TrimSuffix(string(line), "\n")
		if oid, ok := strings.CutPrefix(text, "shallow "); ok && first {
			if !isObject(oid) {
				return nil, nil, errors.New("a shallow line names no object")
			}
			continue
		}
		if first {
			text, _, _ = strings.Cut(text, "\x00") // capabilities follow
			text = strings.TrimSuffix(text, "\n")
			first = false
		}
		before, rest, _ := strings.Cut(text, " ")
		after, ref, _ := strings.Cut(rest, " ")
		if before == "push-cert" {
			return nil, nil, errors.New("it is signed, which is not supported")
		}
		if !isObject(before) || !isObject(after) || len(before) != len(after) || !isRef(ref) {
			return nil, nil, errors.New("a line is no command")
		}
		if len(commands) == maxCommands {
			return nil, nil, errors.New("it writes more than 1000 refs")
		}
		commands = append(commands, command{ref, strings.Trim(after, "0") == ""})
	}
}

// readPacket reads one pkt-line, nil for a flush packet, and appends all of it to read.
func readPacket(r io.Reader, read *[]byte) ([]byte, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, errors.New("it ends too early")
	}
	length := 0
	for _, c := range head {
		d := unhex(c)
		if d < 0 {
			return nil, errors.New("a line has no length")
		}
		length = length<<4 | d
	}
	*read = append(*read, head[:]...)
	switch {
	case length == 0:
		return nil, nil
	case length <= len(head) || length > maxPacket:
		return nil, errors.New("the length of a line is wrong")
	case len(*read)+length > maxSection:
		return nil, errors.New("its commands are longer than 256 KiB")
	}
	line := make([]byte, length-len(head))
	if _, err := io.ReadFull(r, line); err != nil {
		return nil, errors.New("it ends too early")
	}
	*read = append(*read, line...)
	return line, nil
}

// isObject says whether s is the name of an object, by SHA-1 or SHA-256.
func isObject(s string) bool {
	return (len(s) == 40 || len(s) == 64) && strings.Trim(s, "0123456789abcdef") == ""
}

// isRef says whether s is the full name of a ref (git-check-ref-format).
func isRef(s string) bool {
	if !strings.HasPrefix(s, "refs/") || strings.HasSuffix(s, "/") || strings.HasSuffix(s, ".") || strings.ContainsAny(s, " ~^:?*[\\") {
		return false
	}
	for _, bad := range []string{"..", "//", "@{", "/.", ".lock/"} {
		if strings.Contains(s+"/", bad) {
			return false
		}
	}
	for i := range len(s) {
		if s[i] < ' ' || s[i] == 0x7f {
			return false
		}
	}
	return true
}
