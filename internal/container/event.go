package container

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"unicode/utf8"

	"github.com/berm-sandbox/berm"
)

// Event is one line of an interpreter's answer: *Output, *Result, *Failure, *Count or *Keepalive.
// The words are those of E2B's code interpreter.
type Event interface{ Kind() string }

// Output is what code wrote to a standard stream.
type Output struct {
	Type      string `json:"type"` // stdout or stderr
	Text      string `json:"text"`
	Timestamp string `json:"timestamp,omitempty"` // as the kernel has it
}

// Result is a value that code showed, in every form that it has. Images are in base64.
type Result struct {
	Type       string          `json:"type"` // result
	Text       string          `json:"text,omitempty"`
	HTML       string          `json:"html,omitempty"`
	Markdown   string          `json:"markdown,omitempty"`
	SVG        string          `json:"svg,omitempty"`
	PNG        string          `json:"png,omitempty"`
	JPEG       string          `json:"jpeg,omitempty"`
	PDF        string          `json:"pdf,omitempty"`
	LaTeX      string          `json:"latex,omitempty"`
	JavaScript string          `json:"javascript,omitempty"`
	JSON       json.RawMessage `json:"json,omitempty"`
	Data       json.RawMessage `json:"data,omitempty"`  // of a table, by columns
	Chart      json.RawMessage `json:"chart,omitempty"` // what a figure shows
	Extra      json.RawMessage `json:"extra,omitempty"` // by other MIME types
	Main       bool            `json:"is_main_result"`  // the value of the last expression
}

// plain is a result for the log: its text, and of the other forms that it has the size and the hash, by
// which they can be told again.
func (e *Result) plain() []byte {
	var text bytes.Buffer
	if e.Text != "" {
		text.WriteString(e.Text + "\n")
	}
	for _, form := range []struct {
		name, value string
		binary      bool
	}{
		{"html", e.HTML, false}, {"markdown", e.Markdown, false}, {"svg", e.SVG, false}, {"png", e.PNG, true}, {"jpeg", e.JPEG, true},
		{"pdf", e.PDF, true}, {"latex", e.LaTeX, false}, {"javascript", e.JavaScript, false}, {"json", string(e.JSON), false},
		{"data", string(e.Data), false}, {"chart", string(e.Chart), false},
	} {
		if form.value == "" {
			continue
		}
		content := []byte(form.value)
		if form.binary {
			if decoded, err := base64.StdEncoding.DecodeString(form.value); err == nil {
				content = decoded
			}
		}
		fmt.Fprintf(&text, "[%s: %d bytes, sha256 %x]\n", form.name, len(content), sha256.Sum256(content))
	}
	return text.Bytes()
}

// Failure is an exception that code did not catch.
type Failure struct {
	Type      string `json:"type"` // error
	Name      string `json:"name"`
	Value     string `json:"value"`
	Traceback string `json:"traceback"`
}

// Count is the number of the execution in its context.
type Count struct {
	Type  string `json:"type"` // number_of_executions
	Count int64  `json:"execution_count"`
}

// Keepalive says that code still runs.
type Keepalive struct {
	Type string `json:"type"` // keepalive
}

// Kind is stdout or stderr.
func (e *Output) Kind() string { return e.Type }

// Kind is result.
func (e *Result) Kind() string { return e.Type }

// Kind is error.
func (e *Failure) Kind() string { return e.Type }

// Kind is number_of_executions.
func (e *Count) Kind() string { return e.Type }

// Kind is keepalive.
func (e *Keepalive) Kind() string { return e.Type }

// endType is the type of the last line.
const endType = "end_of_execution"

// maxLine bounds one line of an interpreter's answer in bytes. Nothing inside is trusted.
const maxLine = 16 << 20

// parse reads a line. Both are zero for one of a type that is not known, which clients ignore.
func parse(line []byte) (e Event, end bool, err error) {
	if !utf8.Valid(line) {
		line = bytes.ToValidUTF8(line, []byte("\uFFFD"))
	}
	var head struct {
		Type string `json:"type"`
	}
	if err := json.Unmarshal(line, &head); err != nil {
		return nil, false, err
	}
	switch head.Type {
	case "stdout", "stderr":
		e = &Output{}
	case "result":
		e = &Result{}
	case "error":
		e = &Failure{}
	case "number_of_executions":
		e = &Count{}
	case "keepalive":
		e = &Keepalive{}
	default:
		return nil, head.Type == endType, nil
	}
	if err := json.Unmarshal(line, e); err != nil {
		return nil, false, err
	}
	return e, false, nil
}

// read calls each for the events of an answer, in order, until it ends as it should. An error of
// each is returned as it is. Unavailable: the answer is cut, or is none of an interpreter.
func read(body io.Reader, each func(Event) error) error {
	broken := func(err error) error {
		if berm.KindOf(err) == berm.NotFound { // the container ended, or was paused
			return err
		}
		return berm.Errorf(berm.Unavailable, "what the container's interpreter answers cannot be read: %w", err).
			WithHint("code in the container can break its interpreter; if this happens again, make another container")
	}
	lines := bufio.NewScanner(body)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		e, end, err := parse(lines.Bytes())
		switch {
		case err != nil:
			return broken(err)
		case end:
			return nil
		case e == nil:
			continue
		}
		if err := each(e); err != nil {
			return err
		}
	}
	switch err := lines.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return berm.Errorf(berm.Exhausted, "the container showed a result of more than %d MiB", maxLine>>20).
			WithHint("write it to a file in the container, and fetch that")
	case err != nil:
		return broken(err)
	}
	return broken(io.ErrUnexpectedEOF)
}
