package session

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/local/apply"
)

// The file of a base: the magic, the directory of git's objects, and an entry for each path
// that was there. An entry has a tag, its path (how many bytes it shares with the one before,
// and the rest), its stamp, and what the tag stands for. A last tag says whether all paths
// came to be recorded. Numbers are varints; a string has its length before it.
const magic = "berm base 1\n"

const (
	tagPlain   = iota + 1 // the stamp alone
	tagUnknown            // there was something, but it changed before it was looked at
	tagPartial            // a directory of which not all was recorded
	tagObject             // a file that git has: the name of the object
	tagContent            // a file whose content is here
	tagEnd
	tagCut // as tagEnd, with more paths than could be recorded
)

// What a base may have.
const (
	maxEntries  = 500_000
	maxContent  = 1 << 20
	maxContents = 64 << 20
	maxCopies   = 20_000
)

// entry is what a base knows of a path.
type entry struct {
	tag    byte
	stamp  apply.Stamp
	object string // raw name of git's object
	at     int64  // where the content is in the file, which has the stamp's size
}

// Base is a project as it was when the session's last command began; of a path that the
// session had changed before, as it was when it first did. It is an apply.Base.
type Base struct {
	file    *os.File
	objects string
	git     string // a repository of our own, to read objects with
	cut     bool
	entries map[string]entry
}

// Base opens what Record wrote. The error is NotFound when it did not come to an end.
func (s *Session) Base() (*Base, error) {
	f, err := s.store.root.Open(filepath.Join(s.Name, baseFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, berm.Errorf(berm.NotFound, "session %s has no record of its project", s.Name)
	}
	if err != nil {
		return nil, stateError(err, "open the record of the project")
	}
	b := &Base{file: f, git: filepath.Join(s.Dir(), "base.git"), entries: map[string]entry{}}
	if err := b.decode(f); err != nil {
		f.Close()
		return nil, berm.Errorf(berm.Internal, "the record of the project in session %s is damaged: %w", s.Name, err)
	}
	return b, nil
}

// Close lets go of the base's file.
func (b *Base) Close() error { return b.file.Close() }

// Stat returns what is known of a path.
func (b *Base) Stat(name string) (apply.Stamp, apply.State) {
	e, ok := b.entries[name]
	switch {
	case ok && e.tag == tagUnknown:
		return apply.Stamp{}, apply.Unknown
	case ok:
		return e.stamp, apply.Present
	case b.cut:
		return apply.Stamp{}, apply.Unknown
	}
	for dir := path.Dir(name); ; dir = path.Dir(dir) {
		if e, ok := b.entries[dir]; ok && e.tag != tagUnknown && e.tag != tagPartial {
			return apply.Stamp{}, apply.Absent
		} else if ok || dir == "." || dir == "/" {
			return apply.Stamp{}, apply.Unknown
		}
	}
}

// Content returns what the file at a path held. The error is NotFound when that is not
// known, and Exhausted when it is longer than limit.
func (b *Base) Content(name string, limit int64) ([]byte, error) {
	e := b.entries[name]
	if e.tag != tagObject && e.tag != tagContent {
		return nil, berm.Errorf(berm.NotFound, "what %q held when the session began is not known", name)
	}
	if e.stamp.Size > limit {
		return nil, berm.Errorf(berm.Exhausted, "%q had %d bytes, more than %d", name, e.stamp.Size, limit)
	}
	if e.tag == tagObject {
		return b.blob(e)
	}
	data := make([]byte, e.stamp.Size)
	if _, err := b.file.ReadAt(data, e.at); err != nil {
		return nil, berm.Errorf(berm.Internal, "read what %q held: %w", name, err)
	}
	return data, nil
}

// blob reads an object of git. The project's repository lends its objects only: what its
// configuration says is not obeyed, since the sandbox may have written it in an earlier run.
func (b *Base) blob(e entry) ([]byte, error) {
	id := hex.EncodeToString([]byte(e.object))
	if err := b.makeRepository(len(e.object)); err != nil {
		return nil, stateError(err, "read objects of git")
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	git := exec.CommandContext(ctx, "git", "cat-file", "blob", id)
	git.Dir = b.git
	git.Env = []string{
		"PATH=" + os.Getenv("PATH"), "LC_ALL=C",
		"GIT_DIR=" + b.git, "GIT_OBJECT_DIRECTORY=" + b.objects, "GIT_NO_REPLACE_OBJECTS=1",
		"GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null",
	}
	out, err := git.StdoutPipe()
	if err == nil {
		err = git.Start()
	}
	if err != nil {
		return nil, berm.Errorf(berm.Unavailable, "start git: %w", err)
	}
	data, err := io.ReadAll(io.LimitReader(out, e.stamp.Size+1))
	out.Close()
	if wait := git.Wait(); err == nil && int64(len(data)) <= e.stamp.Size {
		err = wait
	}
	if err != nil {
		return nil, berm.Errorf(berm.NotFound, "git has the object %s no more: %w", id, err)
	}
	// Filters (line ends, large files) make the file differ from the object.
	if int64(len(data)) != e.stamp.Size {
		return nil, berm.Errorf(berm.NotFound, "the object %s is not what the file held", id)
	}
	return data, nil
}

// makeRepository makes an empty repository whose names of objects have a size.
func (b *Base) makeRepository(hash int) error {
	config := "[core]\n\trepositoryformatversion = 0\n\tbare = true\n"
	if hash == 32 {
		config = "[core]\n\trepositoryformatversion = 1\n\tbare = true\n[extensions]\n\tobjectformat = sha256\n"
	}
	if err := os.MkdirAll(filepath.Join(b.git, "refs"), 0o700); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(b.git, "config"), []byte(config), 0o600); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(b.git, "HEAD"), []byte("ref: refs/heads/none\n"), 0o600)
}

// encoder writes a base. An error of the writer stays, for end to return.
type encoder struct {
	w    io.Writer
	err  error
	last string
	buf  []byte
}

func newEncoder(w io.Writer, objects string) *encoder {
	e := &encoder{w: w}
	e.buf = append(e.buf, magic...)
	e.string(objects)
	return e
}

func (e *encoder) string(s string) {
	e.buf = binary.AppendUvarint(e.buf, uint64(len(s)))
	e.buf = append(e.buf, s...)
}

func (e *encoder) add(name string, tag byte, stamp apply.Stamp, object string, content []byte) {
	shared := 0
	for shared < min(len(name), len(e.last)) && name[shared] == e.last[shared] {
		shared++
	}
	e.last = name
	e.buf = append(e.buf, tag)
	e.buf = binary.AppendUvarint(e.buf, uint64(shared))
	e.string(name[shared:])
	e.buf = binary.AppendUvarint(e.buf, uint64(stamp.Mode))
	e.buf = binary.AppendVarint(e.buf, stamp.Size)
	e.buf = binary.AppendVarint(e.buf, stamp.Mtime)
	e.buf = binary.AppendVarint(e.buf, stamp.Ctime)
	e.buf = binary.AppendUvarint(e.buf, stamp.Inode)
	switch tag {
	case tagObject:
		e.string(object)
	case tagContent:
		e.buf = append(e.buf, content...)
	}
	if len(e.buf) > 64<<10 {
		e.flush()
	}
}

func (e *encoder) flush() {
	if e.err == nil {
		_, e.err = e.w.Write(e.buf)
	}
	e.buf = e.buf[:0]
}

func (e *encoder) end(tag byte) error {
	e.buf = append(e.buf, tag)
	e.flush()
	return e.err
}

// decoder reads a base, and stops being of use at the first error.
type decoder struct {
	r   *bufio.Reader
	at  int64
	err error
}

var errBase = errors.New("it is no record of a project, or one that was cut off")

func (d *decoder) ReadByte() (byte, error) {
	b, err := d.r.ReadByte()
	d.at++
	return b, err
}

func (d *decoder) byte() byte {
	b, err := d.ReadByte()
	if err != nil && d.err == nil {
		d.err = errBase
	}
	return b
}

func (d *decoder) unsigned() uint64 {
	n, err := binary.ReadUvarint(d)
	if err != nil && d.err == nil {
		d.err = errBase
	}
	return n
}

func (d *decoder) signed() int64 {
	n, err := binary.ReadVarint(d)
	if err != nil && d.err == nil {
		d.err = errBase
	}
	return n
}

func (d *decoder) string(limit uint64) string {
	n := d.unsigned()
	if d.err != nil || n > limit {
		d.err = errBase
		return ""
	}
	buf := make([]byte, n)
	if _, err := io.ReadFull(d.r, buf); err != nil {
		d.err = errBase
	}
	d.at += int64(n)
	return string(buf)
}

func (d *decoder) skip(n int64) {
	if n < 0 || n > maxContent {
		d.err = errBase
		return
	}
	if _, err := d.r.Discard(int(n)); err != nil {
		d.err = errBase
	}
	d.at += n
}

// decode reads a whole base but for the contents.
func (b *Base) decode(r io.Reader) error {
	d := &decoder{r: bufio.NewReaderSize(r, 64<<10)}
	head := make([]byte, len(magic))
	if _, err := io.ReadFull(d.r, head); err != nil || string(head) != magic {
		return errBase
	}
	d.at = int64(len(magic))
	b.objects = d.string(maxPath)
	for name := ""; d.err == nil; {
		e := entry{tag: d.byte()}
		if d.err == nil && (e.tag == tagEnd || e.tag == tagCut) {
			b.cut = e.tag == tagCut
			return nil
		}
		shared := d.unsigned()
		if e.tag < tagPlain || e.tag > tagContent || shared > uint64(len(name)) || len(b.entries) >= 2*maxEntries {
			return errBase
		}
		if name = name[:shared] + d.string(maxPath); len(name) > maxPath {
			return errBase
		}
		e.stamp.Mode = uint32(d.unsigned())
		e.stamp.Size, e.stamp.Mtime, e.stamp.Ctime, e.stamp.Inode = d.signed(), d.signed(), d.signed(), d.unsigned()
		switch e.tag {
		case tagObject:
			e.object = d.string(32)
		case tagContent:
			e.at = d.at
			d.skip(e.stamp.Size)
		}
		b.entries[name] = e
	}
	return d.err
}
