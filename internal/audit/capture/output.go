package capture

import (
	"bufio"
	"strconv"
	"time"

	"github.com/berm-sandbox/berm/internal/audit"
)

// Of more output than one blob takes, the first part is kept and the last maxTail bytes.
const (
	maxTail = 1 << 20
	maxHead = audit.MaxBlob - maxTail - audit.MaxFrame - 4096
	// frameCost is what a frame takes in memory beside its data.
	frameCost = 64
)

// Output is what one command shows that does not run by a guest agent, as its record has it.
type Output struct {
	out   output
	keeps bool
	began time.Time
	bytes int64
}

// Output begins to keep what a command that begins now shows, or only counts it.
func (c *Recorder) Output() *Output {
	return &Output{out: output{blobs: c.blobs}, keeps: c.output, began: time.Now()}
}

// Add takes a piece, of any size.
func (o *Output) Add(stream audit.Stream, data []byte) {
	o.bytes += int64(len(data))
	if o.keeps {
		o.out.add(time.Since(o.began), stream, data)
	}
}

// End says how many bytes there were and what keeps them. An error says why nothing does. It is
// called once.
func (o *Output) End() (bytes int64, blobs []audit.Blob, err error) {
	blobs, err = o.out.end()
	return o.bytes, blobs, err
}

// output keeps the frames of one command.
type output struct {
	blobs   audit.Blobs
	blob    *audit.BlobWriter // nil before the first frame
	buffer  *bufio.Writer
	frames  *audit.FrameWriter
	head    int64 // bytes in the blob
	full    bool  // from here on only the tail
	tail    []audit.Frame
	gone    int   // frames at the start of tail that were dropped
	tailed  int64 // bytes and cost of tail
	dropped int64 // bytes of output before the tail
	lostAt  time.Duration
	failed  error
}

// add takes a piece of output. data is copied if it must be.
func (o *output) add(at time.Duration, stream audit.Stream, data []byte) {
	if o.failed != nil || len(data) == 0 {
		return
	}
	if !o.full && o.head+int64(len(data))+frameCost*int64(1+len(data)/audit.MaxFrame) <= maxHead {
		o.keep(audit.Frame{At: at, Stream: stream, Data: data})
		return
	}
	o.full = true
	for len(data) > 0 {
		piece := data[:min(len(data), audit.MaxFrame)]
		data = data[len(piece):]
		o.tail = append(o.tail, audit.Frame{At: at, Stream: stream, Data: append([]byte(nil), piece...)})
		o.tailed += int64(len(piece)) + frameCost
	}
	for o.tailed > maxTail {
		first := &o.tail[o.gone]
		o.tailed -= int64(len(first.Data)) + frameCost
		o.lost(first.At, int64(len(first.Data)))
		*first = audit.Frame{}
		o.gone++
	}
	if o.gone > len(o.tail)/2 {
		o.tail = append(o.tail[:0], o.tail[o.gone:]...)
		o.gone = 0
	}
}

// lost counts output that is not kept.
func (o *output) lost(at time.Duration, n int64) {
	if o.dropped == 0 {
		o.lostAt = at
	}
	o.dropped += n
}

// miss takes note of output that could not be read.
func (o *output) miss(at time.Duration, n int64) {
	if o.full = o.full || o.head > maxHead; o.full {
		o.lost(at, n)
		return
	}
	o.cut(at, n)
}

func (o *output) cut(at time.Duration, n int64) {
	o.keep(audit.Frame{At: at, Stream: audit.Cut, Data: strconv.AppendInt(nil, n, 10)})
}

// keep writes a frame to the blob.
func (o *output) keep(f audit.Frame) {
	if o.failed != nil {
		return
	}
	if o.blob == nil {
		if o.blob, o.failed = o.blobs.NewBlob(audit.KindFrames); o.failed != nil {
			return
		}
		o.buffer = bufio.NewWriterSize(o.blob, 64<<10)
		o.frames = audit.NewFrameWriter(o.buffer)
	}
	o.failed = o.frames.Write(f)
	o.head += int64(len(f.Data)) + frameCost*int64(1+len(f.Data)/audit.MaxFrame)
}

// end keeps what there is and returns it as the blobs of a record.
func (o *output) end() ([]audit.Blob, error) {
	if o.dropped > 0 {
		o.cut(o.lostAt, o.dropped)
	}
	for _, f := range o.tail[o.gone:] {
		o.keep(f)
	}
	o.tail, o.gone = nil, 0
	if o.blob == nil {
		return nil, o.failed
	}
	if o.failed == nil {
		o.failed = o.buffer.Flush()
	}
	if o.failed != nil {
		o.blob.Discard()
		return nil, o.failed
	}
	blob, err := o.blob.Commit()
	if err != nil {
		return nil, err
	}
	return []audit.Blob{blob}, nil
}
