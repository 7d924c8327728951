package e2b

import (
	"encoding/json"
	"strings"
	"sync"
	"testing"

	"github.com/berm-sandbox/berm/internal/audit"
)

// records is an audit log in memory.
type records struct {
	mu  sync.Mutex
	all []audit.Record
}

func (r *records) Emit(rec audit.Record) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, rec)
	return nil
}

// of returns the records of a type.
func (r *records) of(what audit.Type) (found []audit.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rec := range r.all {
		if rec.Type == what {
			found = append(found, rec)
		}
	}
	return found
}

// call is what a record tells of a call.
func call(r audit.Record) (route, method string, status int) {
	data := r.Data.(map[string]any)
	return data["route"].(string), data["method"].(string), data["status"].(int)
}

func TestCallsAreRecorded(t *testing.T) {
	w := newWorld(t)
	s := w.create(`{"templateID":"base","envVars":{"PASSWORD":"hunter2"},"metadata":{"m":"hunter3"},"network":{"allowPublicTraffic":false}}`)
	at := "/sandboxes/" + string(s.SandboxID)
	w.want(200, "GET", at, "")
	w.want(204, "POST", at+"/timeout?token=hunter4", `{"timeout":60}`)
	w.want(409, "POST", at+"/resume", `{"timeout":60}`)
	w.want(401, "GET", at, "", "X-API-Key", "e2b_hunter5")
	w.want(400, "DELETE", "/sandboxes/hunter6%20", "")
	w.want(204, "DELETE", at, "")

	type line struct {
		route, method string
		status        int
		outcome       audit.Outcome
		actor         string
		known         bool // which sandbox
	}
	want := []line{
		{"/v2/sandboxes", "POST", 201, audit.OK, "key", false},
		{"/sandboxes/{sandboxID}/timeout", "POST", 204, audit.OK, "key", true},
		{"/sandboxes/{sandboxID}/resume", "POST", 409, audit.Failed, "key", true},
		{"/sandboxes/{sandboxID}", "GET", 401, audit.Denied, "anonymous", true},
		{"/sandboxes/{sandboxID}", "DELETE", 400, audit.Failed, "key", false},
		{"/sandboxes/{sandboxID}", "DELETE", 204, audit.OK, "key", true},
	}
	got := w.audit.of(audit.APICall)
	if len(got) != len(want) {
		t.Fatalf("%d records, want %d: %+v", len(got), len(want), got)
	}
	for i, r := range got {
		l := line{outcome: r.Outcome, actor: r.Actor.Type, known: r.Sandbox == s.SandboxID}
		l.route, l.method, l.status = call(r)
		if l != want[i] || (r.Actor.ID != "") != (l.actor == "key") || r.TraceID == "" {
			t.Errorf("record %d: %+v, want %+v", i, r, want[i])
		}
	}
	if p := w.audit.of(audit.PolicySet); len(p) != 1 || p[0].Sandbox != s.SandboxID || p[0].Data == nil {
		t.Errorf("policy: %+v", p)
	}

	all, err := json.Marshal(w.audit.all)
	if err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{"hunter", w.key, s.AccessToken, s.TrafficToken} {
		if strings.Contains(string(all), secret) {
			t.Errorf("records hold %q: %s", secret, all)
		}
	}
}

// Strangers cannot fill the disk, and nothing they did is lost.
func TestRefusalsAreBounded(t *testing.T) {
	w := newWorld(t)
	const tries = 3 * refusalsAtOnce
	for range tries {
		w.want(401, "GET", "/v2/sandboxes", "", "X-API-Key", "")
	}
	w.audit.mu.Lock()
	told := len(w.audit.all)
	w.audit.mu.Unlock()
	if told < refusalsAtOnce || told > tries/2 {
		t.Fatalf("%d records of %d refusals", told, tries)
	}
	eventuallyTold := func() int {
		n := 0
		for _, r := range w.audit.of(audit.APICall) {
			n++
			if more, ok := r.Data.(map[string]any)["untold"].(int64); ok {
				n += int(more)
			}
		}
		return n
	}
	for made := tries; ; {
		if len(w.audit.of(audit.APICall)) > told && eventuallyTold() >= tries {
			break
		}
		if made++; made > 1000*tries {
			t.Fatal("refusals without a record are not counted")
		}
		w.want(401, "GET", "/v2/sandboxes", "", "X-API-Key", "")
	}
}
