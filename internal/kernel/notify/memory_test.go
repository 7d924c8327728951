package notify

import (
	"encoding/binary"
	"os"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// memoryPages is how much of the memory that FuzzMemory reads is there; a page follows that is not.
const memoryPages = 3

// region is a part of this process' memory.
type region struct {
	base  uint64
	bytes []byte
	left  bool // something was looked for elsewhere in the memory of this process
}

func (r *region) at(address uint64) (byte, bool) {
	if address < r.base || address-r.base >= uint64(len(r.bytes)) {
		// The next page is not there, and no address of a process begins with a one.
		r.left = r.left || address>>63 == 0 && address-r.base >= uint64(len(r.bytes)+os.Getpagesize())
		return 0, false
	}
	return r.bytes[address-r.base], true
}

// argv reads arguments byte by byte.
func (r *region) argv(list uint64) (argv []string, cut bool) {
	left := maxArgs
	for len(argv) < maxArgv {
		var word [8]byte
		for i := range word {
			b, ok := r.at(list + uint64(8*len(argv)+i))
			if !ok {
				return argv, len(argv) > 0
			}
			word[i] = b
		}
		arg := binary.NativeEndian.Uint64(word[:])
		if arg == 0 {
			return argv, false
		}
		var text []byte
		for ; len(text) < left; arg++ {
			b, ok := r.at(arg)
			if !ok || b == 0 {
				break
			}
			text = append(text, b)
		}
		argv = append(argv, string(text))
		if left -= len(text) + 1; left <= 0 {
			return argv, true
		}
	}
	return argv, true
}

// FuzzMemory reads arguments from memory that holds anything, up to a page that is not there, and
// compares what comes with what a plain reader finds.
func FuzzMemory(f *testing.F) {
	word := func(words ...uint64) (b []byte) {
		for _, w := range words {
			b = binary.NativeEndian.AppendUint64(b, w)
		}
		return b
	}
	size := uint64(memoryPages * os.Getpagesize())
	f.Add(append(word(24, 27, 0), "ls\x00-l\x00"...), uint16(0))
	f.Add(append(word(24, 24, 24), make([]byte, 9)...), uint16(0))    // texts without a byte
	f.Add(append(word(0, 16, 1<<63), "no end"...), uint16(8))         // a list that runs into the text
	f.Add(word(slices.Repeat([]uint64{size - 1}, 300)...), uint16(0)) // more than are told, at the edge
	f.Add(word(^uint64(0), ^uint64(7), size, size-3), uint16(0))
	f.Add([]byte("unaligned\x00\x01\x00\x00"), uint16(3))
	f.Fuzz(func(t *testing.T, content []byte, at uint16) {
		page := os.Getpagesize()
		mapped, err := unix.Mmap(-1, 0, (memoryPages+1)*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = unix.Munmap(mapped) }()
		if err := unix.Mprotect(mapped[memoryPages*page:], unix.PROT_NONE); err != nil {
			t.Fatal(err)
		}
		r := region{base: uint64(uintptr(unsafe.Pointer(&mapped[0]))), bytes: mapped[:memoryPages*page]}
		// What comes ends where the memory ends, and small numbers in it are places there.
		content = content[:min(len(content), len(r.bytes))]
		start := len(r.bytes) - len(content)
		copy(r.bytes[start:], content)
		for i := start; i+8 <= len(r.bytes); i += 8 {
			if w := binary.NativeEndian.Uint64(r.bytes[i:]); w != 0 && w <= uint64(len(content))+8 {
				binary.NativeEndian.PutUint64(r.bytes[i:], r.base+uint64(start)+w)
			}
		}
		list := r.base + uint64(start) + uint64(at)
		want, wantCut := r.argv(list)
		m := memory{pid: os.Getpid()}
		got, cut := m.argv(list)
		if !r.left && (!slices.Equal(got, want) || cut != wantCut) {
			t.Errorf("%q, %v, want %q, %v", got, cut, want, wantCut)
		}
		all := 0
		for _, arg := range got {
			all += len(arg)
		}
		if all > maxArgs || len(got) > maxArgv {
			t.Errorf("%d arguments of %d bytes", len(got), all)
		}
		if text, _ := m.text(list, maxPath); len(text) > maxPath || slices.Contains(text, 0) {
			t.Errorf("a path of %d bytes: %q", len(text), text)
		}
	})
}

// The arguments of a process prove an execution of the file that it ran before only where they were
// others, and are those of the execution as a whole.
func TestShows(t *testing.T) {
	for _, c := range []struct {
		what, before, name, argv, now string
		want                          bool
	}{
		{"itself, with others", "sh|-c|x", "/bin/sh", "sh|-c|y", "sh|-c|y", true},
		{"itself, with the same", "sh|-c|x", "/bin/sh", "sh|-c|x", "sh|-c|x", false},
		{"not yet", "ways|memfd|ran|a", "/dev/fd/3", "ways|ran|a", "ways|memfd|ran|a", false},
		{"a script", "sh", "./script", "./script|a", "/bin/sh|./script|a", true},
		{"a script, with an option", "sh", "./script", "./script|a", "/bin/sh|-e|./script|a", true},
		{"a script, not yet", "timeout|5|./script|a", "./script", "./script|a", "timeout|5|./script|a", false},
		{"a script of a descriptor", "sh", "/dev/fd/3", "script|a", "/bin/sh|/dev/fd/3|a", true},
		{"one that begins like it", "sh", "/bin/sh", "sh|a", "sh|ab", false},
		{"one that it begins like", "sh", "/bin/sh", "sh|ab", "sh|a", false},
		{"none", "sh", "/bin/sh", "", "sh|a", false},
	} {
		dir := t.TempDir() + "/"
		line := func(of string) []byte { return []byte(strings.ReplaceAll(of, "|", "\x00") + "\x00") }
		if err := os.WriteFile(dir+"cmdline", line(c.now), 0o600); err != nil {
			t.Fatal(err)
		}
		a := &ask{line: line(c.before), name: c.name}
		if c.argv != "" {
			a.Argv = strings.Split(c.argv, "|")
		}
		if got := a.shows(dir); got != c.want {
			t.Errorf("%s: %v", c.what, got)
		}
	}
}

// A process that ends has no arguments any more, which is not one that is empty.
func TestArguments(t *testing.T) {
	for line, want := range map[string][]string{"": nil, "\x00": {""}, "ls\x00-l\x00": {"ls", "-l"}, "ls\x00\x00": {"ls", ""}} {
		if got := arguments([]byte(line)); !slices.Equal(got, want) || (got == nil) != (want == nil) {
			t.Errorf("%q: %q", line, got)
		}
	}
}
