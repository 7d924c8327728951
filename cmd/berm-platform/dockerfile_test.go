package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
)

// buildServer is a template builder that does nothing: it tells the lines of log, and ends with
// status.
type buildServer struct {
	order    client.BuildOrder
	uploaded map[string]int
	log      []client.BuildLog
	status   map[string]any
	calls    []string
	polled   chan struct{} // closed at the first question for the status
}

func (b *buildServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	answer := func(v any) { _ = json.NewEncoder(w).Encode(v) }
	b.calls = append(b.calls, r.Method+" "+r.URL.Path)
	switch path := r.URL.Path; {
	case path == "/v3/templates":
		answer(map[string]any{"templateID": "t", "buildID": "b", "names": []string{"app"}})
	case strings.HasPrefix(path, "/templates/t/files/"):
		hash := strings.TrimPrefix(path, "/templates/t/files/")
		answer(map[string]any{"present": b.uploaded[hash] > 0, "url": "http://" + r.Host + "/put/" + hash})
	case strings.HasPrefix(path, "/put/"):
		n, _ := io.Copy(io.Discard, r.Body)
		b.uploaded[strings.TrimPrefix(path, "/put/")] = int(n)
	case path == "/v2/templates/t/builds/b":
		_ = json.NewDecoder(r.Body).Decode(&b.order)
	case path == "/templates/t/builds/b/status":
		if b.polled != nil {
			close(b.polled)
			b.polled = nil
		}
		var offset int
		_, _ = fmt.Sscan(r.URL.Query().Get("logsOffset"), &offset)
		b.status["logEntries"] = b.log[offset:]
		answer(b.status)
	case path == "/berm/v1/templates/t/builds/b":
		w.WriteHeader(http.StatusNoContent)
	default:
		w.WriteHeader(http.StatusNotFound)
	}
}

// buildDockerfile builds a Dockerfile with a file beside it.
func buildDockerfile(t *testing.T, ctx context.Context, b *buildServer, text string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	b.uploaded = map[string]int{}
	s := httptest.NewServer(b)
	defer s.Close()
	t.Setenv("BERM_URL", s.URL)
	t.Setenv("BERM_API_KEY", "e2b_x")
	dir := filepath.Join(t.TempDir(), "My App")
	if err := errors.Join(os.Mkdir(dir, 0o755), os.WriteFile(filepath.Join(dir, "Dockerfile"), []byte(text), 0o644), os.WriteFile(filepath.Join(dir, "f"), nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	var out, errOut bytes.Buffer
	root := newRootCommand()
	root.SetArgs(append([]string{"template", "build", dir}, args...))
	root.SetOut(&out)
	root.SetErr(&errOut)
	err = root.ExecuteContext(ctx)
	return out.String(), errOut.String(), err
}

func TestBuildDockerfile(t *testing.T) {
	const text = "FROM a AS one\nRUN x\nFROM one\nCOPY f /f\nCOPY f /g\nCMD y\nCOPY --from=one /x /y\n"
	b := &buildServer{
		log: []client.BuildLog{
			{Message: "[base] FROM a"}, {Message: "CACHED [builder 3/9] RUN x", Step: "3"}, {Message: "[builder 3/9] [stdout]: hello\x1b[2J", Step: "3"}, {Message: "[builder 1/9] USER root", Step: "1"},
		},
		status: map[string]any{"status": "ready"},
	}
	out, said, err := buildDockerfile(t, t.Context(), b, text, "--start", "s", "--no-cache")
	if err != nil {
		t.Fatal(err)
	}
	if out != "my-app t\n" {
		t.Errorf("printed %q", out)
	}
	for _, want := range []string{"Dockerfile:6: CMD: is not started", "[base] FROM a\n", "[1/4] RUN x (cached)\n", `  hello\x1b[2J`} {
		if !strings.Contains(said, want) {
			t.Errorf("%q does not tell %q", said, want)
		}
	}
	if strings.Contains(said, "USER root") {
		t.Errorf("%q tells a step that is not in the Dockerfile", said)
	}
	o := b.order
	if !o.Force || o.StartCmd != "s" || len(o.Berm.Stages) != 1 || o.Berm.Stages[0].FromImage != "a" || o.Berm.FromStage != "0" || len(o.Steps) != 6 {
		t.Errorf("order %+v", o)
	}
	if len(b.uploaded) != 1 || b.uploaded[o.Steps[0].FilesHash] == 0 || o.Steps[0].FilesHash != o.Steps[1].FilesHash {
		t.Errorf("uploaded %v", b.uploaded)
	}

	b.status = map[string]any{"status": "error", "reason": map[string]any{"message": "failed to run", "step": "3"}}
	_, _, err = buildDockerfile(t, t.Context(), b, text)
	if err == nil || !strings.HasSuffix(err.Error(), "Dockerfile:2: RUN: failed to run") {
		t.Errorf("failure: %v", err)
	}
	b.calls = nil
	if _, _, err := buildDockerfile(t, t.Context(), b, "FROM a\nCOPY none /x"); err == nil || len(b.calls) > 0 {
		t.Errorf("%v after %v", err, b.calls)
	}
}

// A base that is not there is told with the line of its FROM, and what it may have been meant for.
func TestBuildWithoutBase(t *testing.T) {
	const text = "FROM late AS one\nRUN x\nFROM a AS late\nCOPY --from=one /x /y\n"
	for stage, want := range map[string][2]string{"0": {"Dockerfile:1: FROM: no image", "the stage late begins later, at line 3"}, "": {"Dockerfile:3: FROM: no image", ""}} {
		b := &buildServer{status: map[string]any{"status": "error", "reason": map[string]any{"message": "no image", "step": "base", "stage": stage}}}
		_, _, err := buildDockerfile(t, t.Context(), b, text)
		if err == nil || !strings.HasSuffix(err.Error(), want[0]) || !strings.HasPrefix(berm.HintOf(err), want[1]) {
			t.Errorf("stage %q: %v, hint %q", stage, err, berm.HintOf(err))
		}
	}
}

// A name is taken as it is or refused, and those of recipes are refused.
func TestBuildNames(t *testing.T) {
	for name, kind := range map[string]berm.Kind{
		"foo/pipe": berm.Invalid, "../x": berm.Invalid, "a//b": berm.Invalid, "/x": berm.Invalid, "": berm.Invalid, "App": berm.Invalid, "a:": berm.Invalid, "a:b:c": berm.Invalid,
		"base": berm.Conflict, "base:v1": berm.Conflict, "desktop": berm.Conflict,
	} {
		b := &buildServer{status: map[string]any{"status": "ready"}}
		if _, _, err := buildDockerfile(t, t.Context(), b, "FROM a", "--name", name, "--force"); err == nil || berm.KindOf(err) != kind || len(b.calls) > 0 {
			t.Errorf("%q: %v after %v, want %s", name, err, b.calls, kind)
		}
	}
	b := &buildServer{status: map[string]any{"status": "ready"}}
	if out, _, err := buildDockerfile(t, t.Context(), b, "FROM a", "--name", "app:V1"); err != nil || out != "app:V1 t\n" {
		t.Errorf("printed %q, %v", out, err)
	}
}

// -f names a file, and nothing that would be waited for.
func TestBuildOfFIFO(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(pipe, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, _, err := buildDockerfile(t, t.Context(), &buildServer{}, "FROM a", "-f", pipe); err == nil || berm.KindOf(err) != berm.Invalid {
		t.Errorf("%v", err)
	}
}

// Whoever ends the command ends the build.
func TestBuildInterrupted(t *testing.T) {
	b := &buildServer{status: map[string]any{"status": "building"}, polled: make(chan struct{})}
	ctx, interrupt := context.WithCancel(t.Context())
	go func(polled chan struct{}) { <-polled; interrupt() }(b.polled)
	_, said, err := buildDockerfile(t, ctx, b, "FROM a")
	if !errors.Is(err, context.Canceled) || !strings.Contains(said, "the build was cancelled") || !slices.Contains(b.calls, "DELETE /berm/v1/templates/t/builds/b") {
		t.Errorf("%v, %q, %v", err, said, b.calls)
	}
}

func TestBuildArguments(t *testing.T) {
	store := filepath.Join(t.TempDir(), "templates")
	for _, args := range [][]string{{"build", "base", "--name", "x"}, {"build", "base", "-f", "x"}, {"build"}} {
		_, _, err := runTemplate(t, store, args...)
		if _, usage := errors.AsType[cli.UsageError](err); !usage {
			t.Errorf("%v: %v", args, err)
		}
	}
	if _, _, err := runTemplate(t, store, "build", t.TempDir()); err == nil || berm.KindOf(err) != berm.NotFound || berm.HintOf(err) == "" {
		t.Errorf("no Dockerfile: %v", err)
	}
	t.Chdir(t.TempDir())
	if err := os.Mkdir("app", 0o755); err != nil {
		t.Fatal(err)
	}
	if _, _, err := runTemplate(t, store, "build", "app"); err == nil || !strings.Contains(berm.HintOf(err), "./app") {
		t.Errorf("a directory for a recipe: %v", err)
	}
	for dir, want := range map[string]bool{".": true, "..": true, "./x": true, "../x": true, "/x": true, "x": false, "x/y": false, ".x": false} {
		if isPath(dir) != want {
			t.Errorf("%q: %t", dir, !want)
		}
	}
}
