package files

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/guest/rest"
)

const bufferSize = 64 << 10

var buffers = sync.Pool{New: func() any { return new([bufferSize]byte) }}

// Get answers with the content of a file.
func (h *Handler) Get(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	if err := h.authorize(r, query, read); err != nil {
		rest.Error(w, http.StatusUnauthorized, err.Error())
		return
	}
	_, path, fail := h.resolve(query.Get("username"), query.Get("path"))
	if fail != nil {
		fail.answer(w)
		return
	}
	f, size, fail := open(path)
	if fail != nil {
		fail.answer(w)
		return
	}
	defer f.Close()
	send(w, r, f, size)
}

// unsized is the size of what must be read to know it.
const unsized = -1

// open opens a regular file without ever waiting: on FIFOs and devices an ordinary
// open or read may last for ever.
func open(path string) (*os.File, int64, *failure) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOCTTY, 0)
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return nil, 0, &failure{http.StatusNotFound, fmt.Sprintf("path '%s' does not exist", path)}
	case errors.Is(err, syscall.ENXIO), errors.Is(err, syscall.ENODEV): // a socket, a device without a driver
		return nil, 0, notRegular(path)
	case err != nil:
		return nil, 0, &failure{http.StatusInternalServerError, fmt.Sprintf("open '%s': %v", path, err)}
	}
	fi, err := f.Stat()
	switch {
	case err != nil:
		f.Close()
		return nil, 0, &failure{http.StatusInternalServerError, err.Error()}
	case fi.IsDir():
		f.Close()
		return nil, 0, &failure{http.StatusBadRequest, fmt.Sprintf("path '%s' is a directory", path)}
	case !fi.Mode().IsRegular():
		f.Close()
		return nil, 0, notRegular(path)
	case fi.Size() == 0 || generated(f):
		return f, unsized, nil
	}
	return f, fi.Size(), nil
}

func notRegular(path string) *failure {
	return &failure{http.StatusBadRequest, fmt.Sprintf("path '%s' is not a regular file", path)}
}

// generated says whether the kernel makes up the content as it is read, so that the
// size that it reports (0 in /proc, a page in /sys) means nothing.
func generated(f *os.File) bool {
	var st unix.Statfs_t
	if unix.Fstatfs(int(f.Fd()), &st) != nil {
		return false
	}
	switch uint32(st.Type) {
	case unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC,
		unix.DEBUGFS_MAGIC, unix.TRACEFS_MAGIC, unix.SECURITYFS_MAGIC, 0x62656570 /* configfs */, 0x65735543 /* fusectl */ :
		return true
	}
	return false
}

func send(w http.ResponseWriter, r *http.Request, f *os.File, size int64) {
	wantGzip, plainOK := acceptEncoding(r.Header.Get("Accept-Encoding"))
	partial := false
	for _, name := range []string{"Range", "If-Range", "If-Modified-Since", "If-Unmodified-Since", "If-None-Match", "If-Match"} {
		partial = partial || r.Header.Get(name) != ""
	}
	if !plainOK && (!wantGzip || partial) {
		rest.Error(w, http.StatusNotAcceptable, "no acceptable encoding: gzip and identity can be had, with Range and conditions only identity")
		return
	}

	buf := buffers.Get().(*[bufferSize]byte)
	defer buffers.Put(buf)
	n, err := io.ReadFull(f, buf[:])
	if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
		rest.Error(w, http.StatusInternalServerError, fmt.Sprintf("read '%s': %v", f.Name(), err))
		return
	}
	head, whole := buf[:n], err != nil
	header := w.Header()
	header.Set("Vary", "Accept-Encoding")
	header.Set("Content-Type", http.DetectContentType(head)) // never the sandbox's mime.types
	if v := mime.FormatMediaType("inline", map[string]string{"filename": filepath.Base(f.Name())}); v != "" {
		header.Set("Content-Disposition", v)
	}

	switch {
	case whole && n == 0:
		header.Set("Content-Length", "0") // clients tell an empty file by it
		w.WriteHeader(http.StatusOK)
	case wantGzip && !partial:
		header.Set("Content-Encoding", "gzip")
		z, _ := gzip.NewWriterLevel(w, gzip.BestSpeed)
		if _, err := z.Write(head); err == nil && !whole {
			_, err = io.Copy(z, f)
			abort(err)
		}
		abort(z.Close())
	case whole && size == unsized:
		fi, err := f.Stat()
		if err != nil {
			rest.Error(w, http.StatusInternalServerError, err.Error())
			return
		}
		http.ServeContent(w, r, "", fi.ModTime(), bytes.NewReader(head))
	case size == unsized:
		_, _ = w.Write(head)
		_, err := io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{f}, buf[:])
		abort(err)
	default:
		fi, err := f.Stat()
		if err == nil {
			_, err = f.Seek(0, io.SeekStart)
		}
		if err != nil {
			rest.Error(w, http.StatusInternalServerError, err.Error())
			return
		}
		http.ServeContent(w, r, "", fi.ModTime(), f)
	}
}

// abort cuts the connection when a body cannot be completed: a clean end would pass
// for the whole file.
func abort(err error) {
	if err != nil {
		panic(http.ErrAbortHandler)
	}
}
