package audit

import (
	"bytes"
	"encoding/json"

	"github.com/berm-sandbox/berm"
)

// AppendBody appends a record as its source hands it to a log in another process: a JSON object of
// the fields that the source fills, in the order that they have in a line. What is too long for a
// line is cut. Kind Invalid.
func AppendBody(b []byte, r Record) ([]byte, error) {
	start := len(b)
	b, err := appendBody(append(b, '{'), &r)
	if size := len(b) - start; err == nil && size > MaxLine {
		if err = r.shorten(size); err == nil {
			b, err = appendBody(b[:start+1], &r)
		}
		if size = len(b) - start; err == nil && size > MaxLine {
			return b[:start], berm.Errorf(berm.Invalid, "audit record: %d bytes are too long for a line", size)
		}
	}
	if err != nil {
		return b[:start], berm.Errorf(berm.Invalid, "audit record: %w", err)
	}
	return append(b, '}'), nil
}

// fields are those of a body in their order.
var fields = []struct {
	key    string
	needed bool
	check  func(r *Record, value []byte) bool
}{
	{`"team":`, false, isText},
	{`"sandbox":`, false, func(r *Record, value []byte) bool {
		r.Sandbox = berm.SandboxID(bytes.Trim(value, `"`))
		// Who erases looks for it as it is written.
		return len(value) == len(r.Sandbox)+2 && r.Sandbox != "" && bytes.IndexByte(value, '\\') < 0
	}},
	{`"actor":`, true, isActor},
	{`"type":`, true, func(r *Record, value []byte) bool {
		r.Type = types[string(value)]
		return r.Type != ""
	}},
	{`"src":`, true, func(_ *Record, value []byte) bool { return value[0] == '"' && string(value) != `"`+OwnSource+`"` }},
	{`"trust":`, true, isText},
	{`"outcome":`, true, isText},
	{`"reason":`, false, isText},
	{`"policyRev":`, false, isText},
	{`"data":`, false, func(*Record, []byte) bool { return true }},
	{`"blobs":`, false, func(_ *Record, value []byte) bool { return isA[[]Blob](value) }},
	{`"traceID":`, false, isText},
}

// types are those that others than the log itself may tell of, as they stand in a line.
var types = map[string]Type{}

func init() {
	for _, t := range Types {
		if t != Erase && t != Removed && t != KeyRotate {
			types[`"`+string(t)+`"`] = t
		}
	}
}

func isText(_ *Record, value []byte) bool { return value[0] == '"' }

// isActor reports whether a value, which is one, is written as an Actor is.
func isActor(_ *Record, value []byte) bool {
	rest, ok := bytes.CutPrefix(value, []byte(`{"type":"`))
	if !ok {
		return false
	}
	rest = rest[textEnd(rest, -1):]
	if id, ok := bytes.CutPrefix(rest, []byte(`,"id":"`)); ok {
		rest = id[textEnd(id, -1):]
	}
	return string(rest) == "}"
}

// isA reports whether a value is what a reader of the log decodes into a T, and no more than that.
func isA[T any](value []byte) bool {
	d := json.NewDecoder(bytes.NewReader(value))
	d.DisallowUnknownFields()
	return d.Decode(new(T)) == nil
}

// ParseBody reads what AppendBody wrote in another process, and keeps body: nothing but a record
// of a known type that the log does not make itself, with no field twice. Only Sandbox and Type are
// set besides. Kind Invalid.
func ParseBody(body []byte) (Record, error) {
	var r Record
	if !r.take(body) {
		return Record{}, berm.Errorf(berm.Invalid, "this is not a record that can be handed over")
	}
	return r, nil
}

func (r *Record) take(body []byte) bool {
	if len(body) < 2 || len(body) > MaxLine+1 || body[0] != '{' || body[len(body)-1] != '}' {
		return false
	}
	rest := body[1 : len(body)-1]
	r.body = rest
	for i := range fields {
		f := &fields[i]
		if len(rest) < len(f.key) || string(rest[:len(f.key)]) != f.key {
			if f.needed {
				return false
			}
			continue
		}
		rest = rest[len(f.key):]
		n := valueEnd(rest, 0, 0)
		if n < 0 || !f.check(r, rest[:n]) {
			return false
		}
		if rest = rest[n:]; len(rest) > 0 {
			if rest[0] != ',' || len(rest) == 1 {
				return false
			}
			rest = rest[1:]
		}
	}
	return len(rest) == 0
}

// unfold makes fields of a body, for one that must be changed.
func (r *Record) unfold() error {
	if r.body == nil {
		return nil
	}
	whole := append(append([]byte{'{'}, r.body...), '}')
	r.body = nil
	head := *r
	if err := json.Unmarshal(whole, r); err != nil {
		return err
	}
	r.V, r.Seq, r.Time, r.Host, r.Salt, r.Prev = head.V, head.Seq, head.Time, head.Host, head.Salt, head.Prev
	return nil
}
