package main

import (
	"io"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/template"
)

// Whoever asks for the default template after its build failed is told why, and what to
// do about it.
func TestDefaultTemplateThatCannotBeBuilt(t *testing.T) {
	t.Setenv("PATH", t.TempDir()) // where mmdebstrap is not
	store, err := template.Open(filepath.Join(t.TempDir(), "templates"))
	if err != nil {
		t.Fatal(err)
	}
	s := newTemplates(t.Context(), store, slog.New(slog.NewTextHandler(io.Discard, nil)))
	for end := time.Now().Add(10 * time.Second); s.building.Load(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the build does not end")
		}
	}
	if _, err = s.Resolve(t.Context(), "", template.Base); err == nil || !strings.Contains(err.Error(), "could not be built") || berm.HintOf(err) == "" {
		t.Errorf("%v, hint %q", err, berm.HintOf(err))
	}
	if _, err = s.Resolve(t.Context(), "", "another"); err == nil || berm.KindOf(err) != berm.NotFound {
		t.Errorf("another template: %v", err)
	}
}
