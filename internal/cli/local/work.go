package local

import (
	"context"
	"os"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/local/apply"
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
	loaded  *session.Base // to be closed
}

// openWork opens a session by its name, or the newest one here. lock takes it for the
// command alone: a session whose command runs is refused then.
func openWork(cmd *cobra.Command, name string, lock bool) (_ *work, err error) {
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
	s, err := choose(cmd, store, name)
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

// request is what an apply of changes to paths begins with, without the base.
func (w *work) request(changes []change.Change, paths []string) apply.Request {
	return apply.Request{
		Dir: w.session.Dir(), Upper: w.upper, Project: w.project, Started: w.session.Created, Recorded: w.session.Used(),
		Changes: changes, Paths: paths,
	}
}

// base is the project as it was, nil when that is not known.
func (w *work) base(cmd *cobra.Command) apply.Base {
	base, err := w.session.Base()
	if err == nil {
		w.loaded = base
		return base
	}
	if berm.KindOf(err) != berm.NotFound {
		cli.Notice(cmd, "changes outside are judged by time alone: %v", err)
	}
	return nil
}

func (w *work) close() {
	for _, root := range []*os.Root{w.upper, w.project} {
		if root != nil {
			root.Close()
		}
	}
	if w.loaded != nil {
		w.loaded.Close()
	}
	if w.locked && w.session != nil {
		w.session.Unlock()
	}
	w.store.Close()
}
