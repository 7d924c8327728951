package apply

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"path"
)

// indexLimit bounds an index that is read: about 500,000 files.
const indexLimit = 64 << 20

func isIndex(name string) bool { return path.Base(name) == "index" && inRepository(name) }

// indexSum is a digest of what a git index says of the files, without what it remembers of
// their times and inodes: "git status" refreshes that, and always does after an apply. It is
// nil when this is no index that indexEntries understands.
func indexSum(b []byte) []byte {
	h := sha256.New()
	ok := indexEntries(b, func(mode, id []byte, flags uint16, extended, name []byte) {
		// The low 12 bits are the length of the name.
		h.Write(binary.BigEndian.AppendUint16(nil, flags&0xb000))
		h.Write(extended)
		h.Write(mode)
		h.Write(id)
		h.Write(name)
		h.Write([]byte{0})
	})
	if !ok {
		return nil
	}
	return h.Sum(nil)
}

// indexEntries visits the entries of a git index (version 2 to 4, SHA-1), and says whether
// this is one. The slices are valid for one visit only. Format: gitformat-index(5).
func indexEntries(b []byte, visit func(mode, id []byte, flags uint16, extended, name []byte)) bool {
	const header, fixed, checksum = 12, 62, 20
	if len(b) < header+checksum || string(b[:4]) != "DIRC" {
		return false
	}
	version, count := binary.BigEndian.Uint32(b[4:]), binary.BigEndian.Uint32(b[8:])
	if version < 2 || version > 4 {
		return false
	}
	b = b[header : len(b)-checksum]
	var name []byte
	for range count {
		if len(b) < fixed {
			return false
		}
		mode, id, flags := b[24:28], b[40:60], binary.BigEndian.Uint16(b[60:])
		size := fixed
		extended := []byte{0, 0}
		if flags&0x4000 != 0 {
			if size += 2; version == 2 || len(b) < size {
				return false
			}
			extended = b[fixed:size]
		}
		rest := b[size:]
		if version == 4 {
			// How many bytes of the name before to drop: git's own varint.
			drop, n := uint64(0), 0
			for {
				if n == len(rest) || n > 8 {
					return false
				}
				c := rest[n]
				drop = drop<<7 | uint64(c&0x7f)
				if n++; c&0x80 == 0 {
					break
				}
				drop++
			}
			if drop > uint64(len(name)) {
				return false
			}
			name, rest, size = name[:uint64(len(name))-drop], rest[n:], size+n
		} else {
			name = name[:0]
		}
		end := bytes.IndexByte(rest, 0)
		if end < 0 {
			return false
		}
		name = append(name, rest[:end]...)
		if size += end + 1; version != 4 {
			size = (size + 7) &^ 7
		}
		if size > len(b) {
			return false
		}
		b = b[size:]
		visit(mode, id, flags, extended, name)
	}
	return true
}

// sameIndex says whether an index says of the files what it said in the base.
func (p *Plan) sameIndex(name string) bool {
	now, err := p.project.content(name, indexLimit)
	if err != nil {
		return false
	}
	var was []byte
	if last := p.base.last(name); last != nil {
		was = last.Index
	} else if p.base.Base != nil {
		if b, err := p.base.Content(name, indexLimit); err == nil {
			was = indexSum(b)
		}
	}
	return was != nil && bytes.Equal(was, indexSum(now))
}
