package builder

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// opaque is how overlayfs marks, with the option userxattr, a directory of which nothing from
// below is to be seen. OCI's form of it, and of a deleted name, is a file of a certain name.
const (
	opaque         = "user.overlay.opaque"
	overlayXattrs  = "user.overlay."
	whiteoutPrefix = ".wh."
	opaqueMarker   = ".wh..wh..opq"
)

// apart are what Berm writes into each sandbox, or mounts there: none of it is the template's.
var apart = map[string]bool{
	"etc/hostname": true, "etc/hosts": true, "etc/resolv.conf": true, "etc/machine-id": true,
	"run/e2b": true, "proc": true, "sys": true, "dev": true,
}

// pack writes what a sandbox wrote as a layer in the form of OCI's, and returns how many entries
// it has. The sandbox must stand still. Hostile code made the tree: nothing is opened but
// directories and regular files, below the tree's root and without following links. base is the
// host's id of the sandbox's root.
func pack(ctx context.Context, w *berm.Written, base int, out io.Writer) (entries int, err error) {
	root, err := os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", w.Upper.Fd()))
	if err != nil {
		return 0, berm.Errorf(berm.Internal, "open the writable layer: %w", err)
	}
	defer root.Close()
	p := &packer{root: root, base: base, archive: tar.NewWriter(out), links: map[uint64]string{}, buf: make([]byte, 256<<10)}
	for _, l := range slices.Backward(w.Layers) {
		lower, err := os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", l.Fd()))
		if err != nil {
			return 0, berm.Errorf(berm.Internal, "open a layer: %w", err)
		}
		defer lower.Close()
		p.lower = append(p.lower, lower)
	}
	if err := p.walk(ctx, "."); err != nil {
		return 0, err
	}
	return p.entries, p.archive.Close()
}

// walk tells of what a directory holds. Package fs is of no use here: its names are UTF-8.
func (p *packer) walk(ctx context.Context, dir string) error {
	f, err := p.root.Open(dir)
	if err != nil {
		return err
	}
	names, err := f.Readdirnames(-1)
	_ = f.Close()
	if err != nil {
		return err
	}
	slices.Sort(names)
	for _, name := range names {
		name = path.Join(dir, name)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case apart[name]:
			continue
		case len(name) >= unix.PathMax:
			return invalid("the name %.200q… has %d bytes", name, len(name))
		}
		isDir, err := p.entry(name)
		if err != nil {
			return fmt.Errorf("%q: %w", name, err)
		}
		if isDir {
			if err := p.walk(ctx, name); err != nil {
				return err
			}
		}
	}
	return nil
}

type packer struct {
	root    *os.Root
	lower   []*os.Root    // highest first
	pending []*tar.Header // directories as they are below, on the way to what is told next
	base    int
	archive *tar.Writer
	links   map[uint64]string // first names of files with several, by inode
	entries int
	buf     []byte
}

// write tells of an entry, and of the directories on the way to it.
func (p *packer) write(h *tar.Header) error {
	for _, dir := range append(p.pending, h) {
		if dir != h && !strings.HasPrefix(h.Name, dir.Name) {
			continue
		}
		p.entries++
		dir.Format = tar.FormatPAX // long names, and any bytes in them
		if err := p.archive.WriteHeader(dir); err != nil {
			return err
		}
	}
	p.pending = nil
	return nil
}

// below says whether the layers below have a directory with the same owner and rights.
func (p *packer) below(name string, st *syscall.Stat_t) bool {
	for _, lower := range p.lower {
		if info, err := lower.Lstat(name); err == nil {
			was, ok := info.Sys().(*syscall.Stat_t)
			return ok && was.Mode == st.Mode && int(was.Uid) == int(st.Uid)-p.base && int(was.Gid) == int(st.Gid)-p.base
		}
	}
	return false
}

// entry tells of one name, and says whether it is a directory.
func (p *packer) entry(name string) (isDir bool, err error) {
	info, err := p.root.Lstat(name)
	if err != nil {
		return false, err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return false, errors.ErrUnsupported
	}
	h := &tar.Header{
		Name: name, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid) - p.base, Gid: int(st.Gid) - p.base, ModTime: info.ModTime(),
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFCHR:
		if st.Rdev == 0 {
			dir, file := path.Split(name)
			return false, p.write(&tar.Header{Name: dir + whiteoutPrefix + file, Typeflag: tar.TypeReg})
		}
		return false, nil // inside nobody can make another; a template holds none
	case unix.S_IFLNK:
		h.Typeflag = tar.TypeSymlink
		if h.Linkname, err = p.root.Readlink(name); err != nil {
			return false, err
		}
		return false, p.write(h)
	case unix.S_IFDIR:
		return true, p.directory(name, h, st)
	case unix.S_IFREG:
		return false, p.regular(name, h, st)
	}
	return false, nil // a FIFO or socket, which needs the process that made it
}

func (p *packer) directory(name string, h *tar.Header, st *syscall.Stat_t) error {
	h.Typeflag, h.Name = tar.TypeDir, name+"/"
	f, err := p.root.OpenFile(name, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	hidden, err := p.attributes(f, h)
	if err != nil {
		return err
	}
	if !hidden && len(h.PAXRecords) == 0 && p.below(name, st) {
		p.pending = append(p.pending, h)
		return nil
	}
	if err := p.write(h); err != nil || !hidden {
		return err
	}
	return p.write(&tar.Header{Name: name + "/" + opaqueMarker, Typeflag: tar.TypeReg})
}

func (p *packer) regular(name string, h *tar.Header, st *syscall.Stat_t) error {
	if st.Nlink > 1 {
		if first, ok := p.links[st.Ino]; ok {
			h.Typeflag, h.Linkname = tar.TypeLink, first
			return p.write(h)
		}
		p.links[st.Ino] = name
	}
	f, err := p.root.OpenFile(name, unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	h.Typeflag, h.Size = tar.TypeReg, st.Size
	if _, err := p.attributes(f, h); err != nil {
		return err
	}
	if err := p.write(h); err != nil {
		return err
	}
	_, err = io.CopyBuffer(struct{ io.Writer }{p.archive}, io.LimitReader(f, st.Size), p.buf)
	return err
}

// attributes takes over a file's extended attributes, and says whether it is an opaque
// directory.
func (p *packer) attributes(f *os.File, h *tar.Header) (hidden bool, err error) {
	names := make([]byte, 64<<10) // XATTR_LIST_MAX
	n, err := unix.Flistxattr(int(f.Fd()), names)
	if err != nil {
		return false, err
	}
	for name := range strings.SplitSeq(string(names[:n]), "\x00") {
		if !strings.HasPrefix(name, "user.") {
			continue // of others a sandbox has none, or they are not kept
		}
		value := make([]byte, 64<<10) // XATTR_SIZE_MAX
		n, err := unix.Fgetxattr(int(f.Fd()), name, value)
		switch {
		case err != nil:
			return false, err
		case name == opaque:
			hidden = string(value[:n]) == "y"
		case !strings.HasPrefix(name, overlayXattrs):
			if h.PAXRecords == nil {
				h.PAXRecords = map[string]string{}
			}
			h.PAXRecords["SCHILY.xattr."+name] = string(value[:n])
		}
	}
	return hidden, nil
}
