package network

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// What rules of a server's sandboxes ask is answered by the operator's webhook, and limits of
// their policies are kept.
func TestAskAndLimits(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte(strings.Repeat("s", 32)), 0o600); err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	asked := map[string]int{}
	hook := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var q struct {
			Host     string
			Metadata map[string]string
		}
		body, _ := io.ReadAll(r.Body)
		if err := json.Unmarshal(body, &q); err != nil || !strings.HasPrefix(r.Header.Get("Berm-Signature"), "v1=") || q.Metadata["user"] != "ann" {
			t.Errorf("%s %v", body, r.Header)
		}
		mu.Lock()
		asked[q.Host]++
		n := asked[q.Host]
		mu.Unlock()
		switch {
		case q.Host == "www.example.com":
			_, _ = io.WriteString(w, `{"answer":"allow","for":"sandbox"}`)
		case q.Host == one && n == 1:
			_, _ = io.WriteString(w, `{"answer":"allow"}`)
		case q.Host == eight:
			http.Error(w, "down", http.StatusInternalServerError)
		default:
			_, _ = io.WriteString(w, `{"answer":"deny","for":"until","until":"`+time.Now().Add(time.Hour).Format(time.RFC3339)+`"}`)
		}
	}))
	defer hook.Close()
	ctx, s := start(t, "--ask-webhook", hook.URL, "--ask-secret-file", secret)
	sandbox := create(t, ctx, s, object{"metadata": map[string]string{"user": "ann"}})
	at := "/berm/v1/sandboxes/" + sandbox.ID + "/network"
	put := func(policy string) {
		t.Helper()
		if err := s.Call(ctx, "PUT", at, rawJSON(policy), nil); err != nil {
			t.Fatal(err)
		}
	}
	put(`{"version":1,"rules":[{"id":"web","to":["www.example.com"],"action":"ask","http":{"methods":["GET"]}},{"id":"rest","to":["public"],"action":"ask"}]}`)
	results := reaches(t, ctx, sandbox, "http://www.example.com/", "http://www.example.com/", "http://"+one+"/", "http://"+one+"/", "http://"+one+"/", "http://"+eight+"/", "http://other.example.org/")
	for i, want := range []bool{true, true, true, false, false, false, false} {
		if results[i] != want {
			t.Errorf("%d: reached %v", i, results[i])
		}
	}
	if out := run(t, ctx, sandbox, `curl -sk -m 5 -o /dev/null -w '%{http_code}' -X POST http://www.example.com/`); out.Stdout != "403" {
		t.Errorf("a request that the rule has not: %+v", out)
	}
	mu.Lock()
	for host, n := range map[string]int{"www.example.com": 1, one: 2, eight: 1, "other.example.org": 1} {
		if asked[host] != n {
			t.Errorf("%s was asked about %d times, want %d", host, asked[host], n)
		}
	}
	mu.Unlock()
	// The answer outlives a change of the policy that leaves the rule.
	put(`{"version":1,"limits":{"new_flows":3},"rules":[{"id":"web","to":["www.example.com"],"action":"ask","http":{"methods":["GET"]}}]}`)
	results = reaches(t, ctx, sandbox, "http://www.example.com/", "http://www.example.com/", "http://www.example.com/", "http://www.example.com/", "http://www.example.com/")
	if !results[0] || results[3] && results[4] {
		t.Errorf("3 new flows a second: %v", results)
	}
	var log struct {
		Events []struct{ Action, Reason, Detail string }
	}
	reasons := map[string]bool{}
	for end := time.Now().Add(30 * time.Second); (!reasons["ask"] || !reasons["limit"]) && time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if err := s.Call(ctx, "GET", at+"/log", nil, &log); err != nil {
			t.Fatal(err)
		}
		for _, e := range log.Events {
			reasons[e.Reason] = true
		}
	}
	if !reasons["ask"] || !reasons["limit"] {
		t.Errorf("the reasons are not told: %+v", log)
	}
	records, err := os.ReadFile(filepath.Join(s.Data, "audit", "log.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(records), `"net.ask"`); n < 5 {
		t.Errorf("%d records of questions", n)
	}
	never(t)
}
