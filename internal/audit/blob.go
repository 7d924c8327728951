package audit

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// BlobDir is the directory of blobs in that of the log: XX/HASH by the SHA-256 in hex.
const BlobDir = "blobs"

// MaxBlob bounds one blob in bytes.
const MaxBlob = 64 << 20

// BlobWriter takes content that a record will name. It is kept when Commit returns; a record
// must not name it earlier. Discard, or a crash, leaves nothing.
type BlobWriter struct {
	dir  string
	kind string
	file *os.File
	sum  interface {
		io.Writer
		Sum([]byte) []byte
	}
	size int64
}

// NewBlob begins a blob of a log's directory.
func NewBlob(dir, kind string) (*BlobWriter, error) {
	blobs := filepath.Join(dir, BlobDir)
	if err := os.MkdirAll(blobs, 0o700); err != nil {
		return nil, berm.Errorf(berm.Internal, "audit blob: %w", err)
	}
	f, err := os.CreateTemp(blobs, "new-*")
	if err != nil {
		return nil, berm.Errorf(berm.Unavailable, "audit blob: %w", err)
	}
	return &BlobWriter{dir: blobs, kind: kind, file: f, sum: sha256.New()}, nil
}

// Write adds content. Kind Exhausted beyond MaxBlob; nothing of p is taken then.
func (b *BlobWriter) Write(p []byte) (int, error) {
	if b.size+int64(len(p)) > MaxBlob {
		return 0, berm.Errorf(berm.Exhausted, "an audit blob has at most %d bytes", MaxBlob)
	}
	n, err := b.file.Write(p)
	_, _ = b.sum.Write(p[:n])
	b.size += int64(n)
	return n, err
}

// Size is how many bytes were written.
func (b *BlobWriter) Size() int64 { return b.size }

// Commit keeps the content under its hash.
func (b *BlobWriter) Commit() (Blob, error) {
	sum := hex.EncodeToString(b.sum.Sum(nil))
	// How old it is counts from now on, however long ago it was written: a record is to name it.
	err := errors.Join(unix.Futimes(int(b.file.Fd()), nil), b.file.Close())
	if err == nil {
		err = os.MkdirAll(filepath.Join(b.dir, sum[:2]), 0o700)
	}
	if err == nil {
		err = os.Rename(b.file.Name(), filepath.Join(b.dir, sum[:2], sum))
	}
	if err != nil {
		_ = os.Remove(b.file.Name())
		return Blob{}, berm.Errorf(berm.Unavailable, "audit blob: %w", err)
	}
	return Blob{SHA256: sum, Size: b.size, Kind: b.kind}, nil
}

// Discard throws the content away. It does nothing after Commit.
func (b *BlobWriter) Discard() {
	if b.file.Close() == nil {
		_ = os.Remove(b.file.Name())
	}
}
