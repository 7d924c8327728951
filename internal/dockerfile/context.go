package dockerfile

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/patternmatcher"
	"github.com/moby/patternmatcher/ignorefile"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/client"
)

// Context is a directory of which steps copy.
type Context struct {
	root   *os.Root
	ignore *patternmatcher.PatternMatcher
}

// Open opens a context with what its .dockerignore leaves out, or the file of that kind that lies
// beside the Dockerfile under the name of that. Kinds: NotFound, Invalid.
func Open(dir, dockerfile string) (*Context, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, berm.Errorf(berm.NotFound, "the context: %w", err)
	}
	c := &Context{root: root}
	name := dockerfile + ".dockerignore"
	file, err := OpenFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		name = ".dockerignore"
		file, err = c.open(name)
	}
	var patterns []string
	if err == nil {
		patterns, err = ignored(name, file)
		_ = file.Close()
	}
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		c.ignore, err = patternmatcher.New(patterns)
	}
	if err != nil {
		_ = root.Close()
		return nil, berm.Errorf(berm.Invalid, "%w", err)
	}
	return c, nil
}

// ignored reads the patterns of a .dockerignore. Each is tried alone, for an error to have its line.
func ignored(name string, from io.Reader) (all []string, err error) {
	text, err := io.ReadAll(io.LimitReader(from, maxSize+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("%s: %w", name, err)
	case len(text) > maxSize:
		return nil, fmt.Errorf("%s is larger than %d KiB", name, maxSize>>10)
	}
	n := 0
	for line := range bytes.Lines(text) {
		n++
		patterns, err := ignorefile.ReadAll(bytes.NewReader(line))
		if err == nil {
			var m *patternmatcher.PatternMatcher
			if m, err = patternmatcher.New(patterns); err == nil {
				_, err = m.MatchesOrParentMatches("x") // makes regular expressions of them
			}
		}
		if err != nil {
			return nil, fmt.Errorf("%s:%d: %.200q is no pattern: %w", name, n, bytes.TrimSpace(line), err)
		}
		all = append(all, patterns...)
	}
	return all, nil
}

// noBlock opens a file to read, and keeps a FIFO from blocking the open.
const noBlock = os.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY

// OpenFile opens a regular file; anything else is Invalid.
func OpenFile(name string) (*os.File, error) { return regular(os.OpenFile(name, noBlock, 0)) }

// open is OpenFile of the context.
func (c *Context) open(name string) (*os.File, error) {
	return regular(c.root.OpenFile(name, noBlock, 0))
}

func regular(file *os.File, err error) (*os.File, error) {
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = berm.Errorf(berm.Invalid, "%s is no regular file", file.Name())
	}
	if err != nil {
		_ = file.Close()
		return nil, err
	}
	return file, nil
}

// Close lets the directory go.
func (c *Context) Close() error { return c.root.Close() }

// entry is one file for an archive.
type entry struct {
	name string // in the archive
	path string // in the context
	data string // of a file that is in the Dockerfile
	info fs.FileInfo
	link string
}

// Files are what a step takes from a context.
type Files struct {
	c       *Context
	entries []entry
	Hash    string // over names, rights and contents; the time of a file does not count
}

// Pack finds what a step takes from the context, and completes the step with it. Its errors begin as
// those of Parse do. Kinds: Invalid, NotFound, Unsupported.
func (c *Context) Pack(s *Step) (*Files, error) {
	f, source, err := c.files(s.Copy, strings.HasSuffix(s.Args[1], "/"))
	if size := f.size(); err == nil && size > client.MaxUpload {
		err = berm.Errorf(berm.Invalid, "%.1f GiB of files, and a step may have %d GiB", float64(size)/(1<<30), client.MaxUpload>>30).
			WithHint("leave out with .dockerignore what the template does not need, or copy by several steps")
	}
	if err == nil {
		err = f.hash()
	}
	if err != nil {
		e := berm.Errorf(berm.KindOf(err), "%s%w", s.At, err)
		e.Hint = berm.HintOf(err)
		return nil, e
	}
	s.Args[0], s.FilesHash = source, f.Hash
	return f, nil
}

// files finds them, and says which name in the archive is to be copied: "." is what it holds.
func (c *Context) files(of *Copy, toDir bool) (*Files, string, error) {
	f := &Files{c: c}
	source, matched := ".", 0
	for _, inline := range of.Inline {
		f.entries = append(f.entries, entry{name: path.Base(inline.Name), data: inline.Data})
		source, matched = path.Base(inline.Name), matched+1
	}
	for _, pattern := range of.Sources {
		found, err := c.match(pattern)
		if err != nil {
			return nil, "", err
		}
		for _, name := range found {
			matched++
			name, info, err := c.follow(name)
			if err != nil {
				return nil, "", err
			}
			if info.IsDir() {
				source = "."
				before := len(f.entries)
				err = f.walk(name)
				if out, _ := c.ignore.MatchesOrParentMatches(name); err == nil && out && len(f.entries) == before {
					err = leftOut(pattern)
				}
			} else {
				source = path.Base(name)
				if of.Unpacks {
					err = c.refuseArchive(name)
				}
				if err == nil {
					err = f.add(name, source, info)
				}
			}
			if err != nil {
				return nil, "", err
			}
		}
	}
	switch {
	case toDir:
		source = "."
	case matched > 1:
		return nil, "", berm.Errorf(berm.Invalid, "%d sources need a destination that ends with /", matched)
	case strings.ContainsAny(source, "*?[{"):
		return nil, "", berm.Errorf(berm.Unsupported, "a single file with %q in its name needs a destination that ends with /", "*?[{")
	}
	return f, source, nil
}

// match finds the names of a pattern that are not ignored, relative to the context, with at least
// one of them.
func (c *Context) match(pattern string) ([]string, error) {
	pattern = path.Clean("/" + pattern)[1:]
	if pattern == "" {
		return []string{"."}, nil
	}
	names := []string{pattern}
	if strings.ContainsAny(pattern, `*?[\`) {
		var err error
		if names, err = fs.Glob(c.root.FS(), pattern); err != nil {
			return nil, berm.Errorf(berm.Invalid, "%s: %w", pattern, err)
		}
	}
	ignored := false
	names = slices.DeleteFunc(names, func(name string) bool {
		out, err := c.ignore.MatchesOrParentMatches(name)
		// Of a directory that is left out, something may be brought back.
		if out && err == nil && c.ignore.Exclusions() {
			if info, err := c.root.Lstat(name); err == nil && info.IsDir() {
				return false
			}
		}
		ignored = ignored || out
		return out
	})
	if len(names) == 0 {
		if ignored {
			return nil, leftOut(pattern)
		}
		return nil, berm.Errorf(berm.NotFound, "the context has no %s", pattern)
	}
	return names, nil
}

func leftOut(name string) error {
	return berm.Errorf(berm.NotFound, "%s is left out by .dockerignore", name)
}

// follow is what a source is, which may be a link to another place in the context.
func (c *Context) follow(name string) (string, fs.FileInfo, error) {
	for range 40 { // as the kernel
		info, err := c.root.Lstat(name)
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				err = fmt.Errorf("the context has no %s", name)
			}
			return "", nil, berm.Errorf(berm.NotFound, "%w", err)
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			return name, info, nil
		}
		target, err := c.root.Readlink(name)
		if err != nil {
			return "", nil, err
		}
		if path.IsAbs(target) { // from the top of the context, as Docker has it
			target = path.Clean(target)[1:]
		} else {
			target = path.Join(path.Dir(name), target)
		}
		if target == "" {
			target = "."
		}
		if !filepath.IsLocal(target) {
			return "", nil, berm.Errorf(berm.Invalid, "%s leads out of the context", name)
		}
		name = target
	}
	return "", nil, berm.Errorf(berm.Invalid, "%s leads in a circle", name)
}

// walk adds what a directory holds.
func (f *Files) walk(dir string) error {
	return fs.WalkDir(f.c.root.FS(), dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name == dir {
			return nil
		}
		ignored, err := f.c.ignore.MatchesOrParentMatches(name)
		if err != nil {
			return berm.Errorf(berm.Invalid, ".dockerignore: %w", err)
		}
		if ignored {
			if d.IsDir() && !f.c.ignore.Exclusions() {
				return fs.SkipDir
			}
			return nil
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		below := name
		if dir != "." {
			below = strings.TrimPrefix(name, dir+"/")
		}
		return f.add(name, below, info)
	})
}

// add adds one file. Sockets, FIFOs and devices are no part of templates.
func (f *Files) add(name, as string, info fs.FileInfo) (err error) {
	e := entry{name: as, path: name, info: info}
	switch info.Mode().Type() {
	case fs.ModeSymlink:
		if e.link, err = f.c.root.Readlink(name); err != nil {
			return err
		}
	case 0, fs.ModeDir:
	default:
		return nil
	}
	f.entries = append(f.entries, e)
	return nil
}

// magics are the first bytes of what ADD unpacks; a plain tar has its own further on.
var magics = []string{"\x1f\x8b", "BZh", "\xfd7zXZ\x00", "\x28\xb5\x2f\xfd"}

func (c *Context) refuseArchive(name string) error {
	file, err := c.open(name)
	if err != nil {
		return err
	}
	defer file.Close()
	head := make([]byte, 512)
	n, err := io.ReadFull(file, head)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return err
	}
	head = head[:n]
	if slices.ContainsFunc(magics, func(m string) bool { return bytes.HasPrefix(head, []byte(m)) }) || n >= 262 && string(head[257:262]) == "ustar" {
		return berm.Errorf(berm.Unsupported, "%s is an archive, and the builder unpacks none", name).WithHint("COPY it, and RUN tar")
	}
	return nil
}

func (e *entry) header() (*tar.Header, error) {
	if e.info == nil {
		return &tar.Header{Name: e.name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(e.data))}, nil
	}
	h, err := tar.FileInfoHeader(e.info, e.link)
	if err != nil {
		return nil, err
	}
	h.Name = e.name
	if e.info.IsDir() {
		h.Name += "/"
	}
	h.Uid, h.Gid, h.Uname, h.Gname = 0, 0, "", ""
	h.Format = tar.FormatPAX // any name
	return h, nil
}

// content opens a file's.
func (f *Files) content(e *entry) (io.ReadCloser, error) {
	if e.info == nil {
		return io.NopCloser(strings.NewReader(e.data)), nil
	}
	return f.c.open(e.path)
}

func (f *Files) hash() error {
	sum := sha256.New()
	for i := range f.entries {
		e := &f.entries[i]
		h, err := e.header()
		if err != nil {
			return err
		}
		_, _ = fmt.Fprintf(sum, "%q %c %o %d %q\n", h.Name, h.Typeflag, h.Mode, h.Size, h.Linkname)
		if err := f.copy(sum, e, h); err != nil {
			return err
		}
	}
	f.Hash = hex.EncodeToString(sum.Sum(nil))
	return nil
}

// copy writes what a regular file holds, which must be as long as it was.
func (f *Files) copy(to io.Writer, e *entry, h *tar.Header) error {
	if h.Typeflag != tar.TypeReg {
		return nil
	}
	from, err := f.content(e)
	if err != nil {
		return err
	}
	defer from.Close()
	n, err := io.Copy(to, io.LimitReader(from, h.Size))
	if err == nil && n < h.Size {
		err = berm.Errorf(berm.Conflict, "%s became shorter while it was read", e.path)
	}
	return err
}

// Write writes them as an archive.
func (f *Files) Write(to io.Writer) error {
	zipped, err := gzip.NewWriterLevel(to, gzip.BestSpeed)
	if err != nil {
		return err
	}
	archive := tar.NewWriter(zipped)
	for i := range f.entries {
		e := &f.entries[i]
		h, err := e.header()
		if err != nil {
			return err
		}
		if err := archive.WriteHeader(h); err != nil {
			return err
		}
		if err := f.copy(archive, e, h); err != nil {
			return err
		}
	}
	return errors.Join(archive.Close(), zipped.Close())
}

// size is how many bytes they hold.
func (f *Files) size() (n int64) {
	if f == nil {
		return 0
	}
	for _, e := range f.entries {
		if e.info == nil {
			n += int64(len(e.data))
		} else if e.info.Mode().IsRegular() {
			n += e.info.Size()
		}
	}
	return n
}
