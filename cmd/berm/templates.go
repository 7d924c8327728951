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
}

// newTemplates begins to build the default template in the background when it is
// missing.
func newTemplates(ctx context.Context, store *template.Store, log *slog.Logger) *serverTemplates {
	s := &serverTemplates{Store: store}
	if _, err := store.Resolve(ctx, template.Base); berm.KindOf(err) != berm.NotFound || err == nil {
		return s
	}
	s.building.Store(true)
	log.Info("building the default template; this takes a minute or two", "template", template.Base)
	go func() {
		defer s.building.Store(false)
		if _, err := store.Ensure(ctx, template.Base, nil); err != nil {
			log.Error("building the default template failed", "template", template.Base, "error", err, "hint", berm.HintOf(err))
			return
		}
		log.Info("the default template is ready", "template", template.Base)
	}()
	return s
}

// Resolve finds a template. Unavailable when it is being built.
func (s *serverTemplates) Resolve(ctx context.Context, ref string) (berm.Template, error) {
	t, err := s.Store.Resolve(ctx, ref)
	if berm.KindOf(err) == berm.NotFound && err != nil && s.building.Load() && ref == template.Base {
		return t, berm.Errorf(berm.Unavailable, "template '%s' is being built, try again in a minute", ref)
	}
	return t, err
}
