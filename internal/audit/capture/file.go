package capture

import (
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"hash"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"strings"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/berm-sandbox/berm/internal/audit"
	pb "github.com/berm-sandbox/berm/internal/proto/filesystem"
)

// access is one use of the files API.
type access struct {
	brief
	recorder *Recorder
	who      Caller
	trace    string
	files    []audit.FileAccess
	sums     func() []audit.FileAccess // of what was sent; nil: files is complete
}

// maxPaths bounds the files of one request that have a record of their own.
const maxPaths = 1000

// maxPathSize bounds a path that is told, in bytes. The kernel takes no longer one.
const maxPathSize = 4095

const (
	maxCall    = 64 << 10 // bytes of a call about files
	maxCompose = 1 << 20  // of one that joins files, as the agent has it
)

// content records a use of /files.
func (c *Recorder) content(r *http.Request, who Caller) (Call, error) {
	query := r.URL.Query()
	path := audit.Shorten(query.Get("path"), maxPathSize)
	a := &access{recorder: c, who: who, trace: newTrace()}
	switch {
	case r.URL.Path == "/files" && r.Method == http.MethodGet:
		a.files = []audit.FileAccess{{Path: path, Op: "read"}}
	case r.URL.Path == "/files" && r.Method == http.MethodPost:
		a.upload(r, path)
	case r.URL.Path == "/files/compose" && r.Method == http.MethodPost:
		content, err := peek(r, false, maxCompose)
		if err != nil {
			return nil, err
		}
		var request struct {
			Sources     []string `json:"source_paths"`
			Destination string   `json:"destination"`
		}
		// The first value of a body counts, as for the agent.
		if json.NewDecoder(strings.NewReader(string(content))).Decode(&request) != nil {
			return nil, invalid("invalid request body")
		}
		for _, s := range request.Sources[:min(len(request.Sources), maxPaths)] {
			a.files = append(a.files, audit.FileAccess{Path: audit.Shorten(s, maxPathSize), Op: "move", To: audit.Shorten(request.Destination, maxPathSize)})
		}
	default:
		return nil, nil
	}
	return a, nil
}

// filesystem records a call of the service filesystem.Filesystem.
func (c *Recorder) filesystem(r *http.Request, who Caller) (Call, error) {
	read := func(m proto.Message) error {
		f, err := formatOf(r.Header)
		if err != nil {
			return err
		}
		content, err := peek(r, f.envelope, maxCall)
		if err != nil {
			return err
		}
		return f.decode(content, m)
	}
	var file audit.FileAccess
	var err error
	switch strings.TrimPrefix(r.URL.Path, "/filesystem.Filesystem/") {
	case "MakeDir":
		var m pb.MakeDirRequest
		err = read(&m)
		file = audit.FileAccess{Op: "mkdir", Path: m.GetPath()}
	case "Move":
		var m pb.MoveRequest
		err = read(&m)
		file = audit.FileAccess{Op: "move", Path: m.GetSource(), To: audit.Shorten(m.GetDestination(), maxPathSize)}
	case "Remove":
		var m pb.RemoveRequest
		err = read(&m)
		file = audit.FileAccess{Op: "remove", Path: m.GetPath()}
	case "ListDir":
		var m pb.ListDirRequest
		err = read(&m)
		file = audit.FileAccess{Op: "list", Path: m.GetPath()}
	default:
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	file.Path = audit.Shorten(file.Path, maxPathSize)
	return &access{recorder: c, who: who, trace: newTrace(), files: []audit.FileAccess{file}}, nil
}

// upload has the content of a request summed up while it passes.
func (a *access) upload(r *http.Request, path string) {
	kind, params, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
	encoding := strings.ToLower(strings.TrimSpace(r.Header.Get("Content-Encoding")))
	packed := encoding == "gzip" || encoding == "x-gzip"
	form := strings.HasPrefix(kind, "multipart/")
	if !packed && !form {
		s := &sum{hash: sha256.New()}
		r.Body = body{io.TeeReader(r.Body, s), r.Body}
		a.sums = func() []audit.FileAccess { return []audit.FileAccess{s.access(path)} }
		return
	}
	// The content is inside of something that is to be read: another goroutine does, at the
	// pace of the request.
	reading, writing := io.Pipe()
	found := make(chan []audit.FileAccess, 1)
	go func() {
		var content io.Reader = reading
		var files []audit.FileAccess
		if packed {
			if z, err := gzip.NewReader(reading); err == nil {
				content = z
			} else {
				content = strings.NewReader("")
			}
		}
		if form {
			files = parts(multipart.NewReader(content, params["boundary"]), path)
		} else {
			s := &sum{hash: sha256.New()}
			_, err := io.Copy(s, content)
			file := s.access(path)
			if err != nil {
				file.SHA256 = ""
			}
			files = []audit.FileAccess{file}
		}
		_, _ = io.Copy(io.Discard, reading) // what cannot be understood passes all the same
		found <- files
	}()
	r.Body = body{io.TeeReader(r.Body, writing), closer{r.Body, writing}}
	a.sums = func() []audit.FileAccess {
		_ = writing.Close() // the agent has answered: it read what it wanted
		return <-found
	}
}

type closer struct{ body, pipe io.Closer }

func (c closer) Close() error {
	_ = c.pipe.Close()
	return c.body.Close()
}

// parts sums up the files of a form as the agent reads it.
func parts(form *multipart.Reader, path string) (files []audit.FileAccess) {
	for len(files) < maxPaths {
		part, err := form.NextRawPart()
		if err != nil {
			return files
		}
		kind, params, err := mime.ParseMediaType(part.Header.Get("Content-Disposition"))
		if err != nil || kind != "form-data" || params["name"] != "file" {
			continue
		}
		name := path
		if name == "" {
			name = audit.Shorten(params["filename"], maxPathSize)
		}
		s := &sum{hash: sha256.New()}
		_, err = io.Copy(s, part)
		file := s.access(name)
		if err != nil {
			file.SHA256 = ""
		}
		files = append(files, file)
	}
	return files
}

// sum is the size and hash of what is written to it. An agent may answer while a body is still
// being sent.
type sum struct {
	mu   sync.Mutex
	hash hash.Hash
	size int64
}

func (s *sum) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.size += int64(len(p))
	return s.hash.Write(p)
}

func (s *sum) access(path string) audit.FileAccess {
	s.mu.Lock()
	defer s.mu.Unlock()
	return audit.FileAccess{Path: path, Op: "write", Size: s.size, SHA256: hex.EncodeToString(s.hash.Sum(nil))}
}

// Answer records what was done before the client hears of it. A read is recorded when what
// was read has passed.
func (a *access) Answer(r *http.Response) error {
	if a.sums != nil {
		a.files, a.sums = a.sums(), nil
	}
	outcome, reason := audit.OK, ""
	status := r.Header.Get("Grpc-Status")
	switch {
	case r.StatusCode == http.StatusUnauthorized:
		if !a.recorder.refusals.Allow() {
			return nil
		}
		outcome, reason = audit.Denied, "the guest agent answers "+r.Status
	case r.StatusCode >= 300:
		outcome, reason = audit.Failed, "the guest agent answers "+r.Status
	case status != "" && status != "0":
		outcome, reason = audit.Failed, "the guest agent answers with status "+status
	}
	if outcome == audit.OK && len(a.files) == 1 && a.files[0].Op == "read" {
		d := &download{access: a, body: r.Body, whole: r.StatusCode == http.StatusOK}
		switch r.Header.Get("Content-Encoding") {
		case "":
			s := &sum{hash: sha256.New()}
			d.content, d.found = s, func() (audit.FileAccess, bool) { return s.access(a.files[0].Path), true }
		case "gzip":
			d.content, d.found = unpack(a.files[0].Path)
		default: // the agent has no other
			d.content, d.found = io.Discard, func() (audit.FileAccess, bool) { return audit.FileAccess{Path: a.files[0].Path}, false }
		}
		r.Body = d
		return nil
	}
	return a.record(outcome, reason)
}

func (a *access) record(outcome audit.Outcome, reason string) error {
	for _, f := range a.files {
		if err := a.recorder.emit(a.who, audit.Record{Type: audit.FileAPI, Outcome: outcome, Reason: reason, Data: f, TraceID: a.trace}); err != nil {
			return err
		}
	}
	return nil
}

// Failed records that it is not known what was done.
func (a *access) Failed(err error) {
	if a.sums != nil {
		a.files, a.sums = a.sums(), nil
	}
	for i := range a.files {
		a.files[i].SHA256 = ""
	}
	if err := a.record(audit.Failed, err.Error()); err != nil {
		a.recorder.log.Error("audit record lost", "sandbox", a.who.Sandbox, "type", audit.FileAPI, "error", err)
	}
}

// download is the body of an answer that is a file's content.
type download struct {
	*access
	body  io.ReadCloser
	whole bool // the body is all of the file
	told  bool

	content io.Writer                       // gets the body
	found   func() (audit.FileAccess, bool) // what that was, and whether all of it was understood
}

// maxRatio is how many times as large as its packed form content may become: the agent is
// not to be trusted, and has no trouble to send a little that unpacks to terabytes.
const maxRatio = 64

// unpack sums up content that comes packed, in another goroutine, at the pace of the answer.
func unpack(path string) (io.Writer, func() (audit.FileAccess, bool)) {
	reading, writing := io.Pipe()
	s, packed := &sum{hash: sha256.New()}, counter(0)
	understood := make(chan bool, 1)
	go func() {
		content, err := gzip.NewReader(io.TeeReader(reading, &packed))
		whole := err == nil
		for err == nil && s.size <= maxRatio*int64(packed)+maxRatio<<10 {
			_, err = io.CopyN(s, content, 64<<10)
		}
		_, _ = io.Copy(io.Discard, reading) // what cannot be understood passes all the same
		understood <- whole && errors.Is(err, io.EOF)
	}()
	return writing, func() (audit.FileAccess, bool) {
		_ = writing.Close()
		if !<-understood {
			return audit.FileAccess{Path: path}, false
		}
		return s.access(path), true
	}
}

// counter counts the bytes that are written to it.
type counter int64

func (c *counter) Write(p []byte) (int, error) {
	*c += counter(len(p))
	return len(p), nil
}

func (d *download) Read(p []byte) (int, error) {
	n, err := d.body.Read(p)
	_, _ = d.content.Write(p[:n])
	if err != nil {
		d.tell(err == io.EOF)
	}
	return n, err
}

// Close ends it; what was not read has not been read by the client either.
func (d *download) Close() error {
	d.tell(false)
	return d.body.Close()
}

func (d *download) tell(ended bool) {
	if d.told {
		return
	}
	d.told = true
	f, understood := d.found()
	f.Op = "read"
	outcome, reason := audit.OK, ""
	if !ended {
		outcome, reason = audit.Failed, "it was not read to its end"
	}
	if !ended || !d.whole || !understood {
		f.SHA256 = ""
	}
	d.recorder.tell(d.who, audit.Record{Type: audit.FileAPI, Outcome: outcome, Reason: reason, Data: f, TraceID: d.trace})
}
