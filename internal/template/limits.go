package template

import (
	"bufio"
	"bytes"
	"errors"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/berm-sandbox/berm"
)

// Budget is what unpacking one image may still use. Layers draw on it in turn.
type Budget struct {
	Bytes     int64 // of tar streams, decompressed
	FileBytes int64 // of any single file
	Entries   int64 // files, links and directories, those made for missing parents too
	Memory    int64 // bytes of what is remembered of directories until a layer is whole
	Ratio     int64 // decompressed to compressed, once a layer is past ratioFrom
}

// DefaultBudget holds the largest images in common use several times over.
var DefaultBudget = Budget{Bytes: 32 << 30, FileBytes: 16 << 30, Entries: 500_000, Memory: 256 << 20, Ratio: 200}

// ratioFrom is how much a layer may decompress to before its ratio is judged: short
// streams of zeros compress without bound.
const ratioFrom = 64 << 20

// maxWindow is the largest zstd window that a decoder allocates.
const maxWindow = 128 << 20

// maxPath and maxName are what the kernel takes in one call.
const (
	maxPath = 4095
	maxName = 255
)

// maxXattr is the kernel's limit of an extended attribute's value.
const maxXattr = 64 << 10

// perName is about what a directory takes in memory beside its name and attributes.
const perName = 256

func tooLarge(what string, limit int64) error {
	return berm.Errorf(berm.Invalid, "the image has more than %d %s", limit, what).
		WithHint("The limit keeps a hostile archive from filling the disk.")
}

// decompress returns the plain tar stream of a layer: gzip, zstd or tar by its
// first bytes, since media types are what the sender claims. Reading more than
// the budget's bytes, or at more than its ratio, fails.
func decompress(r io.Reader, b *Budget) (io.Reader, error) {
	in := &counter{r: r}
	buffered := bufio.NewReaderSize(in, 64<<10)
	magic, err := buffered.Peek(6)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	var plain io.Reader
	switch {
	case bytes.HasPrefix(magic, []byte{0x1f, 0x8b}):
		plain, err = gzip.NewReader(buffered)
	case bytes.HasPrefix(magic, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		plain, err = zstd.NewReader(buffered, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxWindow))
	case bytes.HasPrefix(magic, []byte("BZh")), bytes.HasPrefix(magic, []byte("\xfd7zXZ\x00")):
		return nil, berm.Errorf(berm.Unsupported, "the layer is compressed with bzip2 or xz").WithHint("Use gzip or zstd, as the OCI image format says.")
	default:
		return &guard{r: buffered, budget: b, source: in}, nil
	}
	if err != nil {
		return nil, berm.Errorf(berm.Invalid, "decompress the layer: %w", err)
	}
	return &guard{r: plain, budget: b, source: in, compressed: true}, nil
}

type counter struct {
	r   io.Reader
	n   int64
	err error // of the source itself, not of its format
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	if err != nil && !errors.Is(err, io.EOF) {
		c.err = err
	}
	return n, err
}

// guard holds a stream to the budget.
type guard struct {
	r          io.Reader
	n          int64
	budget     *Budget
	source     *counter
	compressed bool
}

func (g *guard) Read(p []byte) (int, error) {
	n, err := g.r.Read(p)
	g.n += int64(n)
	if g.budget.Bytes -= int64(n); g.budget.Bytes < 0 {
		return 0, tooLarge("bytes", g.n)
	}
	if g.compressed && g.n > ratioFrom && g.n/g.budget.Ratio > g.source.n {
		return 0, berm.Errorf(berm.Invalid, "the layer decompresses to more than %d times its size", g.budget.Ratio)
	}
	if err != nil && !errors.Is(err, io.EOF) && g.source.err == nil {
		err = berm.Errorf(berm.Invalid, "decompress the layer: %w", err)
	}
	return n, err
}
