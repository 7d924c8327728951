package arrival

import (
	"bytes"
	"container/list"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/klauspost/compress/gzip"
)

// Patience is how long one read waits while nothing arrives, before it fails.
const Patience = time.Minute

// failing is how long a failure is remembered: when the kernel read ahead in vain it asks once
// more for what somebody waits for, who would wait twice.
const failing = time.Second

// maxCached bounds the memory for unpacked chunks. The kernel keeps what was read, so this is
// for the rest of a chunk, which is read next.
const maxCached = 64 << 20

// chunks unpacks and checks chunks, each once at a time.
type chunks struct {
	blobs []*blob

	mu     sync.Mutex
	known  map[place]*list.Element // of *loaded
	recent *list.List              // the newest first
	size   int64
}

// place tells a chunk from others.
type place struct {
	blob        int
	from, inner int64
	digest      [sha256.Size]byte
}

// loaded is a chunk that is there, or on its way.
type loaded struct {
	place place
	done  chan struct{}
	data  []byte
	err   error
}

func newChunks(blobs []*blob) *chunks {
	return &chunks{blobs: blobs, known: map[place]*list.Element{}, recent: list.New()}
}

// get returns what a chunk holds. The caller may stop waiting; the chunk comes all the same.
func (c *chunks) get(cancel <-chan struct{}, of int, chunk Chunk) ([]byte, error) {
	at := place{of, chunk.From, chunk.Inner, chunk.Digest}
	c.mu.Lock()
	e, ok := c.known[at]
	if ok {
		c.recent.MoveToFront(e)
	} else {
		e = c.recent.PushFront(&loaded{place: at, done: make(chan struct{})})
		c.known[at] = e
		c.size += chunk.Size
		c.evict()
		go c.load(e, chunk)
	}
	l := e.Value.(*loaded)
	c.mu.Unlock()
	select {
	case <-l.done:
		return l.data, l.err
	case <-cancel:
		return nil, context.Canceled
	}
}

// evict lets go of the oldest chunks beyond the limit. It needs the lock.
func (c *chunks) evict() {
	for e := c.recent.Back(); e != nil && c.size > maxCached && e != c.recent.Front(); {
		older := e.Prev()
		select {
		case <-e.Value.(*loaded).done:
			c.remove(e)
		default:
		}
		e = older
	}
}

func (c *chunks) remove(e *list.Element) {
	l := c.recent.Remove(e).(*loaded)
	delete(c.known, l.place)
	c.size -= int64(len(l.data))
}

func (c *chunks) load(e *list.Element, chunk Chunk) {
	l := e.Value.(*loaded)
	data, err := c.read(context.Background(), c.blobs[l.place.blob], chunk)
	c.mu.Lock()
	defer c.mu.Unlock()
	l.data, l.err = data, err
	close(l.done)
	if err != nil { // whoever reads it later tries again
		c.size -= chunk.Size
		time.AfterFunc(failing, func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			if c.known[l.place] == e {
				c.remove(e)
			}
		})
	}
}

// read brings a chunk. What does not hash to its digest is fetched once more: the disk may have
// lost it when the machine stopped.
func (c *chunks) read(ctx context.Context, b *blob, chunk Chunk) ([]byte, error) {
	for try := 0; ; try++ {
		if err := b.ensure(ctx, chunk.From, chunk.To); err != nil {
			return nil, err
		}
		data, err := unpack(io.NewSectionReader(b.file, chunk.From, chunk.To-chunk.From), chunk)
		if err == nil || try == 1 {
			return data, err
		}
		if err := b.forget(chunk.From, chunk.To); err != nil {
			return nil, err
		}
	}
}

// unpack reads a chunk from its part of the blob and checks it.
func unpack(r io.Reader, chunk Chunk) ([]byte, error) {
	z, err := gzip.NewReader(r)
	if err != nil {
		return nil, err
	}
	if _, err := io.CopyN(io.Discard, z, chunk.Inner); err != nil {
		return nil, err
	}
	var data bytes.Buffer // grows with what comes, not with what was said
	if _, err := io.CopyN(&data, z, chunk.Size); err != nil {
		return nil, err
	}
	if sha256.Sum256(data.Bytes()) != chunk.Digest {
		return nil, fmt.Errorf("the chunk at %d is another one", chunk.From)
	}
	return data.Bytes(), nil
}
