package e2b

import (
	"net/http"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/store"
)

// keyOfTeam makes a team and a key of it, as a header.
func (w *world) keyOfTeam(name berm.Team, limits store.TeamLimits) []string {
	w.t.Helper()
	if _, err := w.db.CreateTeam(w.t.Context(), "tester", name, limits); err != nil {
		w.t.Fatal(err)
	}
	_, secret, err := w.db.CreateKey(w.t.Context(), store.Key{Name: string(name), Team: name})
	if err != nil {
		w.t.Fatal(err)
	}
	return []string{"X-API-Key", secret}
}

// Every route that names a sandbox answers those of other teams in the words in which it answers what was never there,
// whatever else is wrong with the request, and long after their end.
func TestNoRouteReachesAnotherTeam(t *testing.T) {
	w := newWorld(t)
	blue, red := w.keyOfTeam("blue", store.TeamLimits{}), w.keyOfTeam("red", store.TeamLimits{})
	own := []string{"X-API-Key", w.key}
	var theirs sandbox
	w.want(201, "POST", "/v2/sandboxes", `{"templateID":"base"}`, red...).into(t, &theirs)
	var box toldContainer
	w.want(201, "POST", "/berm/v1/containers", `{}`, red...).into(t, &box)
	const gone, nobody = "i0goneaaaaaaaaaaaaaaa", "i0nobodyaaaaaaaaaaaaa"
	w.logged.Team = "red"
	w.logged.Session(gone)
	for _, rt := range routes {
		some := []string{string(theirs.SandboxID), gone}
		if strings.Contains(rt.path, "{containerID}") {
			some = []string{string(box.ID)}
		} else if !strings.Contains(rt.path, "{sandboxID}") {
			continue
		}
		for team, key := range map[string][]string{"blue": blue, "own": own} {
			ask := func(id string) string {
				path := strings.NewReplacer("{sandboxID}", id, "{containerID}", id, "{sha256}", strings.Repeat("0", 64),
					"{fileID}", "x", "{contextID}", "x").Replace(rt.path)
				got := w.call(rt.method, path, "", key...)
				if got.status != http.StatusNotFound || !strings.Contains(string(got.body), id) {
					t.Errorf("%s %s by team %s: %d %s", rt.method, path, team, got.status, got.body)
				}
				return strings.ReplaceAll(string(got.body), id, "ID")
			}
			unknown := ask(nobody)
			for _, id := range some {
				if got := ask(id); got != unknown {
					t.Errorf("%s %s tells team %s that there is such a sandbox: %s, and not %s", rt.method, rt.path, team, got, unknown)
				}
			}
		}
	}
	w.want(200, "GET", "/sandboxes/"+string(theirs.SandboxID), "", red...)
	w.want(200, "GET", "/berm/v1/containers/"+string(box.ID), "", red...)
	for _, r := range w.audit.of(audit.APICall) {
		if r.Sandbox == theirs.SandboxID && r.Team != "red" || r.Sandbox == gone || r.Sandbox == nobody {
			t.Errorf("another team's call is in the records of the sandbox: %+v", r)
		}
	}
}

func TestListsAreOfATeam(t *testing.T) {
	w := newWorld(t)
	blue, red := w.keyOfTeam("blue", store.TeamLimits{Sandboxes: 1}), w.keyOfTeam("red", store.TeamLimits{})
	var mine, theirs sandbox
	w.want(201, "POST", "/v2/sandboxes", `{"templateID":"base"}`, blue...).into(t, &mine)
	w.want(201, "POST", "/v2/sandboxes", `{"templateID":"base"}`, red...).into(t, &theirs)
	w.want(201, "POST", "/berm/v1/containers", `{"name":"theirs"}`, red...)
	w.want(429, "POST", "/v2/sandboxes", `{"templateID":"base"}`, blue...)
	w.want(201, "POST", "/sandboxes/"+string(theirs.SandboxID)+"/snapshots", `{"name":"kept"}`, red...)
	for _, path := range []string{"/sandboxes", "/v2/sandboxes"} {
		var all []listed
		w.want(200, "GET", path, "", blue...).into(t, &all)
		if len(all) != 1 || all[0].SandboxID != mine.SandboxID {
			t.Errorf("%s: %+v", path, all)
		}
	}
	if got := w.want(200, "GET", "/v2/sandboxes", "", red...); got.header.Get("X-Total-Running") != "2" {
		t.Errorf("running: %s", got.header.Get("X-Total-Running"))
	}
	for path, want := range map[string]string{
		"/snapshots":                      "[]",
		"/snapshots?name=kept":            "[]",
		"/berm/v1/containers":             `{"object":"list","data":[],"first_id":"","last_id":"","has_more":false}`,
		"/berm/v1/containers?name=theirs": `{"object":"list","data":[],"first_id":"","last_id":"","has_more":false}`,
		"/sandboxes/metrics?sandbox_ids=" + string(theirs.SandboxID): `{"sandboxes":{}}`,
	} {
		if got := w.want(200, "GET", path, "", blue...); strings.TrimSpace(string(got.body)) != want {
			t.Errorf("%s: %s", path, got.body)
		}
	}
	w.want(404, "POST", "/v2/sandboxes", `{"templateID":"kept"}`, w.keyOfTeam("green", store.TeamLimits{})...)
	w.want(404, "DELETE", "/templates/kept", "", blue...)
	w.want(201, "POST", "/v2/sandboxes", `{"templateID":"kept"}`, red...)
}

func TestTeamsOfAKey(t *testing.T) {
	w := newWorld(t)
	blue := w.keyOfTeam("blue", store.TeamLimits{})
	team, err := w.db.Team(t.Context(), "blue")
	if err != nil {
		t.Fatal(err)
	}
	var all []map[string]any
	w.want(200, "GET", "/teams", "", blue...).into(t, &all)
	if len(all) != 1 || all[0]["teamID"] != team.ID || all[0]["name"] != "blue" || all[0]["apiKey"] != blue[1] {
		t.Errorf("%+v", all)
	}
	w.want(200, "GET", "/templates?teamID="+team.ID, "", blue...)
	w.want(400, "GET", "/templates?teamID="+team.ID, "")
	w.want(403, "GET", "/metrics", "", blue...)
	w.want(200, "GET", "/metrics", "")
}
