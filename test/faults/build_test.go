package faults

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/internal/driver/drivertest"
	"github.com/berm-sandbox/berm/test/harness"
)

// built is what a server tells of a build.
type built struct {
	TemplateID, BuildID, Status string
	LogEntries                  []struct{ Message string }
	Reason                      *struct{ Message string }
}

func (b *built) at() string { return "/templates/" + b.TemplateID + "/builds/" + b.BuildID }

// order begins a build of template "app" of two steps and a start command.
func order(ctx context.Context, s *harness.Server, second string) (b built, err error) {
	step := func(command string) map[string]any {
		return map[string]any{"type": "RUN", "args": []string{command, "root"}, "berm": map[string]any{"shell": []string{"/bin/sh", "-c"}}}
	}
	if err := s.Call(ctx, "POST", "/v3/templates", map[string]any{"name": "app"}, &b); err != nil {
		return b, err
	}
	return b, s.Call(ctx, "POST", "/v2"+b.at(), map[string]any{
		"fromTemplate": "base", "steps": []any{step("echo first >/first"), step("echo " + second + " >/second; rm /first; mkdir /new")},
		"startCmd": "exec sleep 1000", "readyCmd": "test -e /second",
	}, nil)
}

// ends waits for the end of a build, while the server lives.
func (b *built) ends(t *testing.T, ctx context.Context, s *harness.Server) {
	t.Helper()
	for b.Status != "ready" && b.Status != "error" && s.Alive() {
		err := s.Call(ctx, "GET", b.at()+"/status", nil, b)
		if _, answered := errors.AsType[*harness.StatusError](err); answered || ctx.Err() != nil {
			t.Fatalf("%v\n%s", err, s.Log())
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// A server that dies or fails between any two steps of a build has afterwards made the template, or
// says that it failed, and then the name means what it meant; what went well is not done again, and
// neither a sandbox nor a layer is left that nobody needs.
func TestCrashesAmongBuilds(t *testing.T) {
	harness.Slow(t)
	if os.Geteuid() != 0 {
		t.Skip("templates are built by servers of root")
	}
	failing(t)
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	store, image := filepath.Join(t.TempDir(), "templates"), filepath.Join(t.TempDir(), "box.tar")
	if err := harness.WriteImage(drivertest.Root(t, t.TempDir(), 0), image); err != nil {
		t.Fatal(err)
	}
	binary, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(binary, "template", "import", image, "--name", "base", "--templates", store).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	s := harness.Serve(t, "--templates", store)
	first, err := order(ctx, s, "v0")
	if err != nil {
		t.Fatal(err)
	}
	if first.ends(t, ctx, s); first.Status != "ready" {
		t.Fatalf("%+v\n%s", first, s.Log())
	}
	for i, at := range []struct {
		point  string
		action string
		whole  bool
	}{
		{point: "control.created"}, {point: "builder.done"}, {point: "template.layer.unpacked"}, {point: "builder.layer"},
		{point: "builder.finish"}, {point: "template.put"}, {point: "builder.published", whole: true},
		{point: "builder.done", action: "error"}, {point: "builder.layer", action: "error"}, {point: "builder.finish", action: "error"},
	} {
		action := at.action
		if action == "" {
			action = "crash"
		}
		t.Run(at.point+"-"+action, func(t *testing.T) {
			again := func(failpoints string) {
				t.Helper()
				t.Setenv("BERM_FAILPOINTS", failpoints)
				s.Crash()
				if err := s.Restart(ctx); err != nil {
					t.Fatal(err)
				}
			}
			before, second := means(t, ctx, s), fmt.Sprintf("v%d", i+1)
			again(at.point + "=" + action)
			b, err := order(ctx, s, second)
			if err != nil && s.Alive() {
				t.Fatal(err)
			}
			b.ends(t, ctx, s)
			if died := b.Status != "error"; died != (action == "crash") {
				t.Fatalf("%s was not reached: %+v\n%s", at.point, b, s.Log())
			}
			again("")
			if err := s.Call(ctx, "GET", b.at()+"/status", nil, &b); err != nil {
				t.Fatal(err)
			}
			now := means(t, ctx, s)
			switch {
			case at.whole:
				if b.Status != "ready" || now != second {
					t.Errorf("%+v; the name means %q", b, now)
				}
			case b.Status != "error" || b.Reason == nil || b.Reason.Message == "" || now != before:
				t.Errorf("%+v; the name means %q, and meant %q", b, now, before)
			}
			alone(t, ctx, s)

			// The same again is made, of what was made before.
			b, err = order(ctx, s, second)
			if err != nil {
				t.Fatal(err)
			}
			if b.ends(t, ctx, s); b.Status != "ready" || means(t, ctx, s) != second {
				t.Errorf("again: %+v", b)
			}
			if !slices.ContainsFunc(b.LogEntries, func(l struct{ Message string }) bool {
				return strings.HasPrefix(l.Message, "CACHED [builder 1/2]")
			}) {
				t.Errorf("the first step was done again: %+v", b.LogEntries)
			}
			alone(t, ctx, s)
			if left, err := os.ReadDir(filepath.Join(store, "tmp")); err != nil || len(left) > 0 {
				t.Errorf("half-made in the store: %v, %v", left, err)
			}
		})
	}
	if err := s.Call(ctx, http.MethodDelete, "/templates/app", nil, nil); err != nil {
		t.Fatal(err)
	}
	if left, err := filepath.Glob(filepath.Join(store, "layers", "*")); err != nil || len(left) != 2 { // of base
		t.Errorf("layers are left: %v, %v", left, err)
	}
}

// means says what a sandbox of template "app" has, and ends it.
func means(t *testing.T, ctx context.Context, s *harness.Server) string {
	t.Helper()
	sandbox, err := s.Create(ctx, time.Minute, map[string]any{"templateID": "app"})
	if err != nil {
		t.Fatalf("%v\n%s", err, s.Log())
	}
	defer func() {
		if err := sandbox.Kill(ctx); err != nil {
			t.Error(err)
		}
	}()
	result, err := sandbox.Run(ctx, harness.Command{User: "root", Path: "/bin/sh", Args: []string{"-c", "test ! -e /first && test -d /new && cat /second"}})
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(result.Stdout)
}

// alone waits until a server has no sandbox.
func alone(t *testing.T, ctx context.Context, s *harness.Server) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		var listed []struct{ SandboxID string }
		if err := s.Call(ctx, "GET", "/v2/sandboxes?limit=100&state=running,paused", nil, &listed); err != nil {
			t.Fatal(err)
		}
		ids := held(t, s)
		if len(listed) == 0 && len(ids) == 0 {
			return
		}
		if time.Now().After(end) {
			t.Errorf("sandboxes are left: %v, on disk %v\n%s", listed, ids, s.Log())
			return
		}
	}
}
