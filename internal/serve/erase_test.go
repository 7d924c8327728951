package serve

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit/index"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/store"
)

// unfinished is a log whose erasures fail, before or after they are on record.
type unfinished struct {
	auditLog
	left uint64
}

func (u unfinished) Erase(e trail.Erasure, _ bool) (trail.Erasure, error) {
	e.Left = u.left
	return e, berm.Errorf(berm.Unavailable, "no space")
}

// What an erasure that is on record leaves to be done in the log is left by nothing else.
func TestEraseUnfinished(t *testing.T) {
	db, err := store.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	found, err := index.Open(filepath.Join(t.TempDir(), "index.db"), trail.Dir(t.TempDir()))
	if err != nil {
		t.Fatal(err)
	}
	defer found.Close()
	if err := db.SaveSandbox(t.Context(), store.Sandbox{ID: "i0test", Killed: time.Now(), Record: []byte("{}")}); err != nil {
		t.Fatal(err)
	}
	for _, left := range []uint64{0, 3} {
		e := eraser{unfinished{left: left}, found, db}
		if _, err := e.Erase(t.Context(), trail.Erasure{Sandbox: "i0test"}, false); berm.KindOf(err) != berm.Unavailable {
			t.Errorf("%d left: %v", left, err)
		}
		if _, err := db.Sandbox(t.Context(), "i0test"); (err == nil) != (left == 0) {
			t.Errorf("%d left: %v", left, err)
		}
	}
}
