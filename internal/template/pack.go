package template

import (
	"archive/tar"
	"cmp"
	"context"
	"encoding/json"
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

// overlayXattrs is how the names of overlayfs's own attributes begin.
const overlayXattrs = "user.overlay."

// apart are what Berm writes into each sandbox, or mounts there: none of it is the template's.
var apart = map[string]bool{
	"etc/hostname": true, "etc/hosts": true, "etc/resolv.conf": true, "etc/machine-id": true,
	"run/e2b": true, "proc": true, "sys": true, "dev": true,
}

// AddWritten makes a layer of what a sandbox wrote over others, and returns it with its size in bytes
// on disk and the number of its entries; of none no layer is made. The sandbox must stand still; base is
// the host's id of its root where the server is root. The caller holds the store. Kinds as of AddLayer.
func (s *Store) AddWritten(ctx context.Context, below []berm.Layer, w *berm.Written, base int) (l berm.Layer, size int64, entries int, err error) {
	from, to := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		var err error
		entries, err = s.pack(ctx, w, base, to)
		_ = to.CloseWithError(err)
		packed <- err
	}()
	l, size, err = s.AddLayer(ctx, below, from)
	_ = from.CloseWithError(err)
	if failed := <-packed; failed != nil && (err == nil || ctx.Err() == nil && !errors.Is(failed, err)) {
		err = cmp.Or(failed, err)
	}
	return l, size, entries, err
}

// pack writes what a sandbox wrote as a layer in the form of OCI's, and returns how many entries
// it has. What belongs to subordinate ids is read where they are root's.
func (s *Store) pack(ctx context.Context, w *berm.Written, base int, out io.Writer) (entries int, err error) {
	trees := append([]*os.File{w.Upper}, w.Layers...)
	if !s.ids.shifted() {
		return packTrees(ctx, trees, base, 0, out)
	}
	err = inNamespace(ctx, s.ids.storageMap(), "pack", len(trees), &entries, s.dir, nil, out, os.Stderr, trees...)
	return entries, err
}

// runPack is pack in the helper process: as the store's, the ids of what a sandbox wrote begin at 1
// there.
func runPack(ctx context.Context, args []byte) (any, error) {
	var n int
	if err := json.Unmarshal(args, &n); err != nil {
		return nil, err
	}
	var trees []*os.File
	for i := range n {
		trees = append(trees, os.NewFile(uintptr(firstFile+i), "layer"))
	}
	return packTrees(ctx, trees, 1, 1, os.Stdout)
}

// packTrees packs the first of trees over the others, of which the lowest comes first. Hostile code
// made it: nothing is opened but directories and regular files, below the tree's root and without
// following links. base is the id that root has in it, and below in the others.
func packTrees(ctx context.Context, trees []*os.File, base, below int, out io.Writer) (entries int, err error) {
	p := &packer{base: base, belowBase: below, archive: tar.NewWriter(out), links: map[uint64]string{}, buf: make([]byte, 256<<10)}
	for i, tree := range trees {
		root, err := os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", tree.Fd()))
		if err != nil {
			return 0, berm.Errorf(berm.Internal, "open a layer: %w", err)
		}
		defer root.Close()
		if i == 0 {
			p.root = root
		} else {
			p.lower = append([]*os.Root{root}, p.lower...)
		}
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
		case strings.HasPrefix(path.Base(name), whiteoutPrefix):
			// In a layer it would mean that another file is gone, with all layers below.
			return berm.Errorf(berm.Invalid, "the name %.200q cannot be in a layer, where one with %s says what was removed", name, whiteoutPrefix).WithHint("Remove it in the same step, or give it another name.")
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
	base    int           // the id of root
	// belowBase is that in the layers below.
	belowBase int
	archive   *tar.Writer
	links     map[uint64]string // first names of files with several, by inode
	entries   int
	buf       []byte
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
			return ok && was.Mode == st.Mode && int(was.Uid)-p.belowBase == int(st.Uid)-p.base && int(was.Gid)-p.belowBase == int(st.Gid)-p.base
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
		case name == opaqueXattr:
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
