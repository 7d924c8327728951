package files

import (
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
	switch encoding := strings.ToLower(strings.TrimSpace(r.Header.Get("Content-Encoding"))); encoding {
	case "", "identity":
	case "gzip", "x-gzip":
		z, err := gzip.NewReader(r.Body)
		if err != nil {
			return nil, &failure{http.StatusBadRequest, fmt.Sprintf("gzip body: %v", err)}
		}
		r.Body = io.NopCloser(z) // the server closes the real one
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
		if fail := u.store(u.path, r.Body); fail != nil {
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
		if fail := u.store(path, part); fail != nil {
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

// store writes one file, its metadata included.
func (u *upload) store(path string, body io.Reader) *failure {
	if err := u.user.MakeDirs(filepath.Dir(path)); err != nil {
		return fault(err)
	}
	f, fail := create(path)
	if fail != nil {
		return fail
	}
	defer f.Close()
	if err := f.Chown(int(u.user.UID), int(u.user.GID)); err != nil && !generated(f) {
		return fault(err)
	}
	buf := buffers.Get().(*[bufferSize]byte)
	defer buffers.Put(buf)
	if _, err := io.CopyBuffer(struct{ io.Writer }{f}, struct{ io.Reader }{body}, buf[:]); err != nil {
		if _, ok := errors.AsType[*os.PathError](err); ok {
			return fault(err)
		}
		return &failure{http.StatusBadRequest, fmt.Sprintf("read body: %v", err)}
	}
	if err := metadata.Write(f, u.meta); err != nil && !errors.Is(err, syscall.EOPNOTSUPP) {
		// Without extended attributes the file stands; the answer shows no metadata.
		return fault(err)
	}
	if err := f.Close(); err != nil {
		return fault(err)
	}
	u.entries = append(u.entries, entryOf(path))
	return nil
}

// create opens a file for writing, empty, without ever waiting. A new file gets mode
// 0644 by the agent's umask.
func create(path string) (*os.File, *failure) {
	const flags = os.O_WRONLY | syscall.O_NONBLOCK | syscall.O_NOCTTY
	// O_CREAT only if need be: with fs.protected_regular it fails on files of other
	// users in /tmp, even for root.
	f, err := os.OpenFile(path, flags, 0)
	if errors.Is(err, os.ErrNotExist) {
		f, err = os.OpenFile(path, flags|os.O_CREATE, 0o666)
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
	if err == nil && !fi.Mode().IsRegular() {
		f.Close()
		return nil, notRegular(path)
	}
	if err == nil && fi.Size() > 0 && !generated(f) {
		err = f.Truncate(0)
	}
	if err != nil {
		f.Close()
		return nil, fault(err)
	}
	return f, nil
}
