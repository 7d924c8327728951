package container

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"connectrpc.com/connect"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/proto/filesystem"
	"github.com/berm-sandbox/berm/internal/proto/filesystem/filesystemconnect"
)

// File is a file of a container at one moment.
type File struct {
	ID       string
	Path     string // absolute
	Bytes    int64
	Modified time.Time
	// Uploaded says that it came in as a file; else code made it. Code can change what this says.
	Uploaded bool
}

// filePrefix begins the ids of files.
const filePrefix = "cfile_"

// FileID is the id of the file at a path: it stands for the path, whatever is there.
func FileID(path string) string {
	return filePrefix + base64.RawURLEncoding.EncodeToString([]byte(path))
}

// maxPath bounds a path, in bytes, as the kernel does.
const maxPath = 4095

// filePath is the path that an id stands for.
func filePath(id string) (string, error) {
	text, ok := strings.CutPrefix(id, filePrefix)
	p, err := base64.RawURLEncoding.DecodeString(text)
	if !ok || err != nil || len(p) == 0 || len(p) > maxPath || !utf8.Valid(p) || p[0] != '/' {
		return "", noFile(id)
	}
	return string(p), nil
}

func noFile(id string) error {
	return berm.Errorf(berm.NotFound, "file %.64q was not found", id).WithHint("the list of the container's files has those that there are")
}

// path is what a name of a client means: relative ones begin at the working directory.
func (c *Container) path(name string) string {
	if c.Base == nil || c.Base.Workdir == "" || path.IsAbs(name) {
		return name // which the guest agent takes to begin at the user's home
	}
	return path.Join(c.Base.Workdir, name)
}

// within is what a name means that something is to be written to, or removed: the guest agent does
// so as root, and what is outside of the working directory is the system that code runs on. Links
// are followed: code made them.
func (c *Container) within(name string) (string, error) {
	dir := "."
	if c.Base != nil && c.Base.Workdir != "" {
		dir = c.Base.Workdir
	}
	p := path.Clean(c.path(name))
	if below, err := filepath.Rel(dir, p); err != nil || !filepath.IsLocal(below) {
		return "", berm.Errorf(berm.Invalid, "%.200q is outside of the working directory", p).WithHint("code can write there")
	}
	return p, nil
}

// ErrNoSpace tells that a file does not fit on a container's disk.
var ErrNoSpace = berm.Errorf(berm.Exhausted, "the container's disk has no room for the file")

// sourceField has files that were uploaded marked as such.
const sourceField, sourceName, uploaded = "X-Metadata-Berm-Source", "berm-source", "user"

const (
	maxDepth = 8        // of a list
	maxList  = 16 << 20 // bytes of a list, which is not trusted
)

// Upload writes a file below the working directory from a stream of size bytes, -1 for nobody knows;
// parents are made. Kinds: NotFound (the container), Invalid, Exhausted (ErrNoSpace), Denied,
// Unavailable.
func (m *Manager) Upload(ctx context.Context, id berm.SandboxID, name string, body io.Reader, size int64, actor audit.Actor) (File, error) {
	if len(name) > maxPath {
		return File{}, berm.Errorf(berm.Invalid, "the name of a file takes up to %d bytes, and this one has %d", maxPath, len(name))
	}
	if name == "" || !utf8.ValidString(name) || strings.ContainsRune(name, 0) || strings.HasSuffix(name, "/") {
		return File{}, berm.Errorf(berm.Invalid, "%.200q is no name of a file", name)
	}
	c, err := m.use(ctx, id, actor)
	if err != nil {
		return File{}, err
	}
	if name, err = c.within(name); err != nil {
		return File{}, err
	}
	release := m.hold(ctx, c, actor)
	defer release()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "/files?"+url.Values{"path": {name}}.Encode(), body)
	if err != nil {
		return File{}, berm.Errorf(berm.Internal, "request: %w", err)
	}
	r.ContentLength = size
	r.Header.Set("Content-Type", "application/octet-stream")
	r.Header.Set(sourceField, uploaded)
	answer, err := m.files(r, c, actor)
	if err != nil {
		return File{}, m.ended(ctx, id, err)
	}
	defer answer.Body.Close()
	var written []struct{ Path string }
	if err := json.NewDecoder(io.LimitReader(answer.Body, maxAnswer)).Decode(&written); err != nil || len(written) != 1 {
		return File{}, berm.Errorf(berm.Unavailable, "the container does not tell what it wrote")
	}
	f, err := m.stat(ctx, c, written[0].Path, actor)
	return f, m.ended(ctx, id, err)
}

// Open opens the content of a file, or the part of it that a Range field of the request's header
// asks for. The caller closes the body, until when the container is in use. Of the header
// Content-Length and Content-Range count.
func (m *Manager) Open(ctx context.Context, id berm.SandboxID, file, part string, actor audit.Actor) (*http.Response, error) {
	name, err := filePath(file)
	if err != nil {
		return nil, err
	}
	c, err := m.use(ctx, id, actor)
	if err != nil {
		return nil, err
	}
	release := m.hold(ctx, c, actor)
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "/files?"+url.Values{"path": {name}}.Encode(), nil)
	if err != nil {
		release()
		return nil, berm.Errorf(berm.Internal, "request: %w", err)
	}
	r.Header.Set("Accept-Encoding", "identity")
	if part != "" {
		r.Header.Set("Range", part)
	}
	answer, err := m.files(r, c, actor)
	if err != nil {
		release()
		return nil, m.ended(ctx, id, err)
	}
	answer.Body = held{answer.Body, release}
	return answer, nil
}

// held is a body that keeps a container in use.
type held struct {
	io.ReadCloser
	release func()
}

func (h held) Close() error {
	defer h.release()
	return h.ReadCloser.Close()
}

// files asks the guest agent for content.
func (m *Manager) files(r *http.Request, c Container, actor audit.Actor) (*http.Response, error) {
	answer, err := m.Inside.Do(r, c.ID, berm.AgentPort, actor)
	if err != nil || answer.StatusCode < 300 {
		return answer, err
	}
	defer answer.Body.Close()
	if answer.StatusCode == http.StatusInsufficientStorage {
		return nil, &insideError{ErrNoSpace}
	}
	text, _ := io.ReadAll(io.LimitReader(answer.Body, maxReason)) // what came of it
	var said struct{ Message string }
	if json.Unmarshal(text, &said) != nil || said.Message == "" {
		said.Message = answer.Status
	}
	kind := map[int]berm.Kind{
		http.StatusBadRequest: berm.Invalid, http.StatusNotFound: berm.NotFound, http.StatusForbidden: berm.Denied,
		http.StatusRequestedRangeNotSatisfiable: berm.Invalid,
	}[answer.StatusCode]
	if kind == berm.Internal {
		kind = berm.Unavailable // a fault inside is none of the server's
	}
	return nil, &insideError{berm.Errorf(kind, "the container answers: %.300s", strings.ToValidUTF8(said.Message, "\uFFFD"))}
}

// Files returns the files below a directory, "" for the working directory, by path. Hidden ones,
// whose names begin with a dot, are left out, and so is what lies in hidden directories. Exhausted
// when there are too many.
func (m *Manager) Files(ctx context.Context, id berm.SandboxID, dir string, actor audit.Actor) ([]File, error) {
	c, err := m.use(ctx, id, actor)
	if err != nil {
		return nil, err
	}
	dir = c.path(dir)
	agent := m.agent(c.ID, actor)
	root, err := agent.Stat(ctx, connect.NewRequest(&filesystem.StatRequest{Path: dir}))
	if err != nil {
		return nil, m.ended(ctx, id, agentError(err))
	}
	found, err := agent.ListDir(ctx, connect.NewRequest(&filesystem.ListDirRequest{Path: dir, Depth: maxDepth}))
	if err != nil {
		return nil, m.ended(ctx, id, agentError(err))
	}
	files := []File{}
	for _, e := range found.Msg.GetEntries() {
		below := strings.TrimPrefix(e.GetPath(), root.Msg.GetEntry().GetPath())
		if e.GetType() == filesystem.FileType_FILE_TYPE_FILE && !strings.Contains("/"+strings.TrimPrefix(below, "/"), "/.") {
			files = append(files, toFile(e))
		}
	}
	slices.SortFunc(files, func(a, b File) int { return strings.Compare(a.Path, b.Path) })
	return files, nil
}

// File returns one file. NotFound: it, or the container.
func (m *Manager) File(ctx context.Context, id berm.SandboxID, file string, actor audit.Actor) (File, error) {
	name, err := filePath(file)
	if err != nil {
		return File{}, err
	}
	c, err := m.use(ctx, id, actor)
	if err != nil {
		return File{}, err
	}
	f, err := m.stat(ctx, c, name, actor)
	return f, m.ended(ctx, id, err)
}

// DeleteFile removes a file below the working directory. Kinds: NotFound (it, or the container),
// Invalid (it is elsewhere).
func (m *Manager) DeleteFile(ctx context.Context, id berm.SandboxID, file string, actor audit.Actor) error {
	name, err := filePath(file)
	if err != nil {
		return err
	}
	c, err := m.use(ctx, id, actor)
	if err != nil {
		return err
	}
	f, err := m.stat(ctx, c, name, actor)
	if err != nil {
		return m.ended(ctx, id, err)
	}
	if name, err = c.within(f.Path); err != nil {
		return err
	}
	_, err = m.agent(id, actor).Remove(ctx, connect.NewRequest(&filesystem.RemoveRequest{Path: name}))
	return m.ended(ctx, id, agentError(err))
}

func (m *Manager) stat(ctx context.Context, c Container, name string, actor audit.Actor) (File, error) {
	got, err := m.agent(c.ID, actor).Stat(ctx, connect.NewRequest(&filesystem.StatRequest{Path: name}))
	if err != nil {
		return File{}, agentError(err)
	}
	e := got.Msg.GetEntry()
	if e.GetType() != filesystem.FileType_FILE_TYPE_FILE {
		return File{}, &insideError{berm.Errorf(berm.NotFound, "%.200q is no file", name)}
	}
	return toFile(e), nil
}

func toFile(e *filesystem.EntryInfo) File {
	p := path.Clean("/" + e.GetPath())
	return File{ID: FileID(p), Path: p, Bytes: e.GetSize(), Modified: e.GetModifiedTime().AsTime(), Uploaded: e.GetMetadata()[sourceName] == uploaded}
}

// doer is an HTTP client of a container's guest agent.
type doer struct {
	m     *Manager
	id    berm.SandboxID
	actor audit.Actor
}

func (d doer) Do(r *http.Request) (*http.Response, error) {
	return d.m.Inside.Do(r, d.id, berm.AgentPort, d.actor)
}

func (m *Manager) agent(id berm.SandboxID, actor audit.Actor) filesystemconnect.FilesystemClient {
	return filesystemconnect.NewFilesystemClient(doer{m, id, actor}, "http://agent",
		connect.WithReadMaxBytes(maxList), connect.WithAcceptCompression("gzip", nil, nil))
}

// agentError gives an error of an RPC its kind.
func agentError(err error) error {
	var e *connect.Error
	if !errors.As(err, &e) {
		return err
	}
	if known, ok := errors.AsType[*berm.Error](err); ok {
		return known // it never got there
	}
	kind, hint := berm.Unavailable, ""
	switch e.Code() {
	case connect.CodeNotFound:
		kind = berm.NotFound
	case connect.CodeInvalidArgument, connect.CodeFailedPrecondition: // a loop of links
		kind = berm.Invalid
	case connect.CodePermissionDenied:
		kind = berm.Denied
	case connect.CodeResourceExhausted:
		kind, hint = berm.Exhausted, "list a directory below it: ?path=DIR"
	}
	inside := berm.Errorf(kind, "the container answers: %.300s", strings.ToValidUTF8(e.Message(), "\uFFFD"))
	inside.Hint = hint
	return &insideError{inside}
}
