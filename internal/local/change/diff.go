package change

import (
	"bufio"
	"bytes"
	"crypto/sha1"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"github.com/berm-sandbox/berm/internal/terminal"
	"github.com/rogpeppe/go-internal/diff"
)

// Format is how Diff shows changes.
type Format int

// The formats.
const (
	Patch Format = iota // as git diff: what git apply takes
	Stat                // as git diff --stat: the number of lines of each file
	Names               // as git diff --name-status: A, M, T (type) or D and the name
)

// Options of Diff.
type Options struct {
	Format Format
	// Paths restricts the output to these and what lies below them, relative to the
	// workspace; empty means everything.
	Paths []string
	// Binary shows the bytes of binary files too, as git diff --binary.
	Binary bool
	// Appliable leaves out of a Patch what git apply refuses, and with it the whole patch: all
	// that lies in a .git.
	Appliable bool
	// Terminal is for a person: control characters of files are escaped, and a line
	// before each dangerous change says why it is one. Without it and Style the output
	// is exact.
	Terminal bool
	Style    terminal.Style
}

const (
	maxText  = 8 << 20 // a file with more bytes is shown without hunks
	maxLines = 1 << 20 // and one with more lines
	probe    = 8000    // git calls a file binary that has a NUL in so many bytes
	digits   = 7       // of an object's name
)

// Diff shows changes, which List or Compare found in the same order of trees. What git's
// format has no words for (directories of their own, fifos) is told in lines that begin
// with "# berm:", which git apply skips. A file that cannot be read is told in such a
// line too, and is Diff's error after all others were shown.
func Diff(w io.Writer, changes []Change, upper, project *os.Root, o Options) error {
	old, err := project.Open(".")
	if err != nil {
		return failed("", err)
	}
	defer old.Close()
	new, err := upper.Open(".")
	if err != nil {
		return failed("", err)
	}
	defer new.Close()
	p := &printer{w: bufio.NewWriterSize(w, 64<<10), Options: o, old: int(old.Fd()), new: int(new.Fd())}
	unit, left := "", 0
	for i, c := range changes {
		if !within(c.Path, o.Paths) {
			continue
		}
		if dir := gitDir(c.Path); o.Appliable && o.Format == Patch && dir != "" {
			if dir != unit {
				p.leftOut(unit, left)
				unit, left = dir, 0
			}
			left++
			continue
		}
		below := i+1 < len(changes) && strings.HasPrefix(changes[i+1].Path, c.Path+"/")
		p.show(c, below)
	}
	p.leftOut(unit, left)
	if o.Format == Stat {
		p.stat()
	}
	if err := p.w.Flush(); err != nil {
		return err
	}
	return p.failed
}

// within says whether a path is one of some paths or lies below one.
func within(name string, paths []string) bool {
	if len(paths) == 0 {
		return true
	}
	for _, p := range paths {
		p = path.Clean(p)
		if p == "." || name == p || strings.HasPrefix(name, p+"/") {
			return true
		}
	}
	return false
}

// gitDir returns the .git that a path is or lies in, in any case: git refuses all of them.
func gitDir(name string) string {
	for end := 0; end < len(name); end++ {
		start := end
		for end < len(name) && name[end] != '/' {
			end++
		}
		if strings.EqualFold(name[start:end], ".git") {
			return name[:end]
		}
	}
	return ""
}

// leftOut tells how much of a .git is not in the patch.
func (p *printer) leftOut(unit string, n int) {
	if n > 0 {
		p.note(p.Style.Dim, unit, "left out here, since git apply would refuse it: %d of its paths changed; berm apply brings them", n)
	}
}

type printer struct {
	Options
	w        *bufio.Writer
	old, new int
	failed   error // the first file that could not be read
	rows     []row
}

// line writes a line. The Writer keeps the first error, which Diff returns.
func (p *printer) line(paint func(string) string, format string, args ...any) {
	_, _ = p.w.WriteString(paint(fmt.Sprintf(format, args...)) + "\n")
}

func plain(s string) string { return s }

// note says in words what the format cannot.
func (p *printer) note(paint func(string) string, name, format string, args ...any) {
	p.line(paint, "# berm: %s: %s", Quote(name), fmt.Sprintf(format, args...))
}

// show shows one change; below says that changes of what lies below it follow, which say
// of themselves that a directory was added or deleted.
func (p *printer) show(c Change, below bool) {
	told := p.danger(c)
	if p.Format == Names {
		p.name(c, below, told)
		return
	}
	if p.Format == Patch && told != "" {
		p.note(p.Style.Bad, c.Path, "%s", told)
	}
	if c.Kind == Modified && c.Old.Mode.Type() == c.New.Mode.Type() {
		if inGit(c.New) {
			p.file(c, &c.Old, &c.New)
		} else {
			p.unsaid(c, c.New, fmt.Sprintf("mode %04o, was %04o", UnixPerm(c.New.Mode), UnixPerm(c.Old.Mode)))
		}
		return
	}
	// To git a change of type is a deletion and an addition.
	if c.Kind != Added {
		if inGit(c.Old) {
			p.file(c, &c.Old, nil)
		} else if !c.Old.Mode.IsDir() || !below {
			p.unsaid(c, c.Old, "deleted")
		}
	}
	if c.Kind != Deleted {
		if inGit(c.New) {
			p.file(c, nil, &c.New)
		} else if !c.New.Mode.IsDir() || !below {
			p.unsaid(c, c.New, "added")
		}
	}
}

// inGit says whether git knows such a thing.
func inGit(e Entry) bool { return e.Mode.IsRegular() || e.Mode.Type() == fs.ModeSymlink }

// danger returns the reason that a person is told.
func (p *printer) danger(c Change) string {
	if p.Terminal || bool(p.Style) {
		return c.Danger
	}
	return ""
}

func (p *printer) unsaid(c Change, e Entry, what string) {
	switch p.Format {
	case Patch:
		p.note(p.Style.Dim, c.Path, "%s: %s", typeName(e.Mode), what)
	case Stat:
		p.add(row{change: c, words: typeName(e.Mode) + ": " + what})
	}
}

func (p *printer) name(c Change, below bool, danger string) {
	letter, at := "M", c.New
	switch {
	case c.Kind == Added:
		letter = "A"
	case c.Kind == Deleted:
		letter, at = "D", c.Old
	case c.Old.Mode.Type() != c.New.Mode.Type():
		letter = "T"
	}
	name := c.Path
	if at.Mode.IsDir() {
		if below && c.Kind != Modified {
			return
		}
		name += "/"
	}
	if danger != "" {
		p.line(p.Style.Bad, "%s\t%s\t# berm: %s", letter, Quote(name), danger)
		return
	}
	p.line(plain, "%s\t%s", letter, Quote(name))
}

// side is one of the two files of a comparison.
type side struct {
	present bool
	mode    string // as git writes it
	data    []byte
	huge    bool // data was not read
	size    int64
}

func (p *printer) read(root int, name string, e *Entry) (side, error) {
	if e == nil {
		return side{}, nil
	}
	s := side{present: true, mode: gitMode(e.Mode), size: e.Size}
	if e.Mode.Type() == fs.ModeSymlink {
		s.data, s.size = []byte(e.Target), int64(len(e.Target))
		return s, nil
	}
	var err error
	s.data, s.huge, err = readAll(root, name, maxText)
	s.huge = s.huge || !s.binary() && bytes.Count(s.data, []byte("\n")) > maxLines
	return s, err
}

// gitMode is the mode as git knows it, with the bits that make a program dangerous.
func gitMode(m fs.FileMode) string {
	switch {
	case m.Type() == fs.ModeSymlink:
		return "120000"
	case m&0o100 != 0:
		return fmt.Sprintf("10%04o", UnixPerm(m)&0o7000|0o755)
	default:
		return fmt.Sprintf("10%04o", UnixPerm(m)&0o7000|0o644)
	}
}

func (s *side) binary() bool {
	return bytes.IndexByte(s.data[:min(len(s.data), probe)], 0) >= 0
}

// object is the name that git gives to a content.
func (s *side) object() string {
	if !s.present {
		return strings.Repeat("0", 2*sha1.Size)
	}
	sum := sha1.Sum(fmt.Appendf(nil, "blob %d\x00%s", len(s.data), s.data))
	return hex.EncodeToString(sum[:])
}

// file shows a file or link that was there before, is there after, or both.
func (p *printer) file(c Change, before, after *Entry) {
	old, err := p.read(p.old, c.Path, before)
	if err != nil {
		p.unreadable(c, err)
		return
	}
	new, err := p.read(p.new, c.Path, after)
	if err != nil {
		p.unreadable(c, err)
		return
	}
	if p.Format == Stat {
		p.count(c, old, new)
		return
	}
	if old.mode == new.mode && before.Mode != after.Mode {
		// Git knows one bit of the mode; where only others differ, all are shown.
		old.mode, new.mode = fmt.Sprintf("10%04o", UnixPerm(before.Mode)), fmt.Sprintf("10%04o", UnixPerm(after.Mode))
	}
	p.patch(c.Path, old, new)
}

func (p *printer) unreadable(c Change, err error) {
	err = failed(c.Path, err)
	if p.Format == Stat {
		p.add(row{change: c, words: "cannot be read"})
	} else {
		p.note(p.Style.Bad, c.Path, "not shown: %s", terminal.Escape(err.Error()))
	}
	if p.failed == nil {
		p.failed = err
	}
}

func (p *printer) patch(name string, old, new side) {
	a, b := Quote("a/"+name), Quote("b/"+name)
	p.line(p.Style.Bold, "diff --git %s %s", a, b)
	mode := ""
	switch {
	case !old.present:
		p.line(p.Style.Bold, "new file mode %s", new.mode)
		a = "/dev/null"
	case !new.present:
		p.line(p.Style.Bold, "deleted file mode %s", old.mode)
		b = "/dev/null"
	case old.mode != new.mode:
		p.line(p.Style.Bold, "old mode %s", old.mode)
		p.line(p.Style.Bold, "new mode %s", new.mode)
	default:
		mode = " " + old.mode
	}
	if old.huge || new.huge {
		p.line(plain, "Files %s and %s differ", a, b)
		return
	}
	same := bytes.Equal(old.data, new.data)
	if same && old.present && new.present {
		return
	}
	binary := old.binary() || new.binary()
	oldObject, newObject := old.object(), new.object()
	if !binary || !p.Binary {
		oldObject, newObject = oldObject[:digits], newObject[:digits]
	}
	p.line(p.Style.Bold, "index %s..%s%s", oldObject, newObject, mode)
	switch {
	case same: // an empty file has no hunks
	case binary && p.Binary:
		p.literal(old.data, new.data)
	case binary:
		p.line(plain, "Binary files %s and %s differ", a, b)
	default:
		// A tab ends a name with spaces.
		tab := ""
		if strings.Contains(name, " ") {
			tab = "\t"
		}
		for _, l := range []struct{ mark, name string }{{"---", a}, {"+++", b}} {
			if l.name != "/dev/null" {
				l.name += tab
			}
			p.line(p.Style.Bold, "%s %s", l.mark, l.name)
		}
		p.hunks(hunks(old.data, new.data))
	}
}

// hunks returns the hunks of a unified diff, without a header.
func hunks(old, new []byte) []byte {
	text := diff.Diff("a", old, "b", new)
	for range 3 { // "diff a b", "--- a", "+++ b"
		_, text, _ = bytes.Cut(text, []byte("\n"))
	}
	return text
}

func (p *printer) hunks(text []byte) {
	if !p.Terminal && !bool(p.Style) {
		_, _ = p.w.Write(text)
		return
	}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSuffix(line, "\n")
		if p.Terminal {
			fields := strings.Split(line, "\t")
			for i := range fields {
				fields[i] = terminal.Escape(fields[i])
			}
			line = strings.Join(fields, "\t")
		}
		paint := plain
		switch line[0] {
		case '+':
			paint = p.Style.Good
		case '-':
			paint = p.Style.Bad
		case '@', '\\':
			paint = p.Style.Dim
		}
		p.line(paint, "%s", line)
	}
}
