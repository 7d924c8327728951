package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
)

// runTemplate runs a template command on a store.
func runTemplate(t *testing.T, store string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	var out, errOut bytes.Buffer
	root := newRootCommand()
	root.SetArgs(append([]string{"template", "--templates", store}, args...))
	root.SetOut(&out)
	root.SetErr(&errOut)
	err = root.ExecuteContext(t.Context())
	return out.String(), errOut.String(), err
}

// savedImage writes what `docker save` would of an image with one file and one
// FIFO.
func savedImage(t *testing.T, tag string) string {
	t.Helper()
	pack := func(files map[string]string, extra ...*tar.Header) []byte {
		var out bytes.Buffer
		w := tar.NewWriter(&out)
		for name, content := range files {
			extra = append(extra, &tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(content))})
		}
		for _, h := range extra {
			if err := w.WriteHeader(h); err != nil {
				t.Fatal(err)
			}
			if _, err := w.Write([]byte(files[h.Name])); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		return out.Bytes()
	}
	layer := pack(map[string]string{"hello": "hello"}, &tar.Header{Name: "pipe\x1b[2J", Typeflag: tar.TypeFifo})
	config := fmt.Sprintf(`{"os":"linux","rootfs":{"type":"layers","diff_ids":["sha256:%x"]}}`, sha256.Sum256(layer))
	manifest := fmt.Sprintf(`[{"Config":"config","RepoTags":[%q],"Layers":["layer"]}]`, tag)
	file := filepath.Join(t.TempDir(), "image.tar")
	if err := os.WriteFile(file, pack(map[string]string{"manifest.json": manifest, "config": config, "layer": string(layer)}), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// With a server named, its templates are listed and removed, and else those of this machine; the
// output says which.
func TestTemplatesOfServer(t *testing.T) {
	var calls []string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		calls = append(calls, r.Method+" "+r.URL.Path)
		switch r.Method + " " + r.URL.Path {
		case "GET /templates":
			_, _ = w.Write([]byte(`[{"templateID":"t0","buildID":"b","aliases":["app"],"cpuCount":2,"memoryMB":512,"diskSizeMB":1024,"buildCount":3,"updatedAt":"2026-01-02T03:04:05Z"}]`))
		case "GET /templates/app", "GET /templates/app:v1":
			_, _ = w.Write([]byte(`{"templateID":"t0"}`))
		case "DELETE /templates/t0", "DELETE /templates/t0:v1":
			w.WriteHeader(http.StatusNoContent)
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	defer s.Close()
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	t.Setenv("BERM_API_KEY", "e2b_x")
	t.Setenv("BERM_URL", s.URL)
	run := func(args ...string) (stdout, stderr string, err error) {
		calls = nil
		var out, errOut bytes.Buffer
		root := newRootCommand()
		root.SetArgs(append([]string{"template"}, args...))
		root.SetOut(&out)
		root.SetErr(&errOut)
		err = root.ExecuteContext(t.Context())
		return out.String(), errOut.String(), err
	}
	out, said, err := run("ls")
	if err != nil || !strings.Contains(out, "app   t0  2     512.0 MiB  1.0 GiB  3") || !strings.Contains(said, "templates of "+s.URL) {
		t.Errorf("ls: %q, %q, %v", out, said, err)
	}
	var list []client.Template
	if out, _, err = run("ls", "--json"); err != nil || json.Unmarshal([]byte(out), &list) != nil || len(list) != 1 || list[0].ID != "t0" || list[0].Names[0] != "app" {
		t.Errorf("ls --json: %q, %v", out, err)
	}
	// By id, as a name alone may be that of a snapshot.
	for ref, want := range map[string]string{"app": "DELETE /templates/t0", "app:v1": "DELETE /templates/t0:v1"} {
		if _, said, err := run("rm", ref); err != nil || !slices.Contains(calls, want) || !strings.Contains(said, s.URL+": removed "+ref) {
			t.Errorf("rm %s: %v, %q, %v", ref, calls, said, err)
		}
	}
	if _, _, err = run("rm", "none"); err == nil || berm.KindOf(err) != berm.NotFound || !strings.Contains(err.Error(), s.URL) {
		t.Errorf("rm of none: %v", err)
	}
	if _, _, err = run("rm", "team/app"); err == nil || berm.KindOf(err) != berm.Invalid || len(calls) > 0 {
		t.Errorf("rm of no name: %v after %v", err, calls)
	}
	store := filepath.Join(t.TempDir(), "templates")
	for _, args := range [][]string{{"ls", "--templates", store}, {"ls", "--templates", store, "--local"}} {
		if _, said, err := run(args...); err != nil || len(calls) > 0 || !strings.Contains(said, "templates of this machine, "+store) {
			t.Errorf("%v: %q after %v, %v", args, said, calls, err)
		}
	}
	if _, _, err = run("ls", "--local", "--context", "x"); !errors.As(err, new(cli.UsageError)) {
		t.Errorf("two places: %v", err)
	}
	t.Setenv("BERM_URL", "")
	if _, _, err = run("rm", "--templates", store, "none"); err == nil || berm.KindOf(err) != berm.NotFound || !strings.Contains(err.Error(), store) || len(calls) > 0 {
		t.Errorf("without a server: %v after %v", err, calls)
	}
	if contexts, err := loadContexts(); err != nil || contexts.Named("", os.Getenv) || !contexts.Named("x", os.Getenv) {
		t.Errorf("what is named: %v", err)
	}
}

func TestTemplateCommands(t *testing.T) {
	store := filepath.Join(t.TempDir(), "templates")
	if out, _, err := runTemplate(t, store, "ls", "--json"); err != nil || strings.TrimSpace(out) != "[]" {
		t.Errorf("ls of nothing: %q, %v", out, err)
	}
	out, progress, err := runTemplate(t, store, "import", "--json", savedImage(t, "example.com/team/app:v1"))
	if err != nil {
		t.Fatal(err)
	}
	var made berm.Template
	if err := json.Unmarshal([]byte(out), &made); err != nil || made.Alias() != "app:v1" || len(made.Layers) != 1 {
		t.Errorf("import printed %q, %v", out, err)
	}
	if !strings.Contains(progress, `pipe\x1b[2J`) || strings.Contains(progress, "\x1b[2J") {
		t.Errorf("progress %q does not name the FIFO in a form that is safe to show", progress)
	}
	if out, _, err := runTemplate(t, store, "ls"); err != nil || !strings.Contains(out, "app:v1  "+string(made.ID)) {
		t.Errorf("ls: %q, %v", out, err)
	}
	if _, _, err := runTemplate(t, store, "rm", "app:v2"); err == nil || berm.KindOf(err) != berm.NotFound || berm.HintOf(err) == "" {
		t.Errorf("rm of another: %v", err)
	}
	if _, _, err := runTemplate(t, store, "rm", "app:v1"); err != nil {
		t.Error(err)
	}
	if _, _, err := runTemplate(t, store, "import", "./nonexistent.tar"); err == nil || berm.KindOf(err) != berm.NotFound {
		t.Errorf("import of no file: %v", err)
	}
	if _, _, err := runTemplate(t, store, "build", "other"); err == nil || berm.KindOf(err) != berm.NotFound {
		t.Errorf("build of no recipe: %v", err)
	}
	if layers, err := os.ReadDir(filepath.Join(store, "layers")); err != nil || len(layers) > 0 {
		t.Errorf("layers %v, %v", layers, err)
	}
}
