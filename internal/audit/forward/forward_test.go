package forward

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	logs "go.opentelemetry.io/proto/otlp/logs/v1"
	"google.golang.org/protobuf/proto"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/trail"
)

var quiet = slog.New(slog.DiscardHandler)

func open(t *testing.T, dir string) *trail.Log {
	t.Helper()
	l, err := trail.Open(dir, trail.Options{Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func emit(t *testing.T, l *trail.Log, types ...audit.Type) {
	t.Helper()
	for _, kind := range types {
		if err := l.Emit(audit.Record{Type: kind, Sandbox: "i1", Trust: audit.TrustHost}); err != nil {
			t.Fatal(err)
		}
	}
}

// receiver remembers what it got, and refuses when told to.
type receiver struct {
	mu   sync.Mutex
	got  []uint64
	fail int
}

func (r *receiver) AtOnce() int { return 3 }

func (r *receiver) Send(_ context.Context, lines []trail.Line) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fail > 0 {
		r.fail--
		return errors.New("not now")
	}
	for _, line := range lines {
		r.got = append(r.got, line.Seq)
	}
	return nil
}

func (r *receiver) seqs() []uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.got)
}

// eventually waits until the receiver has what it should have.
func (r *receiver) eventually(t *testing.T, want ...uint64) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !slices.Equal(r.seqs(), want); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("got %v, want %v", r.seqs(), want)
		}
	}
}

func run(f *Forwarder, next uint64) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { f.Run(ctx, next); close(done) }()
	return func() { cancel(); <-done }
}

func TestRecordsAreSentOnceEach(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir)
	emit(t, l, audit.SandboxCreate, audit.APICall)
	r := &receiver{}
	f := &Forwarder{Dir: dir, Places: filepath.Join(dir, "places"), Name: "x", Types: []string{"sandbox.*"}, Target: r, Log: quiet}
	stop := run(f, 2)
	emit(t, l, audit.APICall, audit.SandboxCreate, audit.SandboxExit) // 3, 4, 5
	r.eventually(t, 4, 5)
	// Another file takes the place of the current one.
	if _, err := l.Rotate(func(first uint64) string { return fmt.Sprintf("log-%020d.jsonl", first) }); err != nil {
		t.Fatal(err)
	}
	emit(t, l, audit.SandboxPause, audit.APICall, audit.SandboxResume) // 6, 8
	r.eventually(t, 4, 5, 6, 8)
	stop()
	emit(t, l, audit.SandboxExit, audit.SandboxCreate) // 9, 10, while nobody sends
	r.mu.Lock()
	r.fail = 1
	r.mu.Unlock()
	stop = run(f, l.Seq())
	r.eventually(t, 4, 5, 6, 8, 9, 10)
	stop()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestWebhook(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("0123456789abcdef0123"), 0o600); err != nil {
		t.Fatal(err)
	}
	status := http.StatusAccepted
	var got event
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if err := json.Unmarshal(body, &got); err != nil || r.Header.Get("Berm-Signature") == "" {
			t.Errorf("%s: %v", body, err)
		}
		w.WriteHeader(status)
	}))
	defer server.Close()
	w, err := NewWebhook(server.URL, secret, "berm-audit-1")
	if err != nil {
		t.Fatal(err)
	}
	raw := []byte(`{"seq":7,"type":"sandbox.exit"}`)
	line := trail.Line{Record: audit.Record{Seq: 7, Type: audit.SandboxExit, Team: "blue", Sandbox: "i1", Time: time.Unix(5, 0).UTC()}, Raw: raw}
	if err := w.Send(t.Context(), []trail.Line{line}); err != nil {
		t.Fatal(err)
	}
	if got.SpecVersion != "1.0" || got.ID != "7" || got.Source != "/berm/berm-audit-1" || got.Type != "dev.berm.sandbox.exit" ||
		got.Subject != "i1" || got.Team != "blue" || string(got.Data) != string(raw) {
		t.Errorf("%+v", got)
	}
	for _, status = range []int{301, 404, 500} {
		if err := w.Send(t.Context(), []trail.Line{line}); berm.KindOf(err) != berm.Unavailable {
			t.Errorf("%d: %v", status, err)
		}
	}
	if _, err := NewWebhook("http://example.com/", secret, ""); berm.KindOf(err) != berm.Invalid {
		t.Errorf("http to another host: %v", err)
	}
}

func TestOTLP(t *testing.T) {
	var got logs.LogsData
	status := http.StatusOK
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if err := proto.Unmarshal(body, &got); err != nil || r.URL.Path != "/v1/logs" || r.Header.Get("X-Key") != "k=1" {
			t.Errorf("%s %v: %v", r.URL, r.Header, err)
		}
		w.WriteHeader(status)
	}))
	defer server.Close()
	o, err := NewOTLP(server.URL, []string{"x-key=k=1"}, "berm-audit-1")
	if err != nil {
		t.Fatal(err)
	}
	lines := []trail.Line{
		{Record: audit.Record{Seq: 7, Type: audit.SandboxExit, Team: "blue", Sandbox: "i1", Time: time.Unix(5, 0), Outcome: audit.OK, Data: map[string]any{"code": 1}}},
		{Record: audit.Record{Seq: 8, Type: audit.NetFlow, Sandbox: "i1", Time: time.Unix(6, 0), Outcome: audit.Denied, Reason: "bad\xff"}},
	}
	if err := o.Send(t.Context(), lines); err != nil {
		t.Fatal(err)
	}
	records := got.ResourceLogs[0].ScopeLogs[0].LogRecords
	if len(records) != 2 || records[0].EventName != "berm.sandbox.exit" || records[0].Body.GetStringValue() != `{"code":1}` || records[0].TimeUnixNano != 5e9 ||
		records[1].SeverityNumber != logs.SeverityNumber_SEVERITY_NUMBER_WARN {
		t.Errorf("%v", records)
	}
	if of := fmt.Sprint(records[0].Attributes); !strings.Contains(of, "berm.team") || !strings.Contains(of, "blue") || strings.Contains(fmt.Sprint(records[1].Attributes), "berm.team") {
		t.Errorf("%v", records)
	}
	status = http.StatusTooManyRequests
	if err := o.Send(t.Context(), lines); berm.KindOf(err) != berm.Unavailable {
		t.Errorf("refused: %v", err)
	}
	for _, wrong := range []string{"", "ftp://x", "/v1/logs"} {
		if _, err := NewOTLP(wrong, nil, ""); berm.KindOf(err) != berm.Invalid {
			t.Errorf("%q: %v", wrong, err)
		}
	}
	if _, err := NewOTLP(server.URL, []string{"nothing"}, ""); berm.KindOf(err) != berm.Invalid {
		t.Errorf("header: %v", err)
	}
}

func TestTypes(t *testing.T) {
	types := []string{"sandbox.*", "net.flow", "credential"}
	if err := ParseTypes(append(types, "*")); err != nil {
		t.Error(err)
	}
	f := Forwarder{Types: types}
	for what, want := range map[audit.Type]bool{audit.SandboxExit: true, audit.NetFlow: true, audit.CredentialUse: true, audit.NetDNS: false, audit.ExecExit: false} {
		if f.wants(what) != want {
			t.Errorf("%s: %v", what, !want)
		}
	}
	for _, wrong := range []string{"sand", "sandbox.kill", "x.*", ""} {
		if err := ParseTypes([]string{wrong}); berm.KindOf(err) != berm.Invalid {
			t.Errorf("%q: %v", wrong, err)
		}
	}
}
