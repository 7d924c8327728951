package template

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"
	"time"

	"github.com/containerd/stargz-snapshotter/estargz"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cleanup"
	"github.com/berm-sandbox/berm/internal/template/arrival"
)

// whiteoutPrefix marks, in an OCI layer, the name of a file that is to vanish;
// opaqueMarker a directory of which nothing from below is to be seen.
const (
	whiteoutPrefix = ".wh."
	aufsPrefix     = ".wh..wh." // other metadata of AUFS: no files
	opaqueMarker   = ".wh..wh..opq"
)

// opaqueXattr is the opaque marker in the form that overlayfs reads with the
// option userxattr, which is the one form an unprivileged mount accepts.
const opaqueXattr = "user.overlay.opaque"

// maxLinks is how many symbolic links one path may cross, as in the kernel.
const maxLinks = 40

// unpacker writes one layer as the upper directory of an overlay would hold it:
// every entry at the place that its path names in the stack of layers. That
// matters where a parent of the path is a symbolic link in a lower layer: the
// entry belongs behind the link. Nothing outside the roots is ever reached: paths
// are opened below them without following any link.
type unpacker struct {
	top        *os.Root // the layer being written, empty at first
	topFD      int
	lower      []int // roots of the layers below, highest first
	root       *node
	ids        ids
	budget     *Budget
	size       int64
	skipped    []string
	buf        []byte
	rootOpaque bool // nothing below is to be seen at all
	hollow     *hollow
}

// hollow is for a layer whose files get their contents elsewhere.
type hollow struct {
	entry int            // the one at hand
	files map[uint64]int // the entry of a regular file, by its inode number
}

// node is a directory of the merged tree.
type node struct {
	path     string
	parent   *node
	inTop    bool  // the layer being written has it
	lowers   []int // indexes into unpacker.lower of the layers that shine through
	children map[string]*node
	meta     *meta // to be set when all is written; nil: not in top
}

// meta is what an inode has beside its content. Ids are those on disk.
type meta struct {
	mode     uint32
	uid, gid int
	mtime    unix.Timespec
	xattrs   map[string]string
}

// unpack writes the tar stream r into the empty directory top, as a layer over
// lower (highest first). It returns the bytes that the files take and the names
// of the entries that it left out: devices and FIFOs.
func unpack(ctx context.Context, r io.Reader, top *os.Root, lower []*os.Root, i ids, b *Budget) (size int64, skipped []string, err error) {
	u := &unpacker{top: top, ids: i, budget: b, buf: make([]byte, 256<<10)}
	done, err := u.open(lower)
	if err != nil {
		return 0, nil, err
	}
	defer done()
	last := ""
	for archive := tar.NewReader(r); ; {
		if err := ctx.Err(); err != nil {
			return 0, nil, err
		}
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			if errors.Is(err, tar.ErrHeader) || errors.Is(err, tar.ErrFieldTooLong) {
				err = berm.Errorf(berm.Invalid, "%w", err)
			}
			return 0, nil, entryError("after", last, err)
		}
		if err := u.entry(h, archive); err != nil {
			return 0, nil, entryError("entry", h.Name, err)
		}
		last = h.Name
	}
	// Behind the end marker only padding may follow, but all of it counts for the
	// digest and for the budget.
	if _, err := io.Copy(io.Discard, r); err != nil {
		return 0, nil, entryError("after", last, err)
	}
	return u.size, u.skipped, u.finish(u.root)
}

// unpackHollow writes the files of a layer's table of contents as unpack does, but regular ones
// without their content. It returns the entry of each by inode number. It fails with
// Unsupported where the content of a lower layer would have to be copied.
func unpackHollow(ctx context.Context, entries []arrival.Entry, top *os.Root, lower []*os.Root, i ids, b *Budget) (files map[uint64]int, skipped []string, err error) {
	u := &unpacker{top: top, ids: i, budget: b, hollow: &hollow{files: map[uint64]int{}}}
	done, err := u.open(lower)
	if err != nil {
		return nil, nil, err
	}
	defer done()
	for n, e := range entries {
		if err := ctx.Err(); err != nil {
			return nil, nil, err
		}
		u.hollow.entry = n
		if err := u.entry(e.Header, nil); err != nil {
			return nil, nil, entryError("entry", e.Header.Name, err)
		}
	}
	return u.hollow.files, u.skipped, u.finish(u.root)
}

// open opens the roots of the layer being written and of those below, and begins with them.
func (u *unpacker) open(lower []*os.Root) (done func(), err error) {
	cu := cleanup.Make()
	defer cu.Clean()
	for n, root := range append([]*os.Root{u.top}, lower...) {
		dir, err := root.Open(".")
		if err != nil {
			return nil, err
		}
		cu.Add(func() { dir.Close() })
		if n == 0 {
			u.topFD = int(dir.Fd())
		} else {
			u.lower = append(u.lower, int(dir.Fd()))
		}
	}
	if err := u.start(); err != nil {
		return nil, err
	}
	return cu.Release(), nil
}

// entryError names the entry, or the last one before what cannot be read, and gives errors
// of the kernel a kind.
func entryError(place, name string, err error) error {
	kind, hint := berm.KindOf(err), berm.HintOf(err)
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		kind = berm.Exhausted
	case errors.Is(err, unix.ENAMETOOLONG), errors.Is(err, unix.ELOOP), errors.Is(err, io.ErrUnexpectedEOF):
		kind = berm.Invalid
	case errors.Is(err, unix.EACCES):
		// A user who stores everything as its own is stopped by modes that do not
		// stop root.
		kind, hint = berm.Unsupported, hintIDs
	}
	if len(name) > 200 {
		name = name[:200] + "…"
	}
	e := berm.Errorf(kind, "%s %q: %w", place, name, err)
	e.Hint = hint
	return e
}

func invalid(format string, args ...any) error { return berm.Errorf(berm.Invalid, format, args...) }

// start makes the node of the root directory, with the attributes that it has in
// the highest layer below.
func (u *unpacker) start() error {
	u.root = &node{path: ".", inTop: true, children: map[string]*node{}}
	for i := range u.lower {
		u.root.lowers = append(u.root.lowers, i)
	}
	if len(u.lower) == 0 {
		u.root.meta = u.defaultMeta()
		return nil
	}
	m, err := readMeta(u.lower[0], ".")
	u.root.meta = m
	return err
}

// defaultMeta is for directories that no archive describes.
func (u *unpacker) defaultMeta() *meta {
	m := &meta{mode: 0o755}
	m.uid, m.gid, _ = u.ids.stored(0, 0)
	return m
}

// stored translates an image's owner to ids on disk, as seen by this process.
func (i ids) stored(uid, gid int) (int, int, error) {
	switch {
	case uid < 0 || gid < 0 || uid >= berm.IDsPerSandbox || gid >= berm.IDsPerSandbox:
		return 0, 0, berm.Errorf(berm.Unsupported, "owner %d:%d is beyond the %d ids of a sandbox", uid, gid, berm.IDsPerSandbox)
	case i.shifted():
		return uid + 1, gid + 1, nil // see storageMap
	case i.own && (uid != 0 || gid != 0):
		return 0, 0, berm.Errorf(berm.Unsupported, "owner %d:%d cannot be stored: this user has one id", uid, gid).
			WithHint("%s", hintIDs)
	case i.own:
		return os.Geteuid(), os.Getegid(), nil
	}
	return uid, gid, nil
}

// hintIDs tells a user with a single id how to get more.
const hintIDs = "Give the user 65536 ids in /etc/subuid and /etc/subgid (`usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER`) and install newuidmap (package uidmap), or run as root."

// clean turns an entry's name into a path below the root. An absolute name counts
// from the root, as with other engines; one that climbs is refused.
func clean(name string) (string, error) {
	if len(name) > maxPath {
		return "", invalid("the name has %d bytes; the kernel takes %d", len(name), maxPath)
	}
	if strings.ContainsRune(name, 0) {
		return "", invalid("the name holds a zero byte")
	}
	var parts []string
	for part := range strings.SplitSeq(name, "/") {
		switch {
		case part == "" || part == ".":
		case part == "..":
			return "", invalid("the name climbs with %q", "..")
		case len(part) > maxName:
			return "", invalid("a part of the name has %d bytes; the kernel takes %d", len(part), maxName)
		default:
			parts = append(parts, part)
		}
	}
	if len(parts) == 0 {
		return ".", nil
	}
	return strings.Join(parts, "/"), nil
}

// entry does what one header of the archive asks for.
func (u *unpacker) entry(h *tar.Header, body io.Reader) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	name, err := clean(h.Name)
	if err != nil {
		return err
	}
	if err := u.count(); err != nil {
		return err
	}
	dir, base := path.Split(name)
	for part := range strings.SplitSeq(dir, "/") {
		if strings.HasPrefix(part, aufsPrefix) {
			return nil
		}
		if strings.HasPrefix(part, whiteoutPrefix) {
			return invalid("it lies below a whiteout")
		}
	}
	if strings.HasPrefix(base, whiteoutPrefix) {
		return u.whiteout(dir, base)
	}
	switch h.Typeflag {
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		// A sandbox has a /dev of its own; a device node in a layer has no use, and
		// one with number 0:0 would be a whiteout. A FIFO stops whoever reads it.
		u.skipped = append(u.skipped, name)
		return u.hold(len(name))
	case tar.TypeReg, tar.TypeRegA, tar.TypeCont, tar.TypeGNUSparse, tar.TypeDir, tar.TypeSymlink, tar.TypeLink: //nolint:staticcheck // TypeRegA is what old archives hold
	default:
		return invalid("type %q is unknown", h.Typeflag)
	}
	if isTable(name) && h.Typeflag == tar.TypeReg {
		return nil
	}
	if name == "." {
		if h.Typeflag != tar.TypeDir {
			return invalid("the root is not a directory")
		}
		u.root.meta, err = u.headerMeta(h)
		return err
	}
	parent, err := u.directory(dir, true)
	if err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return u.mkdir(parent, base, h)
	case tar.TypeSymlink:
		return u.symlink(parent, base, h)
	case tar.TypeLink:
		return u.link(parent, base, h)
	default:
		return u.file(parent, base, h, body)
	}
}

// isTable says whether an entry is what eStargz adds to a layer for those who read the layer
// file by file: no file of the image.
func isTable(name string) bool {
	return name == estargz.TOCTarName || name == estargz.PrefetchLandmark || name == estargz.NoPrefetchLandmark
}

// count takes one entry from the budget.
func (u *unpacker) count() error {
	if u.budget.Entries--; u.budget.Entries < 0 {
		return tooLarge("files and directories", DefaultBudget.Entries)
	}
	return nil
}

// hold takes from the budget what has to be remembered until the layer is whole:
// directories with their attributes, and names of what was left out.
func (u *unpacker) hold(bytes int) error {
	if u.budget.Memory -= int64(bytes) + perName; u.budget.Memory < 0 {
		return tooLarge("bytes of names and attributes of directories", DefaultBudget.Memory)
	}
	return nil
}

func (u *unpacker) headerMeta(h *tar.Header) (*meta, error) {
	m := &meta{mode: uint32(h.Mode) & 0o7777, mtime: timespec(h.ModTime)}
	var err error
	if m.uid, m.gid, err = u.ids.stored(h.Uid, h.Gid); err != nil {
		return nil, err
	}
	for key, value := range h.PAXRecords {
		if name, ok := strings.CutPrefix(key, "SCHILY.xattr."); ok && keepXattr(name) {
			if len(value) > maxXattr {
				return nil, invalid("the attribute %.100q has %d bytes; the kernel takes %d", name, len(value), maxXattr)
			}
			if m.xattrs == nil {
				m.xattrs = map[string]string{}
			}
			m.xattrs[name] = value
		}
	}
	return m, nil
}

func timespec(t time.Time) unix.Timespec {
	if t.Unix() < 0 {
		t = time.Unix(0, 0) // "no time", and times that file systems store differently
	}
	return unix.Timespec{Sec: t.Unix(), Nsec: int64(t.Nanosecond())}
}

// keepXattr lets through what belongs to users. Others speak to a kernel:
// security.capability would need ids of the initial namespace, and overlay's own
// would forge whiteouts and redirects.
func keepXattr(name string) bool {
	return strings.HasPrefix(name, "user.") && !strings.HasPrefix(name, "user.overlay.")
}

// directory finds the directory that a path names in the merged tree, crossing
// symbolic links as a process inside would. What is missing is made if create is
// set. It fails with Invalid when something else is in the way.
func (u *unpacker) directory(name string, create bool) (*node, error) {
	at, links := u.root, 0
	pending := strings.Split(name, "/")
	for steps := 0; len(pending) > 0; steps++ {
		if steps > maxPath {
			return nil, invalid("%q leads through more than %d directories", name, maxPath)
		}
		part := pending[0]
		pending = pending[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			if at.parent != nil {
				at = at.parent
			}
			continue
		}
		next, root, st, err := u.child(at, part)
		if err != nil {
			return nil, err
		}
		switch {
		case next != nil:
			at = next
		case st == nil && !create:
			return nil, invalid("%q does not exist", path.Join(at.path, part))
		case st == nil:
			if err := u.count(); err != nil {
				return nil, err
			}
			if at, err = u.addDirectory(at, part, u.defaultMeta()); err != nil {
				return nil, err
			}
		case st.Mode&unix.S_IFMT == unix.S_IFLNK:
			if links++; links > maxLinks {
				return nil, invalid("%q crosses more than %d symbolic links", name, maxLinks)
			}
			target, err := readlink(root, path.Join(at.path, part))
			if err != nil {
				return nil, err
			}
			if strings.HasPrefix(target, "/") {
				at = u.root
			}
			pending = append(strings.Split(target, "/"), pending...)
		default:
			return nil, invalid("%q is not a directory", path.Join(at.path, part))
		}
	}
	return at, nil
}

// child looks a name up in a directory of the merged tree. It returns the node if
// it is a directory, else the root that holds it and its attributes, else nil.
func (u *unpacker) child(at *node, name string) (*node, int, *unix.Stat_t, error) {
	if n := at.children[name]; n != nil {
		return n, 0, nil, nil
	}
	full := path.Join(at.path, name)
	if at.inTop {
		st, err := lstat(u.topFD, full)
		if err != nil || st != nil {
			if st != nil && isWhiteout(st) {
				st = nil
			}
			return nil, u.topFD, st, err
		}
	}
	lowers, first, err := u.shineThrough(at.lowers, full)
	switch {
	case err != nil || first == nil:
		return nil, 0, nil, err
	case first.Mode&unix.S_IFMT != unix.S_IFDIR:
		return nil, u.lower[lowers[0]], first, nil
	}
	n := &node{path: full, parent: at, lowers: lowers, children: map[string]*node{}}
	at.children[name] = n
	return n, 0, nil, u.hold(len(full))
}

// shineThrough says which of the given lower layers make up the file at path, and
// what the highest of them has there; nil when none has it, or it is gone.
func (u *unpacker) shineThrough(candidates []int, full string) (lowers []int, first *unix.Stat_t, err error) {
	for _, i := range candidates {
		st, err := lstat(u.lower[i], full)
		if err != nil {
			return nil, nil, err
		}
		if st == nil {
			continue
		}
		dir := st.Mode&unix.S_IFMT == unix.S_IFDIR
		switch {
		case isWhiteout(st):
			return lowers, first, nil
		case first == nil && !dir:
			return []int{i}, st, nil
		case !dir:
			return lowers, first, nil
		}
		if first == nil {
			first = st
		}
		lowers = append(lowers, i)
		if opaque, err := isOpaque(u.lower[i], full); err != nil || opaque {
			return lowers, first, err
		}
	}
	return lowers, first, nil
}

// intoTop makes a directory of the merged tree part of the layer being written,
// with the attributes that it has below, and returns it opened.
func (u *unpacker) intoTop(n *node) (int, error) {
	if !n.inTop {
		if err := u.count(); err != nil {
			return -1, err
		}
		fd, err := u.intoTop(n.parent)
		if err != nil {
			return -1, err
		}
		defer unix.Close(fd)
		if err := unix.Mkdirat(fd, path.Base(n.path), 0o700); err != nil {
			return -1, err
		}
		if n.meta, err = readMeta(u.lower[n.lowers[0]], n.path); err != nil {
			return -1, err
		}
		n.inTop = true
		u.size += 4096
	}
	return open(u.topFD, n.path, unix.O_RDONLY|unix.O_DIRECTORY)
}

// addDirectory makes a directory at a place that is free in the layer being
// written and not a directory below, or hidden.
func (u *unpacker) addDirectory(parent *node, name string, m *meta) (*node, error) {
	fd, err := u.intoTop(parent)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	hides, err := u.clear(fd, parent, name)
	if err != nil {
		return nil, err
	}
	n := &node{path: path.Join(parent.path, name), parent: parent, inTop: true, children: map[string]*node{}, meta: m}
	if err := unix.Mkdirat(fd, name, 0o700); err != nil {
		return nil, err
	}
	u.size += 4096
	parent.children[name] = n
	if err := u.hold(len(n.path)); err != nil {
		return nil, err
	}
	if hides {
		return n, u.markOpaque(n)
	}
	return n, nil
}

// clear removes what the layer being written has at a name, and says whether
// there was anything, a whiteout for example, that hid what is below.
func (u *unpacker) clear(parentFD int, parent *node, name string) (bool, error) {
	st, err := lstat(parentFD, name)
	if err != nil {
		return false, err
	}
	delete(parent.children, name)
	if st == nil {
		return false, nil
	}
	return true, u.top.RemoveAll(path.Join(parent.path, name))
}

// makeOpaque lets nothing from below be seen in a directory.
func (u *unpacker) makeOpaque(n *node) error {
	if len(n.lowers) == 0 || n == u.root && u.rootOpaque {
		return nil
	}
	if n != u.root {
		if err := u.markOpaque(n); err != nil {
			return err
		}
		return u.cut(n)
	}
	// overlayfs does not look for the mark on the root of a layer: every name below
	// is hidden by itself.
	u.rootOpaque = true
	for _, i := range n.lowers {
		names, err := readNames(u.lower[i])
		if err != nil {
			return err
		}
		for _, name := range names {
			if err := u.hide(n, name); err != nil {
				return err
			}
		}
	}
	return nil
}

// markOpaque sets the mark on a directory, unless nothing can be below it.
func (u *unpacker) markOpaque(n *node) error {
	fd, err := u.intoTop(n)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if len(u.lower) == 0 {
		return nil
	}
	if err := unix.Fsetxattr(fd, opaqueXattr, []byte("y"), 0); err != nil {
		return fmt.Errorf("mark as opaque: %w", err)
	}
	return nil
}

// cut takes the lower layers away from a directory and all below it. Whiteouts in
// there must go: overlayfs shows them by name in a directory that is not merged.
func (u *unpacker) cut(n *node) error {
	if len(n.lowers) == 0 {
		return nil
	}
	n.lowers = nil
	fd, err := u.intoTop(n)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	names, err := readNames(fd)
	if err != nil {
		return err
	}
	for _, name := range names {
		st, err := lstat(fd, name)
		if err != nil {
			return err
		}
		if st != nil && isWhiteout(st) {
			if err := unix.Unlinkat(fd, name, 0); err != nil {
				return err
			}
		}
	}
	for name, child := range n.children {
		if !child.inTop {
			delete(n.children, name)
		} else if err := u.cut(child); err != nil {
			return err
		}
	}
	return nil
}

// whiteout hides what the layers below have; what this layer has stays, in
// whichever order the archive names them.
func (u *unpacker) whiteout(dir, base string) error {
	if base != opaqueMarker && strings.HasPrefix(base, aufsPrefix) {
		return nil
	}
	name := strings.TrimPrefix(base, whiteoutPrefix)
	if name == "" || name == "." || name == ".." {
		return invalid("the whiteout names nothing")
	}
	parent, err := u.directory(dir, true)
	if err != nil {
		return err
	}
	if base == opaqueMarker {
		return u.makeOpaque(parent)
	}
	return u.hide(parent, name)
}

// hide lets nothing from below be seen under one name.
func (u *unpacker) hide(parent *node, name string) error {
	full := path.Join(parent.path, name)
	if parent.inTop {
		st, err := lstat(u.topFD, full)
		if err != nil {
			return err
		}
		if st != nil {
			n := parent.children[name]
			if n == nil {
				return nil // a file, which hides what is below, or a whiteout
			}
			return u.makeOpaque(n)
		}
	}
	_, first, err := u.shineThrough(parent.lowers, full)
	if err != nil || first == nil {
		return err
	}
	fd, err := u.intoTop(parent)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	delete(parent.children, name)
	if err := u.count(); err != nil {
		return err
	}
	if err := unix.Mknodat(fd, name, unix.S_IFCHR, 0); err != nil {
		return fmt.Errorf("make a whiteout: %w", err)
	}
	return nil
}

func (u *unpacker) mkdir(parent *node, name string, h *tar.Header) error {
	m, err := u.headerMeta(h)
	if err != nil {
		return err
	}
	for name, value := range m.xattrs {
		if err := u.hold(len(name) + len(value)); err != nil {
			return err
		}
	}
	n, _, _, err := u.child(parent, name)
	if err != nil {
		return err
	}
	if n == nil {
		_, err := u.addDirectory(parent, name, m)
		return err
	}
	fd, err := u.intoTop(n)
	if err != nil {
		return err
	}
	unix.Close(fd)
	n.meta = m
	return nil
}

func (u *unpacker) symlink(parent *node, name string, h *tar.Header) error {
	if h.Linkname == "" || len(h.Linkname) > maxPath {
		return invalid("the link's target has %d bytes", len(h.Linkname))
	}
	m, err := u.headerMeta(h)
	if err != nil {
		return err
	}
	fd, err := u.place(parent, name)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return writeLink(fd, name, m, h.Linkname)
}

func writeLink(parentFD int, name string, m *meta, target string) error {
	if err := unix.Symlinkat(target, parentFD, name); err != nil {
		return err
	}
	if err := unix.Fchownat(parentFD, name, m.uid, m.gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	return unix.UtimesNanoAt(parentFD, name, []unix.Timespec{m.mtime, m.mtime}, unix.AT_SYMLINK_NOFOLLOW)
}

// place opens the parent and clears the name for a file to be made there.
func (u *unpacker) place(parent *node, name string) (int, error) {
	fd, err := u.intoTop(parent)
	if err != nil {
		return -1, err
	}
	if _, err := u.clear(fd, parent, name); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func (u *unpacker) file(parent *node, name string, h *tar.Header, body io.Reader) error {
	m, err := u.headerMeta(h)
	if err != nil {
		return err
	}
	if h.Size > u.budget.FileBytes {
		return tooLarge("bytes in one file", u.budget.FileBytes)
	}
	fd, err := u.place(parent, name)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return u.write(fd, name, m, h.Size, body)
}

// write makes a regular file. A sparse file is longer than its part of the
// archive: the difference comes from the budget too.
func (u *unpacker) write(parentFD int, name string, m *meta, size int64, body io.Reader) error {
	fd, err := unix.Openat(parentFD, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	before := u.budget.Bytes
	if size > before {
		return tooLarge("bytes", before)
	}
	if u.hollow != nil {
		return u.writeHollow(f, m, size)
	}
	// Not io.Copy: that takes a new buffer for each of many small files.
	n, err := io.CopyBuffer(struct{ io.Writer }{f}, body, u.buf)
	if err != nil {
		return err
	}
	if expanded := n - (before - u.budget.Bytes); expanded > 0 {
		if u.budget.Bytes -= expanded; u.budget.Bytes < 0 {
			return tooLarge("bytes", before)
		}
	}
	u.size += (n + 4095) &^ 4095
	return m.set(fd)
}

// writeHollow gives a new file its length, and notes whose content it has.
func (u *unpacker) writeHollow(f *os.File, m *meta, size int64) error {
	u.budget.Bytes -= size
	if err := f.Truncate(size); err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	u.hollow.files[st.Ino] = u.hollow.entry
	return m.set(int(f.Fd()))
}

// link makes a hard link. Its target may be of a lower layer: then it is copied
// first, as a running system would.
func (u *unpacker) link(parent *node, name string, h *tar.Header) error {
	target, err := clean(h.Linkname)
	if err != nil {
		return fmt.Errorf("the link's target: %w", err)
	}
	dir, base := path.Split(target)
	from, err := u.directory(dir, false)
	if err != nil {
		return fmt.Errorf("the link's target: %w", err)
	}
	n, root, st, err := u.child(from, base)
	switch {
	case err != nil:
		return err
	case n != nil || target == ".":
		return invalid("the link's target %q is a directory", h.Linkname)
	case st == nil:
		return invalid("the link's target %q does not exist", h.Linkname)
	case from == parent && base == name:
		return nil
	}
	fromFD, err := u.intoTop(from)
	if err != nil {
		return err
	}
	defer unix.Close(fromFD)
	if root != u.topFD {
		if err := u.copyUp(root, path.Join(from.path, base), fromFD, base); err != nil {
			return err
		}
	}
	fd, err := u.place(parent, name)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Linkat(fromFD, base, fd, name, 0); err != nil {
		if errors.Is(err, unix.ENOENT) {
			return invalid("the link replaces its own target")
		}
		return err
	}
	return nil
}

// copyUp copies a file or symbolic link of a lower layer into the one being
// written.
func (u *unpacker) copyUp(root int, full string, fd int, name string) error {
	if err := u.count(); err != nil {
		return err
	}
	m, err := readMeta(root, full)
	if err != nil {
		return err
	}
	if m.mode&unix.S_IFMT == unix.S_IFLNK {
		target, err := readlink(root, full)
		if err != nil {
			return err
		}
		return writeLink(fd, name, m, target)
	}
	if u.hollow != nil {
		return berm.Errorf(berm.Unsupported, "it links to a file of a layer below, %q", full)
	}
	source, err := open(root, full, unix.O_RDONLY)
	if err != nil {
		return err
	}
	in := os.NewFile(uintptr(source), full)
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	return u.write(fd, name, m, info.Size(), in)
}

// finish sets the attributes of all directories, deepest first: earlier they would
// stand in the way of what is written below.
func (u *unpacker) finish(n *node) error {
	for _, child := range n.children {
		if err := u.finish(child); err != nil {
			return err
		}
	}
	if !n.inTop {
		return nil
	}
	fd, err := open(u.topFD, n.path, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return n.meta.set(fd)
}

// set gives an open file its attributes. The owner comes first, since a change of
// it clears the set-uid bit.
func (m *meta) set(fd int) error {
	if err := unix.Fchown(fd, m.uid, m.gid); err != nil {
		return err
	}
	for name, value := range m.xattrs {
		// Not every file system has them, and the kernel bounds their size.
		if err := unix.Fsetxattr(fd, name, []byte(value), 0); err != nil && !errors.Is(err, unix.ENOTSUP) {
			return fmt.Errorf("set %q: %w", name, err)
		}
	}
	if err := unix.Fchmod(fd, m.mode&0o7777); err != nil {
		return err
	}
	return unix.UtimesNanoAt(fd, "", []unix.Timespec{m.mtime, m.mtime}, unix.AT_EMPTY_PATH)
}

// open opens a path below a root. No part of it may be a symbolic link or lead out.
func open(root int, name string, flags int) (int, error) {
	return unix.Openat2(root, name, &unix.OpenHow{
		Flags:   uint64(flags | unix.O_NOFOLLOW | unix.O_CLOEXEC),
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
}

// lstat returns nil when nothing is at the path.
func lstat(root int, name string) (*unix.Stat_t, error) {
	fd := root
	if dir, _ := path.Split(name); dir != "" {
		var err error
		fd, err = open(root, path.Clean(dir), unix.O_PATH|unix.O_DIRECTORY)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		defer unix.Close(fd)
	}
	var st unix.Stat_t
	err := unix.Fstatat(fd, path.Base(name), &st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	return &st, err
}

func readNames(root int) ([]string, error) {
	fd, err := open(root, ".", unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	dir := os.NewFile(uintptr(fd), ".")
	defer dir.Close()
	return dir.Readdirnames(-1)
}

func readlink(root int, name string) (string, error) {
	fd, err := open(root, name, unix.O_PATH)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	buf := make([]byte, maxPath+1)
	n, err := unix.Readlinkat(fd, "", buf)
	return string(buf[:max(n, 0)]), err
}

// isWhiteout says whether a file means, in an overlay's layer, that nothing is
// there.
func isWhiteout(st *unix.Stat_t) bool {
	return st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0
}

func isOpaque(root int, name string) (bool, error) {
	fd, err := open(root, name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	var value [1]byte
	n, err := unix.Fgetxattr(fd, opaqueXattr, value[:])
	if errors.Is(err, unix.ENODATA) || errors.Is(err, unix.ENOTSUP) {
		return false, nil
	}
	return n == 1 && value[0] == 'y', err
}

// readMeta reads the attributes of a file of a lower layer.
func readMeta(root int, name string) (*meta, error) {
	st, err := lstat(root, name)
	if err != nil {
		return nil, err
	}
	if st == nil {
		return nil, unix.ENOENT
	}
	m := &meta{mode: st.Mode, uid: int(st.Uid), gid: int(st.Gid), mtime: st.Mtim}
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		return m, nil // has no xattrs of users
	}
	fd, err := open(root, name, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	m.xattrs, err = userXattrs(fd)
	return m, err
}

func userXattrs(fd int) (map[string]string, error) {
	size, err := unix.Flistxattr(fd, nil)
	if errors.Is(err, unix.ENOTSUP) || err == nil && size == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	list := make([]byte, size)
	if size, err = unix.Flistxattr(fd, list); err != nil {
		return nil, err
	}
	xattrs := map[string]string{}
	for name := range strings.SplitSeq(string(list[:size]), "\x00") {
		if !keepXattr(name) {
			continue
		}
		value := make([]byte, maxXattr)
		n, err := unix.Fgetxattr(fd, name, value)
		if err != nil {
			return nil, err
		}
		xattrs[name] = string(value[:n])
	}
	return xattrs, nil
}
