package files

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/guest/account"
	"github.com/berm-sandbox/berm/internal/guest/metadata"
	"github.com/berm-sandbox/berm/internal/guest/rest"
)

// entry is one file that was written.
type entry struct {
	Name     string            `json:"name"`
	Path     string            `json:"path"`
	Type     string            `json:"type"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

func entryOf(path string) entry {
	return entry{Name: filepath.Base(path), Path: path, Type: "file", Metadata: metadata.Read(path)}
}

// Post writes files: one from an octet stream, or the parts of a multipart form
// that are called "file".
func (h *Handler) Post(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	if err := h.authorize(r, query, write); err != nil {
		rest.Error(w, http.StatusUnauthorized, err.Error())
		return
	}
	entries, fail := h.post(r, query)
	if fail != nil {
		fail.answer(w)
		return
	}
	rest.JSON(w, entries)
}

func (h *Handler) post(r *http.Request, query url.Values) ([]entry, *failure) {
	user, path, fail := h.resolve(query.Get("username"), query.Get("path"))
	if fail != nil {
		return nil, fail
	}
	meta := metadataOf(r.Header)
	if err := metadata.Validate(meta); err != nil {
		return nil, &failure{http.StatusBadRequest, err.Error()}
	}
	size := r.ContentLength // unsized is what the server has for an unknown one
	switch encoding := strings.ToLower(strings.TrimSpace(r.Header.Get("Content-Encoding"))); encoding {
	case "", "identity":
	case "gzip", "x-gzip":
		z, err := gzip.NewReader(r.Body)
		if err != nil {
			return nil, &failure{http.StatusBadRequest, fmt.Sprintf("gzip body: %v", err)}
		}
		r.Body = io.NopCloser(z) // the server closes the real one
		size = unsized
	default:
		return nil, &failure{http.StatusBadRequest, fmt.Sprintf("unsupported Content-Encoding: %q, supported: gzip", encoding)}
	}

	u := upload{user: user, meta: meta, resolve: func(name string) (string, *failure) {
		_, path, fail := h.resolve(query.Get("username"), name)
		return path, fail
	}}
	if query.Get("path") != "" {
		u.path = path
	}
	contentType, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
	switch {
	case contentType == "application/octet-stream":
		if u.path == "" {
			return nil, &failure{http.StatusBadRequest, "path query parameter is required for raw body upload"}
		}
		if fail := u.store(u.path, r.Body, size); fail != nil {
			return nil, fail
		}
	case strings.HasPrefix(contentType, "multipart/"):
		if fail := u.form(r); fail != nil {
			return nil, fail
		}
	default:
		return nil, &failure{http.StatusBadRequest, fmt.Sprintf("unsupported content type: %.64q, expected multipart/form-data or application/octet-stream", r.Header.Get("Content-Type"))}
	}
	return u.entries, nil
}

// metadataOf collects the X-Metadata-… headers.
func metadataOf(h http.Header) map[string]string {
	var m map[string]string
	for name, values := range h {
		if key, ok := strings.CutPrefix(name, "X-Metadata-"); ok && len(values) > 0 {
			if m == nil {
				m = map[string]string{}
			}
			m[strings.ToLower(key)] = values[0]
		}
	}
	return m
}

// upload is the state of one request.
type upload struct {
	user    *account.Account
	meta    map[string]string
	path    string // of the query; it wins over names of parts
	resolve func(name string) (string, *failure)
	entries []entry
}

// form stores the parts of a multipart form as they arrive.
func (u *upload) form(r *http.Request) *failure {
	u.entries = []entry{} // none is an empty list, not null
	form, err := r.MultipartReader()
	if err != nil {
		return &failure{http.StatusBadRequest, err.Error()}
	}
	for {
		// NextRawPart: no Content-Transfer-Encoding in form-data (RFC 7578, 4.7).
		part, err := form.NextRawPart()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return &failure{http.StatusBadRequest, fmt.Sprintf("multipart body: %v", err)}
		}
		name, filename, ok := disposition(part)
		if name != "file" {
			continue
		}
		path := u.path
		if path == "" {
			if !ok || filename == "" {
				return &failure{http.StatusBadRequest, "a file part has no filename and there is no path query parameter"}
			}
			var fail *failure
			if path, fail = u.resolve(filename); fail != nil {
				return fail
			}
		}
		if slices.ContainsFunc(u.entries, func(e entry) bool { return e.Path == path }) {
			return &failure{http.StatusBadRequest, fmt.Sprintf("you cannot upload multiple files to the same path '%s' in one upload request, only the first specified file was uploaded", path)}
		}
		if fail := u.store(path, part, unsized); fail != nil {
			return fail
		}
	}
}

// disposition reads a part's name and the filename as it was sent: unlike
// multipart.Part.FileName it keeps the directories.
func disposition(part *multipart.Part) (name, filename string, ok bool) {
	kind, params, err := mime.ParseMediaType(part.Header.Get("Content-Disposition"))
	if err != nil || kind != "form-data" {
		return "", "", false
	}
	filename, ok = params["filename"]
	return params["name"], filename, ok
}

// store writes one file, its metadata included. size is that of the body in bytes, or
// unsized.
func (u *upload) store(path string, body io.Reader, size int64) *failure {
	if err := u.user.MakeDirs(filepath.Dir(path)); err != nil {
		return fault(err)
	}
	t, fail := create(path)
	if fail != nil {
		return fail
	}
	defer t.Close()
	if fail := u.fill(t, body, size); fail != nil {
		t.undo()
		return fail
	}
	if err := metadata.Write(t.File, u.meta); err != nil && !errors.Is(err, syscall.EOPNOTSUPP) {
		// Without extended attributes the file stands; the answer shows no metadata.
		t.undo()
		return fault(err)
	}
	if err := t.Close(); err != nil {
		return fault(err)
	}
	u.entries = append(u.entries, entryOf(path))
	return nil
}

// fill gives a file its owner and content. Content that is there is written over when
// the new one has arrived in full and fits.
func (u *upload) fill(t *target, body io.Reader, size int64) *failure {
	own := func() error {
		if err := t.Chown(int(u.user.UID), int(u.user.GID)); err != nil && !t.generated {
			return err
		}
		return nil
	}
	if size > bufferSize && !t.generated && !fits(t.File, size) {
		return fault(syscall.ENOSPC)
	}
	if t.old == 0 {
		if err := own(); err != nil {
			return fault(err)
		}
		n, fail := receive(t.File, body)
		t.written = n
		return fail
	}
	var head bytes.Buffer // what fits into it needs no file
	if _, err := head.ReadFrom(io.LimitReader(body, bufferSize)); err != nil {
		return unread(err)
	}
	var content io.ReaderAt = bytes.NewReader(head.Bytes())
	n := int64(head.Len())
	if n == bufferSize {
		arrived, err := unnamed()
		if err != nil {
			return fault(err)
		}
		defer arrived.Close()
		var fail *failure
		if n, fail = receive(arrived, io.MultiReader(&head, body)); fail != nil {
			return fail
		}
		content = arrived
	}
	if err := replace(t.File, t.old, content, n); err != nil {
		return fault(err)
	}
	if err := own(); err != nil {
		return fault(err)
	}
	return nil
}

// receive writes a body into a file.
func receive(f *os.File, body io.Reader) (int64, *failure) {
	buf := buffers.Get().(*[bufferSize]byte)
	defer buffers.Put(buf)
	n, err := io.CopyBuffer(struct{ io.Writer }{f}, struct{ io.Reader }{body}, buf[:])
	if _, ok := errors.AsType[*os.PathError](err); ok {
		return n, fault(err)
	}
	if err != nil {
		return n, unread(err)
	}
	return n, nil
}

func unread(err error) *failure {
	return &failure{http.StatusBadRequest, fmt.Sprintf("read body: %v", err)}
}

// replace writes the size bytes of content over the old ones of a file, which stays the
// one that programs have open, watch, or know by another name. What it grows by comes
// first: without space for that the old content is kept.
func replace(f *os.File, old int64, content io.ReaderAt, size int64) error {
	put := func(from, to int64) error {
		_, err := io.Copy(io.NewOffsetWriter(f, from), io.NewSectionReader(content, from, to-from))
		return err
	}
	if size > old {
		if err := put(old, size); err != nil {
			return errors.Join(err, f.Truncate(old))
		}
	}
	if err := put(0, min(old, size)); err != nil {
		return err
	}
	if fi, err := f.Stat(); err != nil || fi.Size() == size {
		return err
	}
	return f.Truncate(size)
}

// unnamed makes a file that is gone when it is closed. It is not beside the one that is
// written over, where programs and clients that watch would be told of it, and of one
// without a name (O_TMPFILE) too.
func unnamed() (*os.File, error) {
	f, err := os.CreateTemp("", "upload-*")
	if errors.Is(err, os.ErrNotExist) { // an image without /tmp
		f, err = os.CreateTemp("/", ".upload-*")
	}
	if err != nil {
		return nil, err
	}
	return f, os.Remove(f.Name())
}

// fits says whether a file can get a size, as far as its file system says.
func fits(f *os.File, size int64) bool {
	var st unix.Statfs_t
	var is unix.Stat_t
	if unix.Fstatfs(int(f.Fd()), &st) != nil || unix.Fstat(int(f.Fd()), &is) != nil || st.Blocks == 0 || st.Bsize <= 0 {
		return true
	}
	const block = 512 // of stat, whatever the file system's are
	more := size - is.Blocks*block
	return more <= 0 || uint64(more)/uint64(st.Bsize) <= st.Bavail
}

// target is a file that is being written.
type target struct {
	*os.File
	made      bool  // was not there before
	generated bool  // takes what is written, and keeps no content of its own
	old       int64 // bytes to keep until new ones can take their place
	written   int64 // bytes where there were none
}

// undo takes away what was written before something failed. A file that has changed
// since is somebody else's: a client that tries again may have been faster.
func (t *target) undo() {
	fi, err := t.Stat()
	if t.generated || t.old > 0 || err != nil || fi.Size() != t.written {
		return
	}
	if named, err := os.Lstat(t.Name()); t.made && err == nil && os.SameFile(fi, named) {
		_ = os.Remove(t.Name()) // the failure that led here is what is told
		return
	}
	_ = t.Truncate(0)
}

// create opens a file for writing without ever waiting. A new file gets mode 0644 by the
// agent's umask.
func create(path string) (*target, *failure) {
	const flags = os.O_WRONLY | syscall.O_NONBLOCK | syscall.O_NOCTTY
	// O_CREAT only if need be: with fs.protected_regular it fails on files of other
	// users in /tmp, even for root.
	f, err := os.OpenFile(path, flags, 0)
	made := false
	if errors.Is(err, os.ErrNotExist) {
		f, err = os.OpenFile(path, flags|os.O_CREATE|os.O_EXCL, 0o666)
		if made = err == nil; errors.Is(err, os.ErrExist) { // a link to nothing, or somebody was faster
			f, err = os.OpenFile(path, flags|os.O_CREATE, 0o666)
		}
	}
	switch {
	case errors.Is(err, syscall.EISDIR):
		return nil, &failure{http.StatusBadRequest, fmt.Sprintf("path is a directory: %s", path)}
	case errors.Is(err, syscall.ENXIO), errors.Is(err, syscall.ENODEV): // a FIFO without a reader, a socket
		return nil, notRegular(path)
	case err != nil:
		return nil, fault(err)
	}
	fi, err := f.Stat()
	switch {
	case err != nil:
		f.Close()
		return nil, fault(err)
	case !fi.Mode().IsRegular():
		f.Close()
		return nil, notRegular(path)
	}
	t := &target{File: f, made: made, generated: generated(f)}
	if !t.generated {
		t.old = fi.Size()
	}
	return t, nil
}
