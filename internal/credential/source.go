package credential

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// Source has secrets by name. The caller owns the bytes and wipes them. NotFound when
// there is none of that name.
type Source interface {
	Value(ctx context.Context, name string) ([]byte, error)
}

// Sources are by the scheme of a reference: "env:NAME" is the Source "env". A server gives
// those who use its API the source of stored secrets alone.
type Sources map[string]Source

// Value resolves a reference. Invalid when it has no scheme that there is.
func (s Sources) Value(ctx context.Context, reference string) ([]byte, error) {
	scheme, name, ok := strings.Cut(reference, ":")
	source := s[scheme]
	if !ok || source == nil {
		// The reference may be a secret that somebody wrote in the wrong place: it is not told.
		return nil, berm.Errorf(berm.Invalid, "a reference to a secret has no scheme that can be used here").
			WithHint("write secret:NAME for a stored one, or where the operator allows it env:NAME or file:PATH")
	}
	return source.Value(ctx, name)
}

// Env has the variables of this process.
type Env struct{}

// Value returns a variable that is set and not empty.
func (Env) Value(_ context.Context, name string) ([]byte, error) {
	value := os.Getenv(name)
	if value == "" {
		return nil, berm.Errorf(berm.NotFound, "the variable %s is not set", quote(name))
	}
	return []byte(value), nil
}

// Files has files of this machine, by absolute path.
type Files struct{}

// MaxValue bounds a secret in bytes.
const MaxValue = 64 << 10

// Value returns what a file holds, without a line end at its end. Links are followed: the
// mounted secrets of systemd and Kubernetes are links.
func (Files) Value(_ context.Context, name string) ([]byte, error) {
	if !filepath.IsAbs(name) {
		return nil, berm.Errorf(berm.Invalid, "the file of a secret is named by its absolute path, not %s", quote(name))
	}
	file, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		kind := berm.Denied
		if os.IsNotExist(err) {
			kind = berm.NotFound
		}
		return nil, berm.Errorf(kind, "read a secret: %w", err)
	}
	defer file.Close()
	if info, err := file.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, berm.Errorf(berm.Invalid, "read a secret: %s is no regular file", quote(name))
	}
	value := make([]byte, MaxValue+1)
	n, err := io.ReadFull(file, value)
	switch {
	case err == nil:
		clear(value)
		return nil, berm.Errorf(berm.Invalid, "read a secret: %s is longer than 64 KiB", quote(name))
	case err != io.EOF && err != io.ErrUnexpectedEOF: //nolint:errorlint // io.ReadFull returns them bare
		return nil, berm.Errorf(berm.Internal, "read a secret: %w", err)
	}
	value = bytes.TrimRight(value[:n], "\r\n")
	if len(value) == 0 {
		return nil, berm.Errorf(berm.NotFound, "read a secret: %s is empty", quote(name))
	}
	return value, nil
}
