package main

import (
	"context"
	"log/slog"
	"sync/atomic"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/template"
)

// serverTemplates is the template store as a server uses it: the default template is
// built when it is missing.
type serverTemplates struct {
	*template.Store
	building atomic.Bool
	failed   atomic.Pointer[error] // why the default template could not be built
}

// newTemplates begins to build the default template in the background when it is
// missing.
func newTemplates(ctx context.Context, store *template.Store, log *slog.Logger) *serverTemplates {
	s := &serverTemplates{Store: store}
	if _, err := store.Resolve(ctx, "", template.Base); berm.KindOf(err) != berm.NotFound || err == nil {
		return s
	}
	s.building.Store(true)
	log.Info("building the default template; this takes a minute or two", "template", template.Base)
	go func() {
		defer s.building.Store(false)
		if _, err := store.Ensure(ctx, template.Base, nil); err != nil {
			s.failed.Store(&err)
			log.Error("building the default template failed", "template", template.Base, "error", err, "hint", berm.HintOf(err))
			return
		}
		log.Info("the default template is ready", "template", template.Base)
	}()
	return s
}

// Resolve finds a template. Unavailable when it is being built; when that failed, the
// error tells why.
func (s *serverTemplates) Resolve(ctx context.Context, team berm.Team, ref string) (berm.Template, error) {
	t, err := s.Store.Resolve(ctx, team, ref)
	if err == nil || berm.KindOf(err) != berm.NotFound || ref != template.Base {
		return t, err
	}
	if s.building.Load() {
		return t, berm.Errorf(berm.Unavailable, "template '%s' is being built, try again in a minute", ref)
	}
	if failed := s.failed.Load(); failed != nil {
		return t, berm.Errorf(berm.KindOf(*failed), "template '%s' could not be built: %w", ref, *failed)
	}
	return t, err
}
