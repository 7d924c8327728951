package batch

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"regexp"
	"slices"
	"sync"
)

// kept is an output of which the start and the end are kept.
type kept struct {
	limit int // bytes
	total int64
	head  []byte
	tail  []byte // at most twice what is kept of it
}

// Write takes everything.
func (k *kept) Write(p []byte) (int, error) {
	n := len(p)
	k.total += int64(n)
	if room := k.limit/2 - len(k.head); room > 0 {
		room = min(room, len(p))
		k.head, p = append(k.head, p[:room]...), p[room:]
	}
	end := k.limit - k.limit/2
	if len(p) > end {
		p = p[len(p)-end:]
	}
	if k.tail = append(k.tail, p...); len(k.tail) > 2*end {
		k.tail = append(k.tail[:0], k.tail[len(k.tail)-end:]...)
	}
	return n, nil
}

// String is the output, or its start and its end with the number of bytes between them.
func (k *kept) String() string {
	end := k.tail[max(0, len(k.tail)-(k.limit-k.limit/2)):]
	if left := k.total - int64(len(k.head)+len(end)); left > 0 {
		return fmt.Sprintf("%s\n… %d bytes are left out …\n%s", k.head, left, end)
	}
	return string(k.head) + string(end)
}

// judge looks at a stream of bytes, of which it keeps little, and says at its end whether what was
// asked for holds.
type judge interface {
	io.Writer
	holds() bool
}

// judged is one thing that is asked of a stream.
type judged struct {
	judge
	what string // for the reason: "does not contain …"
}

// judges are all that is asked of one stream. They must be closed.
type judges []judged

func (t Text) judges() (all judges) {
	if t.Contains != "" {
		all = append(all, judged{&contains{text: []byte(t.Contains)}, fmt.Sprintf("does not contain %.200q", t.Contains)})
	}
	if t.Matches != "" {
		all = append(all, judged{newMatches(regexp.MustCompile(t.Matches)), fmt.Sprintf("does not match %.200q", t.Matches)})
	}
	if t.Equals != nil {
		all = append(all, judged{&equals{rest: []byte(*t.Equals)}, fmt.Sprintf("is not %.200q", *t.Equals)})
	}
	return all
}

// stream is where what they judge is written to.
func (all judges) stream(also ...io.Writer) io.Writer {
	for _, j := range all {
		also = append(also, j)
	}
	return io.MultiWriter(also...)
}

// unmet are the reasons of those that do not hold, for what was looked at.
func (all judges) unmet(of string) (reasons []string) {
	for _, j := range all {
		if !j.holds() {
			reasons = append(reasons, of+" "+j.what)
		}
	}
	return reasons
}

func (all judges) close() { all.unmet("") }

type contains struct {
	text  []byte
	last  []byte // what may be the start of text
	found bool
}

func (c *contains) Write(p []byte) (int, error) {
	if c.found {
		return len(p), nil
	}
	// Only the start of p can complete what was there before.
	joined := slices.Concat(c.last, p[:min(len(p), len(c.text)-1)])
	c.found = bytes.Contains(joined, c.text) || bytes.Contains(p, c.text)
	if len(p) >= len(c.text)-1 {
		joined = p
	}
	c.last = append([]byte(nil), joined[max(0, len(joined)-len(c.text)+1):]...)
	return len(p), nil
}

func (c *contains) holds() bool { return c.found }

type equals struct {
	rest    []byte
	differs bool
}

func (e *equals) Write(p []byte) (int, error) {
	if e.differs = e.differs || !bytes.HasPrefix(e.rest, p); !e.differs {
		e.rest = e.rest[len(p):]
	}
	return len(p), nil
}

func (e *equals) holds() bool { return !e.differs && len(e.rest) == 0 }

// matches has an expression read the stream as it comes.
type matches struct {
	*io.PipeWriter
	found func() bool
}

func newMatches(expression *regexp.Regexp) *matches {
	r, w := io.Pipe()
	found := make(chan bool, 1)
	go func() {
		in := bufio.NewReader(r)
		found <- expression.MatchReader(in)
		_, _ = io.Copy(io.Discard, in) // ends with the pipe, whose writer has no errors
	}()
	return &matches{w, sync.OnceValue(func() bool { return <-found })}
}

func (m *matches) holds() bool {
	_ = m.Close() // never fails
	return m.found()
}
