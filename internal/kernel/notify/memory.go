package notify

import (
	"bytes"
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// Bounds of one execution.
const (
	maxArgs = 4 << 10 // bytes of arguments
	maxArgv = 256     // arguments
	maxPath = 4096    // the kernel's PATH_MAX
)

// memory is that of a process, which may hold anything. What was read last is kept: arguments mostly
// lie side by side.
type memory struct {
	pid    int
	from   uint64
	window [512]byte
	filled int
}

// near returns at least a byte from an address on, or none when there is none to read.
func (m *memory) near(at uint64) (got []byte, known bool) {
	if at < m.from || at-m.from >= uint64(m.filled) {
		got, known := m.read(m.window[:], at)
		if m.from, m.filled = at, len(got); m.filled == 0 {
			return nil, known
		}
	}
	return m.window[at-m.from : m.filled], true
}

// read fills p with as much as there is from an address on. known says that it may be read at all.
func (m *memory) read(p []byte, at uint64) (got []byte, known bool) {
	const page = 4096
	for n := 0; ; { // a read that ends in a page that is not there fails as a whole
		part := p[n:min(len(p), n+page-int((at+uint64(n))%page))]
		if len(part) == 0 {
			return p[:n], true
		}
		got, err := unix.ProcessVMReadv(m.pid, []unix.Iovec{{Base: &part[0], Len: uint64(len(part))}},
			[]unix.RemoteIovec{{Base: uintptr(at) + uintptr(n), Len: len(part)}}, 0)
		if err != nil || got <= 0 {
			return p[:n], err != unix.EPERM && err != unix.ESRCH
		}
		n += got
	}
}

// text reads what ends with a zero byte, or at max bytes.
func (m *memory) text(at uint64, max int) (all []byte, known bool) {
	for len(all) < max {
		part, known := m.near(at + uint64(len(all)))
		if len(part) == 0 {
			return all, known
		}
		end := bytes.IndexByte(part, 0)
		if end >= 0 {
			part = part[:end]
		}
		if all = append(all, part[:min(len(part), max-len(all))]...); end >= 0 {
			break
		}
	}
	return all, true
}

// argv reads a list of arguments.
func (m *memory) argv(at uint64) (argv []string, cut bool) {
	left := maxArgs
	const pointer, some = 8, 16 // pointers that are read at once
	var buffer [some * pointer]byte
	for len(argv) < maxArgv {
		list, _ := m.read(buffer[:], at+uint64(len(argv)*pointer))
		if len(list) < pointer {
			return argv, len(argv) > 0
		}
		for ; len(list) >= pointer; list = list[pointer:] {
			arg := binary.NativeEndian.Uint64(list)
			if arg == 0 {
				return argv, false
			}
			text, _ := m.text(arg, left)
			argv = append(argv, string(text))
			if left -= len(text) + 1; left <= 0 {
				return argv, true
			}
		}
	}
	return argv, true
}
