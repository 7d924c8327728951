package trail

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/failpoint"
)

// blobMargin is how much older than its record a blob may be: it is kept first.
const blobMargin = time.Hour

// retain removes what is older than the log keeps, whole files at a time. A record tells so
// before, and the tree keeps the hashes, so that the rest is proved as before.
func (l *Log) retain(now time.Time) error {
	if l.keep == 0 {
		return nil
	}
	began, err := Dir(l.dir).began(current)
	if err != nil {
		return err
	}
	// Files end by their age too, so that a log that grows slowly gets old files.
	if !began.IsZero() && now.Sub(began) > l.keep/10 {
		if err := l.rotate(); err != nil {
			return err
		}
	}
	names, firsts, err := Dir(l.dir).segments()
	if err != nil {
		return err
	}
	kept := time.Time{} // when the oldest file that stays begins
	old := 0
	for i := range len(names) - 1 { // the current one ends by its age before
		if kept, err = Dir(l.dir).began(names[i]); err != nil {
			return err
		}
		if i > 0 && !kept.IsZero() && now.Sub(kept) > l.keep { // all of the file before is older
			old = i
		}
	}
	if old == 0 {
		return nil
	}
	if kept, err = Dir(l.dir).began(names[old]); err != nil {
		return err
	}
	if err := l.Emit(audit.Record{
		Actor: audit.Actor{Type: "system"}, Type: audit.Removed, Src: "audit", Trust: audit.TrustHost, Outcome: audit.OK,
		Reason: "they are older than " + l.keep.String(), Data: audit.Removal{To: firsts[old] - 1},
	}); err != nil {
		return err
	}
	if err := l.Checkpoint(); err != nil {
		return err
	}
	for _, name := range names[:old] {
		if err := failpoint.Hit("audit/remove"); err != nil {
			return err
		}
		if err := os.Remove(filepath.Join(l.dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return berm.Errorf(berm.Internal, "remove old records: %w", err)
		}
	}
	return removeBlobs(filepath.Join(l.dir, audit.BlobDir), kept.Add(-blobMargin))
}

// began is the time of the first record of a file, zero if it has none.
func (d Dir) began(name string) (time.Time, error) {
	for raw, err := range d.file(name) {
		var h header
		if err == nil {
			err = decode(raw, &h, false)
		}
		if err != nil {
			return time.Time{}, berm.Errorf(berm.Internal, "audit log: %w", err)
		}
		return h.Time, nil
	}
	return time.Time{}, nil
}

// removeBlobs removes content that no record since a time names: a blob that a new record names
// is written anew.
func removeBlobs(dir string, before time.Time) error {
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err == nil && info.ModTime().Before(before) {
			err = os.Remove(path)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return berm.Errorf(berm.Internal, "remove old content: %w", err)
	}
	return nil
}
