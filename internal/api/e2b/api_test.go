package e2b

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/gorillamux"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/api/router"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/audittest"
	"github.com/berm-sandbox/berm/internal/audit/capture"
	"github.com/berm-sandbox/berm/internal/audit/index"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/builder"
	"github.com/berm-sandbox/berm/internal/container"
	"github.com/berm-sandbox/berm/internal/container/containertest"
	"github.com/berm-sandbox/berm/internal/control"
	"github.com/berm-sandbox/berm/internal/control/enginetest"
	"github.com/berm-sandbox/berm/internal/credential/vault"
	"github.com/berm-sandbox/berm/internal/store"
	"github.com/berm-sandbox/berm/internal/template"
)

// world is an API over an engine in memory, and a client that checks every answer
// against the OpenAPI document.
type world struct {
	*httptest.Server
	t       testing.TB
	engine  *enginetest.Engine
	db      *store.DB
	key     string
	audit   *records
	log     *enginetest.Log
	logged  *audittest.Log // what the routes of the audit log read
	eraser  *eraser
	images  *template.Store
	builder *builder.Builder
	router  routers.Router

	containers *container.Manager
	inside     *containertest.Interpreter // of every container
}

func newWorld(t testing.TB, configure ...func(*control.Config)) *world {
	t.Helper()
	db, err := store.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	w := &world{t: t, engine: &enginetest.Engine{}, db: db, audit: &records{}, log: &enginetest.Log{}, eraser: &eraser{}}
	if _, w.key, err = db.CreateKey(context.Background(), store.Key{Name: "test"}); err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.NewTextHandler(w.log, nil))
	if w.images, err = template.Open(filepath.Join(t.TempDir(), "templates")); err != nil {
		t.Fatal(err)
	}
	c := control.Config{
		Engine: w.engine, Templates: templatesAndBase{w.images}, Store: db, Audit: w.audit, Log: log,
		Seed: make([]byte, 32), MaxTimeout: 24 * time.Hour, SampleEvery: 20 * time.Millisecond, SnapshotDir: t.TempDir(),
	}
	for _, f := range configure {
		f(&c)
	}
	sessions := control.New(c)
	if err := sessions.Start(context.Background()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(sessions.Close)
	secrets, err := vault.Open(context.Background(), filepath.Join(t.TempDir(), "secrets"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { secrets.Close() })
	w.logged = audittest.New(t, t.TempDir())
	found, err := index.Open(filepath.Join(t.TempDir(), "index.db"), trail.Dir(w.logged.Dir))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = found.Close() })
	if w.builder, err = builder.New(builder.Config{Sessions: sessions, Store: w.images, Audit: w.audit, Dir: t.TempDir(), Log: log}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.builder.Close)
	w.inside = &containertest.Interpreter{}
	w.engine.Ports = map[uint16]http.Handler{container.Port: w.inside}
	recorder := capture.New(w.audit, audit.Directory(t.TempDir()), true, log)
	t.Cleanup(recorder.Close)
	w.containers = container.New(container.Config{Sessions: sessions, Inside: router.Inside{Sessions: sessions, Capture: recorder}, Template: "base", Audit: w.audit, Capture: recorder})
	w.Server = httptest.NewServer(New(Config{Builder: w.builder, Containers: w.containers, UploadKey: make([]byte, 32), Sessions: sessions, Templates: c.Templates, Keys: db, Secrets: secrets, Audit: w.audit, Trail: found, Eraser: w.eraser, Log: log}))
	t.Cleanup(w.Close)
	doc := document(t)
	doc.Servers = openapi3.Servers{{URL: w.URL}}
	if w.router, err = gorillamux.NewRouter(doc); err != nil {
		t.Fatal(err)
	}
	return w
}

// templatesAndBase is a store that has base, too.
type templatesAndBase struct{ *template.Store }

func (t templatesAndBase) Resolve(ctx context.Context, team berm.Team, ref string) (berm.Template, error) {
	if base, err := (enginetest.Templates{}).Resolve(ctx, team, ref); err == nil {
		return base, nil
	}
	return t.Store.Resolve(ctx, team, ref)
}

func (t templatesAndBase) List(ctx context.Context) ([]berm.Template, error) {
	all, err := t.Store.List(ctx)
	return append(all, enginetest.Base), err
}

func document(t testing.TB) *openapi3.T {
	t.Helper()
	doc, err := openapi3.NewLoader().LoadFromData(openAPI)
	if err != nil {
		t.Fatal(err)
	}
	if err := doc.Validate(context.Background()); err != nil {
		t.Fatal(err)
	}
	return doc
}

type response struct {
	status int
	header http.Header
	body   []byte
}

func (r response) into(t testing.TB, v any) {
	t.Helper()
	if err := json.Unmarshal(r.body, v); err != nil {
		t.Fatalf("%v in %s", err, r.body)
	}
}

// call makes a request. A request that succeeds must be one that the document
// allows, and so must every answer be.
func (w *world) call(method, path, body string, header ...string) response {
	w.t.Helper()
	r, err := http.NewRequest(method, w.URL+path, strings.NewReader(body))
	if err != nil {
		w.t.Fatal(err)
	}
	r.Header.Set("X-API-Key", w.key)
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	answer, err := http.DefaultTransport.RoundTrip(r)
	if err != nil {
		w.t.Fatalf("%s %s: %v", method, path, err)
	}
	defer answer.Body.Close()
	content, err := io.ReadAll(answer.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	w.validate(r, body, answer, content)
	return response{answer.StatusCode, answer.Header, content}
}

func (w *world) validate(r *http.Request, body string, answer *http.Response, content []byte) {
	w.t.Helper()
	route, params, err := w.router.FindRoute(r)
	if err != nil {
		if answer.StatusCode < 400 && r.Method != http.MethodOptions {
			w.t.Errorf("%s %s answers %d and is not in the document: %v", r.Method, r.URL, answer.StatusCode, err)
		}
		return
	}
	if r.Body = http.NoBody; body != "" {
		r.Body = io.NopCloser(strings.NewReader(body))
	}
	in := &openapi3filter.RequestValidationInput{
		Request: r, PathParams: params, Route: route,
		Options: &openapi3filter.Options{AuthenticationFunc: openapi3filter.NoopAuthenticationFunc, IncludeResponseStatus: true},
	}
	if answer.StatusCode < 400 {
		if err := openapi3filter.ValidateRequest(context.Background(), in); err != nil {
			w.t.Errorf("%s %s was accepted: %.300v", r.Method, r.URL, err)
		}
	}
	if answer.StatusCode == http.StatusMethodNotAllowed {
		return
	}
	out := &openapi3filter.ResponseValidationInput{RequestValidationInput: in, Status: answer.StatusCode, Header: answer.Header, Options: in.Options}
	out.SetBodyBytes(content)
	if err := openapi3filter.ValidateResponse(context.Background(), out); err != nil {
		w.t.Errorf("%s %s: answer %d %.200s: %.300v", r.Method, r.URL, answer.StatusCode, content, err)
	}
}

// want calls and checks the status, and the body's code where it is an error.
func (w *world) want(status int, method, path, body string, header ...string) response {
	w.t.Helper()
	r := w.call(method, path, body, header...)
	if r.status != status {
		w.t.Fatalf("%s %s %s: %d %s, want %d", method, path, body, r.status, r.body, status)
	}
	if status >= 400 {
		var e errorBody
		r.into(w.t, &e)
		if e.Code != status || e.Message == "" || r.header.Get("Content-Type") != "application/json" {
			w.t.Errorf("%s %s: error body %s", method, path, r.body)
		}
	}
	return r
}

func (w *world) create(body string) sandbox {
	w.t.Helper()
	var s sandbox
	w.want(201, "POST", "/v2/sandboxes", body).into(w.t, &s)
	return s
}

func TestDocumentNamesTheRoutes(t *testing.T) {
	documented := map[string]bool{}
	for path, item := range document(t).Paths.Map() {
		for method := range item.Operations() {
			documented[method+" "+path] = true
		}
	}
	for _, r := range routes {
		name := r.method + " " + r.path
		if r.lacking == "" && !documented[name] {
			t.Errorf("%s is not in openapi.yaml", name)
		}
		if r.lacking != "" && documented[name] {
			t.Errorf("%s is in openapi.yaml and not served", name)
		}
		delete(documented, name)
	}
	for name := range documented {
		t.Errorf("%s is in openapi.yaml and not a route", name)
	}
}

func TestEveryRouteNeedsAKey(t *testing.T) {
	w := newWorld(t)
	s := w.create(`{"templateID":"base"}`)
	fill := strings.NewReplacer("{sandboxID}", string(s.SandboxID), "{templateID}", "base", "{alias}", "base",
		"{hash}", "h", "{buildID}", "b", "{teamID}", "t", "{volumeID}", "v", "{secretID}", "s", "{keyID}", "k", "{tag}", "t", "{containerID}", "i1", "{contextID}", "c", "{fileID}", "f")
	for _, r := range routes {
		for name, header := range map[string][]string{
			"none":         {"X-API-Key", ""},
			"wrong":        {"X-API-Key", "e2b_" + strings.Repeat("0", 40)},
			"malformed":    {"X-API-Key", "' OR 1=1 --"},
			"long":         {"X-API-Key", strings.Repeat("a", 10_000)},
			"wrong bearer": {"X-API-Key", "", "Authorization", "Bearer nope"},
			"basic":        {"X-API-Key", "", "Authorization", "Basic " + w.key},
			"sandbox's":    {"X-API-Key", s.AccessToken},
		} {
			if r.open && r.method == "PUT" { // has a signature, not a key
				w.want(403, r.method, fill.Replace(r.path), "", header...)
				continue
			}
			if r.open {
				w.want(200, r.method, fill.Replace(r.path), "", header...)
				continue
			}
			if got := w.want(401, r.method, fill.Replace(r.path), "", header...); strings.Contains(string(got.body), string(s.SandboxID)) {
				t.Errorf("%s %s with %s key tells of a sandbox: %s", r.method, r.path, name, got.body)
			}
		}
		if r.lacking != "" {
			w.want(501, r.method, fill.Replace(r.path), "")
		}
	}
	w.want(200, "GET", "/sandboxes/"+string(s.SandboxID), "", "X-API-Key", "", "Authorization", "bearer "+w.key)
}

func TestForkTellsWhatIsWrong(t *testing.T) {
	w := newWorld(t)
	at := "/sandboxes/" + string(w.create(`{"templateID":"base"}`).SandboxID) + "/fork"
	w.want(400, "POST", at, `{"count":0}`)
	w.want(400, "POST", at, `{"count":"two"}`)
	w.want(404, "POST", "/sandboxes/"+string(berm.NewSandboxID())+"/fork", `{"count":1}`)
	w.want(400, "POST", at, `{"count":101}`)
	w.want(501, "POST", at, `{"berm":{"memory":true}}`)
}

func TestForks(t *testing.T) {
	w := newWorld(t)
	s := w.create(`{"templateID":"base","metadata":{"a":"b"},"envVars":{"E":"1"}}`)
	at := "/sandboxes/" + string(s.SandboxID)
	var children []fork
	w.want(201, "POST", at+"/fork", ``).into(t, &children)
	if len(children) != 1 || children[0].Sandbox == nil || children[0].Error != nil {
		t.Fatalf("%+v", children)
	}
	child := children[0].Sandbox
	if child.SandboxID == s.SandboxID || child.AccessToken == s.AccessToken || child.TemplateID != s.TemplateID || child.Berm.Parent != s.SandboxID {
		t.Errorf("%+v of %+v", child, s)
	}
	if d := w.detail("/sandboxes/" + string(child.SandboxID)); d.Metadata["a"] != "b" {
		t.Errorf("%+v", d)
	}
	if spec := w.engine.Specs[1]; spec.From == "" || spec.Guest.Env["E"] != "1" || spec.Guest.AccessToken != child.AccessToken {
		t.Errorf("%+v", spec)
	}
	// Of five children two fail, each by itself.
	var made atomic.Int32
	w.engine.Fail(func(_ berm.SandboxID, method string) error {
		if method == "Create" {
			if made.Add(1)%2 == 0 {
				return berm.Errorf(berm.Exhausted, "no room")
			}
		}
		return nil
	})
	children = nil
	w.want(201, "POST", at+"/fork", `{"count":5,"timeout":60}`).into(t, &children)
	w.engine.Fail(nil)
	failed := 0
	for _, c := range children {
		if (c.Sandbox == nil) == (c.Error == nil) {
			t.Errorf("%+v", c)
		}
		if c.Error != nil {
			failed++
			if c.Error.Code != 429 || c.Error.Message != "no room" {
				t.Errorf("%+v", c.Error)
			}
		}
	}
	if len(children) != 5 || failed != 2 {
		t.Errorf("%d of %d failed", failed, len(children))
	}
	w.want(204, "POST", at+"/pause", "")
	w.want(409, "POST", at+"/fork", "")
}

func TestSnapshots(t *testing.T) {
	w := newWorld(t)
	s := w.create(`{"templateID":"base"}`)
	at := "/sandboxes/" + string(s.SandboxID)
	w.want(404, "POST", "/sandboxes/i0none/snapshots", `{}`)
	w.want(501, "POST", at+"/snapshots", `{"berm":{"memory":true}}`)
	for _, name := range []string{"A", "a b", "../a", ":", "a:", "a:b/c:d", strings.Repeat("a", 300)} {
		w.want(400, "POST", at+"/snapshots", `{"name":"`+name+`"}`)
	}
	w.want(409, "POST", at+"/snapshots", `{"name":"base"}`)
	take := func(body string) (got snapshot) {
		t.Helper()
		w.want(201, "POST", at+"/snapshots", body).into(t, &got)
		return got
	}
	plain := take("")
	if !strings.HasSuffix(plain.SnapshotID, ":default") || len(plain.Names) != 0 || fmt.Sprint(plain.Berm.Keeps) != "[files]" {
		t.Errorf("%+v", plain)
	}
	named := take(`{"name":"one"}`)
	if named.SnapshotID != "one:default" || fmt.Sprint(named.Names) != "[one:default]" {
		t.Errorf("%+v", named)
	}
	if again := take(`{"name":"one"}`); again.SnapshotID != named.SnapshotID {
		t.Errorf("%+v", again)
	}
	take(`{"name":"one:v2"}`)
	var ofOne [3]sandbox
	for i, ref := range []string{"one", "one:v2", "default/one:default"} {
		ofOne[i] = w.create(`{"templateID":"` + ref + `"}`)
	}
	if ofOne[0].TemplateID != ofOne[1].TemplateID || ofOne[0].TemplateID != ofOne[2].TemplateID || ofOne[0].TemplateID == s.TemplateID {
		t.Errorf("%+v", ofOne)
	}
	w.want(404, "POST", "/sandboxes", `{"templateID":"one:v3"}`)
	// Another team has no names here, and gets none that would be different ones.
	w.want(404, "POST", "/sandboxes", `{"templateID":"team/one"}`)
	w.want(400, "POST", at+"/snapshots", `{"name":"team/one"}`)
	w.want(409, "POST", "/v3/templates", `{"name":"one:v2"}`)
	list := func(query string) (ids []string) {
		t.Helper()
		for token := ""; ; {
			r := w.want(200, "GET", "/snapshots?limit=2&"+query+"&nextToken="+token, "")
			var page []snapshot
			r.into(t, &page)
			for _, snap := range page {
				ids = append(ids, snap.SnapshotID)
			}
			if token = r.header.Get("X-Next-Token"); token == "" {
				return ids
			}
		}
	}
	all := "[one:v2 one:default " + plain.SnapshotID + "]"
	for query, want := range map[string]string{
		"": all, "sandboxID=" + string(s.SandboxID): all, "sandboxID=i0none": "[]",
		"name=one": "[one:v2 one:default]", "name=one:v2": "[one:v2]", "name=default/one:v2": "[one:v2]", "name=team/one": "[]", "name=on": "[]",
	} {
		if got := fmt.Sprint(list(query)); got != want {
			t.Errorf("%q: %s, want %s", query, got, want)
		}
	}
	w.want(400, "GET", "/snapshots?nextToken=x", "")
	w.want(400, "GET", "/snapshots?limit=0", "")

	// Its source gone, it goes on, and is not deleted under a paused sandbox that it was made from.
	w.want(204, "DELETE", at, "")
	child := "/sandboxes/" + string(w.create(`{"templateID":"`+plain.SnapshotID+`"}`).SandboxID)
	w.want(204, "POST", child+"/pause", "")
	w.want(400, "DELETE", "/templates/"+plain.SnapshotID, "")
	w.want(201, "POST", child+"/connect", `{"timeout":60}`)
	w.want(204, "DELETE", "/templates/"+plain.SnapshotID, "")
	w.want(404, "DELETE", "/templates/"+plain.SnapshotID, "")
	w.want(404, "DELETE", "/templates/team%2Fone%3Av2", "")
	w.want(204, "DELETE", "/templates/default%2Fone%3Av2", "")
	w.want(501, "DELETE", "/templates/base", "")
	if got := fmt.Sprint(list("")); got != "[one:default]" {
		t.Error(got)
	}
	if taken, removed := len(w.audit.of(audit.SnapshotTake)), len(w.audit.of(audit.SnapshotRemove)); taken != 5 || removed != 2 {
		t.Errorf("%d records of snapshots, %d of removals", taken, removed) // one failed, for memory
	}
}

func TestRollback(t *testing.T) {
	w := newWorld(t)
	s := w.create(`{"templateID":"base"}`)
	at := "/sandboxes/" + string(s.SandboxID)
	w.want(201, "POST", at+"/snapshots", `{"name":"good"}`)
	w.want(400, "POST", "/berm/v1"+at+"/rollback", `{}`)
	w.want(404, "POST", "/berm/v1"+at+"/rollback", `{"snapshot":"bad"}`)
	w.want(404, "POST", "/berm/v1/sandboxes/i0none/rollback", `{"snapshot":"good"}`)
	var again sandbox
	w.want(200, "POST", "/berm/v1"+at+"/rollback", `{"snapshot":"good"}`).into(t, &again)
	if again.SandboxID != s.SandboxID || again.AccessToken != s.AccessToken || len(w.engine.Specs) != 2 || w.engine.Specs[1].From == "" {
		t.Errorf("%+v", again)
	}
	w.want(204, "POST", at+"/pause", "")
	w.want(200, "POST", "/berm/v1"+at+"/rollback", `{"snapshot":"good"}`)
	w.want(204, "POST", at+"/pause", `{"memory":false}`)
	w.want(200, "POST", "/berm/v1"+at+"/rollback", `{"snapshot":"good"}`)
	w.want(200, "POST", at+"/connect", `{"timeout":60}`)
	w.want(204, "DELETE", "/templates/good", "") // it is nobody's now
}

func TestCreateBothGenerations(t *testing.T) {
	w := newWorld(t)
	var v1, v1secure sandbox
	w.want(201, "POST", "/sandboxes", `{"templateID":"base","timeout":300,"autoPause":false,"secure":false,"allow_internet_access":true,"unknown":{"x":[1]}}`).into(t, &v1)
	w.want(201, "POST", "/sandboxes", `{"templateID":"base","secure":true}`).into(t, &v1secure)
	v2 := w.create(`{"templateID":"basetemplate00000000","mcp":null,"metadata":{"a":"b"},"envVars":{"X":"y"}}`)
	if v1.AccessToken != "" || v1secure.AccessToken == "" || v2.AccessToken == "" || v1.EnvdVersion != berm.AgentVersion || v2.Alias != "base" || v2.Berm.Network != "none" {
		t.Errorf("%+v %+v %+v", v1, v1secure, v2)
	}
	for i, wantTimeout := range []time.Duration{300 * time.Second, 15 * time.Second, 300 * time.Second} {
		spec := w.engine.Specs[i]
		if left := time.Until(spec.Deadline); left > wantTimeout || left < wantTimeout-5*time.Second {
			t.Errorf("sandbox %d ends in %v, want %v", i, left, wantTimeout)
		}
	}
	if spec := w.engine.Specs[2]; spec.Guest.Env["X"] != "y" || spec.Guest.AccessToken != v2.AccessToken || spec.Limits != enginetest.Base.Limits {
		t.Errorf("spec: %+v", spec)
	}
	if spec := w.engine.Specs[0]; spec.Guest.AccessToken != "" {
		t.Error("an unsecured sandbox asks for a token")
	}
	var d detail
	w.want(200, "GET", "/sandboxes/"+string(v1.SandboxID), "").into(t, &d)
	if d.Internet == nil || !*d.Internet || d.State != berm.Running || d.MemoryMB != 1024 || d.DiskSizeMB != 2048 || d.Lifecycle.OnTimeout != "kill" {
		t.Errorf("detail: %+v", d)
	}
	private := w.create(`{"templateID":"base","autoPause":true,"autoResume":{"enabled":true},"network":{"allowPublicTraffic":false,"maskRequestHost":"localhost:${PORT}","httpsPorts":[8443],"denyOut":["0.0.0.0/0","1.1.1.1"]}}`)
	if private.TrafficToken == "" {
		t.Error("no traffic token")
	}
	w.want(200, "GET", "/sandboxes/"+string(private.SandboxID), "").into(t, &d)
	if d.Network == nil || *d.Network.Public || d.Network.MaskHost != "localhost:${PORT}" || !d.Lifecycle.AutoResume || d.Lifecycle.OnTimeout != "pause" {
		t.Errorf("detail: %+v", d.Network)
	}
}

func TestCreateRefusals(t *testing.T) {
	w := newWorld(t)
	for body, status := range map[string]int{
		``:                                      400,
		`{`:                                     400,
		`[]`:                                    400,
		`"base"`:                                400,
		`{"templateID":1}`:                      400,
		`{"templateID":""}`:                     400,
		`{"templateID":"x"}`:                    404,
		`{"templateID":"base","timeout":-1}`:    400,
		`{"templateID":"base","timeout":1e99}`:  400,
		`{"templateID":"base","timeout":1.5}`:   400,
		`{"templateID":"base","timeout":86401}`: 400,
		`{"templateID":"base","timeout":9223372036854775807}`:                                          400,
		`{"templateID":"base","metadata":{"a":1}}`:                                                     400,
		`{"templateID":"base","envVars":["a"]}`:                                                        400,
		`{"templateID":"base","envVars":{"a=b":"c"}}`:                                                  400,
		`{"templateID":"base","network":{"denyOut":["example.com"]}}`:                                  400,
		`{"templateID":"base","network":{"allowOut":["example.com"]}}`:                                 501,
		`{"templateID":"base","network":{"egressProxy":{"address":"a:1"}}}`:                            501,
		`{"templateID":"base","network":{"rules":{"a.b":[{"transform":{"headers":{"A":"b"}}}]}}}`:      501, // without a network
		`{"templateID":"base","berm":{"credentials":[{"name":"a","secret":"secret:b"}]}}`:              501,
		`{"templateID":"base","network":{"maskRequestHost":"a b"}}`:                                    400,
		`{"templateID":"base","network":{"httpsPorts":[70000]}}`:                                       400,
		`{"templateID":"base","network":{"httpsPorts":[49983]}}`:                                       400,
		`{"templateID":"base","volumeMounts":[{"name":"a","path":"/b"}]}`:                              501,
		`{"templateID":"base","iam":{"tokens":{"a":{"audience":"b","tokenType":"JWT-SVID"}}}}`:         501,
		`{"templateID":"base","iam":{"tokens":{"a":{"audience":"b","tokenType":"JWT"}}}}`:              400,
		`{"templateID":"base","iam":{"tokens":{"a":{"tokenType":"JWT-SVID"}}}}`:                        400,
		`{"templateID":"base","iam":{"tokens":{"a}":{"audience":"b","tokenType":"JWT-SVID"}}}}`:        400,
		`{"templateID":"base","iam":{"tokens":["a"]}}`:                                                 400,
		`{"templateID":"base","iam":{"tokens":{"a":{},"b":{},"c":{},"d":{},"e":{},"f":{}}}}`:           400,
		`{"templateID":"base","autoPauseMemory":false}`:                                                400,
		`{"templateID":"base","autoPause":true,"autoPauseMemory":false,"autoResume":{"enabled":true}}`: 400,
		`{"templateID":"base","berm":{"level":"none"}}`:                                                201, // the engine in memory takes any
		`{"templateID":"base","berm":{"limits":{"memory":-1}}}`:                                        400,
		`{"templateID":"base","berm":{"limits":{"pids":1}}}`:                                           400,
		`{"templateID":"base","metadata":{"a":"` + strings.Repeat("x", 40_000) + `"}}`:                 400,
		`{"templateID":"` + strings.Repeat("x", maxBody) + `"}`:                                        413,
		`{"a":` + strings.Repeat("[", 20_000):                                                          400,
	} {
		if status == 201 {
			continue
		}
		if r := w.call("POST", "/v2/sandboxes", body); r.status != status {
			t.Errorf("%.80s: %d %s, want %d", body, r.status, r.body, status)
		}
	}
	r := w.want(400, "POST", "/sandboxes", `{"templateID":"base","network":{"allowPublicTraffic":false}}`)
	if !strings.Contains(string(r.body), "You cannot create a sandbox without public access unless you enable secure envd access via 'secure' flag.") {
		t.Errorf("%s", r.body)
	}
	if len(w.engine.Specs) > 0 {
		t.Error("a refused request reached the engine")
	}
	w.want(201, "POST", "/sandboxes", `{"templateID":"base","iam":{"tokens":{}}}`)
}

func TestIDs(t *testing.T) {
	w := newWorld(t)
	s := w.create(`{"templateID":"base"}`)
	id := string(s.SandboxID)
	for path, status := range map[string]int{
		id:                      200,
		id + "-clientid":        200,
		"nonexistingsandbox":    404,
		strings.ToUpper(id):     400,
		id + "%2f":              400,
		"..%2f" + id:            400,
		"%00":                   400,
		id[:20] + "ｉ":           400,
		strings.Repeat("a", 65): 400,
		id + "/../" + id:        404,
		id + "/nothing":         404,
	} {
		w.want2(status, "GET", "/sandboxes/"+path)
	}
	w.want(404, "DELETE", "/sandboxes/nonexistingsandbox", "")
	w.want(404, "POST", "/sandboxes/nonexistingsandbox/fork", `{"count":1}`)
	w.want(404, "POST", "/sandboxes/nonexistingsandbox/pause", "")
	w.want(404, "POST", "/sandboxes/nonexistingsandbox/timeout", `{"timeout":1}`)
	w.want(404, "GET", "/sandboxes/nonexistingsandbox/metrics", "")
	w.want(404, "GET", "/sandboxes/nonexistingsandbox/logs", "")
	w.want(404, "POST", "/v2/sandboxes/nonexistingsandbox/connect", `{"timeout":999999}`) // as that of another team
	w.want(400, "POST", "/v2/sandboxes/"+id+"/connect", `{"timeout":999999}`)
	w.want(405, "PUT", "/v2/sandboxes", "")
	w.want(404, "GET", "/no/such/route", "")
}

func (w *world) want2(status int, method, path string) {
	w.t.Helper()
	if r := w.call(method, path, ""); r.status != status {
		w.t.Errorf("%s %s: %d %s, want %d", method, path, r.status, r.body, status)
	}
}

func TestLifecycleOverHTTP(t *testing.T) {
	w := newWorld(t)
	s := w.create(`{"templateID":"base"}`)
	at := "/sandboxes/" + string(s.SandboxID)
	before := w.detail(at)
	var again sandbox
	w.want(200, "POST", "/v2"+at+"/connect", ``).into(t, &again)
	w.want(200, "POST", at+"/connect", `{"timeout":10}`)
	if d := w.detail(at); d.EndAt.Before(before.EndAt) || again.AccessToken != s.AccessToken {
		t.Error("connect made the time shorter, or changed the token")
	}
	w.want(204, "POST", at+"/timeout", `{"timeout":100}`)
	w.want(400, "POST", at+"/timeout", `{}`)
	w.want(400, "POST", at+"/timeout", `{"timeout":"5"}`)
	w.want(204, "POST", at+"/refreshes", ``)
	w.want(204, "POST", at+"/refreshes", `{"duration":3600}`)
	w.want(400, "POST", at+"/refreshes", `{"duration":3601}`)
	w.want(204, "PUT", at+"/network", `{}`)
	w.want(204, "PUT", at+"/network", `{"denyOut":["10.0.0.0/8"]}`)
	w.want(501, "PUT", at+"/network", `{"allowOut":["10.0.0.0/8"]}`)
	w.want(409, "POST", at+"/resume", `{"timeout":60}`)
	w.want(503, "POST", at+"/pause", `{"requireHealthyGuest":true}`) // nothing listens in it
	w.want(204, "POST", at+"/pause", `{}`)
	w.want(409, "POST", at+"/pause", ``)
	if d := w.detail(at); d.State != berm.Paused || d.PauseMode != "full" {
		t.Errorf("state %s", d.State)
	}
	w.want(409, "POST", at+"/timeout", `{"timeout":5}`)
	w.want(201, "POST", "/v2"+at+"/connect", `{"memory":true}`)
	w.want(204, "POST", at+"/pause", `{"memory":false}`)
	w.want(409, "POST", at+"/pause", `{"memory":false}`)
	if d := w.detail(at); d.State != berm.Paused || d.PauseMode != "filesystem" {
		t.Errorf("%+v", d)
	}
	w.want(201, "POST", "/v2"+at+"/connect", ``)
	w.want(204, "POST", at+"/pause", ``)
	w.want(201, "POST", "/v2"+at+"/connect", `{"memory":false}`)
	if n := len(w.engine.Specs); n != 3 || w.engine.Specs[2].From == "" {
		t.Errorf("%d creations", n)
	}
	w.want(204, "POST", at+"/pause", ``)
	w.want(501, "POST", at+"/resume", `{"autoPause":true}`)
	w.want(201, "POST", at+"/resume", `{"autoPause":false}`)
	w.want(200, "GET", "/berm/v1"+at+"/policy", "")
	w.want(204, "DELETE", at, "")
	w.want(404, "DELETE", at, "")
	w.want(404, "POST", "/v2"+at+"/connect", "")
	var told struct{ Exit berm.Exit }
	w.want(200, "GET", "/berm/v1"+at, "").into(t, &told)
	if told.Exit.Reason != berm.ReasonKilled {
		t.Errorf("reason of death %q", told.Exit.Reason)
	}
	w.want(404, "GET", "/berm/v1"+at+"/policy", "")
}

func (w *world) detail(at string) detail {
	w.t.Helper()
	var d detail
	w.want(200, "GET", at, "").into(w.t, &d)
	return d
}

func TestListPages(t *testing.T) {
	w := newWorld(t)
	var ids []string
	for i := range 7 {
		s := w.create(fmt.Sprintf(`{"templateID":"base","metadata":{"n":"%d","all":"yes"}}`, i))
		ids = append(ids, string(s.SandboxID))
		if i%3 == 0 {
			w.want(204, "POST", "/sandboxes/"+ids[i]+"/pause", "")
		}
		time.Sleep(2 * time.Millisecond)
	}
	list := func(query string) (got []string) {
		t.Helper()
		token := ""
		for range 20 {
			r := w.want(200, "GET", "/v2/sandboxes?"+query+"&nextToken="+url.QueryEscape(token), "")
			var page []listed
			r.into(t, &page)
			for _, s := range page {
				got = append(got, string(s.SandboxID))
			}
			_, more := r.header["X-Next-Token"]
			if token = r.header.Get("X-Next-Token"); !more {
				return got
			}
			if len(page) == 0 {
				t.Fatal("an empty page that is not the last")
			}
		}
		t.Fatal("paging does not end")
		return nil
	}
	newest := slices.Clone(ids)
	slices.Reverse(newest)
	pick := func(from []string, positions ...int) (some []string) {
		for _, id := range from {
			if slices.Contains(positions, slices.Index(ids, id)) {
				some = append(some, id)
			}
		}
		return some
	}
	for query, want := range map[string][]string{
		"":                                 newest,
		"limit=1":                          newest,
		"limit=3&order=asc":                ids,
		"limit=2&state=paused":             pick(newest, 0, 3, 6),
		"limit=2&state=running":            pick(newest, 1, 2, 4, 5),
		"limit=2&state=running,paused":     newest,
		"state=running&state=paused":       newest,
		"metadata=n%3D3":                   pick(newest, 3),
		"metadata=n%253D3%2526all%253Dyes": pick(newest, 3),
		"metadata=n%3D3%26all%3Dno":        nil,
		"metadata=none%3D":                 nil,
		"template=base":                    newest,
		"template=basetemplate00000000":    newest,
		"template=other":                   nil,
	} {
		if got := list(query); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", query, got, want)
		}
	}
	third := w.detail("/sandboxes/" + ids[2]).StartedAt
	for after, want := range map[time.Time]int{third.Truncate(time.Millisecond): 5, third: 5, third.Add(time.Hour): 0} {
		if got := list("startedAfter=" + url.QueryEscape(after.Format(time.RFC3339Nano))); len(got) != want {
			t.Errorf("%d started after %v, want %d", len(got), after, want)
		}
	}
	r := w.want(200, "GET", "/v2/sandboxes?limit=1", "")
	if r.header.Get("X-Total-Running") != "4" {
		t.Errorf("X-Total-Running %q", r.header.Get("X-Total-Running"))
	}
	if r := w.want(200, "GET", "/v2/sandboxes?state=paused", ""); r.header.Get("X-Total-Running") != "" {
		t.Error("running ones counted though not asked for")
	}
	var old []listed
	w.want(200, "GET", "/sandboxes", "").into(t, &old)
	if len(old) != 4 {
		t.Errorf("%d running in the old list", len(old))
	}
	for _, query := range []string{"limit=0", "limit=101", "limit=x", "state=killed", "order=up", "startedAfter=now", "nextToken=x", "nextToken=%00", "order=asc&nextToken=" + r.header.Get("X-Next-Token")} {
		w.want(400, "GET", "/v2/sandboxes?"+query, "")
	}
}

func TestMetricsAndLogs(t *testing.T) {
	w := newWorld(t)
	s := w.create(`{"templateID":"base"}`)
	at := "/sandboxes/" + string(s.SandboxID)
	var metrics []metric
	for end := time.Now().Add(30 * time.Second); len(metrics) == 0 && time.Now().Before(end); {
		w.want(200, "GET", at+"/metrics", "").into(t, &metrics)
	}
	if len(metrics) == 0 || metrics[0].CPUCount != 2 || metrics[0].MemTotal != 1<<30 {
		t.Fatalf("metrics: %+v", metrics)
	}
	now := time.Now().Unix()
	w.want(200, "GET", fmt.Sprintf("%s/metrics?start=%d&end=%d", at, now-60, now+60), "").into(t, &metrics)
	if len(metrics) == 0 {
		t.Error("no metrics in the last minute")
	}
	r := w.want(200, "GET", fmt.Sprintf("%s/metrics?start=%d&end=%d", at, now-3600, now-1800), "")
	if string(r.body) != "[]" {
		t.Errorf("metrics from before the start: %s", r.body)
	}
	w.want(400, "GET", at+"/metrics?start=x", "")
	w.want(400, "GET", "/sandboxes/metrics", "")
	var latest struct{ Sandboxes map[string]metric }
	w.want(200, "GET", "/sandboxes/metrics?sandbox_ids="+string(s.SandboxID)+",unknown", "").into(t, &latest)
	if len(latest.Sandboxes) != 1 {
		t.Errorf("latest: %+v", latest)
	}

	w.want(204, "DELETE", at, "")
	var logs struct {
		Logs       []logLine
		LogEntries []logEntry
	}
	w.want(200, "GET", at+"/logs?start=0&limit=1000", "").into(t, &logs)
	if len(logs.Logs) != 2 || len(logs.LogEntries) != 2 {
		t.Fatalf("logs: %+v", logs)
	}
	var line struct{ Level, Logger, Message string }
	if err := json.Unmarshal([]byte(logs.Logs[1].Line), &line); err != nil || line.Message != "Sandbox ended" || line.Level != "info" {
		t.Errorf("line %q: %v", logs.Logs[1].Line, err)
	}
	var v2 struct{ Logs []logEntry }
	w.want(200, "GET", "/v2"+at+"/logs?direction=backward&search=ended&level=info", "").into(t, &v2)
	if len(v2.Logs) != 1 || v2.Logs[0].Fields["reason"] != "killed" {
		t.Errorf("logs: %+v", v2)
	}
	w.want(400, "GET", "/v2"+at+"/logs?direction=up", "")
}

func TestTemplates(t *testing.T) {
	w := newWorld(t)
	var all []templateInfo
	w.want(200, "GET", "/templates?teamID=00000000-0000-4000-8000-000000000000", "").into(t, &all)
	if len(all) != 1 || all[0].Aliases[0] != "base" || all[0].BuildStatus != "ready" {
		t.Errorf("%+v", all)
	}
	w.want(400, "GET", "/templates?teamID=other", "")
	w.want(200, "GET", "/v2/templates?limit=1", "")
	w.want(400, "GET", "/v2/templates?nextToken=x", "")
	w.want(200, "GET", "/templates/base", "")
	w.want(200, "GET", "/templates/base%3Adefault", "")
	w.want(404, "GET", "/templates/team%2Fname%3Atag", "")
	w.want(200, "GET", "/templates/aliases/base", "")
	w.want(404, "GET", "/templates/aliases/nope", "")
	w.want(404, "GET", "/templates/base/tags", "") // the test's store has other templates than its sandboxes
	w.want(404, "GET", "/templates/base/other", "")
}

func TestCORS(t *testing.T) {
	w := newWorld(t)
	r := w.call("OPTIONS", "/v2/sandboxes", "", "Origin", "https://x.test", "Access-Control-Request-Method", "POST", "X-API-Key", "")
	if r.status != 204 || r.header.Get("Access-Control-Allow-Origin") != "*" || !strings.Contains(r.header.Get("Access-Control-Allow-Headers"), "*") {
		t.Errorf("%d %v", r.status, r.header)
	}
}

func TestPrometheus(t *testing.T) {
	w := newWorld(t)
	w.create(`{"templateID":"base"}`)
	r := w.want(200, "GET", "/metrics", "")
	for _, line := range []string{"berm_sandboxes_running 1", `berm_requests_total{code="201",method="POST",route="/v2/sandboxes"} 1`} {
		if !bytes.Contains(r.body, []byte(line)) {
			t.Errorf("no %q in the metrics", line)
		}
	}
}

func TestInternalErrorsAreNotTold(t *testing.T) {
	w := newWorld(t)
	w.engine.Fail(func(berm.SandboxID, string) error { return berm.Errorf(berm.Internal, "mount /var/lib/secret failed") })
	r := w.want(500, "POST", "/v2/sandboxes", `{"templateID":"base"}`)
	trace := r.header.Get("X-E2B-Trace-ID")
	if strings.Contains(string(r.body), "/var/lib") || !strings.Contains(string(r.body), trace) || !strings.Contains(w.log.String(), "/var/lib/secret") {
		t.Errorf("%s", r.body)
	}
	if strings.Contains(w.log.String(), w.key) {
		t.Error("the key is in the log")
	}
}

func TestQuota(t *testing.T) {
	w := newWorld(t, func(c *control.Config) { c.MaxSandboxes = 1 })
	w.create(`{"templateID":"base"}`)
	if r := w.want(429, "POST", "/v2/sandboxes", `{"templateID":"base"}`); r.header.Get("Retry-After") != "" || r.header.Get("Should-Retry") != "false" {
		t.Error("clients would try again at once")
	}
}

func FuzzCursor(f *testing.F) {
	f.Add(formatCursor(time.Unix(1, 2), "i0abc", true), true)
	f.Add("", false)
	f.Fuzz(func(t *testing.T, token string, ascending bool) {
		at, id, err := parseCursor(token, ascending)
		if err != nil {
			return
		}
		again, id2, err := parseCursor(formatCursor(at, id, ascending), ascending)
		if err != nil || !again.Equal(at) || id2 != id {
			t.Errorf("%q: %v %s, then %v %s, %v", token, at, id, again, id2, err)
		}
	})
}

func FuzzMetadata(f *testing.F) {
	f.Add("k 1", "v&2")
	f.Add("a%", "+=\x00")
	f.Fuzz(func(t *testing.T, k, v string) {
		if strings.ToValidUTF8(k+v, "") != k+v {
			return
		}
		escape := func(s string) string { return strings.ReplaceAll(url.QueryEscape(s), "+", "%20") }
		encoded := escape(escape(k) + "=" + escape(v)) // what is left after the query's own
		if got := parseMetadata(encoded); len(got) != 1 || got[k] != v {
			t.Errorf("%q=%q travels as %q and arrives as %q", k, v, encoded, got)
		}
		parseMetadata(k + v)
	})
}
