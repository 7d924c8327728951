package client

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"
)

// WriteTree writes what is below a local directory as a tar stream. What is neither
// file, directory nor link is left out and reported to skipped.
func WriteTree(w io.Writer, dir string, skipped func(name, why string)) error {
	t := tar.NewWriter(w)
	err := filepath.WalkDir(dir, func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(dir, name)
		if err != nil || relative == "." {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		link := ""
		switch info.Mode().Type() {
		case 0, fs.ModeDir:
		case fs.ModeSymlink:
			if link, err = os.Readlink(name); err != nil {
				return err
			}
		default:
			skipped(relative, "not a file, directory or link")
			return nil
		}
		// Owners are not those of this machine: whoever unpacks it owns it.
		header := &tar.Header{
			Name: filepath.ToSlash(relative),
			Mode: int64(info.Mode().Perm()),
			// The format holds seconds. The writer would round up to the next one, and
			// tar inside complains of times in the future.
			ModTime: info.ModTime().Truncate(time.Second),
		}
		switch info.Mode().Type() {
		case fs.ModeDir:
			header.Typeflag, header.Name = tar.TypeDir, header.Name+"/"
		case fs.ModeSymlink:
			header.Typeflag, header.Linkname = tar.TypeSymlink, link
		default:
			header.Typeflag, header.Size = tar.TypeReg, info.Size()
		}
		if err := t.WriteHeader(header); err != nil {
			return err
		}
		if header.Size == 0 {
			return nil
		}
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		defer f.Close()
		if n, err := io.CopyN(t, f, header.Size); err != nil {
			return fmt.Errorf("%s: only %d of %d bytes are left: %w", name, n, header.Size, err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return t.Close()
}

// ReadTree unpacks a tar stream from a sandbox into a local directory, which
// exists. The stream is hostile: nothing of it is written, and no link that it
// makes leads, outside of the directory; owners, set-uid bits and devices are
// dropped. What is left out is reported to skipped.
func ReadTree(r io.Reader, dir string, skipped func(name, why string)) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	t, parents := tar.NewReader(r), realDirs{root: root}
	for {
		h, err := t.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) { // judged below
			return err
		}
		name := path.Clean(strings.TrimLeft(h.Name, "/"))
		if name == "." && h.Typeflag == tar.TypeDir {
			continue
		}
		if !filepath.IsLocal(name) || name == "." {
			skipped(h.Name, "a path outside of the directory")
			continue
		}
		if err := parents.make(path.Dir(name), 0o755); err != nil {
			skipped(h.Name, err.Error())
			continue
		}
		if why, err := readEntry(root, &parents, t, h, name); err != nil {
			return err
		} else if why != "" {
			skipped(h.Name, why)
		}
	}
}

// readEntry makes one entry whose parents are real directories. A reason means
// that it was left out.
func readEntry(root *os.Root, parents *realDirs, t *tar.Reader, h *tar.Header, name string) (why string, err error) {
	if h.Typeflag == tar.TypeDir {
		// The owner keeps all rights: files are to be written into it.
		if err := parents.make(name, fs.FileMode(h.Mode).Perm()|0o700); err != nil {
			return err.Error(), nil
		}
		return "", nil
	}
	old := ""
	switch h.Typeflag {
	case tar.TypeReg:
		for key := range h.PAXRecords {
			if strings.HasPrefix(key, "GNU.sparse.") { // a few bytes could fill the disk
				return "a sparse file", nil
			}
		}
	case tar.TypeSymlink:
		if !linkStays(name, h.Linkname) {
			return "a link to " + h.Linkname + ", outside of the directory", nil
		}
	case tar.TypeLink:
		old = path.Clean(strings.TrimLeft(h.Linkname, "/"))
		if !filepath.IsLocal(old) || parents.check(path.Dir(old)) != nil {
			return "a hard link to outside of the directory", nil
		}
		// A link may lead elsewhere from another place.
		if info, err := root.Lstat(old); err != nil || !info.Mode().IsRegular() || old == name {
			return "a hard link to what is no file", nil
		}
	default:
		return "not a file, directory or link", nil
	}
	if info, err := root.Lstat(name); err == nil {
		if info.IsDir() {
			return "a directory of that name exists", nil
		}
		if err := root.Remove(name); err != nil {
			return "", err
		}
	}
	switch h.Typeflag {
	case tar.TypeSymlink:
		return "", root.Symlink(h.Linkname, name)
	case tar.TypeLink:
		return "", root.Link(old, name)
	}
	f, err := root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, fs.FileMode(h.Mode).Perm())
	if err != nil {
		return "", err
	}
	_, err = io.Copy(f, t)
	if closing := f.Close(); err == nil {
		err = closing
	}
	if err == nil && !h.ModTime.IsZero() {
		err = root.Chtimes(name, h.ModTime, h.ModTime)
	}
	return "", err
}

// linkStays says whether a symbolic link at name stays in the tree, whatever other
// such links are in it. It holds because name has real directories for parents and
// because ".." comes first in the target: behind another name, which may be a link
// itself, ".." could lead anywhere.
func linkStays(name, target string) bool {
	if target == "" || strings.HasPrefix(target, "/") {
		return false
	}
	depth, leading := strings.Count(name, "/"), true
	for part := range strings.SplitSeq(target, "/") {
		switch {
		case part == "" || part == ".":
		case part != "..":
			leading = false
		case !leading || depth == 0:
			return false
		default:
			depth--
		}
	}
	return true
}

// realDirs makes directories and knows that no link is on the way to them.
type realDirs struct {
	root *os.Root
	last string // checked before; most entries have the parent of the entry before
}

var errLinkedParent = errors.New("a link is on the way to it")

func (d *realDirs) check(dir string) error { return d.walk(dir, 0) }

func (d *realDirs) make(dir string, mode fs.FileMode) error { return d.walk(dir, mode) }

// walk makes what is missing with a mode, unless that is 0.
func (d *realDirs) walk(dir string, mode fs.FileMode) error {
	if dir == "." || dir == d.last {
		return nil
	}
	for i := 0; i <= len(dir); i++ {
		if i < len(dir) && dir[i] != '/' {
			continue
		}
		info, err := d.root.Lstat(dir[:i])
		switch {
		case errors.Is(err, fs.ErrNotExist) && mode != 0:
			if err := d.root.Mkdir(dir[:i], mode); err != nil {
				return err
			}
		case err != nil:
			return err
		case !info.IsDir():
			return errLinkedParent
		}
	}
	d.last = dir
	return nil
}
