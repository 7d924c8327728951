package e2b

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/store"
	"github.com/berm-sandbox/berm/internal/template"
)

// build has a template made of another with the key of a team, and returns what became of it.
func (w *world) build(key []string, name, from string) (newBuild, template.State, string) {
	w.t.Helper()
	var b newBuild
	w.want(202, "POST", "/v3/templates", `{"name":"`+name+`"}`, key...).into(w.t, &b)
	w.want(202, "POST", "/v2/templates/"+b.TemplateID+"/builds/"+b.BuildID, `{"fromTemplate":"`+from+`"}`, key...)
	var status struct {
		Status template.State
		Reason *template.Failure
	}
	for until := time.Now().Add(10 * time.Second); time.Now().Before(until); time.Sleep(5 * time.Millisecond) {
		w.want(200, "GET", "/templates/"+b.TemplateID+"/builds/"+b.BuildID+"/status", "", key...).into(w.t, &status)
		if status.Status == template.Failed {
			return b, status.Status, status.Reason.Message
		}
		if status.Status == template.Ready {
			return b, status.Status, ""
		}
	}
	w.t.Fatalf("the build of %s does not end", name)
	return b, "", ""
}

// ready is build of what must go well.
func (w *world) ready(key []string, name, from string) newBuild {
	w.t.Helper()
	b, state, why := w.build(key, name, from)
	if state != template.Ready {
		w.t.Fatalf("%s from %s: %s", name, from, why)
	}
	return b
}

// importImage makes a template on the host.
func (w *world) importImage(name string) berm.Template {
	w.t.Helper()
	layer, err := random.Layer(1<<10, "application/vnd.oci.image.layer.v1.tar")
	if err != nil {
		w.t.Fatal(err)
	}
	image, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		w.t.Fatal(err)
	}
	dir := w.t.TempDir()
	if _, err := layout.Write(dir, mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: image})); err != nil {
		w.t.Fatal(err)
	}
	made, err := w.images.Import(w.t.Context(), dir, template.ImportOptions{Name: name}, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	return made
}

// What one team builds another neither sees nor uses nor changes, until it is public, and then it may
// not change it either. What is on the host is for all.
func TestTemplatesOfTeams(t *testing.T) {
	w := newWorld(t)
	own := []string{"X-API-Key", w.key}
	blue, red := w.keyOfTeam("blue", store.TeamLimits{}), w.keyOfTeam("red", store.TeamLimits{})
	w.importImage("tool")
	ownApp, blueApp, redApp := w.ready(own, "app", "tool"), w.ready(blue, "app", "default/tool"), w.ready(red, "red/App:v1", "tool")
	w.ready(own, "private", "app")
	if strings.Join(redApp.Names, "") != "app" || strings.Join(redApp.Tags, "") != "v1" {
		t.Errorf("%+v", redApp)
	}
	for _, name := range []string{"red/app", "default/app", "blue/a/b"} {
		if got := w.want(400, "POST", "/v3/templates", `{"name":"`+name+`"}`, blue...); !strings.Contains(string(got.body), "must match your team 'blue'") {
			t.Errorf("%s: %s", name, got.body)
		}
	}
	names := func(key []string) (all []string) {
		var list []templateInfo
		w.want(200, "GET", "/templates", "", key...).into(t, &list)
		for _, one := range list {
			all = append(all, string(one.TemplateID)+" "+strings.Join(one.Names, ","))
		}
		slices.Sort(all)
		return all
	}
	if got := names(red); len(got) != 3 || !slices.Contains(got, redApp.TemplateID+" app") { // with tool and base
		t.Errorf("red has %q", got)
	}

	// Another team gets for what is there the answer for what is not, but for what it asked for.
	missing := strings.Repeat("z", 20)
	escaped := strings.NewReplacer("/", "%2F", ":", "%3A").Replace
	at := func(of string) string { return "/templates/" + escaped(of) }
	alike := func(method, path, body, of string, key []string) {
		t.Helper()
		none := strings.NewReplacer(of, missing, escaped(of), missing)
		answer := w.call(method, path, body, key...)
		want := w.call(method, none.Replace(path), none.Replace(body), key...)
		if answer.status != 404 || want.status != 404 || strings.ReplaceAll(string(answer.body), of, missing) != string(want.body) {
			t.Errorf("%s %s %s: %d %s; of what there is not %d %s", method, path, body, answer.status, answer.body, want.status, want.body)
		}
	}
	hash := strings.Repeat("ab", 32)
	for of, key := range map[string][]string{redApp.TemplateID: blue, "red/app:v1": blue, blueApp.TemplateID: own, "blue/app": red, "default/private": blue, "private": red, ownApp.TemplateID: red} {
		alike("POST", "/v2/sandboxes", `{"templateID":"`+of+`"}`, of, key)
		for _, c := range [][3]string{
			{"GET", at(of), ""}, {"DELETE", at(of), ""}, {"GET", at(of) + "/tags", ""}, {"PATCH", "/v2" + at(of), `{"public":true}`},
			{"GET", "/templates/aliases/" + escaped(of), ""}, {"POST", "/templates/tags", `{"target":"` + of + `","tags":["x"]}`},
		} {
			alike(c[0], c[1], c[2], of, key)
		}
		name, _, _ := strings.Cut(of, ":")
		alike("DELETE", "/templates/tags", `{"name":"`+name+`","tags":["v1"]}`, name, key)
		_, state, why := w.build(key, "of-another", of)
		if state != template.Failed || why != "template '"+of+"' not found" {
			t.Errorf("a build from %s: %s %s", of, state, why)
		}
	}
	for _, key := range [][]string{blue, own} {
		b := "/templates/" + redApp.TemplateID + "/builds/" + redApp.BuildID
		for _, c := range [][3]string{
			{"GET", b + "/status", ""}, {"GET", b + "/logs", ""}, {"DELETE", "/berm/v1" + b, ""}, {"POST", "/v2" + b, `{"fromTemplate":"base"}`}, {"GET", "/templates/" + redApp.TemplateID + "/files/" + hash, ""},
		} {
			alike(c[0], c[1], c[2], redApp.TemplateID, key)
		}
	}

	// What a team calls its own is its own.
	for _, c := range []struct {
		key       []string
		ask, want string
		alias     string
	}{{own, "app", ownApp.TemplateID, "app"}, {blue, "app", blueApp.TemplateID, "app"}, {blue, "blue/app", blueApp.TemplateID, "app"}, {red, "app:v1", redApp.TemplateID, "app:v1"}} {
		var s sandbox
		w.want(201, "POST", "/v2/sandboxes", `{"templateID":"`+c.ask+`"}`, c.key...).into(t, &s)
		var all []listed
		w.want(200, "GET", "/v2/sandboxes?template="+c.ask, "", c.key...).into(t, &all)
		if string(s.TemplateID) != c.want || s.Alias != c.alias || !slices.ContainsFunc(all, func(l listed) bool { return l.SandboxID == s.SandboxID && l.Alias == c.alias }) {
			t.Errorf("%s: %+v of %s, listed as %+v", c.ask, s, c.want, all)
		}
	}
	var told struct {
		TemplateID string
		Public     bool
	}
	w.want(200, "GET", "/templates/aliases/app", "", blue...).into(t, &told)
	if told.TemplateID != blueApp.TemplateID || told.Public {
		t.Errorf("%+v", told)
	}
	w.want(409, "POST", "/v3/templates", `{"name":"base"}`, blue...)
	w.want(404, "POST", "/v2/sandboxes", `{"templateID":"app"}`, red...)                                               // it has a tag there
	w.want(409, "POST", "/sandboxes/"+string(w.created(blue, "base"))+"/snapshots", `{"name":"blue/app"}`, blue...)    // a template of its own
	w.want(201, "POST", "/sandboxes/"+string(w.created(blue, "base"))+"/snapshots", `{"name":"private"}`, blue...)     // as if there were none
	w.want(400, "POST", "/sandboxes/"+string(w.created(blue, "base"))+"/snapshots", `{"name":"default/app"}`, blue...) // another's name
	w.want(201, "POST", "/v2/sandboxes", `{"templateID":"blue/private"}`, blue...)                                     // the snapshot, whose name is not taken
	w.want(404, "POST", "/v2/sandboxes", `{"templateID":"default/private"}`, blue...)                                  // never the other
	w.want(404, "POST", "/v2/sandboxes", `{"templateID":"blue/private"}`, own...)

	// Public, it is for others to use.
	w.want(200, "PATCH", "/v2/templates/app%3Av1", `{"public":true}`, red...)
	var one templateInfo
	w.want(200, "GET", at("red/app:v1"), "", blue...).into(t, &one)
	if string(one.TemplateID) != redApp.TemplateID || !one.Public || strings.Join(one.Names, "") != "red/app" {
		t.Errorf("%+v", one)
	}
	var s sandbox
	w.want(201, "POST", "/v2/sandboxes", `{"templateID":"red/app:v1"}`, blue...).into(t, &s)
	if s.Alias != "red/app:v1" {
		t.Errorf("%+v", s)
	}
	w.ready(blue, "of-red", "red/app:v1")
	w.want(200, "GET", at("red/app:v1")+"/tags", "", blue...)
	for _, of := range []string{"red/app:v1", redApp.TemplateID, "tool"} {
		w.want(403, "DELETE", at(of), "", blue...)
		w.want(403, "PATCH", "/v2"+at(of), `{"public":false}`, blue...)
		w.want(403, "POST", "/templates/tags", `{"target":"`+of+`","tags":["x"]}`, blue...)
		w.want(403, "DELETE", "/templates/tags", `{"name":"`+of+`","tags":["v1"]}`, blue...)
	}
	w.want(404, "GET", "/templates/"+redApp.TemplateID+"/builds/"+redApp.BuildID+"/status", "", blue...)
	w.want(400, "PATCH", "/v2"+at("tool"), `{"public":false}`, own...)

	// Its own a team changes.
	w.want(201, "POST", "/templates/tags", `{"target":"red/app:v1","tags":["v2"]}`, red...)
	w.want(204, "DELETE", "/templates/tags", `{"name":"app","tags":["v1"]}`, red...)
	w.want(200, "PATCH", "/v2"+at("app:v2"), `{"public":false}`, red...)
	w.want(404, "POST", "/v2/sandboxes", `{"templateID":"red/app:v2"}`, blue...)
	w.want(404, "DELETE", at("app:none"), "", red...)
	w.want(204, "DELETE", at("app"), "", red...) // whatever its tags
	w.want(404, "GET", at("app:v2"), "", red...)
	w.want(200, "GET", at("app"), "", blue...)
	for _, what := range []audit.Type{audit.TemplateBuild, audit.TemplateRemove} {
		of := w.audit.of(what)
		if i := slices.IndexFunc(of, func(r audit.Record) bool { return strings.Contains(fmt.Sprint(r.Data), redApp.TemplateID) }); i < 0 || of[i].Team != "red" {
			t.Errorf("%s: %+v", what, of)
		}
	}
}

// created makes a sandbox with the key of a team.
func (w *world) created(key []string, of string) berm.SandboxID {
	w.t.Helper()
	var s sandbox
	w.want(201, "POST", "/v2/sandboxes", `{"templateID":"`+of+`"}`, key...).into(w.t, &s)
	return s.SandboxID
}

// Files that one team uploaded are there for no other, whatever hash it knows.
func TestUploadsOfTeams(t *testing.T) {
	w := newWorld(t)
	blue, red := w.keyOfTeam("blue", store.TeamLimits{}), w.keyOfTeam("red", store.TeamLimits{})
	hash := strings.Repeat("ab", 32)
	upload := func(key []string) (present bool, put func() int) {
		t.Helper()
		var b newBuild
		w.want(202, "POST", "/v3/templates", `{"name":"app"}`, key...).into(t, &b)
		var told struct {
			Present bool
			URL     string
		}
		w.want(201, "GET", "/templates/"+b.TemplateID+"/files/"+hash, "", key...).into(t, &told)
		return told.Present, func() int {
			r, err := http.NewRequest("PUT", told.URL, strings.NewReader("x"))
			if err != nil {
				t.Fatal(err)
			}
			answer, err := http.DefaultClient.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			answer.Body.Close()
			return answer.StatusCode
		}
	}
	if _, put := upload(red); put() != 200 {
		t.Error("the files were not taken")
	}
	for _, c := range []struct {
		key  []string
		want bool
	}{{red, true}, {blue, false}} {
		if got, _ := upload(c.key); got != c.want {
			t.Errorf("present: %t, want %t", got, c.want)
		}
	}
}
