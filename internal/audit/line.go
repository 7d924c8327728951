package audit

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/berm-sandbox/berm/internal/terminal"
)

// encode appends a line that is at most MaxLine bytes long, holds nothing that looks like a
// token, and can be shown on a terminal.
func encode(lines []byte, r *Record) ([]byte, error) {
	start := len(lines)
	lines, err := safe(lines, r)
	if err != nil || len(lines)-start <= MaxLine {
		return lines, err
	}
	if err = r.shorten(len(lines) - start); err != nil {
		return lines, err
	}
	if lines, err = safe(lines[:start], r); err == nil && len(lines)-start > MaxLine {
		err = fmt.Errorf("%d bytes are too long for a line", len(lines)-start)
	}
	return lines, err
}

// shorten leaves of what a record tells that it was size bytes long.
func (r *Record) shorten(size int) error {
	if err := r.unfold(); err != nil {
		return err
	}
	r.Data = map[string]any{"cut": size}
	if len(r.Reason) > 1024 {
		r.Reason = r.Reason[:1024]
	}
	return nil
}

// safe appends a line without tokens. Salt and hash at its end are none, whatever they look like.
func safe(lines []byte, r *Record) ([]byte, error) {
	start := len(lines)
	lines, err := appendRecord(lines, r)
	if err != nil {
		return lines, err
	}
	// Sandboxes choose much of what is in a record, and JSON leaves C1 control characters and
	// those that reorder text as they are.
	if !plain(lines[start:]) {
		lines = append(lines[:start], terminal.EscapeJSON(lines[start:])...)
	}
	body := lines[start:]
	if masked := MaskTokens(body); len(masked) != len(body) || &masked[0] != &body[0] {
		// A line that is no JSON would be the end of the log: should a pattern ever take too
		// much, the record goes without what it tells.
		if whole := append(bytes.Clone(masked), '}'); !json.Valid(whole) {
			if err := r.unfold(); err != nil {
				return lines, err
			}
			r.Data, r.Reason, r.Blobs = map[string]any{"masked": true}, "", nil
			if lines, err = appendRecord(lines[:start], r); err != nil {
				return lines, err
			}
		} else {
			lines = append(lines[:start], masked...)
		}
	}
	if r.Salt != "" {
		lines = append(append(append(lines, `,"salt":"`...), r.Salt...), '"')
	}
	lines = append(append(lines, `,"prev":"`...), r.Prev...)
	return append(lines, `"}`...), nil
}

// plain reports whether a terminal shows a JSON text as it is, whatever it is: it has nothing
// but printable ASCII.
func plain(text []byte) bool {
	if bytes.IndexByte(text, 0x7f) >= 0 {
		return false
	}
	for ; len(text) >= 8; text = text[8:] {
		if binary.NativeEndian.Uint64(text)&0x8080808080808080 != 0 {
			return false
		}
	}
	for _, c := range text {
		if c >= 0x80 {
			return false
		}
	}
	return true
}

// appendRecord appends what json.Marshal makes of a record, up to Salt, which is left out with
// what follows it. It is done by hand because most of what a record costs is here.
func appendRecord(b []byte, r *Record) ([]byte, error) {
	b = strconv.AppendInt(append(b, `{"v":`...), int64(r.V), 10)
	b = strconv.AppendUint(append(b, `,"seq":`...), r.Seq, 10)
	b = r.Time.AppendFormat(append(b, `,"time":"`...), time.RFC3339Nano)
	b = append(appendText(append(b, `","host":`...), r.Host), ',')
	if r.body != nil {
		return append(b, r.body...), nil
	}
	return appendBody(b, r)
}

// appendBody appends the fields of a record that its source fills, as they stand in a line.
func appendBody(b []byte, r *Record) ([]byte, error) {
	if r.Team != "" {
		b = append(appendText(append(b, `"team":`...), string(r.Team)), ',')
	}
	if r.Sandbox != "" {
		b = append(appendText(append(b, `"sandbox":`...), string(r.Sandbox)), ',')
	}
	b = appendText(append(b, `"actor":{"type":`...), r.Actor.Type)
	if r.Actor.ID != "" {
		b = appendText(append(b, `,"id":`...), r.Actor.ID)
	}
	b = appendText(append(b, `},"type":`...), string(r.Type))
	b = appendText(append(b, `,"src":`...), r.Src)
	b = appendText(append(b, `,"trust":`...), string(r.Trust))
	b = appendText(append(b, `,"outcome":`...), string(r.Outcome))
	if r.Reason != "" {
		b = appendText(append(b, `,"reason":`...), r.Reason)
	}
	if r.PolicyID != "" {
		b = appendText(append(b, `,"policyRev":`...), r.PolicyID)
	}
	switch data := r.Data.(type) {
	case nil:
	case Process: // of which there are most
		b = appendProcess(append(b, `,"data":`...), &data)
	default:
		text, err := json.Marshal(data)
		if err != nil {
			return b, err
		}
		b = append(append(b, `,"data":`...), text...)
	}
	if len(r.Blobs) > 0 {
		blobs, err := json.Marshal(r.Blobs)
		if err != nil {
			return b, err
		}
		b = append(append(b, `,"blobs":`...), blobs...)
	}
	if r.TraceID != "" {
		b = appendText(append(b, `,"traceID":`...), r.TraceID)
	}
	return b, nil
}

// appendProcess appends what json.Marshal makes of a process.
func appendProcess(b []byte, p *Process) []byte {
	b = strconv.AppendInt(append(b, `{"pid":`...), int64(p.PID), 10)
	if p.PPID != 0 {
		b = strconv.AppendInt(append(b, `,"ppid":`...), int64(p.PPID), 10)
	}
	if p.Host != 0 {
		b = strconv.AppendInt(append(b, `,"host":`...), int64(p.Host), 10)
	}
	b = strconv.AppendInt(append(b, `,"uid":`...), int64(p.UID), 10)
	if p.Ago != 0 {
		b = strconv.AppendInt(append(b, `,"ago":`...), p.Ago, 10)
	}
	if p.Exe != "" {
		b = appendText(append(b, `,"exe":`...), p.Exe)
	}
	if p.SHA256 != "" {
		b = appendText(append(b, `,"sha256":`...), p.SHA256)
	}
	for i, arg := range p.Argv {
		if i == 0 {
			b = append(b, `,"argv":[`...)
		} else {
			b = append(b, ',')
		}
		b = appendText(b, arg)
	}
	if len(p.Argv) > 0 {
		b = append(b, ']')
	}
	if p.Cwd != "" {
		b = appendText(append(b, `,"cwd":`...), p.Cwd)
	}
	if p.Cut {
		b = append(b, `,"cut":true`...)
	}
	if p.Asked {
		b = append(b, `,"asked":true`...)
	}
	if p.Code != nil {
		b = strconv.AppendInt(append(b, `,"code":`...), int64(*p.Code), 10)
	}
	if p.Signal != "" {
		b = appendText(append(b, `,"signal":`...), p.Signal)
	}
	if p.Call != "" {
		b = appendText(append(b, `,"call":`...), p.Call)
	}
	if p.Error != "" {
		b = appendText(append(b, `,"error":`...), p.Error)
	}
	return append(b, '}')
}

// appendText appends a string of JSON as json.Marshal writes it.
func appendText(b []byte, s string) []byte {
	for i := range len(s) {
		if c := s[i]; c < 0x20 || c >= 0x7f || c == '"' || c == '\\' || c == '<' || c == '>' || c == '&' {
			text, _ := json.Marshal(s) // a text always marshals
			return append(b, text...)
		}
	}
	return append(append(append(b, '"'), s...), '"')
}
