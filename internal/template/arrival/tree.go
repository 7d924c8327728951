package arrival

import (
	"encoding/gob"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Tree is a layer without the contents of its files: every inode of it, the root first.
type Tree []Inode

// Inode is one file, directory, link or whiteout.
type Inode struct {
	Mode, UID, GID, Links uint32
	Size                  int64
	Sec                   int64 // modified
	Nsec                  uint32
	Target                string            // of a symbolic link
	Xattrs                map[string]string // those of users
	Children              []Child           // of a directory, by name
	Chunks                []Chunk           // of a regular file
}

// Child is a name in a directory.
type Child struct {
	Name  string
	Inode uint32 // index in the tree
}

// Walk reads the tree below a directory that nobody else changes. chunks tells those of the
// regular file with an inode number.
func Walk(dir string, chunks func(ino uint64) []Chunk) (Tree, error) {
	w := walk{chunks: chunks, linked: map[uint64]uint32{}}
	_, err := w.add(dir)
	return w.tree, err
}

type walk struct {
	tree   Tree
	chunks func(ino uint64) []Chunk
	linked map[uint64]uint32 // files with several names, by inode number
}

func (w *walk) add(file string) (uint32, error) {
	var st unix.Stat_t
	if err := unix.Lstat(file, &st); err != nil {
		return 0, &os.PathError{Op: "lstat", Path: file, Err: err}
	}
	kind := st.Mode & unix.S_IFMT
	if i, ok := w.linked[st.Ino]; ok && kind != unix.S_IFDIR {
		return i, nil
	}
	i := uint32(len(w.tree))
	n := Inode{
		Mode: st.Mode, UID: st.Uid, GID: st.Gid, Links: uint32(st.Nlink), Size: st.Size,
		Sec: st.Mtim.Sec, Nsec: uint32(st.Mtim.Nsec),
	}
	var err error
	switch kind {
	case unix.S_IFLNK:
		n.Target, err = os.Readlink(file)
	case unix.S_IFREG:
		n.Chunks = w.chunks(st.Ino)
		n.Xattrs, err = xattrs(file)
	case unix.S_IFDIR:
		n.Xattrs, err = xattrs(file)
	}
	if err != nil {
		return 0, err
	}
	if kind != unix.S_IFDIR && st.Nlink > 1 {
		w.linked[st.Ino] = i
	}
	w.tree = append(w.tree, n)
	if kind != unix.S_IFDIR {
		return i, nil
	}
	names, err := os.ReadDir(file)
	if err != nil {
		return 0, err
	}
	children := make([]Child, 0, len(names))
	for _, e := range names {
		at, err := w.add(filepath.Join(file, e.Name()))
		if err != nil {
			return 0, err
		}
		children = append(children, Child{e.Name(), at})
	}
	slices.SortFunc(children, func(a, b Child) int { return strings.Compare(a.Name, b.Name) })
	w.tree[i].Children = children
	return i, nil
}

func xattrs(file string) (map[string]string, error) {
	size, err := unix.Llistxattr(file, nil)
	if errors.Is(err, unix.ENOTSUP) || err == nil && size == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	list := make([]byte, size)
	if size, err = unix.Llistxattr(file, list); err != nil {
		return nil, err
	}
	all := map[string]string{}
	value := make([]byte, 64<<10) // the kernel's limit
	for name := range strings.SplitSeq(string(list[:size]), "\x00") {
		if !strings.HasPrefix(name, "user.") {
			continue
		}
		n, err := unix.Lgetxattr(file, name, value)
		if err != nil {
			return nil, err
		}
		all[name] = string(value[:n])
	}
	return all, nil
}

// Write stores a tree for the process that serves it.
func (t Tree) Write(w io.Writer) error { return gob.NewEncoder(w).Encode(t) }

func readTree(r io.Reader) (t Tree, err error) {
	err = gob.NewDecoder(r).Decode(&t)
	return t, err
}
