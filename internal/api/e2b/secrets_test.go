package e2b

import (
	"encoding/json"
	"maps"
	"net/http"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/credential/vault"
	"github.com/berm-sandbox/berm/internal/store"
)

func TestSecrets(t *testing.T) {
	w, _ := newOnlineWorld(t, true)
	const canary = "CANARY-value-of-a-secret"
	var made, got vault.Secret
	r := w.want(201, "POST", "/secrets", `{"name":"My_Token","value":"`+canary+`","metadata":{"team":"a"}}`)
	r.into(t, &made)
	if r.header.Get("Cache-Control") != "no-store" || made.Name != "my_token" || made.Version != 1 {
		t.Errorf("%v %+v", r.header, made)
	}
	w.want(409, "POST", "/secrets", `{"name":"my_token","value":"x"}`)
	for _, id := range []string{made.ID, "my_token", "MY_TOKEN"} {
		w.want(200, "GET", "/secrets/"+id, "").into(t, &got)
		if got.ID != made.ID {
			t.Errorf("%s is %+v", id, got)
		}
	}
	w.want(200, "POST", "/secrets/My_Token", `{"value":"`+canary+`-2"}`).into(t, &got)
	if got.Version != 2 || got.Metadata["team"] != "a" {
		t.Errorf("updated: %+v", got)
	}
	for body, text := range map[string]string{
		`{"value":"x"}`:                "name is required",
		`{"name":"a"}`:                 "value is required",
		`{"name":"a","value":""}`:      "1 to 65536",
		`{"name":"a","value":5}`:       "",
		`{"name":"a b","value":"x"}`:   "letters, digits",
		`{"name":"","value":"x"}`:      "letters, digits",
		`{"name":"sec_a","value":"x"}`: "sec_",
		`{"name":"` + strings.Repeat("a", 129) + `","value":"x"}`:                       "128",
		`{"name":"a","value":"` + strings.Repeat("x", 64<<10+1) + `"}`:                  "65536",
		`{"name":"a","value":"x","metadata":{"` + strings.Repeat("k", 129) + `":"v"}}`:  "metadata",
		`{"name":"a","value":"x","metadata":{"k":"` + strings.Repeat("v", 1025) + `"}}`: "metadata",
	} {
		if r := w.want(400, "POST", "/secrets", body); !strings.Contains(string(r.body), text) {
			t.Errorf("%.60s: %s", body, r.body)
		}
	}
	w.want(413, "POST", "/secrets", `{"name":"a","value":"`+strings.Repeat("x", maxSecretBody)+`"}`)
	w.want(201, "POST", "/secrets", `{"name":"another","value":"`+canary+`"}`)
	r = w.want(200, "GET", "/secrets?limit=1", "")
	next := r.header.Get("X-Next-Token")
	var page []vault.Secret
	if r.into(t, &page); len(page) != 1 || next == "" {
		t.Fatalf("%s, next %q", r.body, next)
	}
	r = w.want(200, "GET", "/secrets?limit=1&nextToken="+next, "")
	if r.into(t, &page); len(page) != 1 || page[0].Name != "my_token" || r.header.Get("X-Next-Token") != "" {
		t.Errorf("%s", r.body)
	}
	w.want(400, "GET", "/secrets?nextToken=%00", "")
	w.want(204, "POST", "/berm/v1/secrets/rotate", "")
	w.want(204, "DELETE", "/secrets/my_token", "")
	w.want(404, "DELETE", "/secrets/my_token", "")
	w.want(404, "GET", "/secrets/"+made.ID, "")
	w.want(404, "POST", "/secrets/my_token", `{"value":"x"}`)
	w.audit.mu.Lock()
	defer w.audit.mu.Unlock()
	text, err := json.Marshal(w.audit.all)
	if err != nil || strings.Contains(string(text), canary) || !strings.Contains(string(text), "secret.set") || strings.Contains(w.log.String(), canary) {
		t.Errorf("records: %s, %v", text, err)
	}
}

// API keys reach the secrets of their team alone, and know of no others.
func TestSecretsOfTeams(t *testing.T) {
	w, _ := newOnlineWorld(t, true)
	ctx := t.Context()
	keys := map[berm.Team]string{"": w.key}
	for _, team := range []berm.Team{"blue", "red"} {
		if _, err := w.db.CreateTeam(ctx, "root", team, store.TeamLimits{}); err != nil {
			t.Fatal(err)
		}
		_, key, err := w.db.CreateKey(ctx, store.Key{Name: "test", Team: team})
		if err != nil {
			t.Fatal(err)
		}
		keys[team] = key
	}
	made := map[berm.Team]vault.Secret{}
	as := func(team berm.Team, status int, method, path, body string) response {
		t.Helper()
		return w.want(status, method, path, body, "X-API-Key", keys[team])
	}
	for team := range keys {
		var s vault.Secret
		as(team, 201, "POST", "/secrets", `{"name":"same","value":"of `+team.String()+`"}`).into(t, &s)
		as(team, 409, "POST", "/secrets", `{"name":"Same","value":"x"}`)
		as(team, 201, "POST", "/secrets", `{"name":"of-`+team.String()+`","value":"x"}`)
		made[team] = s
	}
	for team := range keys {
		var all []vault.Secret
		var got vault.Secret
		if as(team, 200, "GET", "/secrets", "").into(t, &all); len(all) != 2 || all[0].Name != "of-"+team.String() || all[1].ID != made[team].ID {
			t.Errorf("team %s has %+v", team, all)
		}
		next := as(team, 200, "GET", "/secrets?limit=1", "").header.Get("X-Next-Token")
		if as(team, 200, "GET", "/secrets?nextToken="+next, "").into(t, &all); len(all) != 1 || all[0].ID != made[team].ID {
			t.Errorf("the second page of team %s is %+v", team, all)
		}
		if as(team, 200, "GET", "/secrets/same", "").into(t, &got); got.ID != made[team].ID {
			t.Errorf("team %s has %+v", team, got)
		}
		unknown := as(team, 404, "GET", "/secrets/sec_0123", "")
		for other := range keys {
			if other == team {
				continue
			}
			for _, name := range []string{made[other].ID, "of-" + other.String()} {
				for method, body := range map[string]string{"GET": "", "POST": `{"value":"stolen"}`, "DELETE": ""} {
					r := as(team, 404, method, "/secrets/"+name, body)
					if strings.ReplaceAll(string(r.body), name, "sec_0123") != string(unknown.body) {
						t.Errorf("%s of a secret of another team: %s, and of one that there is not: %s", method, r.body, unknown.body)
					}
				}
			}
		}
	}
	as("blue", 200, "POST", "/secrets/same", `{"value":"changed"}`).into(t, new(vault.Secret))
	as("red", 204, "DELETE", "/secrets/same", "")
	for team, version := range map[berm.Team]int64{"": 1, "blue": 2} {
		var got vault.Secret
		if as(team, 200, "GET", "/secrets/same", "").into(t, &got); got.Version != version {
			t.Errorf("team %s has version %d, want %d", team, got.Version, version)
		}
	}

	// All of them have one key, which is the server's.
	for team, want := range map[berm.Team]int{"": 204, "blue": 403, "red": 403} {
		if r := as(team, want, "POST", "/berm/v1/secrets/rotate", ""); want == 403 && !strings.Contains(string(r.body), "all teams") {
			t.Errorf("%s", r.body)
		}
	}

	// Sandboxes get those of their team.
	uses := func(name string) string {
		return `[{"name":"api","secret":"secret:` + name + `","hosts":["api.example"]}]`
	}
	as("red", 400, "POST", "/sandboxes", `{"templateID":"base","berm":{"credentials":`+uses("sblue")+`}}`)
	as("red", 400, "POST", "/berm/v1/containers", `{"network_policy":{"type":"allowlist","allowed_domains":["api.example"],"domain_secrets":[{"domain":"api.example","name":"KEY","value":"secret:sblue"}]}}`)
	var s sandbox
	as("blue", 201, "POST", "/sandboxes", `{"templateID":"base","berm":{"credentials":`+uses("sblue")+`}}`).into(t, &s)
	at := "/berm/v1/sandboxes/" + string(s.SandboxID) + "/credentials"
	as("blue", 400, "PUT", at, `{"credentials":`+uses("sred")+`}`)
	as("blue", 204, "PUT", at, `{"credentials":`+uses("sblue")+`}`)

	w.audit.mu.Lock()
	defer w.audit.mu.Unlock()
	count := map[string]int{}
	for _, r := range w.audit.all {
		if strings.HasPrefix(string(r.Type), "secret.") {
			count[r.Team.String()+" "+string(r.Type)]++
		}
	}
	want := map[string]int{"default secret.set": 2, "blue secret.set": 3, "red secret.set": 2, "red secret.remove": 1, "default secret.rotate": 1}
	if !maps.Equal(count, want) {
		t.Errorf("records %v, want %v", count, want)
	}
}

func TestCredentials(t *testing.T) {
	w, _ := newOnlineWorld(t, true)
	s := w.create(`{"templateID":"base","berm":{"credentials":[{"name":"api","secret":"secret:some","hosts":["api.example"]}]}}`)
	at := "/berm/v1/sandboxes/" + string(s.SandboxID) + "/credentials"
	if r := w.want(200, "GET", at, ""); !strings.Contains(string(r.body), `"secret":"secret:some"`) {
		t.Errorf("%s", r.body)
	}
	for body, want := range map[string]int{
		`{}`: 400, `{"credentials":[{"name":"api","secret":"secret:some","value":"x"}]}`: 400, // unknown fields of ours are wrong
		`{"credentials":[{"name":"api","secret":"x"}]}`: 400, `{"credentials":[{"secret":"secret:some"}]}`: 400,
		`{"credentials":[{"name":"api","secret":"secret:unknown"}]}`: 400,
	} {
		if r := w.call("PUT", at, body); r.status != want {
			t.Errorf("%s: %d %s", body, r.status, r.body)
		}
	}
	w.want(204, "PUT", "/sandboxes/"+string(s.SandboxID)+"/network", `{"rules":{"a.example":[{"transform":{"headers":{"X-Key":"a value"}}}]}}`)
	if r := w.want(200, "GET", at, ""); !strings.Contains(string(r.body), `"fields":{"a.example":["X-Key"]}`) || strings.Contains(string(r.body), "a value") {
		t.Errorf("%s", r.body)
	}
	w.want(http.StatusNoContent, "PUT", at, `{"credentials":[]}`)
	if r := w.want(200, "GET", at, ""); !strings.Contains(string(r.body), `"credentials":[]`) {
		t.Errorf("%s", r.body)
	}
	w.want(404, "GET", "/berm/v1/sandboxes/"+string(berm.NewSandboxID())+"/credentials", "")
}
