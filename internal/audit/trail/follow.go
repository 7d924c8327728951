package trail

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
)

// followEvery is how often a log is looked at for more.
const followEvery = 300 * time.Millisecond

// Follow yields the records from a number on, and goes on with those to come until ctx ends.
// An error ends it.
func (d Dir) Follow(ctx context.Context, from uint64) iter.Seq2[Line, error] {
	return func(yield func(Line, error) bool) {
		for ctx.Err() == nil {
			// What older files have, and then the current one, which is held open: should it
			// become an older one meanwhile, all of it is read before the next.
			f, err := os.Open(filepath.Join(string(d), current))
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				yield(Line{}, berm.Errorf(berm.KindOf(err), "audit log: %w", err))
				return
			}
			for line, err := range d.Records(from) {
				if err != nil || line.Seq >= from {
					if !yield(line, err) || err != nil {
						f.Close()
						return
					}
					from = line.Seq + 1
				}
			}
			if f == nil {
				wait(ctx)
				continue
			}
			goOn := d.tail(ctx, f, &from, yield)
			f.Close()
			if !goOn {
				return
			}
		}
	}
}

func wait(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(followEvery):
	}
}

// tail yields what is appended to the current file until another takes its place, and reports
// whether to go on with that.
func (d Dir) tail(ctx context.Context, f *os.File, from *uint64, yield func(Line, error) bool) bool {
	r := bufio.NewReaderSize(f, 2*audit.MaxLine)
	var part []byte // of a line that is being written
	for {
		raw, err := r.ReadSlice('\n')
		if errors.Is(err, io.EOF) {
			part = append(part, raw...)
			if ctx.Err() != nil {
				return false
			}
			if d.isOld(f) && len(raw) == 0 {
				return true
			}
			wait(ctx)
			continue
		}
		if err != nil {
			return yield(Line{}, berm.Errorf(berm.Internal, "audit log: %w", err)) && false
		}
		if len(part) > 0 {
			raw = append(part, raw...)
			part = nil
		}
		line := Line{Raw: raw[:len(raw)-1]}
		if err := json.Unmarshal(line.Raw, &line.Record); err != nil {
			yield(line, fmt.Errorf("this is not a record: %w", err))
			return false
		}
		if line.Seq < *from {
			continue
		}
		if !yield(line, nil) {
			return false
		}
		*from = line.Seq + 1
	}
}

// isOld reports whether another file is the current one.
func (d Dir) isOld(f *os.File) bool {
	now, err := os.Stat(filepath.Join(string(d), current))
	if err != nil {
		return false // between two
	}
	mine, err := f.Stat()
	return err == nil && !os.SameFile(now, mine)
}
