package audit

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
	"time"
)

// Stream is what a frame is of.
type Stream byte

// The streams.
const (
	Stdout Stream = 'o' // also the output of a terminal
	Stderr Stream = 'e'
	Stdin  Stream = 'i'
	Resize Stream = 'r' // data: COLUMNSxROWS
	Cut    Stream = 'c' // output is missing from here on to the next frame; data: how many bytes, in decimal
)

// Frame is a piece of output and when it came.
type Frame struct {
	At     time.Duration // since the start of the command
	Stream Stream
	Data   []byte
}

// MaxFrame bounds the data of one frame in bytes.
const MaxFrame = 64 << 10

// FrameWriter writes frames: the microseconds since the frame before as a varint, the
// stream, the length as a varint, the data.
type FrameWriter struct {
	w    io.Writer
	last int64
	head []byte
}

// NewFrameWriter writes to w, unbuffered: a frame is two writes.
func NewFrameWriter(w io.Writer) *FrameWriter { return &FrameWriter{w: w} }

// Write adds one frame; larger data becomes several.
func (w *FrameWriter) Write(f Frame) error {
	for {
		data := f.Data[:min(len(f.Data), MaxFrame)]
		f.Data = f.Data[len(data):]
		at := max(f.At.Microseconds(), w.last)
		w.head = binary.AppendUvarint(w.head[:0], uint64(at-w.last))
		w.head = append(w.head, byte(f.Stream))
		w.head = binary.AppendUvarint(w.head, uint64(len(data)))
		w.last = at
		if _, err := w.w.Write(w.head); err != nil {
			return err
		}
		if _, err := w.w.Write(data); err != nil {
			return err
		}
		if len(f.Data) == 0 {
			return nil
		}
	}
}

// FrameReader reads what a FrameWriter wrote.
type FrameReader struct {
	r  *bufio.Reader
	at int64
}

// NewFrameReader reads from r.
func NewFrameReader(r io.Reader) *FrameReader { return &FrameReader{r: bufio.NewReader(r)} }

// Read returns the next frame, or io.EOF. Other errors mean that the rest cannot be read:
// the content is not to be trusted to be well formed.
func (r *FrameReader) Read() (Frame, error) {
	delta, err := binary.ReadUvarint(r.r)
	if err != nil {
		return Frame{}, err
	}
	stream, err := r.r.ReadByte()
	if err != nil {
		return Frame{}, unexpected(err)
	}
	n, err := binary.ReadUvarint(r.r)
	if err != nil {
		return Frame{}, unexpected(err)
	}
	const century = 100 * 365 * 24 * 3600 * 1_000_000
	if n > MaxFrame || delta > century || r.at+int64(delta) > century {
		return Frame{}, errors.New("a frame is out of bounds")
	}
	r.at += int64(delta)
	f := Frame{At: time.Duration(r.at) * time.Microsecond, Stream: Stream(stream), Data: make([]byte, n)}
	if _, err := io.ReadFull(r.r, f.Data); err != nil {
		return Frame{}, unexpected(err)
	}
	return f, nil
}

func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
