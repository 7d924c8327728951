package arrival

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// registry has a blob, and answers as said.
type registry struct {
	blob  []byte
	slow  time.Duration // for each block
	err   error
	times int // that it fails with err; 0 is always
}

func (r *registry) Range(ctx context.Context, _ string, offset, size int64) (io.ReadCloser, error) {
	if err := r.err; err != nil {
		if r.times--; r.times == 0 {
			r.err = nil
		}
		return nil, err
	}
	return io.NopCloser(&trickle{ctx, r.blob[offset : offset+size], r.slow}), nil
}

type trickle struct {
	ctx  context.Context //nolint:containedctx // of the request
	left []byte
	slow time.Duration
}

func (t *trickle) Read(p []byte) (int, error) {
	select {
	case <-time.After(t.slow):
	case <-t.ctx.Done():
		return 0, t.ctx.Err()
	}
	n := copy(p, t.left)
	t.left = t.left[n:]
	return n, nil
}

func (r *registry) arriving(t *testing.T) *blob {
	t.Helper()
	dir := t.TempDir()
	var files [2]*os.File
	for i, name := range []string{"blob", "have"} {
		f, err := os.Create(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		files[i] = f
	}
	b, err := newBlob("digest", int64(len(r.blob)), files[0], files[1], r)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Who waits for something large from a slow registry gets it, however long it takes, as long as
// something comes; when nothing does, the wait ends.
func TestPatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &registry{blob: make([]byte, 6*BlockSize), slow: 45 * time.Second}
		b := r.arriving(t)
		begun := time.Now()
		if err := b.ensure(t.Context(), 0, int64(len(r.blob))); err != nil {
			t.Errorf("after %v: %v", time.Since(begun), err)
		}
		if took := time.Since(begun); took < 2*Patience {
			t.Errorf("it took %v: nothing was tried", took)
		}
		r.slow = time.Hour
		b, begun = r.arriving(t), time.Now()
		if err := b.ensure(t.Context(), 0, 1); err == nil || errors.Is(err, context.Canceled) {
			t.Errorf("error %v", err)
		}
		if took := time.Since(begun); took > Patience+time.Second {
			t.Errorf("it took %v", took)
		}
	})
}

// Who is told that a read failed has waited once, though the kernel asks twice, and who reads
// later tries again.
func TestFailsOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var packed bytes.Buffer
		z := gzip.NewWriter(&packed)
		_, _ = z.Write([]byte("word"))
		z.Close()
		r := &registry{blob: packed.Bytes(), err: errors.New("status 500")}
		c := newChunks([]*blob{r.arriving(t)})
		chunk := Chunk{To: int64(packed.Len()), Size: 4, Digest: sha256.Sum256([]byte("word"))}
		begun := time.Now()
		for range 2 {
			if _, err := c.get(nil, 0, chunk); !errors.Is(err, r.err) {
				t.Errorf("error %v", err)
			}
		}
		if took := time.Since(begun); took > Patience+time.Second {
			t.Errorf("it took %v", took)
		}
		r.err = nil
		time.Sleep(2 * failing)
		if got, err := c.get(nil, 0, chunk); string(got) != "word" || err != nil {
			t.Errorf("got %q, %v", got, err)
		}
		if c.size != 4 || len(c.known) != 1 {
			t.Errorf("%d chunks of %d bytes are known", len(c.known), c.size)
		}
	})
}

// What keeps a blob from coming is told when it happens twice, and that it comes again.
func TestFillTellsWhy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &registry{blob: make([]byte, 2*BlockSize), err: errors.New("status 500"), times: 2}
		var told []string
		err := r.arriving(t).fill(t.Context(), func() <-chan struct{} { return nil }, func(why string) { told = append(told, why) })
		if want := []string{"status 500", ""}; err != nil || !slices.Equal(told, want) {
			t.Errorf("told %q, want %q; %v", told, want, err)
		}
	})
}
