package inspect

import (
	"compress/gzip"
	"errors"
	"io"
	"net/http"
	"strings"
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
	reply := &filtered{src: res.Body, filter: f, res: res, cut: cut}
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

// filtered reads through a filter.
type filtered struct {
	src    io.ReadCloser
	filter Filter
	res    *http.Response
	cut    func(error)
	piece  []byte
	out    []byte // filtered and not yet read
	spare  []byte // out's memory
	err    error
}

func (r *filtered) Read(p []byte) (int, error) {
	if r.piece == nil {
		r.piece = make([]byte, 16<<10)
	}
	for len(r.out) == 0 {
		if r.err != nil {
			return 0, r.err
		}
		n, err := r.src.Read(r.piece)
		last := errors.Is(err, io.EOF)
		r.err = err
		out, denied := r.filter.Body(r.spare[:0], r.piece[:n], last)
		if denied == nil && last {
			denied = r.filter.Header(r.res.Trailer)
		}
		if denied != nil {
			r.cut(denied)
			r.err = &refusal{denied}
			continue
		}
		r.out, r.spare = out, out
	}
	n := copy(p, r.out)
	r.out = r.out[n:]
	return n, nil
}

func (r *filtered) Close() error { return r.src.Close() }

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
