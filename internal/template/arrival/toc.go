package arrival

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/containerd/stargz-snapshotter/estargz"

	"github.com/berm-sandbox/berm"
)

// Bounds of what a table of contents may hold.
const (
	maxPacked = 64 << 20  // of the table, in the blob
	maxTable  = 256 << 20 // of the table, unpacked
	maxChunk  = 64 << 20  // what has to be unpacked to read one byte; builders use 4 MiB
)

// maxRecords bounds the entries of a table: the unpacker has a limit for files. It is smaller in tests.
var maxRecords = 1_000_000

// Entry is one file of a layer, as the layer's table of contents has it.
type Entry struct {
	Header *tar.Header
	Chunks []Chunk // of a regular file, in their order
}

// Chunk is a part of a file: where it is in the compressed blob, and what it must hash to.
type Chunk struct {
	From, To int64 // in the blob: one gzip stream, or several
	Inner    int64 // in what that unpacks to
	At, Size int64 // in the file
	Digest   [sha256.Size]byte
}

// ReadTOC reads the table of contents of a layer of the given size, in the format eStargz
// (github.com/containerd/stargz-snapshotter, docs/estargz.md). The table must hash to want,
// which the image's manifest says, before anything of it is believed. Kinds: Unsupported (the
// layer has no such table, or one that cannot be used file by file), Invalid (it is another
// one, malformed or hostile; the error names the entry), and what blob fails with.
func ReadTOC(blob io.ReaderAt, size int64, want string) ([]Entry, error) {
	sum, ok := parseDigest(want)
	if !ok {
		return nil, invalid("%.100q is no digest of a table of contents", want)
	}
	format := new(estargz.GzipDecompressor)
	if size < estargz.FooterSize {
		return nil, berm.Errorf(berm.Unsupported, "the layer is no eStargz")
	}
	footer := make([]byte, estargz.FooterSize)
	if _, err := blob.ReadAt(footer, size-estargz.FooterSize); err != nil {
		return nil, fmt.Errorf("read the layer's end: %w", err)
	}
	_, from, _, err := format.ParseFooter(footer)
	if err != nil {
		return nil, berm.Errorf(berm.Unsupported, "the layer is no eStargz: %w", err)
	}
	end := size - estargz.FooterSize
	if from <= 0 || from >= end {
		return nil, invalid("the table of contents is said to be at %d of %d bytes", from, size)
	}
	if end-from > maxPacked {
		return nil, berm.Errorf(berm.Unsupported, "the table of contents has %d bytes", end-from)
	}
	packed := make([]byte, end-from)
	if _, err := blob.ReadAt(packed, from); err != nil {
		return nil, fmt.Errorf("read the table of contents: %w", err)
	}
	plain, err := format.DecompressTOC(bytes.NewReader(packed))
	if err != nil {
		return nil, invalid("the table of contents: %w", err)
	}
	defer plain.Close()
	table, err := io.ReadAll(io.LimitReader(plain, maxTable+1))
	if err != nil {
		return nil, invalid("the table of contents: %w", err)
	}
	if len(table) > maxTable {
		return nil, berm.Errorf(berm.Unsupported, "the table of contents has more than %d bytes", maxTable)
	}
	if got := sha256.Sum256(table); got != sum {
		return nil, invalid("the table of contents hashes to sha256:%x and not to %s as the image says", got, want)
	}
	return parseTOC(table, from)
}

// parseTOC reads a table whose layer's files end at the given place of the blob.
func parseTOC(table []byte, end int64) ([]Entry, error) {
	records, err := readRecords(table)
	if err != nil {
		return nil, err
	}
	var entries []Entry
	file := -1                // index of the one that chunks belong to
	var last estargz.TOCEntry // which had a chunk
	var chunks []*Chunk
	for _, r := range records {
		if r.Type != "chunk" {
			h, err := header(r)
			if err != nil {
				return nil, entryError(r.Name, err)
			}
			if complete(entries, file) != nil {
				return nil, complete(entries, file)
			}
			entries, file = append(entries, Entry{Header: h}), -1
			if h.Typeflag != tar.TypeReg {
				continue
			}
			file = len(entries) - 1
			if h.Size == 0 {
				continue
			}
		} else if file < 0 || r.Name != "" && r.Name != entries[file].Header.Name {
			return nil, entryError(r.Name, invalid("a chunk of no file"))
		}
		e := &entries[file]
		at := int64(0)
		if n := len(e.Chunks); n > 0 {
			at = e.Chunks[n-1].At + e.Chunks[n-1].Size
		}
		c := Chunk{From: r.Offset, Inner: r.InnerOffset, At: at, Size: r.ChunkSize}
		if c.Size == 0 {
			c.Size = e.Header.Size - at
		}
		digest := r.ChunkDigest
		if digest == "" && len(e.Chunks) == 0 && c.Size == e.Header.Size {
			digest = r.Digest // of a file that is one chunk
		}
		var ok bool
		c.Digest, ok = parseDigest(digest)
		switch {
		case !ok:
			err = berm.Errorf(berm.Unsupported, "a chunk has no digest")
		case r.ChunkOffset != at, c.Size <= 0, c.Size > e.Header.Size-at:
			err = invalid("a chunk of %d bytes at %d, in a file of %d", r.ChunkSize, r.ChunkOffset, e.Header.Size)
		case c.From < 0, c.From >= end, c.Inner < 0:
			err = invalid("a chunk is said to be at %d and %d of %d", c.From, c.Inner, end)
		case c.From < last.Offset, c.From == last.Offset && last.ChunkSize > 0 && c.Inner < last.InnerOffset+last.ChunkSize:
			err = invalid("a chunk at %d and %d overlaps another", c.From, c.Inner)
		case c.Inner > maxChunk || c.Size > maxChunk-c.Inner:
			err = berm.Errorf(berm.Unsupported, "a chunk has %d bytes; %d are possible", c.Inner+c.Size, maxChunk)
		}
		if err != nil {
			return nil, entryError(e.Header.Name, err)
		}
		last = estargz.TOCEntry{Offset: c.From, InnerOffset: c.Inner, ChunkSize: c.Size}
		e.Chunks = append(e.Chunks, c)
	}
	if err := complete(entries, file); err != nil {
		return nil, err
	}
	for i := range entries {
		for j := range entries[i].Chunks {
			chunks = append(chunks, &entries[i].Chunks[j])
		}
	}
	// A chunk's stream ends where the next one begins, of whatever file.
	for _, c := range slices.Backward(chunks) {
		c.To = end
		if c.From < last.Offset {
			end = last.Offset
			c.To = end
		}
		last.Offset = c.From
	}
	return entries, nil
}

// complete checks that the chunks of a file make it up.
func complete(entries []Entry, file int) error {
	if file < 0 {
		return nil
	}
	e := &entries[file]
	have := int64(0)
	if n := len(e.Chunks); n > 0 {
		have = e.Chunks[n-1].At + e.Chunks[n-1].Size
	}
	if have != e.Header.Size {
		return entryError(e.Header.Name, invalid("its chunks have %d of %d bytes", have, e.Header.Size))
	}
	return nil
}

// readRecords reads the JSON one entry at a time: what it takes in memory is many times what it
// takes as text.
func readRecords(table []byte) (records []*estargz.TOCEntry, err error) {
	d := json.NewDecoder(bytes.NewReader(table))
	failed := func(err error) error { return invalid("the table of contents: %w", err) }
	if err := expect(d, json.Delim('{')); err != nil {
		return nil, failed(err)
	}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return nil, failed(err)
		}
		if key != "entries" {
			var ignored json.RawMessage
			if err := d.Decode(&ignored); err != nil {
				return nil, failed(err)
			}
			continue
		}
		if records != nil {
			return nil, invalid("the table of contents has two lists")
		}
		if err := expect(d, json.Delim('[')); err != nil {
			return nil, failed(err)
		}
		records = []*estargz.TOCEntry{}
		for d.More() {
			if len(records) == maxRecords {
				return nil, berm.Errorf(berm.Unsupported, "the table of contents has more than %d entries", maxRecords)
			}
			r := new(estargz.TOCEntry)
			if err := d.Decode(r); err != nil {
				return nil, failed(err)
			}
			records = append(records, r)
		}
		if err := expect(d, json.Delim(']')); err != nil {
			return nil, failed(err)
		}
	}
	if err := expect(d, json.Delim('}')); err != nil {
		return nil, failed(err)
	}
	return records, nil
}

func expect(d *json.Decoder, want json.Delim) error {
	got, err := d.Token()
	if err == nil && got != want {
		err = fmt.Errorf("%v in the place of %v", got, want)
	}
	return err
}

// types are the names that tables have for kinds of files.
var types = map[string]byte{
	"dir": tar.TypeDir, "reg": tar.TypeReg, "symlink": tar.TypeSymlink, "hardlink": tar.TypeLink,
	"char": tar.TypeChar, "block": tar.TypeBlock, "fifo": tar.TypeFifo,
}

// header is what the layer's archive says of an entry; times are in seconds.
func header(r *estargz.TOCEntry) (*tar.Header, error) {
	kind, ok := types[r.Type]
	if !ok {
		return nil, invalid("type %.20q is unknown", r.Type)
	}
	h := &tar.Header{Typeflag: kind, Name: r.Name, Linkname: r.LinkName, Mode: r.Mode, Uid: r.UID, Gid: r.GID}
	if kind == tar.TypeReg {
		if h.Size = r.Size; h.Size < 0 {
			return nil, invalid("its size is %d", h.Size)
		}
	}
	if r.ModTime3339 != "" {
		var err error
		if h.ModTime, err = time.Parse(time.RFC3339, r.ModTime3339); err != nil {
			return nil, invalid("its time: %w", err)
		}
	}
	for name, value := range r.Xattrs {
		if h.PAXRecords == nil {
			h.PAXRecords = map[string]string{}
		}
		h.PAXRecords["SCHILY.xattr."+name] = string(value)
	}
	return h, nil
}

func parseDigest(s string) (sum [sha256.Size]byte, ok bool) {
	hexadecimal, ok := strings.CutPrefix(s, "sha256:")
	if !ok || len(hexadecimal) != 2*len(sum) {
		return sum, false
	}
	_, err := hex.Decode(sum[:], []byte(hexadecimal))
	return sum, err == nil
}

func invalid(format string, args ...any) error { return berm.Errorf(berm.Invalid, format, args...) }

func entryError(name string, err error) error {
	if len(name) > 200 {
		name = name[:200] + "…"
	}
	return berm.Errorf(berm.KindOf(err), "entry %q: %w", name, err)
}
