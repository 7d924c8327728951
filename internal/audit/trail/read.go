// Package trail reads, checks and keeps the log of records as a whole.
package trail

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/klauspost/compress/zstd"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
)

// A log is a directory:
//
//	log.jsonl            the records, a line each
//	log-N.jsonl.zst      earlier ones, from number N on
//	blobs/XX/HASH        what is too large for a line
const (
	current   = "log.jsonl"
	segment   = "log-"
	plainEnd  = ".jsonl"
	packedEnd = ".jsonl.zst"
)

// Line is a record and the bytes that it was read from, which its hash is of.
type Line struct {
	audit.Record
	Raw []byte // without the newline; valid until the next one is read
}

// Source is records and their blobs: a log, or an export of one.
type Source interface {
	// Records yields the records from a number on, in order. It goes on after a line that is
	// not a record, which comes with an error and its bytes.
	Records(from uint64) iter.Seq2[Line, error]
	// Blob opens content by its hash, which the reader has to check. Kind NotFound.
	Blob(sha256 string) (io.ReadCloser, error)
}

// Dir is the log in a directory, for reading. Others may write to it meanwhile.
type Dir string

// segments lists the files of the log from the oldest to the newest, with the number of
// their first record; that of the newest is 0 if there is no other.
func (d Dir) segments() (names []string, firsts []uint64, err error) {
	entries, err := os.ReadDir(string(d))
	if err != nil {
		return nil, nil, berm.Errorf(berm.KindOf(err), "audit log: %w", err)
	}
	type part struct {
		first uint64
		name  string
	}
	var parts []part
	for _, e := range entries {
		number, ok := strings.CutPrefix(e.Name(), segment)
		if !ok {
			continue
		}
		packed := strings.HasSuffix(number, packedEnd)
		number = strings.TrimSuffix(strings.TrimSuffix(number, packedEnd), plainEnd)
		first, err := strconv.ParseUint(number, 10, 64)
		if err != nil {
			continue
		}
		at, found := slices.BinarySearchFunc(parts, first, func(p part, n uint64) int { return int(int64(p.first) - int64(n)) })
		switch {
		case !found:
			parts = slices.Insert(parts, at, part{first, e.Name()})
		case !packed: // a crash came between packing and removing it
			parts[at].name = e.Name()
		}
	}
	for _, p := range parts {
		names, firsts = append(names, p.name), append(firsts, p.first)
	}
	return append(names, current), append(firsts, 0), nil
}

// Records implements Source.
func (d Dir) Records(from uint64) iter.Seq2[Line, error] {
	return func(yield func(Line, error) bool) { records(d.raw(from), from, yield) }
}

// records yields the records of lines, from a number on.
func records(lines iter.Seq2[[]byte, error], from uint64, yield func(Line, error) bool) {
	for raw, err := range lines {
		if n, ok := seqOf(raw); ok && n < from {
			continue // without decoding it: who follows a log does this for most of it
		}
		line := Line{Raw: raw}
		if err == nil {
			if err = json.Unmarshal(raw, &line.Record); err != nil {
				err = fmt.Errorf("this is not a record: %w", err)
			} else if line.Seq < from {
				continue
			}
		}
		if !yield(line, err) {
			return
		}
	}
}

// seqOf is the number of a line as this version writes it.
func seqOf(raw []byte) (n uint64, ok bool) {
	digits, ok := bytes.CutPrefix(raw, []byte(`{"v":1,"seq":`))
	if !ok {
		return 0, false
	}
	for i, c := range digits {
		switch {
		case c == ',' && i > 0:
			return n, true
		case c < '0' || c > '9' || i > 18:
			return 0, false
		}
		n = n*10 + uint64(c-'0')
	}
	return 0, false
}

// raw yields the lines of the files that can hold a record from a number on. A line is valid
// until the next one; an error without one is the last.
func (d Dir) raw(from uint64) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		names, firsts, err := d.segments()
		if err != nil {
			yield(nil, err)
			return
		}
		for i, name := range names {
			if i+1 < len(names) && firsts[i+1] > 0 && firsts[i+1] <= from {
				continue
			}
			for raw, err := range d.file(name) {
				if !yield(raw, err) || raw == nil {
					return
				}
			}
		}
	}
}

// file yields the lines of one file.
func (d Dir) file(name string) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) { d.eachLine(name, yield) }
}

func (d Dir) eachLine(name string, yield func([]byte, error) bool) {
	f, err := os.Open(filepath.Join(string(d), name))
	if errors.Is(err, fs.ErrNotExist) && name != current { // packed meanwhile
		name = strings.TrimSuffix(name, plainEnd) + packedEnd
		f, err = os.Open(filepath.Join(string(d), name))
	}
	if errors.Is(err, fs.ErrNotExist) && name == current {
		return
	}
	if err != nil {
		yield(nil, berm.Errorf(berm.KindOf(err), "audit log: %w", err))
		return
	}
	defer f.Close()
	var content io.Reader = f
	if strings.HasSuffix(name, packedEnd) {
		unpacked, err := zstd.NewReader(f, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(64<<20))
		if err != nil {
			yield(nil, berm.Errorf(berm.Internal, "audit log %s: %w", name, err))
			return
		}
		defer unpacked.Close()
		content = unpacked
	}
	lines(content, name, name == current, yield)
}

// lines yields the lines that content has. The last line of a log that is being written may
// be half there: growing leaves it out.
func lines(content io.Reader, name string, growing bool, yield func([]byte, error) bool) {
	r := bufio.NewReaderSize(content, 2*audit.MaxLine)
	for n := 1; ; n++ {
		raw, err := r.ReadSlice('\n')
		switch {
		case errors.Is(err, io.EOF) && (len(raw) == 0 || growing):
			return
		case errors.Is(err, io.EOF):
			err = errors.New("it is cut off")
			fallthrough
		case err != nil:
			yield(nil, fmt.Errorf("%s: line %d: %w", name, n, err))
			return
		}
		if !yield(raw[:len(raw)-1:len(raw)-1], nil) {
			return
		}
	}
}

// Blob implements Source.
func (d Dir) Blob(sha256 string) (io.ReadCloser, error) {
	if !isHash(sha256) {
		return nil, berm.Errorf(berm.Invalid, "%q is not a SHA-256", sha256)
	}
	f, err := os.Open(filepath.Join(string(d), audit.BlobDir, sha256[:2], sha256))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, berm.Errorf(berm.NotFound, "the content %s is not kept", sha256)
	}
	return f, err
}

func isHash(s string) bool {
	return len(s) == 64 && strings.Trim(s, "0123456789abcdef") == ""
}
