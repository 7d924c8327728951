package ledger

import (
	"crypto/sha256"
	"encoding/hex"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Version is a version of a file: no program can set the time of the last change.
type Version struct {
	Dev, Ino     uint64
	Size         int64
	Mtime, Ctime unix.Timespec
}

// VersionOf is the version that a file has now. ok is false for what is no regular file.
func VersionOf(f *os.File) (v Version, ok bool) {
	var st unix.Stat_t
	if unix.Fstat(int(f.Fd()), &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return v, false
	}
	return Version{st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim}, true
}

const (
	maxHashes = 10_000    // remembered
	maxHashed = 512 << 20 // bytes of a file that is hashed
	maxLate   = 8 << 20   // also when hurry says so
)

// Hashes are those of executables. They are safe for concurrent use.
type Hashes struct {
	mu    sync.Mutex
	known map[Version]string
}

// Known is the SHA-256 of a version, in hexadecimal; "" when it is not known.
func (h *Hashes) Known(v Version) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.known[v]
}

// Sum reads the SHA-256 of a version from its file, "" when it cannot be known: the file is too
// large, or changed meanwhile. hurry, if it is not nil, is asked whether a large one has to wait no more.
func (h *Hashes) Sum(f *os.File, v Version, hurry func() bool) string {
	if hash := h.Known(v); hash != "" {
		return hash
	}
	if v.Size > maxHashed {
		return ""
	}
	sum := sha256.New()
	for {
		if v.Size > maxLate && hurry != nil && hurry() {
			return ""
		}
		if _, err := io.CopyN(sum, f, 1<<20); err == io.EOF { //nolint:errorlint // io.CopyN returns it as it is
			break
		} else if err != nil {
			return ""
		}
	}
	if now, ok := VersionOf(f); !ok || now != v {
		return ""
	}
	hash := hex.EncodeToString(sum.Sum(nil))
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.known == nil || len(h.known) > maxHashes {
		h.known = map[Version]string{}
	}
	h.known[v] = hash
	return hash
}
