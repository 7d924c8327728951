package inspect

import (
	"errors"
	"io"
	"sync"
	"sync/atomic"
)

// countedBody counts what is read of a request's body, by the goroutine that sends it.
type countedBody struct {
	io.ReadCloser
	n     atomic.Int64
	ended atomic.Bool
}

func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.n.Add(int64(n))
	if errors.Is(err, io.EOF) {
		b.ended.Store(true)
	}
	return n, err
}

// replyBuffers lends the buffers through which replies are copied.
type replyBuffers struct{}

func (replyBuffers) Get() []byte { return buffers.Get().(*[32 << 10]byte)[:] }

func (replyBuffers) Put(b []byte) { buffers.Put((*[32 << 10]byte)(b)) }

var buffers = sync.Pool{New: func() any { return new([32 << 10]byte) }}
