package session

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// What an index of git may have to be read.
const (
	maxIndex      = 64 << 20
	maxIndexFiles = 500_000
)

// repository is the git repository that a project is in.
type repository struct {
	objects string // the directory of its objects
	prefix  string // of the project's paths in the index
	files   map[string]tracked
	written int64 // when the index was, in nanoseconds since the epoch
}

// tracked is a file as the index has it. Numbers are cut to 32 bits there.
type tracked struct {
	ctime, ctimeNano, mtime, mtimeNano, ino, mode, size uint32
	oid                                                 string // raw
}

// openRepository finds the repository of a project and reads its index. It returns nil when
// there is none that it understands: the files' content is then not known from git.
func openRepository(project string) *repository {
	for dir := project; ; dir = filepath.Dir(dir) {
		if gitDir := gitDirectory(dir); gitDir != "" {
			r, err := readRepository(gitDir)
			if err != nil {
				return nil
			}
			if rel, err := filepath.Rel(dir, project); err == nil && rel != "." {
				r.prefix = rel + "/"
			}
			return r
		}
		if dir == "/" {
			return nil
		}
	}
}

// gitDirectory returns where the repository of a work tree is (gitrepository-layout(5)), or
// "" when dir is no work tree.
func gitDirectory(dir string) string {
	name := filepath.Join(dir, ".git")
	info, err := os.Lstat(name)
	if err != nil {
		return ""
	}
	if info.IsDir() {
		return name
	}
	data, _, err := readRegular(name, unix.PathMax)
	target, ok := strings.CutPrefix(string(data), "gitdir: ")
	if err != nil || !ok {
		return ""
	}
	return absolute(dir, strings.TrimRight(target, "\n"))
}

func absolute(dir, name string) string {
	if filepath.IsAbs(name) {
		return filepath.Clean(name)
	}
	return filepath.Join(dir, name)
}

func readRepository(gitDir string) (*repository, error) {
	common := gitDir
	// A work tree of its own shares the objects with the main one.
	if data, _, err := readRegular(filepath.Join(gitDir, "commondir"), unix.PathMax); err == nil {
		common = absolute(gitDir, strings.TrimRight(string(data), "\n"))
	}
	data, st, err := readRegular(filepath.Join(gitDir, "index"), maxIndex)
	if err != nil {
		return nil, err
	}
	files, err := parseIndex(data, 20) // SHA-1
	if err != nil {
		if files, err = parseIndex(data, 32); err != nil { // SHA-256
			return nil, err
		}
	}
	return &repository{objects: filepath.Join(common, "objects"), files: files, written: st.Mtim.Nano()}, nil
}

// clean returns the name of the object that holds what the file at a path holds, when the
// index says so: nothing of the file changed since git wrote both. A file as young as the
// index may have changed unnoticed (git's technical/racy-git).
func (r *repository) clean(path string, st *unix.Stat_t) (oid string, known bool) {
	if r == nil {
		return "", false
	}
	f, known := r.files[r.prefix+path]
	if !known || f.mode&unix.S_IFMT != unix.S_IFREG || st.Mode&unix.S_IFMT != unix.S_IFREG ||
		f.mode&0o100 != st.Mode&0o100 || f.size != uint32(st.Size) || f.ino != uint32(st.Ino) ||
		f.mtime != uint32(st.Mtim.Sec) || f.mtimeNano != uint32(st.Mtim.Nsec) ||
		f.ctime != uint32(st.Ctim.Sec) || f.ctimeNano != uint32(st.Ctim.Nsec) ||
		st.Mtim.Nano() >= r.written {
		return "", known
	}
	return f.oid, true
}

var errIndex = errors.New("no index of git in a format from 2 to 4")

// parseIndex reads an index (gitformat-index(5)) of a repository whose object names have a
// size. It leaves out what is no file in a single version.
func parseIndex(data []byte, hash int) (map[string]tracked, error) {
	if len(data) < 12+hash || string(data[:4]) != "DIRC" {
		return nil, errIndex
	}
	version, count := binary.BigEndian.Uint32(data[4:]), binary.BigEndian.Uint32(data[8:])
	if version < 2 || version > 4 || count > maxIndexFiles {
		return nil, errIndex
	}
	at, end := 12, len(data)-hash
	files := make(map[string]tracked, min(int(count), len(data)/(40+hash)))
	name := ""
	for range count {
		start := at
		if at += 40 + hash + 2; at > end {
			return nil, errIndex
		}
		var n [10]uint32
		for i := range n {
			n[i] = binary.BigEndian.Uint32(data[start+4*i:])
		}
		oid := string(data[start+40 : start+40+hash])
		flags, extended := binary.BigEndian.Uint16(data[at-2:]), uint16(0)
		if flags&0x4000 != 0 {
			if at += 2; version < 3 || at > end {
				return nil, errIndex
			}
			extended = binary.BigEndian.Uint16(data[at-2:])
		}
		kept := 0
		if version == 4 {
			cut, size := offset(data[at:end])
			if size == 0 || cut > len(name) {
				return nil, errIndex
			}
			kept, at = len(name)-cut, at+size
		}
		length := bytes.IndexByte(data[at:end], 0)
		if length < 0 || kept+length > maxPath {
			return nil, errIndex
		}
		name = name[:kept] + string(data[at:at+length])
		if at += length + 1; version < 4 {
			at = start + (at-1-start+8)&^7 // one to eight zero bytes
		}
		if at > end {
			return nil, errIndex
		}
		const stages, intentToAdd = 0x3000, 0x2000
		if flags&stages == 0 && extended&intentToAdd == 0 && name != "" {
			files[name] = tracked{n[0], n[1], n[2], n[3], n[5], n[6], n[9], oid}
		}
	}
	// The extensions must fill the rest, else the size of the names was a wrong guess.
	for at < end {
		if end-at < 8 {
			return nil, errIndex
		}
		size := int64(binary.BigEndian.Uint32(data[at+4:]))
		if string(data[at:at+4]) == "link" || size > int64(end-at-8) { // link: most entries are elsewhere
			return nil, errIndex
		}
		at += 8 + int(size)
	}
	return files, nil
}

// offset reads a number as pack files have it: each byte but the first adds one to what
// came before. size is 0 when it is none.
func offset(data []byte) (value, size int) {
	for i, b := range data[:min(len(data), 4)] {
		if i > 0 {
			value++
		}
		value = value<<7 | int(b&0x7f)
		if b&0x80 == 0 {
			return value, i + 1
		}
	}
	return 0, 0
}

// readRegular reads a whole file if it is a regular one of at most limit bytes.
func readRegular(name string, limit int64) ([]byte, *unix.Stat_t, error) {
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, nil, err
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, nil, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > limit {
		return nil, nil, unix.EFBIG
	}
	data := make([]byte, st.Size)
	if _, err := io.ReadFull(f, data); err != nil {
		return nil, nil, err
	}
	return data, &st, nil
}
