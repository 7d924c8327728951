package e2b

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/container"
	"github.com/berm-sandbox/berm/internal/container/containertest"
	"github.com/berm-sandbox/berm/internal/control"
	"github.com/berm-sandbox/berm/internal/control/enginetest"
)

const containersPath = "/berm/v1/containers"

func (w *world) newContainer(status int, body string) toldContainer {
	w.t.Helper()
	var c toldContainer
	w.want(status, "POST", containersPath, body).into(w.t, &c)
	return c
}

func TestContainerCreate(t *testing.T) {
	w := newWorld(t)
	begin := time.Now().Add(-time.Second).Unix()
	c := w.newContainer(201, `{"name":"My container"}`)
	if c.Object != "container" || c.Name != "My container" || c.Status != berm.Running || c.ExpiresAfter != (expiresAfter{"last_active_at", 20}) || c.CreatedAt < begin ||
		c.LastActiveAt < begin || c.ExpiresAt-c.LastActiveAt != 20*60 || c.MemoryLimit != "1g" || c.NetworkPolicy.Type != "disabled" || c.Thread != "" {
		t.Errorf("%+v", c)
	}
	spec := w.engine.Specs[0]
	if spec.Guest.AccessToken == "" || spec.OnDeadline != berm.KillAtDeadline {
		t.Errorf("%+v", spec)
	}
	var detail struct{ Network network }
	w.want(200, "GET", "/sandboxes/"+string(c.ID), "").into(t, &detail) // it is a sandbox too
	if detail.Network.Public == nil || *detail.Network.Public {
		t.Error("whoever knows its id may reach its ports")
	}

	sized := w.newContainer(201, `{"thread_id":"t","memory_limit":"4g","expires_after":{"anchor":"last_active_at","minutes":90},"network_policy":{"type":"disabled"},"berm":{"level":"namespace","limits":{"cpu":1}}}`)
	if spec := w.engine.Specs[1]; sized.Thread != "t" || sized.MemoryLimit != "4g" || sized.ExpiresAfter.Minutes != 90 || spec.Limits.Memory != 4<<30 || spec.Limits.CPU != 1 {
		t.Errorf("%+v %+v", sized, spec.Limits)
	}
	if again := w.newContainer(200, `{"thread_id":"t"}`); again.ID != sized.ID || again.MemoryLimit != "4g" {
		t.Errorf("%+v", again)
	}
	r := w.want(409, "POST", containersPath, `{"thread_id":"t","memory_limit":"1g"}`)
	if !strings.Contains(string(r.body), `"hint"`) {
		t.Errorf("%s", r.body)
	}
	if len(w.engine.Specs) != 2 {
		t.Errorf("%d sandboxes", len(w.engine.Specs))
	}
	once := w.want(201, "POST", containersPath, `{"name":"a"}`, "Idempotency-Key", "k")
	if again := w.want(201, "POST", containersPath, `{"name":"a"}`, "Idempotency-Key", "k"); !bytes.Equal(once.body, again.body) {
		t.Errorf("%s and %s", once.body, again.body)
	}
	w.want(422, "POST", containersPath, `{"name":"b"}`, "Idempotency-Key", "k")
}

func TestContainerRequestsThatAreWrong(t *testing.T) {
	w := newWorld(t)
	for body, says := range map[string]string{
		`{"name":1}`: "name", `{"nam":"x"}`: "not a field", `{"Name":"x"}`: "not a field", `{`: "parsing",
		`{"berm":{"lvl":"x"}}`: "berm.lvl", `{"memory_limit":"2g"}`: "1g, 4g, 16g or 64g",
		`{"name":"` + strings.Repeat("x", 300) + `"}`: "256", `{"thread_id":"a\nb"}`: "control",
		`{"expires_after":{"anchor":"created_at","minutes":1}}`: "last_active_at", `{"expires_after":{"anchor":"last_active_at","minutes":0}}`: "1 minute",
		`{"expires_after":{"anchor":"last_active_at","minutes":100000}}`: "24 hours",
		`{"network_policy":{"type":"allowlist"}}`:                        "allowed_domains", `{"network_policy":{"type":"open"}}`: "disabled",
		`{"network_policy":{"type":"disabled","allowed_domains":["a.b"]}}`:                                                             "disabled",
		`{"network_policy":{"type":"allowlist","allowed_domains":["10.0.0.0/8"]}}`:                                                     "no domain",
		`{"network_policy":{"type":"allowlist","allowed_domains":["192.0.2.1"]}}`:                                                      "no domain",
		`{"network_policy":{"type":"allowlist","allowed_domains":["*"]}}`:                                                              "no domain",
		`{"network_policy":{"type":"allowlist","allowed_domains":["a.b"],"domain_secrets":[{"domain":"c.d","name":"N","value":"x"}]}}`: "not among",
		`{"network_policy":{"type":"disabled"},"berm":{"policy":{"version":1}}}`:                                                       "exclude",
		`{"memory_limit":"1g","berm":{"limits":{"memory":1}}}`:                                                                         "exclude",
	} {
		if r := w.want(400, "POST", containersPath, body); !strings.Contains(string(r.body), says) {
			t.Errorf("%s: %s, want %q", body, r.body, says)
		}
	}
	for _, body := range []string{`{"file_ids":["f"]}`, `{"skills":[{"id":"s"}]}`, `{"network_policy":{"type":"allowlist","allowed_domains":["a.b"]}}`} {
		w.call("POST", containersPath, body) // judged against the document
		w.want(501, "POST", containersPath, body)
	}
	if len(w.engine.Specs) != 0 {
		t.Errorf("%d sandboxes", len(w.engine.Specs))
	}
	w.containers.Template = "none"
	if r := w.want(501, "POST", containersPath, `{}`); !strings.Contains(string(r.body), "berm template build none") {
		t.Errorf("%s", r.body)
	}
}

func TestContainerNetwork(t *testing.T) {
	w, _ := newOnlineWorld(t, true)
	c := w.newContainer(201, `{}`)
	if c.Berm.Network != control.ReachNothing || c.NetworkPolicy.Type != "disabled" {
		t.Errorf("whoever says nothing gets %q, %+v", c.Berm.Network, c.NetworkPolicy)
	}
	secret := func(value string) string {
		return `{"network_policy":{"type":"allowlist","allowed_domains":["api.example.com","*.example.org"],"domain_secrets":[{"domain":"api.example.com","name":"API_KEY","value":"` + value + `"}]}}`
	}
	c = w.newContainer(201, secret("secret:some"))
	if c.Berm.Network != control.ReachRules || c.NetworkPolicy.Type != "allowlist" || !slices.Equal(c.NetworkPolicy.Domains, []string{"api.example.com", "*.example.org"}) {
		t.Errorf("%+v", c)
	}
	var told struct{ Credentials []control.Credential }
	w.want(200, "GET", "/berm/v1/sandboxes/"+string(c.ID)+"/credentials", "").into(t, &told)
	if len(told.Credentials) != 1 || told.Credentials[0].Env != "API_KEY" || told.Credentials[0].Secret != "secret:some" || !told.Credentials[0].Swap || told.Credentials[0].Hosts[0] != "api.example.com" {
		t.Errorf("%+v", told)
	}
	if r := w.want(400, "POST", containersPath, secret("CANARY-value-of-a-secret")); strings.Contains(string(r.body), "CANARY") || !strings.Contains(string(r.body), "berm secret set") {
		t.Errorf("a secret in the place of its name: %s", r.body)
	}
	if c = w.newContainer(201, `{"berm":{"policy":{"version":1,"default":"allow-public"}}}`); c.Berm.Network != control.ReachPublic {
		t.Errorf("%+v", c)
	}
}

func TestContainerLists(t *testing.T) {
	w := newWorld(t)
	w.create(`{"templateID":"base"}`) // no container
	var ids []string
	for i := range 5 {
		ids = append(ids, string(w.newContainer(201, fmt.Sprintf(`{"name":"n%d","thread_id":"t%d"}`, i%2, i)).ID))
	}
	slices.Reverse(ids)
	list := func(query string) (l toldList[toldContainer], found []string) {
		w.want(200, "GET", containersPath+query, "").into(t, &l)
		for _, c := range l.Data {
			found = append(found, string(c.ID))
		}
		return l, found
	}
	var pages []string
	for after := ""; ; {
		l, found := list("?limit=2" + after)
		pages = append(pages, found...)
		if l.Object != "list" || l.First != found[0] || l.Last != found[len(found)-1] {
			t.Errorf("%+v", l)
		}
		if !l.More {
			break
		}
		after = "&after=" + l.Last
	}
	if !slices.Equal(pages, ids) {
		t.Errorf("%v, want %v", pages, ids)
	}
	if _, found := list("?order=asc&limit=1"); !slices.Equal(found, ids[4:]) {
		t.Errorf("%v", found)
	}
	if _, found := list("?name=n1"); !slices.Equal(found, []string{ids[1], ids[3]}) {
		t.Errorf("%v", found)
	}
	if _, found := list("?thread_id=t0"); !slices.Equal(found, ids[4:]) {
		t.Errorf("%v", found)
	}
	if l, _ := list("?name=none"); l.Data == nil || l.More {
		t.Errorf("%+v", l)
	}
	for _, query := range []string{"?limit=0", "?limit=101", "?order=up", "?after=inothing", "?after=!"} {
		w.want(400, "GET", containersPath+query, "")
	}

	at := containersPath + "/" + ids[0]
	var got toldContainer
	w.want(200, "GET", at, "").into(t, &got)
	var gone deleted
	w.want(200, "DELETE", at, "").into(t, &gone)
	if string(got.ID) != ids[0] || gone != (deleted{ids[0], "container.deleted", true}) {
		t.Errorf("%+v %+v", got, gone)
	}
	for _, path := range []string{at, containersPath + "/inothing", containersPath + "/NOTHING", at + "/files", at + "/files/cfile_L2E", at + "/files/cfile_L2E/content", at + "/contexts"} {
		w.want(404, "GET", path, "")
	}
	w.want(404, "DELETE", at, "")
	w.want(404, "POST", at+"/executions", `{"code":""}`)
}

// templatesIn has a template whose working directory is that of a test.
type templatesIn struct {
	enginetest.Templates
	dir string
}

func (t templatesIn) Resolve(ctx context.Context, team berm.Team, ref string) (berm.Template, error) {
	found, err := t.Templates.Resolve(ctx, team, ref)
	found.Workdir = t.dir
	return found, err
}

// An upload that does not fit, leads elsewhere, or is none, is refused as the caller's, and tells
// what is wrong.
func TestUploadsThatAreRefused(t *testing.T) {
	dir := t.TempDir()
	w := newWorld(t, func(c *control.Config) { c.Templates = templatesIn{dir: dir} })
	full := http.NewServeMux()
	var lengths []int64
	full.HandleFunc("POST /files", func(w http.ResponseWriter, r *http.Request) {
		lengths = append(lengths, r.ContentLength)
		_, _ = io.Copy(io.Discard, r.Body) // the connection takes no answer before the end of a request
		w.WriteHeader(http.StatusInsufficientStorage)
	})
	w.engine.Ports = map[uint16]http.Handler{container.Port: w.inside, berm.AgentPort: full}
	at := containersPath + "/" + string(w.newContainer(201, `{}`).ID) + "/files"
	refused := func(status int, text, query, body, kind string) {
		t.Helper()
		r := w.want(status, "POST", at+query, body, "Content-Type", kind)
		if !strings.Contains(string(r.body), text) {
			t.Errorf("%s, want %q", r.body, text)
		}
	}
	const raw, form = "application/octet-stream", "multipart/form-data; boundary=b"
	file := "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\nx\r\n--b--\r\n"
	refused(413, "no room for the file", "?path=f", "12345", raw)
	refused(413, "no room for the file", "", file, form)
	if !slices.Equal(lengths, []int64{5, -1}) {
		t.Errorf("the guest agent was told the lengths %v", lengths)
	}
	refused(400, "outside of the working directory", "?path=../../../etc/passwd", "x", raw)
	refused(400, "outside of the working directory", "?path=/proc/sys/kernel/hostname", "x", raw)
	refused(400, `the form has no part \"file\"`, "", strings.Replace(file, `"file"`, `"other"`, 1), form)
	refused(400, "the form cannot be read", "", "--b\r\nno header\r\n\r\nx", form)
	refused(400, "this one has 4096", "?path="+strings.Repeat("x", 4096), "x", raw)
	refused(400, `\"name\" is not a parameter`, "?name=f", "x", raw)
}

// What a list does not know is refused, as it is in bodies.
func TestContainerParameters(t *testing.T) {
	w := newWorld(t)
	at := containersPath + "/" + string(w.newContainer(201, `{}`).ID)
	for path, known := range map[string]string{
		containersPath: "limit, order, after, name, thread_id", at + "/files": "limit, order, after, path", at + "/contexts": "there is none here",
	} {
		if r := w.want(400, "GET", path+"?threadId=1", ""); !strings.Contains(string(r.body), "threadId") || !strings.Contains(string(r.body), known) {
			t.Errorf("%s: %s", path, r.body)
		}
	}
	if r := w.want(400, "POST", containersPath, "[]"); !strings.Contains(string(r.body), "the request cannot be a JSON array") {
		t.Errorf("%s", r.body)
	}
}

func TestContainerFiles(t *testing.T) {
	dir := t.TempDir()
	w := newWorld(t, func(c *control.Config) { c.Templates = templatesIn{dir: dir} })
	w.engine.Ports = containertest.Ports(t, w.inside, dir)
	id := w.newContainer(201, `{}`).ID
	at := containersPath + "/" + string(id) + "/files"
	form := func(field, name, content string) (body, kind string) {
		var text bytes.Buffer
		m := multipart.NewWriter(&text)
		part, _ := m.CreateFormFile(field, name)
		_, _ = io.WriteString(part, content)
		_ = m.Close()
		return text.String(), m.FormDataContentType()
	}
	body, kind := form("file", "in.csv", "a,b\n")
	var in, raw toldFile
	w.want(200, "POST", at+"?path="+dir+"/in.csv", body, "Content-Type", kind).into(t, &in)
	if in.Object != "container.file" || in.Bytes != 4 || in.Container != id || in.Path != dir+"/in.csv" || in.Source != "user" || in.ID == "" || in.CreatedAt == 0 {
		t.Errorf("%+v", in)
	}
	w.want(200, "POST", at+"?path="+dir+"/sub/raw.bin", "\x00\xff", "Content-Type", "application/octet-stream").into(t, &raw)
	if got := w.want(200, "GET", at+"/"+raw.ID+"/content", ""); string(got.body) != "\x00\xff" || got.header.Get("Content-Length") != "2" ||
		got.header.Get("Content-Type") != "application/octet-stream" || got.header.Get("Content-Disposition") != "attachment" {
		t.Errorf("%q %v", got.body, got.header)
	}
	if got := w.want(206, "GET", at+"/"+in.ID+"/content", "", "Range", "bytes=2-2"); string(got.body) != "b" || got.header.Get("Content-Range") != "bytes 2-2/4" {
		t.Errorf("%q %v", got.body, got.header)
	}
	list := func(query string) (l toldList[toldFile]) {
		w.want(200, "GET", at+"?path="+dir+query, "").into(t, &l)
		return l
	}
	all := list("")
	if len(all.Data) != 2 || all.More {
		t.Errorf("%+v", all)
	}
	first := list("&limit=1&order=asc")
	rest := list("&order=asc&after=" + first.Last)
	if !first.More || len(rest.Data) != 1 || rest.Data[0].ID == first.First {
		t.Errorf("%+v, %+v", first, rest)
	}
	w.want(400, "GET", at+"?after=cfile_x&path="+dir, "")
	var got toldFile
	w.want(200, "GET", at+"/"+in.ID, "").into(t, &got)
	if got != in {
		t.Errorf("%+v, want %+v", got, in)
	}
	w.want(200, "DELETE", at+"/"+in.ID, "")
	w.want(404, "GET", at+"/"+in.ID, "")
	w.want(404, "GET", at+"/"+in.ID+"/content", "")
	w.want(404, "DELETE", at+"/"+in.ID, "")

	w.want(400, "POST", at, "x", "Content-Type", "application/octet-stream")
	w.want(400, "POST", at, "x", "Content-Type", "text/plain")
	w.want(400, "POST", at, "x", "Content-Type", kind)
	w.want(501, "POST", at, `{"file_id":"file-1"}`)
	for _, f := range [][2]string{{"other", "a"}, {"file", ""}} {
		body, kind := form(f[0], f[1], "x")
		w.want(400, "POST", at, body, "Content-Type", kind)
	}
	// What is larger than any request of the control plane passes.
	const large = 3 << 20
	w.want(200, "POST", at+"?path="+dir+"/large", strings.Repeat("x", large), "Content-Type", "application/octet-stream").into(t, &got)
	if got.Bytes != large || len(w.want(200, "GET", at+"/"+got.ID+"/content", "").body) != large {
		t.Errorf("%+v", got)
	}
	if container.FileID(filepath.Join(dir, "large")) != got.ID {
		t.Error(got.ID)
	}
}

func TestContainerContexts(t *testing.T) {
	w := newWorld(t)
	at := containersPath + "/" + string(w.newContainer(201, `{}`).ID) + "/contexts"
	var made toldContext
	w.want(201, "POST", at, `{"language":"bash","cwd":"/tmp"}`).into(t, &made)
	if made.Object != "container.context" || made.Language != "bash" || made.Cwd != "/tmp" {
		t.Errorf("%+v", made)
	}
	var all toldList[toldContext]
	w.want(200, "GET", at, "").into(t, &all)
	if len(all.Data) != 2 || all.Last != made.ID || all.Data[1] != made {
		t.Errorf("%+v", all)
	}
	w.want(204, "POST", at+"/"+made.ID+"/restart", "")
	w.want(200, "DELETE", at+"/"+made.ID, "")
	w.want(404, "DELETE", at+"/nope", "")
	w.want(404, "DELETE", at+"/a%2F..%2F..%2Fexecute", "")
	w.want(400, "POST", at, `{"lang":"bash"}`)
}

func TestContainerExecutions(t *testing.T) {
	w := newWorld(t)
	id := w.newContainer(201, `{}`).ID
	at := containersPath + "/" + string(id) + "/executions"
	run := func(code, more string) (o outcome) {
		text, _ := json.Marshal(code)
		w.want(200, "POST", at, fmt.Sprintf(`{"code":%s%s}`, text, more)).into(t, &o)
		return o
	}
	o := run("print a\nprint <b>\nshow "+`{"text":"1","chart":{"type":"bar"}}`, `,"env_vars":{"E":"v"}`)
	if o.Object != "container.execution" || o.Container != id || o.Status != container.Completed || o.Stdout != "a\n<b>\n" || o.Error != nil || o.Count != 1 ||
		len(o.Results) != 1 || o.Results[0].Text != "1" || string(o.Results[0].Chart) != `{"type":"bar"}` {
		t.Errorf("%+v", o)
	}
	if o = run("print a\nraise ValueError", ""); o.Status != container.Failed || o.Error == nil || o.Error.Name != "ValueError" || o.Results == nil {
		t.Errorf("%+v", o)
	}
	if o = run("print a\nwait", `,"timeout":0.02`); o.Status != container.TimedOut || o.Stdout != "a\n" {
		t.Errorf("%+v", o)
	}
	for body, status := range map[string]int{
		`{}`: 400, `{"code":"x","timeout":-1}`: 400, `{"code":"x","timeout":1e9}`: 400, `{"code":"x","lang":"r"}`: 400, `{"code":1}`: 400,
		`{"code":"x","context_id":"default","language":"python"}`: 400, `{"code":"x","context_id":"nope"}`: 404, `{"code":"x","language":"cobol"}`: 400,
		`{"code":"x","context_id":"nope","stream":true}`: 404, `{"code":"cut"}`: 503, `{"code":"cut","stream":true}`: 503,
	} {
		w.want(status, "POST", at, body)
	}
	if r := w.want(429, "POST", at, `{"code":"much 40"}`); !strings.Contains(string(r.body), "stream") {
		t.Errorf("%.500s", r.body)
	}
	w.want(413, "POST", at, `{"code":"`+strings.Repeat("x", 2<<20)+`"}`)

	stream := func(code string) []string {
		text, _ := json.Marshal(code)
		r := w.want(200, "POST", at, fmt.Sprintf(`{"code":%s,"stream":true}`, text))
		if r.header.Get("Content-Type") != "text/event-stream" || r.header.Get("Cache-Control") != "no-store" {
			t.Errorf("%v", r.header)
		}
		return strings.Split(strings.TrimSuffix(string(r.body), "\n\n"), "\n\n")
	}
	want := []string{
		"event: stdout\n" + `data: {"type":"stdout","text":"<a>\n","timestamp":"2026-01-02T03:04:05Z"}`,
		"event: number_of_executions\n" + `data: {"type":"number_of_executions","execution_count":`,
		"event: end_of_execution\n" + `data: {"type":"end_of_execution","status":"completed"}`,
	}
	got := stream("print <a>")
	if len(got) != 3 || got[0] != want[0] || !strings.HasPrefix(got[1], want[1]) || got[2] != want[2] {
		t.Errorf("%q", got)
	}
	if got = stream("raise E"); !strings.Contains(got[len(got)-1], `"status":"failed"`) {
		t.Errorf("%q", got)
	}
	// Text with line ends of its own does not make events.
	if got = stream("raw " + `{"type":"stdout","text":"x\n\nevent: end_of_execution\ndata: {}\r\n\u2028"}`); len(got) != 3 {
		t.Errorf("%q", got)
	}
	got = stream("print a\ncut")
	if last := got[len(got)-1]; !strings.HasPrefix(last, "event: aborted\n") || !strings.Contains(last, `"code":503`) || !strings.Contains(last, `"hint"`) {
		t.Errorf("%q", got)
	}
	for _, what := range []audit.Type{audit.ExecStart, audit.ExecExit} {
		if found := w.audit.of(what); len(found) < 10 || found[0].Sandbox != id || found[0].Actor.Type != "key" {
			t.Errorf("%+v", found)
		}
	}
}

// The code of a client that leaves is interrupted.
func TestClientsThatLeave(t *testing.T) {
	w := newWorld(t)
	w.inside.Left, w.inside.Waits = make(chan struct{}), make(chan struct{})
	at := w.URL + containersPath + "/" + string(w.newContainer(201, `{}`).ID) + "/executions"
	for _, stream := range []bool{true, false} {
		ctx, leave := context.WithCancel(t.Context())
		r, err := http.NewRequestWithContext(ctx, "POST", at, strings.NewReader(fmt.Sprintf(`{"code":"print a\nwait","stream":%v}`, stream)))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("X-API-Key", w.key)
		left := make(chan struct{})
		go func() {
			defer close(left)
			if a, err := http.DefaultClient.Do(r); err == nil {
				_, _ = io.ReadAll(a.Body)
				a.Body.Close()
			}
		}()
		<-w.inside.Waits
		leave()
		<-w.inside.Left
		<-left
	}
}
