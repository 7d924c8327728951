package arrival

import (
	"context"
	"errors"
	"log/slog"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// valid is how long the kernel need not ask again: nothing changes.
const valid = 365 * 24 * time.Hour

// MaxRead is the largest piece that the kernel asks for, in bytes.
const MaxRead = 1 << 20

// files is a file system with a directory for each layer. Its node ids follow from the trees
// alone, so that another process can go on with a mount.
type files struct {
	fuse.RawFileSystem // answers that nothing else is implemented
	nodes              []node
	hasXattrs          bool
	chunks             *chunks
}

type node struct {
	*Inode
	layer int
	first uint64 // node id of the layer's root: those of children count from there
}

func newFiles(trees []Tree, c *chunks) *files {
	root := Inode{Mode: unix.S_IFDIR | 0o700, Links: 2}
	f := &files{RawFileSystem: fuse.NewDefaultRawFileSystem(), nodes: make([]node, 2), chunks: c}
	for i, t := range trees {
		first := uint64(len(f.nodes))
		root.Children = append(root.Children, Child{strconv.Itoa(i), uint32(first)})
		for j := range t {
			f.nodes = append(f.nodes, node{&t[j], i, first})
			f.hasXattrs = f.hasXattrs || len(t[j].Xattrs) > 0
		}
	}
	sort.Slice(root.Children, func(i, j int) bool { return root.Children[i].Name < root.Children[j].Name })
	f.nodes[fuse.FUSE_ROOT_ID] = node{Inode: &root}
	return f
}

func (f *files) String() string { return "berm" }

func (f *files) node(id uint64) (node, fuse.Status) {
	if id >= uint64(len(f.nodes)) || f.nodes[id].Inode == nil {
		return node{}, fuse.Status(unix.ESTALE)
	}
	return f.nodes[id], fuse.OK
}

func (f *files) attr(id uint64, out *fuse.Attr) {
	n := f.nodes[id]
	out.Ino, out.Mode, out.Nlink = id, n.Mode, n.Links
	out.Size, out.Blocks, out.Blksize = uint64(n.Size), uint64(n.Size+511)/512, 4096
	out.Uid, out.Gid = n.UID, n.GID
	out.Mtime, out.Mtimensec = uint64(n.Sec), n.Nsec
	out.Atime, out.Atimensec, out.Ctime, out.Ctimensec = out.Mtime, out.Mtimensec, out.Mtime, out.Mtimensec
}

func (f *files) entry(id uint64, out *fuse.EntryOut) {
	out.NodeId = id
	out.SetEntryTimeout(valid)
	out.SetAttrTimeout(valid)
	f.attr(id, &out.Attr)
}

// Lookup implements fuse.RawFileSystem. That a name is not there is remembered too.
func (f *files) Lookup(_ <-chan struct{}, in *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	n, status := f.node(in.NodeId)
	if !status.Ok() {
		return status
	}
	i := sort.Search(len(n.Children), func(i int) bool { return n.Children[i].Name >= name })
	if i == len(n.Children) || n.Children[i].Name != name {
		out.NodeId = 0
		out.SetEntryTimeout(valid)
		return fuse.OK
	}
	f.entry(n.first+uint64(n.Children[i].Inode), out)
	return fuse.OK
}

// GetAttr implements fuse.RawFileSystem.
func (f *files) GetAttr(_ <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	if _, status := f.node(in.NodeId); !status.Ok() {
		return status
	}
	out.SetTimeout(valid)
	f.attr(in.NodeId, &out.Attr)
	return fuse.OK
}

// Readlink implements fuse.RawFileSystem.
func (f *files) Readlink(_ <-chan struct{}, in *fuse.InHeader) ([]byte, fuse.Status) {
	n, status := f.node(in.NodeId)
	return []byte(n.target()), status
}

func (n node) target() string {
	if n.Inode == nil {
		return ""
	}
	return n.Target
}

// GetXAttr implements fuse.RawFileSystem.
func (f *files) GetXAttr(_ <-chan struct{}, in *fuse.InHeader, name string, dest []byte) (uint32, fuse.Status) {
	if !f.hasXattrs {
		return 0, fuse.ENOSYS // and the kernel does not ask again
	}
	n, status := f.node(in.NodeId)
	if !status.Ok() {
		return 0, status
	}
	value, ok := n.Xattrs[name]
	if !ok {
		return 0, fuse.ENOATTR
	}
	return put(dest, value)
}

// ListXAttr implements fuse.RawFileSystem.
func (f *files) ListXAttr(_ <-chan struct{}, in *fuse.InHeader, dest []byte) (uint32, fuse.Status) {
	if !f.hasXattrs {
		return 0, fuse.ENOSYS
	}
	n, status := f.node(in.NodeId)
	if !status.Ok() {
		return 0, status
	}
	var names strings.Builder
	for name := range n.Xattrs {
		names.WriteString(name + "\x00")
	}
	return put(dest, names.String())
}

func put(dest []byte, value string) (uint32, fuse.Status) {
	if len(dest) < len(value) {
		return uint32(len(value)), fuse.ERANGE
	}
	return uint32(copy(dest, value)), fuse.OK
}

// Open implements fuse.RawFileSystem: the kernel need not ask, and keeps what was read.
func (f *files) Open(<-chan struct{}, *fuse.OpenIn, *fuse.OpenOut) fuse.Status { return fuse.ENOSYS }

// OpenDir implements fuse.RawFileSystem.
func (f *files) OpenDir(_ <-chan struct{}, _ *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	out.OpenFlags = fuse.FOPEN_KEEP_CACHE | fuse.FOPEN_CACHE_DIR
	return fuse.OK
}

// ReadDir implements fuse.RawFileSystem.
func (f *files) ReadDir(_ <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	return f.list(in, func(e fuse.DirEntry) bool { return out.AddDirEntry(e) })
}

// ReadDirPlus implements fuse.RawFileSystem.
func (f *files) ReadDirPlus(_ <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	return f.list(in, func(e fuse.DirEntry) bool {
		entry := out.AddDirLookupEntry(e)
		if entry != nil && e.Name != "." && e.Name != ".." {
			f.entry(e.Ino, entry)
		}
		return entry != nil
	})
}

func (f *files) list(in *fuse.ReadIn, add func(fuse.DirEntry) bool) fuse.Status {
	n, status := f.node(in.NodeId)
	if !status.Ok() {
		return status
	}
	for at := in.Offset; at < uint64(len(n.Children))+2; at++ {
		e := fuse.DirEntry{Off: at + 1, Mode: unix.S_IFDIR, Ino: in.NodeId}
		switch at {
		case 0:
			e.Name = "."
		case 1:
			e.Name = ".."
		default:
			child := n.Children[at-2]
			e.Name, e.Ino = child.Name, n.first+uint64(child.Inode)
			e.Mode = f.nodes[e.Ino].Mode
		}
		if !add(e) {
			break
		}
	}
	return fuse.OK
}

// StatFs implements fuse.RawFileSystem.
func (f *files) StatFs(_ <-chan struct{}, _ *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	out.Bsize, out.Frsize, out.NameLen, out.Files = 4096, 4096, 255, uint64(len(f.nodes))
	return fuse.OK
}

// Read implements fuse.RawFileSystem. It waits for what has not arrived, at most for
// Patience, and ends when the reader is killed.
func (f *files) Read(cancel <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	n, status := f.node(in.NodeId)
	if !status.Ok() {
		return nil, status
	}
	at, end := int64(in.Offset), min(int64(in.Offset)+int64(len(buf)), n.Size)
	i := sort.Search(len(n.Chunks), func(i int) bool { return n.Chunks[i].At+n.Chunks[i].Size > at })
	filled := buf[:0]
	for ; at < end; i++ {
		c := n.Chunks[i]
		data, err := f.chunks.get(cancel, n.layer, c)
		if errors.Is(err, context.Canceled) {
			return nil, fuse.EINTR
		}
		if err != nil {
			slog.Error("a read failed", "layer", n.layer, "error", err)
			return nil, fuse.EIO
		}
		piece := data[at-c.At:]
		piece = piece[:min(int64(len(piece)), end-at)]
		filled = append(filled, piece...)
		at += int64(len(piece))
	}
	return fuse.ReadResultData(filled), fuse.OK
}
