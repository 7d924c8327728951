package trail

import (
	"bufio"
	"crypto/sha256"
	"errors"
	"io"
	"os"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/berm-sandbox/berm"
)

// tree is the RFC 6962 hash tree over the lines of a log, in the order in which package tlog
// stores hashes. The file can be made again from the lines.
type tree struct {
	file    *os.File
	size    uint64      // lines
	edge    []tlog.Hash // roots of the complete subtrees, the largest first
	pending []byte      // hashes that are not in the file
	spare   []byte      // memory for the next ones
	broken  bool        // the file lacks some: it ends where it is
}

// maxSpare bounds the memory that a tree keeps, in bytes.
const maxSpare = 1 << 20

// openTree opens or creates the tree at path, up to at most limit lines.
func openTree(path string, limit uint64) (*tree, error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "audit tree: %w", err)
	}
	t := &tree{file: file}
	if err := t.load(limit); err != nil {
		file.Close()
		return nil, berm.Errorf(berm.Internal, "audit tree: %w", err)
	}
	return t, nil
}

// load finds the end of what the file holds for whole lines.
func (t *tree) load(limit uint64) error {
	info, err := t.file.Stat()
	if err != nil {
		return err
	}
	t.size = linesIn(info.Size()/tlog.HashSize, limit)
	if err := t.file.Truncate(tlog.StoredHashCount(int64(t.size)) * tlog.HashSize); err != nil {
		return err
	}
	if _, err := t.file.Seek(0, io.SeekEnd); err != nil {
		return err
	}
	var indexes []int64
	rest := int64(t.size)
	for level := 62; level >= 0; level-- {
		if bit := int64(1) << level; rest&bit != 0 {
			indexes = append(indexes, tlog.StoredHashIndex(level, (int64(t.size)>>level)-1))
		}
	}
	t.edge, err = readHashes(t.file, indexes)
	return err
}

// linesIn is the largest number of lines, at most limit, whose hashes are among n.
func linesIn(n int64, limit uint64) uint64 {
	low, high := uint64(0), min(limit, uint64(n))
	for low < high {
		middle := (low + high + 1) / 2
		if tlog.StoredHashCount(int64(middle)) <= n {
			low = middle
		} else {
			high = middle - 1
		}
	}
	return low
}

// add appends a line.
func (t *tree) add(line []byte) { t.addLeaf(leafHash(line)) }

// leafHash is tlog.RecordHash (RFC 6962, 2.1), without memory of its own for most lines.
func leafHash(line []byte) tlog.Hash {
	hashed := append(make([]byte, 0, 1<<10), 0)
	return sha256.Sum256(append(hashed, line...))
}

// nodeHash is tlog.NodeHash (RFC 6962, 2.1), without memory of its own.
func nodeHash(left, right tlog.Hash) tlog.Hash {
	var hashed [1 + 2*tlog.HashSize]byte
	hashed[0] = 1
	copy(hashed[1:], left[:])
	copy(hashed[1+tlog.HashSize:], right[:])
	return sha256.Sum256(hashed[:])
}

func (t *tree) addLeaf(h tlog.Hash) {
	t.pending = append(t.pending, h[:]...)
	// A subtree is complete for each trailing one bit of the number of lines before.
	for n := t.size; n&1 == 1; n >>= 1 {
		last := len(t.edge) - 1
		h = nodeHash(t.edge[last], h)
		t.edge = t.edge[:last]
		t.pending = append(t.pending, h[:]...)
	}
	t.edge = append(t.edge, h)
	t.size++
}

// root is the hash of the tree over all lines.
func (t *tree) root() tlog.Hash { return fold(t.edge) }

func fold(edge []tlog.Hash) tlog.Hash {
	if len(edge) == 0 {
		h, _ := tlog.TreeHash(0, nil) // of no lines: it reads nothing
		return h
	}
	h := edge[len(edge)-1]
	for i := len(edge) - 2; i >= 0; i-- {
		h = nodeHash(edge[i], h)
	}
	return h
}

// take returns what is to be written to the file, and forgets it.
func (t *tree) take() []byte {
	pending := t.pending
	t.pending, t.spare = t.spare, nil
	return pending
}

// save appends hashes that take returned, in its order. After a failure it does nothing: what
// the file lacks is made again when it is opened.
func (t *tree) save(hashes []byte) error {
	if t.broken {
		return nil
	}
	_, err := t.file.Write(hashes)
	t.broken = err != nil
	if cap(hashes) <= maxSpare {
		t.spare = hashes[:0]
	}
	return err
}

// hashFile reads the hashes of a tree's file.
type hashFile struct{ io.ReaderAt }

// ReadHashes implements tlog.HashReader.
func (f hashFile) ReadHashes(indexes []int64) ([]tlog.Hash, error) { return readHashes(f, indexes) }

func readHashes(r io.ReaderAt, indexes []int64) ([]tlog.Hash, error) {
	hashes := make([]tlog.Hash, len(indexes))
	for i, index := range indexes {
		if _, err := r.ReadAt(hashes[i][:], index*tlog.HashSize); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
	}
	return hashes, nil
}

// leaves calls f with the hash of each line that a tree's file holds.
func leaves(r io.Reader, f func(n uint64, h tlog.Hash)) error {
	b := bufio.NewReaderSize(r, 1<<16)
	var h tlog.Hash
	for n := uint64(0); ; n++ {
		if _, err := io.ReadFull(b, h[:]); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		f(n+1, h)
		for m := n; m&1 == 1; m >>= 1 { // the hashes of the subtrees that this line completed
			if _, err := io.ReadFull(b, h[:]); err != nil {
				return err
			}
		}
	}
}
