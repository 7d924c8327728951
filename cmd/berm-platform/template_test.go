package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm"
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
