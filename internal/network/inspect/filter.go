package inspect

import (
	"compress/gzip"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"
)

// filterReply puts a filter into a reply. Its text must be readable: it was asked for
// without an encoding, and gzip, which some servers send all the same, is undone. Cut is
// told why the reply ends early.
func filterReply(res *http.Response, f Filter, cut func(error)) error {
	switch encoding := strings.ToLower(res.Header.Get("Content-Encoding")); encoding {
	case "", "identity":
	case "gzip", "x-gzip":
		res.Body = &gunzip{src: res.Body}
		res.Header.Del("Content-Encoding")
	default:
		return &Denial{Status: http.StatusBadGateway, Reason: ReasonSecret,
			Message: "the reply is encoded as " + printable(encoding) + ", so that it cannot be searched for secrets"}
	}
	if err := f.Header(res.Header); err != nil {
		return &refusal{err}
	}
	reply := newFiltered(res.Body, f, func() error { return f.Header(res.Trailer) }, cut)
	if up, ok := res.Body.(io.ReadWriteCloser); ok && res.StatusCode == http.StatusSwitchingProtocols {
		res.Body = struct {
			*filtered
			io.Writer
		}{reply, up}
		return nil
	}
	res.Body = reply
	if res.Request.Method != http.MethodHead {
		res.ContentLength = -1
		res.Header.Del("Content-Length")
	}
	return nil
}

// holdTime is the interval at which a stream gives on what its filter kept back.
const holdTime = 30 * time.Millisecond

// filtered reads a reply through its filter.
type filtered struct {
	src    io.ReadCloser
	filter Filter
	// end is called when src has ended, before what was kept back is read.
	end func() error
	cut func(error)

	pieces chan piece  // that came
	free   chan []byte // memory for them
	closed chan struct{}
	close  sync.Once
	timer  *time.Timer // of Late; nil before the first read
	runs   bool        // the timer
	out    []byte      // filtered and not yet read
	spare  []byte      // out's memory
	err    error
}

// piece is what one read gave.
type piece struct {
	b   []byte
	err error
}

// Filtered reads a stream through a filter: what comes is kept back for 30 to 60 ms at most,
// unless the filter is certain that it is the start of what it looks for. Its errors are those of
// src and of the filter.
func Filtered(src io.ReadCloser, f Filter) io.ReadCloser {
	return newFiltered(src, f, func() error { return nil }, func(error) {})
}

func newFiltered(src io.ReadCloser, f Filter, end func() error, cut func(error)) *filtered {
	return &filtered{src: src, filter: f, end: end, cut: cut, pieces: make(chan piece), free: make(chan []byte, 2), closed: make(chan struct{})}
}

// fetch reads on while what came is filtered and sent.
func (r *filtered) fetch() {
	for {
		select {
		case b := <-r.free:
			n, err := r.src.Read(b)
			select {
			case r.pieces <- piece{b[:n], err}:
			case <-r.closed:
				return
			}
			if err != nil {
				return
			}
		case <-r.closed:
			return
		}
	}
}

func (r *filtered) Read(p []byte) (int, error) {
	if r.timer == nil {
		r.timer = time.NewTimer(holdTime)
		r.timer.Stop()
		for range cap(r.free) {
			r.free <- make([]byte, 16<<10)
		}
		go r.fetch()
	}
	for len(r.out) == 0 {
		if r.err != nil {
			return 0, r.err
		}
		out := r.spare[:0]
		select {
		case next := <-r.pieces:
			var denied error
			if out, denied = r.take(out, next); denied != nil {
				r.cut(denied)
				r.err = &refusal{denied}
				continue
			}
		case <-r.timer.C:
			r.runs = false
			out = r.filter.Late(out)
		case <-r.closed:
			return 0, net.ErrClosed
		}
		if waits := r.err == nil && r.filter.Waits(); waits && !r.runs {
			r.timer.Reset(holdTime)
			r.runs = true
		} else if !waits {
			r.timer.Stop()
			r.runs = false
		}
		r.out, r.spare = out, out
	}
	n := copy(p, r.out)
	r.out = r.out[n:]
	return n, nil
}

// take filters a piece.
func (r *filtered) take(dst []byte, next piece) ([]byte, error) {
	last := errors.Is(next.err, io.EOF)
	r.err = next.err
	dst, denied := r.filter.Body(dst, next.b, last)
	if denied == nil && last {
		denied = r.end()
	}
	r.free <- next.b[:cap(next.b)]
	return dst, denied
}

func (r *filtered) Close() error {
	r.close.Do(func() { close(r.closed) })
	return r.src.Close()
}

// gunzip begins to decode at the first read, so that the head of a reply does not wait for
// its body.
type gunzip struct {
	src io.ReadCloser
	dec *gzip.Reader
	err error
}

func (g *gunzip) Read(p []byte) (int, error) {
	if g.dec == nil && g.err == nil {
		g.dec, g.err = gzip.NewReader(g.src)
	}
	if g.err != nil {
		return 0, g.err
	}
	return g.dec.Read(p)
}

func (g *gunzip) Close() error { return g.src.Close() }
