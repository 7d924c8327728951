package builder

import (
	"context"
	"encoding/base64"
	"errors"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/control"
	"github.com/berm-sandbox/berm/internal/template"
)

func newBuilder(t *testing.T) *Builder {
	t.Helper()
	store, err := template.Open(filepath.Join(t.TempDir(), "templates"))
	if err != nil {
		t.Fatal(err)
	}
	b, err := New(Config{Sessions: &control.Manager{}, Store: store, Audit: audit.Discard, Dir: t.TempDir(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return b
}

// begin is a build of a team that waits, as it runs.
func begin(t *testing.T, b *Builder, team berm.Team, name string) *running {
	t.Helper()
	made, err := b.New(Request{Team: team, Name: name})
	if err != nil {
		t.Fatal(err)
	}
	return &running{b: b, build: b.builds[made.ID], made: map[string]template.Stage{}}
}

// A build is known to its team alone, and a name is a team's.
func TestBuildsOfTeams(t *testing.T) {
	b := newBuilder(t)
	red, blue := begin(t, b, "red", "app").build, begin(t, b, "blue", "app").build
	if red.TemplateID == blue.TemplateID || red.Names[0] != "red/app" {
		t.Errorf("%+v, %+v", red.Build, blue.Build)
	}
	if again := begin(t, b, "red", "App:v1").build; again.TemplateID != red.TemplateID || again.Names[0] != "red/app:v1" {
		t.Errorf("%+v", again.Build)
	}
	if _, err := b.New(Request{Name: "red/app"}); berm.KindOf(err) != berm.Invalid {
		t.Errorf("a name in another team: %v", err)
	}
	for _, team := range []berm.Team{"", "blue"} {
		_, build := b.Build(team, red.TemplateID, red.ID, 0, 1)
		_, uploaded := b.Uploaded(team, red.TemplateID, strings.Repeat("a", 64))
		for what, err := range map[string]error{
			"build": build, "uploaded": uploaded, "cancel": b.Cancel(team, red.TemplateID, red.ID),
			"start":  b.Start(team, red.TemplateID, red.ID, Order{From: From{Template: "none"}}, system),
			"remove": b.RemoveTemplate(t.Context(), team, string(red.TemplateID), system),
		} {
			if berm.KindOf(err) != berm.NotFound || err == nil {
				t.Errorf("%s by team %s: %v", what, team, err)
			}
		}
		if all := b.Builds(team, red.TemplateID); len(all) > 0 {
			t.Errorf("team %s knows %+v", team, all)
		}
	}
}

// A team waits for its own builds, and not for those of others.
func TestTurnsOfTeams(t *testing.T) {
	b := newBuilder(t)
	for range atOnce {
		b.turn("blue") <- struct{}{}
	}
	for _, team := range []berm.Team{"", "red"} {
		r := begin(t, b, team, "app")
		r.order = Order{From: From{Template: "none"}}
		if _, err := r.all(t.Context()); berm.KindOf(err) != berm.NotFound || len(r.build.Log) > 0 {
			t.Errorf("team %s: %v after %+v", team, err, r.build.Log)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	r := begin(t, b, "blue", "app")
	r.order = Order{From: From{Template: "none"}}
	if _, err := r.all(ctx); !errors.Is(err, context.DeadlineExceeded) || len(r.build.Log) != 1 {
		t.Errorf("one more of team blue: %v after %+v", err, r.build.Log)
	}
}

// What a step came to is no other team's: who has the build could have changed it.
func TestStepsOfTeams(t *testing.T) {
	b := newBuilder(t)
	red := begin(t, b, "red", "app")
	if err := red.reach(template.Stage{Key: "k"}); err != nil {
		t.Fatal(err)
	}
	for team, want := range map[berm.Team]bool{"": false, "blue": false, "red": true} {
		if _, ok := begin(t, b, team, "next").cached("k"); ok != want {
			t.Errorf("team %s: %t, want %t", team, ok, want)
		}
	}
}

// An image that a registry gives to who logs in is for the team that did; what the operator is logged
// in to is not the teams', and what was fetched is no template.
func TestImagesOfTeams(t *testing.T) {
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	var asked atomic.Int64
	var open atomic.Bool
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		if user, password, _ := r.BasicAuth(); !open.Load() && (user != "user" || password != "secret") {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		inner.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	host := strings.TrimPrefix(server.URL, "http://")
	layer, err := random.Layer(1<<10, "application/vnd.oci.image.layer.v1.tar")
	if err != nil {
		t.Fatal(err)
	}
	image, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		t.Fatal(err)
	}
	ref, err := name.ParseReference(host + "/base")
	if err != nil {
		t.Fatal(err)
	}
	open.Store(true)
	if err := remote.Write(ref, image); err != nil {
		t.Fatal(err)
	}
	open.Store(false)
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	login := `{"auths":{"` + host + `":{"auth":"` + base64.StdEncoding.EncodeToString([]byte("user:secret")) + `"}}}`
	if err := os.WriteFile(filepath.Join(os.Getenv("DOCKER_CONFIG"), "config.json"), []byte(login), 0o600); err != nil {
		t.Fatal(err)
	}

	b := newBuilder(t)
	b.outside = http.DefaultTransport // the registry of this test is on the host itself
	for i, c := range []struct {
		team  berm.Team
		login template.Login
		want  berm.Kind // 0 is that it is built
		asks  bool
	}{
		{"", nil, 0, true}, {"", nil, 0, false},
		{"blue", nil, berm.Denied, true},
		{"blue", template.Basic("user", "wrong"), berm.Denied, true},
		{"blue", template.Basic("user", "secret"), 0, true},
		{"blue", nil, 0, false},
		{"blue", template.Basic("user", "wrong"), berm.Denied, true},
		{"green", nil, berm.Denied, true},
	} {
		before := asked.Load()
		r := begin(t, b, c.team, "app")
		r.order = Order{From: From{Stage: "a"}, Stages: []Stage{{Name: "a", From: From{Image: host + "/base", Login: c.login}}}}
		made, err := r.all(t.Context())
		if (err == nil) != (c.want == 0) || err != nil && berm.KindOf(err) != c.want || asked.Load() > before != c.asks {
			t.Errorf("%d, team %s: %v, %v after %d requests", i, c.team, made.Names, err, asked.Load()-before)
		}
	}
	r := begin(t, b, "", "app")
	r.order = Order{From: From{Stage: "a"}, Stages: []Stage{{Name: "a", From: From{Image: host + "/base"}}}, Force: true}
	before := asked.Load()
	if _, err := r.all(t.Context()); err != nil || asked.Load() == before {
		t.Errorf("without what is here: %v after %d requests", err, asked.Load()-before)
	}
	all, err := b.Store.List(t.Context())
	if err != nil || len(all) != 2 { // app and blue/app
		t.Errorf("%+v, %v", all, err)
	}
}

// A registry that answers nothing, or half of a layer, does not keep others from removing templates for ever.
func TestSlowRegistry(t *testing.T) {
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	var slow atomic.Value
	slow.Store("")
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if at := slow.Load().(string); at != "" && r.Method == http.MethodGet && strings.Contains(r.URL.Path, at) {
			_, _ = w.Write([]byte("half"))
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
			return
		}
		inner.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	host := strings.TrimPrefix(server.URL, "http://")
	image, err := random.Image(1<<10, 1)
	if err != nil {
		t.Fatal(err)
	}
	ref, err := name.ParseReference(host + "/base")
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(ref, image); err != nil {
		t.Fatal(err)
	}
	layers, err := image.Layers()
	if err != nil {
		t.Fatal(err)
	}
	layer, err := layers[0].Digest()
	if err != nil {
		t.Fatal(err)
	}
	before := fetchTime
	fetchTime = 200 * time.Millisecond
	t.Cleanup(func() { fetchTime = before })
	for _, at := range []string{"/manifests/", "/blobs/", "/blobs/" + layer.String()} {
		slow.Store(at)
		b := newBuilder(t)
		b.outside = http.DefaultTransport
		r := begin(t, b, "blue", "app")
		r.order = Order{From: From{Image: host + "/base"}}
		if _, err := r.all(t.Context()); err == nil || !strings.Contains(err.Error(), "did not come within") {
			t.Errorf("%s: %v", at, err)
		}
		if err := b.Store.Remove(t.Context(), "none"); berm.KindOf(err) != berm.NotFound {
			t.Errorf("%s: afterwards %v", at, err)
		}
	}
}
