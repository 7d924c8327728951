// Package writer has the audit log of a server written by a process of its own, which holds the
// signing key and the files.
//
// Records go over one connection, many at a time; the other brings all else. The writer judges what
// comes: it takes no record that only it makes, and no name of a file but of those that it made.
package writer

import (
	"encoding/binary"
	"encoding/json"
	"io"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/service"
)

// protocol is the number of the protocol that this build speaks.
const protocol = 1

// A batch is a length and, so long, records, each with its length; lengths are 32 bits,
// little-endian. The answer is the number of the last record of the log, 64 bits, and a length of
// refusals, in JSON.
const (
	maxBatch    = 1 << 20 // bytes
	maxRefusals = 1 << 20
)

// refusal is why records of a batch were not taken.
type refusal struct {
	At    int              `json:"at"` // which; all is every one that has no refusal of its own
	Error *service.Failure `json:"error"`
}

const all = -1

// message is what goes over the other connection, in both directions.
type message struct {
	ID uint64 `json:"id,omitempty"` // of a question and its answer; each side counts for itself

	// From the server.
	Begin    bool            `json:"begin,omitempty"`    // a blob, whose file comes with the answer
	Name     string          `json:"name,omitempty"`     // of that file, which gets its hash for a name
	SHA256   string          `json:"sha256,omitempty"`   // "" throws it away
	Erase    *trail.Erasure  `json:"erase,omitempty"`    //
	Dry      bool            `json:"dry,omitempty"`      // of Erase
	EraseAll []trail.Erasure `json:"eraseAll,omitempty"` //
	Rotate   bool            `json:"rotate,omitempty"`   // the key
	Close    bool            `json:"close,omitempty"`    // all was said: the end of the connection is no death
	Holding  *holding        `json:"holding,omitempty"`  // the answer to Holds

	// From the writer.
	Ready *ready           `json:"ready,omitempty"` // the first message, unless it is an error
	Holds bool             `json:"holds,omitempty"` // which sandboxes are held?
	Log   string           `json:"log,omitempty"`   // what goes wrong beside records
	Error *service.Failure `json:"error,omitempty"`
}

// ready says that the log is open.
type ready struct {
	Protocol int    `json:"protocol"`
	Origin   string `json:"origin"`
	Seq      uint64 `json:"seq"`
	// Taken is how many of the records after the one that the server knew were the server's, and
	// Told whether one of the others tells of those for which there was no space.
	Taken int  `json:"taken"`
	Told  bool `json:"told,omitempty"`
}

type holding struct {
	Sandboxes []berm.SandboxID `json:"sandboxes"`
}

// lengthSize is that of the length of a batch, or of a record in it.
const lengthSize = 4

// setLength writes the length of a batch, which begins with room for it.
func setLength(batch []byte) {
	binary.LittleEndian.PutUint32(batch, uint32(len(batch)-lengthSize))
}

// appendEntry appends a record to a batch.
func appendEntry(batch []byte, body []byte) []byte {
	return append(binary.LittleEndian.AppendUint32(batch, uint32(len(body))), body...)
}

// readBatch reads the next batch into buffer, which it returns, grown. The error is io.EOF when
// nothing more comes.
func readBatch(r io.Reader, buffer []byte) ([]byte, error) {
	var head [lengthSize]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return buffer, err
	}
	n := binary.LittleEndian.Uint32(head[:])
	if n == 0 || n > maxBatch {
		return buffer, berm.Errorf(berm.Invalid, "a batch of %d bytes", n)
	}
	if cap(buffer) < int(n) {
		buffer = make([]byte, n)
	}
	buffer = buffer[:n]
	_, err := io.ReadFull(r, buffer)
	return buffer, err
}

// entries are the records of a batch, which they keep.
type entries struct {
	records []audit.Record
	at      []int // where each was in the batch
	refused []refusal
}

// parse reads a batch. Records that are none are refused; a batch that is none is an error.
func (e *entries) parse(batch []byte) error {
	e.records, e.at, e.refused = e.records[:0], e.at[:0], nil
	for at := 0; len(batch) > 0; at++ {
		if len(batch) < 4 || uint64(len(batch)-4) < uint64(binary.LittleEndian.Uint32(batch)) {
			return berm.Errorf(berm.Invalid, "a batch that ends in the middle of a record")
		}
		n := binary.LittleEndian.Uint32(batch)
		r, err := audit.ParseBody(batch[4 : 4+n : 4+n])
		if err != nil {
			e.refused = append(e.refused, refusal{at, service.Failed(err)})
		} else {
			e.records, e.at = append(e.records, r), append(e.at, at)
		}
		batch = batch[4+n:]
	}
	return nil
}

// appendAnswer appends the answer to a batch.
func appendAnswer(b []byte, seq uint64, refused []refusal) ([]byte, error) {
	b = binary.LittleEndian.AppendUint64(b, seq)
	var text []byte
	if len(refused) > 0 {
		var err error
		if text, err = json.Marshal(refused); err != nil {
			return b, err
		}
		if len(text) > maxRefusals { // there were thousands, which a server does not send
			if text, err = json.Marshal([]refusal{{all, refused[0].Error}}); err != nil {
				return b, err
			}
		}
	}
	return append(binary.LittleEndian.AppendUint32(b, uint32(len(text))), text...), nil
}

// readAnswer reads the answer to a batch. The error is that of the reader only when nothing of it was read.
func readAnswer(r io.Reader) (seq uint64, refused []refusal, err error) {
	var head [12]byte
	if n, err := io.ReadFull(r, head[:]); err != nil {
		if n > 0 {
			err = io.ErrUnexpectedEOF
		}
		return 0, nil, err
	}
	n := binary.LittleEndian.Uint32(head[8:])
	if n > maxRefusals {
		return 0, nil, berm.Errorf(berm.Invalid, "an answer of %d bytes", n)
	}
	if n > 0 {
		text := make([]byte, n)
		if _, err = io.ReadFull(r, text); err != nil {
			err = io.ErrUnexpectedEOF
		} else {
			err = json.Unmarshal(text, &refused)
		}
		for _, f := range refused {
			if err == nil && f.Error == nil {
				err = berm.Errorf(berm.Invalid, "a refusal without a reason")
			}
		}
	}
	return binary.LittleEndian.Uint64(head[:]), refused, err
}
