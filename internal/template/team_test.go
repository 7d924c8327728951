package template

import (
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/berm-sandbox/berm"
)

// publish stores a build that a team ordered, with the layers of another template.
func publish(t *testing.T, s *Store, team berm.Team, name string, of berm.Template) berm.Template {
	t.Helper()
	full := FullName(team, name)
	id, err := s.IDOf(full)
	if err != nil {
		t.Fatal(err)
	}
	b := Build{ID: berm.BuildID(berm.NewUUID()), TemplateID: id, Team: team, Names: []string{full}, State: Ready}
	if err := s.SaveBuild(b); err != nil {
		t.Fatal(err)
	}
	made, err := s.Publish(t.Context(), b, berm.Template{Layers: of.Layers})
	if err != nil {
		t.Fatal(err)
	}
	return made
}

// What a team calls a template leads to its own before the server's, and never to what another team has
// for itself, whose errors are those of what is not there.
func TestResolveForTeams(t *testing.T) {
	s := newStore(t)
	hosts := addTemplate(t, s, "tool", "1")
	own := publish(t, s, "", "app", hosts)
	blue, blueV1 := publish(t, s, "blue", "app", hosts), publish(t, s, "blue", "app:v1", hosts)
	red, open := publish(t, s, "red", "app", hosts), publish(t, s, "red", "open", hosts)
	if _, err := s.SetPublic(t.Context(), "red", "open", true); err != nil {
		t.Fatal(err)
	}
	// Somebody who knows the id of another's template calls one of its own so.
	posing := publish(t, s, "", string(red.ID), hosts)
	if _, err := s.SetPublic(t.Context(), "", "default/"+string(red.ID), true); err != nil {
		t.Fatal(err)
	}
	if blue.ID == own.ID || blue.ID == red.ID || blue.ID != blueV1.ID {
		t.Fatalf("ids %s, %s, %s, %s", own.ID, blue.ID, blueV1.ID, red.ID)
	}
	for _, c := range []struct {
		team berm.Team
		ref  string
		want berm.BuildID
	}{
		{"", "app", own.BuildID},
		{"", "default/app", own.BuildID},
		{"", "app:v1", ""},
		{"", "blue/app", ""},
		{"", string(blue.ID), ""},
		{"", "red/open", open.BuildID},
		{"", string(open.ID), open.BuildID},
		{"", "open", ""},
		{"blue", "app", blue.BuildID},
		{"blue", "blue/app:default", blue.BuildID},
		{"blue", "app:v1", blueV1.BuildID},
		{"blue", "app:v2", ""},
		{"blue", string(blue.ID) + ":v1", blueV1.BuildID},
		{"blue", "default/app", ""},
		{"blue", string(own.ID), ""},
		{"blue", "red/app", ""},
		{"blue", "red/open", open.BuildID},
		{"blue", "tool", hosts.BuildID},
		{"blue", "default/tool:latest", hosts.BuildID},
		{"blue", "blue/tool", ""},
		{"blue", "blue/" + string(blue.ID), ""},
		{"blue", "BLUE/app", ""},
		{"blue", "/app", ""},
		{"blue", "blue/blue/app", ""},
		{"red", string(red.ID), red.BuildID},
		{"green", "app", ""},
		{"green", string(red.ID), posing.BuildID},
	} {
		got, err := s.Resolve(t.Context(), c.team, c.ref)
		switch {
		case c.want == "":
			if berm.KindOf(err) != berm.NotFound || err == nil || err.Error() != "template '"+c.ref+"' not found" {
				t.Errorf("%q of team %s: %v, %v", c.ref, c.team, got.Names, err)
			}
		case err != nil || got.BuildID != c.want:
			t.Errorf("%q of team %s: %v, %v", c.ref, c.team, got.Names, err)
		}
	}
}

// A team changes what is its own alone; what it may not know of is not there.
func TestTeamsChangeTheirOwn(t *testing.T) {
	s := newStore(t)
	ctx := t.Context()
	hosts := addTemplate(t, s, "tool", "1")
	publish(t, s, "", "app", hosts)
	red := publish(t, s, "red", "app", hosts)
	publish(t, s, "red", "open", hosts)
	if _, err := s.SetPublic(ctx, "red", "open", true); err != nil {
		t.Fatal(err)
	}
	for ref, want := range map[string]berm.Kind{"red/app": berm.NotFound, string(red.ID): berm.NotFound, "app": berm.NotFound, "red/open": berm.Denied, "tool": berm.Denied} {
		_, added := s.AddTags(ctx, "blue", ref, []string{"v1"})
		_, public := s.SetPublic(ctx, "blue", ref, true)
		_, owned := s.Owned("blue", ref)
		for what, err := range map[string]error{
			"tags": added, "public": public, "owned": owned,
			"remove tags": s.RemoveTags(ctx, "blue", ref, []string{"v1"}),
		} {
			if err == nil || berm.KindOf(err) != want {
				t.Errorf("%s of %s: %v", what, ref, err)
			}
		}
	}
	if _, err := s.SetPublic(ctx, "", "tool", false); berm.KindOf(err) != berm.Invalid {
		t.Errorf("what was made on the host is taken from the teams: %v", err)
	}

	if _, err := s.AddTags(ctx, "red", "app", []string{"v1", "v2"}); err != nil {
		t.Fatal(err)
	}
	if err := s.RemoveTags(ctx, "red", "red/app", []string{"v1"}); err != nil {
		t.Error(err)
	}
	if err := s.RemoveTags(ctx, "red", string(red.ID), []string{"v1"}); berm.KindOf(err) != berm.NotFound {
		t.Errorf("a tag that is gone: %v", err)
	}
	tags, err := s.Tags("red", "app")
	if err != nil || len(tags) != 2 {
		t.Errorf("%v, %v", tags, err)
	}
	if _, err := s.Tags("blue", "red/app"); berm.KindOf(err) != berm.NotFound {
		t.Errorf("another team's tags: %v", err)
	}
	// A new build of a public template is public.
	if again := publish(t, s, "red", "open:v2", hosts); !again.Public {
		t.Errorf("%+v", again)
	}
	if next := publish(t, s, "", "tool:v2", hosts); next.Public {
		t.Errorf("a build is public because of an image of that name: %+v", next)
	}
	for _, ref := range []string{string(red.ID), "red/open"} { // as on the host
		if err := s.Remove(ctx, ref); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Owned("red", ref); berm.KindOf(err) != berm.NotFound {
			t.Errorf("%s is there after it went: %v", ref, err)
		}
	}
	for team, want := range map[berm.Team]berm.Kind{"": 0, "red": berm.NotFound} {
		if _, err := s.Owned(team, "app"); err == nil != (want == 0) || err != nil && berm.KindOf(err) != want {
			t.Errorf("team %s: %v", team, err)
		}
	}
}

// What earlier versions imported says nothing of teams, and is for all.
func TestImportedBeforeTeams(t *testing.T) {
	s := newStore(t)
	made := addTemplate(t, s, "tool", "1")
	r, err := s.find("tool")
	if err != nil {
		t.Fatal(err)
	}
	r.Public = false
	if err := s.write(r); err != nil {
		t.Fatal(err)
	}
	if got, err := s.Resolve(t.Context(), "blue", "tool"); err != nil || got.BuildID != made.BuildID || !got.Public {
		t.Errorf("%+v, %v", got, err)
	}
}

// An image that a build fetches takes no name, and a layer that is here only for another team comes
// again: its hash alone gives it to nobody.
func TestFetchForTeams(t *testing.T) {
	r := newRegistry(t, httptest.NewServer)
	r.push(t, "red/base", testImage(t, here(t).Architecture, "x"))
	s := newStore(t)
	base := addTemplate(t, s, Base, "1")
	release, err := s.Hold(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	fetch := func(team berm.Team) (requests int) {
		t.Helper()
		r.asked()
		got, err := s.Fetch(t.Context(), team, r.host+"/red/base", ImportOptions{Setuid: true, Login: Anonymous}, nil)
		if err != nil || len(got.Names) != 0 || len(got.Layers) != 2 {
			t.Fatalf("%+v, %v", got, err)
		}
		requests = len(r.asked())
		checkLayers(t, s, got)
		if err := s.SaveBuild(Build{ID: berm.BuildID(berm.NewUUID()), Team: team, Stages: []Stage{{Image: "x", Layers: got.Layers}}}); err != nil {
			t.Fatal(err)
		}
		return requests
	}
	all := fetch("red")
	if known := fetch("red"); known != all-2 {
		t.Errorf("%d requests of the team that has the two layers, %d before", known, all)
	}
	if other := fetch("blue"); other != all {
		t.Errorf("%d requests of another team, want %d", other, all)
	}
	if got, err := s.Resolve(t.Context(), "red", Base); err != nil || got.BuildID != base.BuildID {
		t.Errorf("base is now %+v, %v", got, err)
	}
	if list, err := s.List(t.Context()); err != nil || len(list) != 1 {
		t.Errorf("%d templates, %v", len(list), err)
	}
	if left, err := os.ReadDir(filepath.Join(s.dir, "tmp")); err != nil || len(left) > 0 {
		t.Errorf("%v is left, %v", left, err)
	}
}

func checkLayers(t *testing.T, s *Store, made berm.Template) {
	t.Helper()
	if !s.Holds(made.Layers) {
		t.Errorf("the layers %v are not there", made.Layers)
	}
}

// A build from an image begins with what the team calls so, and with no team's template where the image
// is of somebody in a registry whose name is a team's.
func TestImageForTeams(t *testing.T) {
	s := newStore(t)
	hosts := addTemplate(t, s, "python:3.12", "1")
	publish(t, s, "", "app", hosts)
	red := publish(t, s, "red", "app", hosts)
	for _, c := range []struct {
		team berm.Team
		ref  string
		want berm.BuildID
	}{
		{"blue", "python:3.12", hosts.BuildID}, {"blue", "docker.io/library/python:3.12", hosts.BuildID},
		{"blue", "app", ""}, {"red", "app", red.BuildID}, {"red", "red/app", ""}, {"blue", "red/app", ""},
	} {
		got, ok, err := s.Image(t.Context(), c.team, c.ref)
		if err != nil || ok != (c.want != "") || got.BuildID != c.want {
			t.Errorf("%q of team %s: %+v, %t, %v", c.ref, c.team, got, ok, err)
		}
	}
	if _, _, err := s.Image(t.Context(), "", "/etc"); berm.KindOf(err) != berm.Invalid {
		t.Errorf("a file: %v", err)
	}
}
