package e2b

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/credential/vault"
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
