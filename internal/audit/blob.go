package audit

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"hash"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
)

// BlobDir is the directory of blobs in that of the log: XX/HASH by the SHA-256 in hex.
const BlobDir = "blobs"

// MaxBlob bounds one blob in bytes.
const MaxBlob = 64 << 20

// BlobWriter takes content that a record will name. It is kept when Commit returns; a record
// must not name it earlier. Discard, or a crash, leaves nothing that could be named.
type BlobWriter struct {
	kind string
	file *os.File
	keep Keep
	sum  hash.Hash
	size int64
}

// Keep names the content that was written by its hash; "" is that it is thrown away.
type Keep func(sha256 string) error

// Blobs is what begins blobs: a log.
type Blobs interface {
	NewBlob(kind string) (*BlobWriter, error)
}

// Directory is that of a log.
type Directory string

// NewBlob implements Blobs.
func (d Directory) NewBlob(kind string) (*BlobWriter, error) {
	f, err := d.CreateBlob()
	if err != nil {
		return nil, err
	}
	name := filepath.Base(f.Name())
	return WriteBlob(f, kind, func(sum string) error { return d.KeepBlob(name, sum) }), nil
}

// WriteBlob begins a blob in a file of CreateBlob, which keep gives its name.
func WriteBlob(f *os.File, kind string, keep Keep) *BlobWriter {
	return &BlobWriter{kind: kind, file: f, keep: keep, sum: sha256.New()}
}

// unnamed begins the names of files whose content has no hash yet.
const unnamed = "new-"

// CreateBlob makes the file of a blob.
func (d Directory) CreateBlob() (*os.File, error) {
	blobs := filepath.Join(string(d), BlobDir)
	if err := os.MkdirAll(blobs, 0o700); err != nil {
		return nil, berm.Errorf(berm.Internal, "audit blob: %w", err)
	}
	f, err := os.CreateTemp(blobs, unnamed+"*")
	if err != nil {
		return nil, berm.Errorf(berm.Unavailable, "audit blob: %w", err)
	}
	return f, nil
}

// RemoveUnnamed removes files of CreateBlob that nobody writes to any more.
func (d Directory) RemoveUnnamed() error {
	left, err := filepath.Glob(filepath.Join(string(d), BlobDir, unnamed+"*"))
	for _, path := range left {
		err = errors.Join(err, os.Remove(path))
	}
	return err
}

// KeepBlob names a file of CreateBlob, which is not written to any more, by the hash of its content; ""
// removes it. It may be called again. Kind Invalid when these are no names of such.
func (d Directory) KeepBlob(name, sum string) error {
	digits, ok := strings.CutPrefix(name, unnamed)
	_, err := strconv.ParseUint(digits, 10, 64)
	raw, hexErr := hex.DecodeString(sum)
	if !ok || err != nil || hexErr != nil || sum != "" && (len(raw) != sha256.Size || strings.ToLower(sum) != sum) {
		return berm.Errorf(berm.Invalid, "audit blob: %q cannot be named %q", name, sum)
	}
	blobs := filepath.Join(string(d), BlobDir)
	path := filepath.Join(blobs, name)
	if sum == "" {
		err = os.Remove(path)
	} else {
		to := filepath.Join(blobs, sum[:2], sum)
		// How old it is counts from now on, however long ago it was written: a record is to name it.
		err = os.Chtimes(path, time.Time{}, time.Now())
		if err == nil {
			err = os.MkdirAll(filepath.Dir(to), 0o700)
		}
		if err == nil {
			err = os.Rename(path, to)
		}
		if errors.Is(err, fs.ErrNotExist) {
			if _, have := os.Lstat(to); have == nil {
				err = nil
			}
		}
	}
	if err != nil {
		return berm.Errorf(berm.Unavailable, "audit blob: %w", err)
	}
	return nil
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
	err := b.file.Close()
	if err == nil {
		err = b.keep(sum)
	}
	if err != nil {
		_ = b.keep("")
		return Blob{}, berm.Errorf(berm.Unavailable, "audit blob: %w", err)
	}
	return Blob{SHA256: sum, Size: b.size, Kind: b.kind}, nil
}

// Discard throws the content away. It does nothing after Commit.
func (b *BlobWriter) Discard() {
	if b.file.Close() == nil {
		_ = b.keep("")
	}
}
