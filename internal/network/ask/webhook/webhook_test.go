package webhook

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

const secret = "0123456789abcdef0123456789abcdef"

func secretFile(t *testing.T, content string, mode os.FileMode) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(path, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
	return path
}

var event = egress.Event{Kind: egress.Asks, Name: "api.example.com", Port: 443, Protocol: "tcp", Rule: "rest", Detail: "all else", Revision: "3", Duration: 2}

func TestAsk(t *testing.T) {
	answer, status := "", http.StatusOK
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		mac := hmac.New(sha256.New, []byte(secret))
		mac.Write([]byte(r.Header.Get("Berm-Timestamp") + "." + string(body)))
		if got := r.Header.Get("Berm-Signature"); got != "v1="+hex.EncodeToString(mac.Sum(nil)) {
			t.Errorf("signature %s", got)
		}
		var q map[string]any
		if err := json.Unmarshal(body, &q); err != nil {
			t.Error(err)
		}
		if q["host"] != "api.example.com" || q["port"] != 443.0 || q["rule"] != "rest" || q["sandbox"] != "i1" || q["id"] == "" || q["metadata"].(map[string]any)["user"] != "ann" {
			t.Errorf("%s", body)
		}
		if status == http.StatusFound {
			w.Header().Set("Location", "/")
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, answer)
	}))
	defer server.Close()
	h, err := New(server.URL+"/hook", secretFile(t, secret+"\n", 0o600))
	if err != nil {
		t.Fatal(err)
	}
	ask := func() (egress.Reply, error) {
		return h.Ask(t.Context(), "i1", map[string]string{"user": "ann"}, event)
	}
	for text, want := range map[string]egress.Reply{
		`{"answer":"allow"}`:                                                    {Allow: true, Scope: egress.ScopeOnce},
		`{"answer":"deny","for":"sandbox","more":1}`:                            {Scope: egress.ScopeSandbox},
		`{"answer":"allow","for":"until","until":"2999-01-01T00:00:00Z"}`:       {Allow: true, Scope: egress.ScopeUntil, Until: time.Date(2999, 1, 1, 0, 0, 0, 0, time.UTC)},
		`{"answer":"allow","for":"once","until":"1999-01-01T00:00:00Z","x":{}}`: {Allow: true, Scope: egress.ScopeOnce},
	} {
		answer, want.Question = text, event.Question()
		if got, err := ask(); err != nil || got != want {
			t.Errorf("%s: %+v %v", text, got, err)
		}
	}
	for _, text := range []string{``, `{}`, `{"answer":"yes"}`, `[]`, `{"answer":"allow","for":"ever"}`, `{"answer":"allow","for":"until"}`, `{"answer":"allow"}` + strings.Repeat(" ", 16<<10)} {
		answer = text
		if got, err := ask(); berm.KindOf(err) != berm.Invalid || got.Allow {
			t.Errorf("%.40s: %+v %v", text, got, err)
		}
	}
	answer = `{"answer":"allow"}`
	for _, status = range []int{http.StatusFound, http.StatusForbidden, http.StatusInternalServerError, http.StatusCreated} {
		if got, err := ask(); berm.KindOf(err) != berm.Unavailable || got.Allow {
			t.Errorf("%d: %+v %v", status, got, err)
		}
	}
	server.Close()
	if got, err := ask(); berm.KindOf(err) != berm.Unavailable || got.Allow || strings.Contains(err.Error(), "/hook") {
		t.Errorf("%+v %v", got, err)
	}
}

func TestPatience(t *testing.T) {
	end := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-end }))
	defer server.Close()
	defer close(end)
	h, err := New(server.URL, secretFile(t, secret, 0o600))
	if err != nil {
		t.Fatal(err)
	}
	e := event
	e.Duration = 0.2
	if got, err := h.Ask(context.Background(), "i1", nil, e); berm.KindOf(err) != berm.Unavailable || got.Allow {
		t.Errorf("%+v %v", got, err)
	}
}

func TestWrongSettings(t *testing.T) {
	good := secretFile(t, secret, 0o600)
	for _, c := range []struct {
		url, file string
		kind      berm.Kind
	}{
		{"http://hook.example.com/", good, berm.Invalid}, {"hook.example.com", good, berm.Invalid}, {"ftp://127.0.0.1/", good, berm.Invalid},
		{"https://u:p@hook.example.com/", good, berm.Invalid}, {"https://hook.example.com/", "", berm.Invalid},
		{"https://hook.example.com/", good + "x", berm.NotFound}, {"https://hook.example.com/", secretFile(t, secret, 0o640), berm.Invalid},
		{"https://hook.example.com/", secretFile(t, "short\n", 0o600), berm.Invalid},
	} {
		if _, err := New(c.url, c.file); err == nil || berm.KindOf(err) != c.kind {
			t.Errorf("%+v: %v", c, err)
		}
	}
	for _, url := range []string{"https://hook.example.com/a?b", "http://127.0.0.1:80/", "http://[::1]/", "http://localhost/"} {
		if _, err := New(url, good); err != nil {
			t.Errorf("%s: %v", url, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(`{"answer":"allow","for":"until","until":"2999-01-01T00:00:00Z"}`)
	f.Add(`{"answer":"deny"}`)
	f.Add(`{"answer":"allow","for":"sandbox"}`)
	f.Fuzz(func(t *testing.T, text string) {
		r, err := parse(event.Question(), []byte(text), time.Now())
		if err != nil && r.Allow || err == nil && (r.Question != event.Question() || r.Scope == "") {
			t.Fatalf("%+v %v", r, err)
		}
	})
}
