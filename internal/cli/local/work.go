package local

import (
	"context"
	"os"

	"github.com/berm-sandbox/berm/internal/local/change"
	"github.com/berm-sandbox/berm/internal/local/session"
)

// work is a session that a command looks at or changes.
type work struct {
	store   *session.Store
	session *session.Session
	upper   *os.Root
	project *os.Root
	locked  bool
}

// openWork opens a session by its name, or the newest one here. lock takes it for the
// command alone: a session whose command runs is refused then.
func openWork(name string, lock bool) (_ *work, err error) {
	store, err := openStore()
	if err != nil {
		return nil, err
	}
	w := &work{store: store, locked: lock}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	s, err := choose(store, name)
	if err != nil {
		return nil, err
	}
	if lock {
		if err := s.Lock(); err != nil {
			return nil, err
		}
	}
	w.session = s
	if w.upper, err = s.OpenUpper(); err != nil {
		return nil, err
	}
	if w.project, err = s.OpenProject(); err != nil {
		return nil, err
	}
	return w, nil
}

func (w *work) changes(ctx context.Context) ([]change.Change, error) {
	return change.List(ctx, w.upper, w.project, change.Limits{})
}

func (w *work) close() {
	for _, root := range []*os.Root{w.upper, w.project} {
		if root != nil {
			root.Close()
		}
	}
	if w.locked && w.session != nil {
		w.session.Unlock()
	}
	w.store.Close()
}
