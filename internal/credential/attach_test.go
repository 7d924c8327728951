package credential

import (
	"encoding/json"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"

	"bytes"
	"context"
	cryptorand "crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
)

// values are secrets by name.
type values map[string]string

func (v values) Value(_ context.Context, name string) ([]byte, error) {
	if v[name] == "" {
		return nil, berm.Errorf(berm.NotFound, "there is no secret %q", name)
	}
	return []byte(v[name]), nil
}

const (
	tokenSecret = "CANARY-token-0123456789abcdef"
	otherSecret = "CANARY-other-fedcba9876543210"
)

// rig is a broker that remembers its events.
type rig struct {
	*Broker
	mu     sync.Mutex
	events []Event
}

func newRig() *rig {
	r := &rig{}
	r.Broker = &Broker{
		Sources: Sources{"secret": values{"token": tokenSecret, "other": otherSecret, "short": "1234", "odd": "CANARY with \"space\"; and more", "line": "CANARY-two\nlines", "long": strings.Repeat("x", maxSecret+1)}},
		Report: func(e Event) error {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.events = append(r.events, e)
			return nil
		},
	}
	return r
}

// last returns the last event.
func (r *rig) last() Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.events) == 0 {
		return Event{}
	}
	return r.events[len(r.events)-1]
}

func (r *rig) open(t testing.TB, bindings ...Binding) *Set {
	t.Helper()
	s, err := r.Open(context.Background(), berm.NewSandboxID(), 1, bindings)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

var bearer = Binding{ID: "api", Kind: Bearer, Secret: "secret:token", Hosts: []string{"api.test"}, Methods: []string{"GET", "POST"}, Paths: []string{"/v1/**"}}

func swap(b Binding) Binding {
	b.Mode, b.Env, b.Shape = Swap, "API_TOKEN", "github"
	return b
}

var apiFlow = Flow{Name: "api.test", Port: 443, SNI: "api.test"}

func request(t testing.TB, method, target, body string) *http.Request {
	t.Helper()
	var r io.Reader
	if body != "" {
		r = strings.NewReader(body)
	}
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	out, err := http.NewRequestWithContext(ctx, method, target, r)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// wire returns what would be sent, and the refusal that ends it. The request's line and
// fields are given in the clear whatever their encoding.
func wire(out *http.Request) (string, error) {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s %s\n", out.Method, out.URL, out.Host)
	out.Header.Write(&b)
	if user, password, ok := out.BasicAuth(); ok {
		fmt.Fprintf(&b, "%s:%s\n", user, password)
	}
	if out.Body != nil {
		body, err := io.ReadAll(out.Body)
		b.Write(body)
		if err != nil {
			return b.String(), err
		}
	}
	out.Trailer.Write(&b)
	return b.String(), nil
}

func TestGate(t *testing.T) {
	for _, c := range []struct {
		name    string
		binding func(*Binding)
		flow    func(*Flow)
		request func(*http.Request)
		want    Reason // "" when the secret is set, "none" when the request goes on without it
	}{
		{name: "all holds"},
		{name: "another host", flow: func(f *Flow) { f.Name, f.SNI = "evil.test", "evil.test" }, want: "none"},
		{name: "a host below", flow: func(f *Flow) { f.Name, f.SNI = "x.api.test", "x.api.test" }, want: "none"},
		{name: "a host that ends alike", flow: func(f *Flow) { f.Name, f.SNI = "evilapi.test", "evilapi.test" }, want: "none"},
		{name: "another port", flow: func(f *Flow) { f.Port = 8443 }, want: "none"},
		{name: "another method", request: func(r *http.Request) { r.Method = "DELETE" }, want: "none"},
		{name: "another path", request: func(r *http.Request) { r.URL.Path = "/v2/x" }, want: "none"},
		{name: "a path that begins alike", request: func(r *http.Request) { r.URL.Path = "/v1x" }, want: "none"},
		{name: "dot segments", request: func(r *http.Request) { r.URL.Path = "/v1/../admin" }, want: Slot},
		{name: "an encoded slash", request: func(r *http.Request) { r.URL, _ = url.Parse("https://api.test/v1/..%2fadmin") }, want: Slot},
		{name: "a double slash", request: func(r *http.Request) { r.URL.Path = "/v1//x" }, want: Slot},
		{name: "a path parameter", request: func(r *http.Request) { r.URL.Path = "/v1/..;/x" }, want: Slot},
		{name: "dots and a space", request: func(r *http.Request) { r.URL.Path = "/v1/.. /admin" }, want: Slot},
		{name: "three dots", request: func(r *http.Request) { r.URL.Path = "/v1/.../admin" }, want: Slot},
		{name: "twice encoded", request: func(r *http.Request) { r.URL, _ = url.Parse("https://api.test/v1/%252e%252e/x") }, want: Slot},
		{name: "no TLS", request: func(r *http.Request) { r.URL.Scheme = "http" }, want: Insecure},
		{name: "another SNI", flow: func(f *Flow) { f.SNI = "other.test" }, want: Insecure},
		{name: "no SNI", flow: func(f *Flow) { f.SNI = "" }, want: Insecure},
		{name: "another Host", request: func(r *http.Request) { r.Host = "other.test" }, want: Insecure},
		{name: "Host with another port", request: func(r *http.Request) { r.Host = "api.test:8443" }, want: Insecure},
		{name: "Host with user", request: func(r *http.Request) { r.Host = "api.test@evil.test" }, want: Insecure},
		{name: "Host with the Kelvin sign", binding: func(b *Binding) { b.Hosts = []string{"ki.test"} }, flow: func(f *Flow) { f.Name, f.SNI = "ki.test", "ki.test" }, request: func(r *http.Request) { r.URL.Host, r.Host = "ki.test", "\u212ai.test" }, want: Insecure},
		{name: "sent to another host", request: func(r *http.Request) { r.URL.Host = "evil.test" }, want: Insecure},
		{name: "user in the URL", request: func(r *http.Request) { r.URL.User = url.User("x") }, want: Insecure},
		{name: "opaque URL", request: func(r *http.Request) { r.URL.Opaque = "//evil.test/v1/x" }, want: Insecure},
		{name: "Host with its port", request: func(r *http.Request) { r.Host = "API.test:443" }},
		{name: "TRACE", binding: func(b *Binding) { b.Methods = nil }, request: func(r *http.Request) { r.Method = "TRACE" }, want: Slot},
		{name: "expired", binding: func(b *Binding) { b.Expires = time.Now().Add(-time.Second) }, want: Expired},
		{name: "not expired", binding: func(b *Binding) { b.Expires = time.Now().Add(time.Hour) }},
		{name: "wildcard", binding: func(b *Binding) { b.Hosts = []string{"*.test"} }, want: "invalid"},
		{name: "an exception", binding: func(b *Binding) { b.Hosts = []string{"api.test", "!api.test"} }, want: "none"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig()
			b, f, out := bearer, apiFlow, request(t, "GET", "https://api.test/v1/things", "")
			if c.binding != nil {
				c.binding(&b)
			}
			if c.want == "invalid" {
				if _, err := r.Open(t.Context(), "i0", 1, []Binding{b}); berm.KindOf(err) != berm.Invalid {
					t.Fatal(err)
				}
				return
			}
			s := r.open(t, b)
			if c.flow != nil {
				c.flow(&f)
			}
			if c.request != nil {
				c.request(out)
			}
			out.Header.Set("Authorization", "Bearer of the client")
			_, err := s.Attach(f, out)
			sent, _ := wire(out)
			var refusal *Refusal
			switch {
			case c.want == "":
				if err != nil || out.Header.Get("Authorization") != "Bearer "+tokenSecret || strings.Contains(sent, "of the client") {
					t.Fatal(err, sent)
				}
				if e := r.last(); e.Type != Use || e.Binding != "api" || e.Name != f.Name || e.Revision != 1 {
					t.Errorf("recorded is %+v", e)
				}
				return
			case c.want == "none":
				if err != nil || !strings.Contains(sent, "of the client") || len(r.events) != 0 {
					t.Error(err, sent, r.events)
				}
			case !errors.As(err, &refusal) || refusal.Reason != c.want || berm.KindOf(err) != berm.Denied:
				t.Errorf("%v, want %s", err, c.want)
			case r.last().Reason != c.want:
				t.Errorf("recorded is %+v", r.last())
			}
			if strings.Contains(sent, "CANARY") {
				t.Errorf("the secret is in %q", sent)
			}
		})
	}
}

// What a body holds goes on at once, right or wrong, until it is a whole secret: whoever sees both
// ends learns nothing from it.
func TestBodiesAreNotKeptBack(t *testing.T) {
	r := newRig()
	s := r.open(t, swap(bearer))
	for _, name := range []string{"api.test", "evil.test"} {
		for i := 1; i <= len(tokenSecret); i++ {
			in, feed := io.Pipe()
			out := request(t, "POST", "https://"+name+"/v1/x", "")
			if name == "api.test" {
				out.Header.Set("Authorization", "Bearer "+s.Env(host)["API_TOKEN"])
			}
			out.Body = in
			if _, err := s.Attach(Flow{name, 443, name}, out); err != nil {
				t.Fatal(err)
			}
			go io.WriteString(feed, tokenSecret[:i])
			b := make([]byte, 64)
			n, err := out.Body.Read(b)
			if i < len(tokenSecret) {
				if string(b[:n]) != tokenSecret[:i] || err != nil {
					t.Fatalf("%s: of %q came %q: %v", name, tokenSecret[:i], b[:n], err)
				}
				go io.WriteString(feed, tokenSecret[i:])
				n, err = out.Body.Read(b)
			}
			var refusal *Refusal
			if n != 0 || !errors.As(err, &refusal) || refusal.Reason != Leak || r.last().Type != Leaked {
				t.Fatalf("%s: the end of a secret after %d bytes: %q, %v, %+v", name, i, b[:n], err, r.last())
			}
			feed.Close()
		}
	}
}

// A text is masked in whatever form it holds a secret, before and after the end of its rights.
func TestMask(t *testing.T) {
	s := newRig().open(t, bearer)
	texts := []string{tokenSecret, url.QueryEscape(tokenSecret), base64.StdEncoding.EncodeToString([]byte("xy" + tokenSecret)), `\u0043` + tokenSecret[1:], fmt.Sprintf("%x", tokenSecret)}
	for range 2 {
		for _, text := range texts {
			masked := string(s.Mask([]byte(`{"a":"` + text + `"}`)))
			if len(masked) != len(text)+8 || !strings.HasPrefix(masked, `{"a":"`) || !strings.HasSuffix(masked, `"}`) || strings.Count(masked, "*") < len(tokenSecret) && strings.Count(masked, "Kioq") < len(tokenSecret)/3-1 {
				t.Errorf("%s: %s", text, masked)
			}
		}
		s.Close()
	}
	if text := string(s.Mask([]byte("nothing"))); text != "nothing" {
		t.Error(text)
	}
}

func TestSwap(t *testing.T) {
	for _, c := range []struct {
		name    string
		binding Binding
		set     func(out *http.Request, placeholder string)
		want    Reason // "" when the secret is set, "none" when the request goes on without it
		holds   string
	}{
		{"in its place", bearer, func(r *http.Request, p string) { r.Header.Set("Authorization", "Bearer "+p) }, "", "Authorization: Bearer " + tokenSecret},
		{"another case", bearer, func(r *http.Request, p string) { r.Header.Set("Authorization", "bearer "+p) }, "", "Authorization: Bearer " + tokenSecret},
		{"scheme token", bearer, func(r *http.Request, p string) { r.Header.Set("Authorization", "token "+p) }, "", "Authorization: Bearer " + tokenSecret},
		{"none", bearer, func(*http.Request, string) {}, "none", ""},
		{"another value", bearer, func(r *http.Request, _ string) { r.Header.Set("Authorization", "Bearer mine") }, "none", "Bearer mine"},
		{"not alone", bearer, func(r *http.Request, p string) { r.Header.Set("Authorization", "Bearer "+p+"x") }, Misuse, ""},
		{"two fields", bearer, func(r *http.Request, p string) { r.Header["Authorization"] = []string{"Bearer " + p, "Bearer " + p} }, Misuse, ""},
		{"a field beside", bearer, func(r *http.Request, p string) {
			r.Header.Set("Authorization", "Bearer "+p)
			r.Header.Set("X-Token", p)
		}, Misuse, ""},
		{"another field", bearer, func(r *http.Request, p string) { r.Header.Set("X-Token", p) }, Misuse, ""},
		{"a reflected field", bearer, func(r *http.Request, p string) { r.Header.Set("User-Agent", "curl "+p) }, Misuse, ""},
		{"a field's name", bearer, func(r *http.Request, p string) { r.Header[p] = []string{"x"} }, Misuse, ""},
		{"the query", bearer, func(r *http.Request, p string) { r.URL.RawQuery = "t=" + p }, Misuse, ""},
		{"the query, encoded", bearer, func(r *http.Request, p string) {
			r.URL.RawQuery = "t=" + strings.ReplaceAll(url.QueryEscape(p), "b", "%62")
		}, Misuse, ""},
		{"the path", bearer, func(r *http.Request, p string) { r.URL.Path = "/v1/" + p }, Misuse, ""},
		{"the method", Binding{ID: "api", Kind: Bearer, Secret: "secret:token", Hosts: []string{"api.test"}}, func(r *http.Request, p string) { r.Method = p }, Misuse, ""},
		{"base64 in a field", bearer, func(r *http.Request, p string) {
			r.Header.Set("X-Token", base64.StdEncoding.EncodeToString([]byte("user:"+p)))
		}, Misuse, ""},
		{"Basic where Bearer belongs", bearer, func(r *http.Request, p string) { r.SetBasicAuth("user", p) }, Misuse, ""},
		{"Basic password", Binding{ID: "api", Kind: Basic, Secret: "secret:token", Hosts: []string{"api.test"}}, func(r *http.Request, p string) { r.SetBasicAuth("me", p) }, "", "me:" + tokenSecret},
		{"Basic user", Binding{ID: "api", Kind: Basic, Secret: "secret:token", Hosts: []string{"api.test"}}, func(r *http.Request, p string) { r.SetBasicAuth(p, "x") }, "", tokenSecret + ":x"},
		{"Basic both", Binding{ID: "api", Kind: Basic, Secret: "secret:token", Hosts: []string{"api.test"}}, func(r *http.Request, p string) { r.SetBasicAuth(p, p) }, Misuse, ""},
		{"Bearer where Basic belongs", Binding{ID: "api", Kind: Basic, Secret: "secret:token", Hosts: []string{"api.test"}}, func(r *http.Request, p string) { r.Header.Set("Authorization", "Bearer "+p) }, Misuse, ""},
		{"API key", Binding{ID: "api", Kind: APIKey, Secret: "secret:token", Hosts: []string{"api.test"}}, func(r *http.Request, p string) { r.Header.Set("x-api-key", p) }, "", "X-Api-Key: " + tokenSecret},
		{"cookie", Binding{ID: "api", Kind: Cookie, Name: "sid", Secret: "secret:token", Hosts: []string{"api.test"}}, func(r *http.Request, p string) { r.Header.Set("Cookie", "a=b; sid="+p+"; c=d") }, "", "Cookie: a=b; c=d; sid=" + tokenSecret},
		{"another cookie", Binding{ID: "api", Kind: Cookie, Name: "sid", Secret: "secret:token", Hosts: []string{"api.test"}}, func(r *http.Request, p string) { r.Header.Set("Cookie", "other="+p) }, Misuse, ""},
		{"query key", Binding{ID: "api", Kind: Query, Name: "key", Secret: "secret:token", Hosts: []string{"api.test"}}, func(r *http.Request, p string) { r.URL.RawQuery = "a=%7e&k%65y=" + p }, "", "a=%7e&key=" + tokenSecret},
		{"query key twice", Binding{ID: "api", Kind: Query, Name: "key", Secret: "secret:token", Hosts: []string{"api.test"}}, func(r *http.Request, p string) { r.URL.RawQuery = "key=" + p + "&key=" + p }, Misuse, ""},
		{"query with semicolons", Binding{ID: "api", Kind: Query, Name: "key", Secret: "secret:token", Hosts: []string{"api.test"}}, func(r *http.Request, p string) { r.URL.RawQuery = "a=1;key=" + p }, Misuse, ""},
		{"JSON field", Binding{ID: "api", Kind: JSON, Name: "/auth/token", Secret: "secret:odd", Hosts: []string{"api.test"}}, func(r *http.Request, p string) {
			setJSON(r, `{"a": [1, 2.50], "auth": {"token" : "`+p+`"}, "z":null}`)
		}, "", `{"a": [1, 2.50], "auth": {"token" : "CANARY with \"space\"; and more"}, "z":null}`},
		{"another JSON field", Binding{ID: "api", Kind: JSON, Name: "/auth/token", Secret: "secret:token", Hosts: []string{"api.test"}}, func(r *http.Request, p string) {
			setJSON(r, `{"auth": {"token": "`+p+`"}, "echo":"`+p+`"}`)
		}, Misuse, ""},
		{"JSON field escaped elsewhere", Binding{ID: "api", Kind: JSON, Name: "/t", Secret: "secret:token", Hosts: []string{"api.test"}}, func(r *http.Request, p string) {
			setJSON(r, `{"echo":"\u`+fmt.Sprintf("%04x", p[0])+p[1:]+`"}`)
		}, Misuse, ""},
		{"a body", bearer, func(r *http.Request, p string) {
			r.Method, r.Body = "POST", io.NopCloser(strings.NewReader("x"+p+"y"))
		}, "none", "xghp_berm"},
		{"a body in base64", bearer, func(r *http.Request, p string) {
			r.Method, r.Body = "POST", io.NopCloser(strings.NewReader(base64.StdEncoding.EncodeToString([]byte("xx"+p))))
		}, "none", ""},
		{"a trailer", bearer, func(r *http.Request, p string) {
			r.Method, r.Body, r.Trailer = "POST", io.NopCloser(strings.NewReader("x")), http.Header{"X-Sum": {p}}
		}, Misuse, ""},
		{"a secret itself", bearer, func(r *http.Request, _ string) { r.Header.Set("X-Token", tokenSecret) }, Leak, ""},
		{"a secret as a name", bearer, func(r *http.Request, _ string) { r.Header.Set(tokenSecret, "x") }, Leak, ""},
		{"a secret itself in its place", bearer, func(r *http.Request, _ string) { r.Header.Set("Authorization", "Bearer "+tokenSecret) }, Leak, ""},
		{"a secret in a body", bearer, func(r *http.Request, _ string) {
			r.Method, r.Body = "POST", io.NopCloser(strings.NewReader("x"+url.QueryEscape(tokenSecret)))
		}, Leak, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig()
			s := r.open(t, swap(c.binding))
			p := s.Env(host)["API_TOKEN"]
			out := request(t, "GET", "https://api.test/v1/things", "")
			c.set(out, p)
			before := map[string]bool{}
			for _, v := range out.Header {
				before[strings.Join(v, "")] = true
			}
			_, err := s.Attach(apiFlow, out)
			var sent string
			if err == nil {
				sent, err = wire(out)
			}
			switch c.want {
			case "":
				if err != nil || !strings.Contains(sent, c.holds) || strings.Contains(sent, p) || strings.Count(strings.ToLower(sent), "canary") > 2 {
					t.Errorf("%v: sent is %q", err, sent)
				}
				return
			case "none":
				if err != nil || !strings.Contains(sent, c.holds) || strings.Contains(sent, "CANARY") {
					t.Errorf("%v: sent is %q", err, sent)
				}
				return
			}
			var refusal *Refusal
			if !errors.As(err, &refusal) || refusal.Reason != c.want {
				t.Errorf("%v, want %s", err, c.want)
			}
			if c.want != Leak && strings.Contains(sent, "CANARY") && !strings.Contains(sent, "Bearer "+tokenSecret) {
				t.Errorf("the secret is in %q", sent)
			}
			want := Misused
			if c.want == Leak {
				want = Leaked
			}
			if e := r.last(); e.Type != want || e.Binding != "api" || slices.ContainsFunc(r.events[:len(r.events)-1], func(e Event) bool { return e.Type != Use }) {
				t.Errorf("recorded is %+v", e)
			}
			if e := fmt.Sprint(err, r.last()); strings.Contains(e, "CANARY") || strings.Contains(e, p) {
				t.Error("the record or the error tells it:", e)
			}
		})
	}
}

func setJSON(r *http.Request, body string) {
	r.Method = "POST"
	r.Header.Set("Content-Type", "application/json")
	r.Body, r.ContentLength = io.NopCloser(strings.NewReader(body)), int64(len(body))
}

func TestJSONField(t *testing.T) {
	for _, c := range []struct{ pointer, body, want string }{
		{"/k", `{"k":"old"}`, `{"k":"SECRET"}`},
		{"/k", ` { "a" : "k" , "k" :  "" } `, ` { "a" : "k" , "k" :  "SECRET" } `},
		{"/a/1/k", `{"a":[{"k":"x"},{"k":"y"}]}`, `{"a":[{"k":"x"},{"k":"SECRET"}]}`},
		{"/a~1b/~0", `{"a/b":{"~":"x"}}`, `{"a/b":{"~":"SECRET"}}`},
		{"/k", `{"\u006b":"x"}`, `{"\u006b":"SECRET"}`},
		{"/k", `{"k":"a\"}\\"}`, `{"k":"SECRET"}`},
		{"/k", `{"k":1}`, ""},
		{"/k", `{"k":{"x":"y"}}`, ""},
		{"/k", `{"other":"x"}`, ""},
		{"/k", `{"k":"x","k":"y"}`, ""},
		{"/k", `{"k":"x","K":"y"}`, ""},
		{"/k", `{"k":"x"}{"k":"y"}`, ""},
		{"/k", `{"k":"x"`, ""},
		{"/k", `{"k":"x",}`, ""},
		{"/k", ``, ""},
		{"/k", strings.Repeat(`{"a":`, 100) + `1` + strings.Repeat("}", 100), ""},
		{"/k", `{"k":"` + strings.Repeat("x", maxJSON) + `"}`, ""},
	} {
		out := request(t, "POST", "https://api.test/", "")
		setJSON(out, c.body)
		m := body{c.pointer}
		_, err := m.Sent(out)
		if err == nil {
			m.Clear(out)
			err = m.Put(t.Context(), out, "SECRET", nil)
		}
		got := ""
		if err == nil {
			b, _ := io.ReadAll(out.Body)
			if got = string(b); out.ContentLength != int64(len(b)) {
				t.Errorf("length of %q is %d", got, out.ContentLength)
			}
		}
		if got != c.want {
			t.Errorf("%.80s of %.80q became %q: %v", c.pointer, c.body, got, err)
		}
	}
	// What is not looked at goes on whole.
	r := newRig()
	s := r.open(t, swap(Binding{ID: "api", Kind: JSON, Name: "/k", Secret: "secret:token", Hosts: []string{"api.test"}}))
	long := `{"k":"` + strings.Repeat("x", maxJSON) + `"}`
	out := request(t, "POST", "https://api.test/", "")
	setJSON(out, long)
	if _, err := s.Attach(apiFlow, out); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(out.Body); err != nil || string(b) != long {
		t.Errorf("%d of %d bytes, %v", len(b), len(long), err)
	}
}

// Where a field was set, a decoder finds the secret there, and everything else as it was.
func FuzzJSONField(f *testing.F) {
	f.Add(`{"a":[1,{"k":"x"}],"k":"y"}`, "/a/1/k")
	f.Add(`{"a":{"k":"\"}"}}`, "/a/k")
	f.Add(`{"k":"x","K":"y"}`, "/k")
	f.Fuzz(func(t *testing.T, text, pointer string) {
		out := httptest.NewRequest("POST", "/", nil)
		setJSON(out, text)
		m := body{pointer}
		sent, err := m.Sent(out)
		if err != nil || len(sent) != 1 {
			return
		}
		if err := m.Put(t.Context(), out, "SECRET", nil); err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(out.Body)
		from, to, err := find(b, pointer)
		if err != nil || string(b[from:to]) != `"SECRET"` {
			t.Fatalf("%q became %q: %v", text, b, err)
		}
		quoted, _ := json.Marshal(sent[0])
		back := string(b[:from]) + string(quoted) + string(b[to:])
		var want, got any
		if json.Unmarshal([]byte(text), &want) != nil || json.Unmarshal([]byte(back), &got) != nil || !reflect.DeepEqual(want, got) {
			t.Fatalf("%q became %q", text, b)
		}
	})
}

func TestSources(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return filepath.Join(dir, name)
	}
	t.Setenv("BERM_TEST_SECRET", "from the environment")
	os.Symlink(file("target", "linked\n"), filepath.Join(dir, "link"))
	sources := Sources{"env": Env{}, "file": Files{}}
	for reference, want := range map[string]string{
		"env:BERM_TEST_SECRET": "from the environment", "file:" + file("a", "text\r\n"): "text", "file:" + filepath.Join(dir, "link"): "linked",
		"file:" + file("max", strings.Repeat("x", MaxValue)): strings.Repeat("x", MaxValue),
	} {
		if got, err := sources.Value(t.Context(), reference); err != nil || string(got) != want {
			t.Errorf("%s: %q %v", reference, got, err)
		}
	}
	for reference, kind := range map[string]berm.Kind{
		"env:BERM_TEST_NONE": berm.NotFound, "file:" + filepath.Join(dir, "none"): berm.NotFound, "file:" + file("empty", "\n"): berm.NotFound,
		"file:a": berm.Invalid, "file:" + dir: berm.Invalid, "file:" + file("long", strings.Repeat("x", MaxValue+1)): berm.Invalid,
		"CANARY": berm.Invalid, "vault:CANARY": berm.Invalid, "": berm.Invalid,
	} {
		if got, err := sources.Value(t.Context(), reference); err == nil || berm.KindOf(err) != kind || strings.Contains(err.Error(), "CANARY") {
			t.Errorf("%.80s: %q %v", reference, got, err)
		}
	}
}

func TestAmbiguous(t *testing.T) {
	r := newRig()
	two := bearer
	two.ID, two.Kind, two.Secret = "two", Basic, "secret:other"
	s := r.open(t, bearer, two)
	_, err := s.Attach(apiFlow, request(t, "GET", "https://api.test/v1/x", ""))
	var refusal *Refusal
	if !errors.As(err, &refusal) || refusal.Reason != Ambiguous {
		t.Error(err)
	}

	// The placeholder says which one is meant.
	a, b := swap(bearer), swap(two)
	b.Kind, b.Env = Bearer, "OTHER_TOKEN"
	s = r.open(t, a, b)
	out := request(t, "GET", "https://api.test/v1/x", "")
	out.Header.Set("Authorization", "Bearer "+s.Env(host)["OTHER_TOKEN"])
	if _, err := s.Attach(apiFlow, out); err != nil || out.Header.Get("Authorization") != "Bearer "+otherSecret {
		t.Error(out.Header, err)
	}

	// Different places are no ambiguity.
	key := bearer
	key.ID, key.Kind, key.Secret = "key", APIKey, "secret:other"
	s = r.open(t, bearer, key)
	out = request(t, "GET", "https://api.test/v1/x", "")
	out.Header["x_api_key"] = []string{"what some servers take for the same"}
	if _, err := s.Attach(apiFlow, out); err != nil || out.Header.Get("X-Api-Key") != otherSecret || out.Header.Get("Authorization") != "Bearer "+tokenSecret || len(out.Header["x_api_key"]) != 0 { //nolint:staticcheck // as it was sent
		t.Error(out.Header, err)
	}
}

// Who put a placeholder into the wrong place is told which that was and which is right, never
// what is there.
func TestMisuseNamesThePlaces(t *testing.T) {
	r := newRig()
	b := swap(bearer)
	s := r.open(t, b)
	p := s.Env(host)["API_TOKEN"]
	for where, put := range map[string]func(*http.Request){
		"header X-Other":       func(out *http.Request) { out.Header.Set("X-Other", p) },
		"the query":            func(out *http.Request) { out.URL.RawQuery = "a=" + p },
		"the path":             func(out *http.Request) { out.URL.Path = "/v1/" + p },
		"the name of a header": func(out *http.Request) { out.Header[p] = []string{"x"} },
	} {
		out := request(t, "GET", "https://api.test/v1/x", "")
		put(out)
		_, err := s.Attach(apiFlow, out)
		var refusal *Refusal
		if !errors.As(err, &refusal) || !strings.Contains(refusal.Message, " is in "+where+", where it does not belong") ||
			refusal.Hint != "send it in header authorization to api.test alone" || strings.Contains(refusal.Message+refusal.Hint, p) {
			t.Errorf("%s: %+v", where, refusal)
		}
	}
}

// The placeholder of one binding in the place of another is no value to be replaced.
func TestPlaceholderOfAnotherBinding(t *testing.T) {
	r := newRig()
	other := swap(bearer)
	other.ID, other.Hosts = "other", []string{"other.test"}
	attach := bearer
	attach.Env = "KEY"
	s := r.open(t, attach, other)
	env := s.Env(host)
	for name, c := range map[string]struct {
		value string
		want  Reason
	}{"own": {env["KEY"], ""}, "other": {env["API_TOKEN"], Misuse}, "other after own": {env["KEY"] + " " + env["API_TOKEN"], Misuse}} {
		out := request(t, "GET", "https://api.test/v1/x", "")
		out.Header.Set("Authorization", "Bearer "+c.value)
		_, err := s.Attach(apiFlow, out)
		var refusal *Refusal
		if errors.As(err, &refusal) != (c.want != "") || refusal != nil && refusal.Reason != c.want {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestUses(t *testing.T) {
	r := newRig()
	b := bearer
	b.MaxUses = 5
	s := r.open(t, b)
	var sent, refused int
	var mu sync.Mutex
	var group sync.WaitGroup
	for range 20 {
		group.Go(func() {
			out := request(t, "GET", "https://api.test/v1/x", "")
			_, err := s.Attach(apiFlow, out)
			var refusal *Refusal
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				sent++
			case errors.As(err, &refusal) && refusal.Reason == Used && out.Header.Get("Authorization") == "":
				refused++
			default:
				t.Error(err)
			}
		})
	}
	group.Wait()
	if sent != 5 || refused != 15 {
		t.Errorf("%d sent, %d refused", sent, refused)
	}
	// A change of the binding does not give them back.
	b.Paths = nil
	if err := s.Update(t.Context(), 2, []Binding{b}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Attach(apiFlow, request(t, "GET", "https://api.test/v1/x", "")); err == nil {
		t.Error("uses came back")
	}
}

// signer is a kind that is not built in: it signs requests.
type signer struct{ name string }

func (signer) Slot() string                             { return "field x-signature" }
func (signer) Sent(out *http.Request) ([]string, error) { return out.Header["X-Signature"], nil }
func (signer) Clear(out *http.Request)                  { out.Header.Del("X-Signature") }
func (s signer) Put(_ context.Context, out *http.Request, secret string, _ []string) error {
	if out.URL.Path == "/v1/odd" {
		return errors.New("that cannot be signed")
	}
	sum := digestOf(secret + out.Method + out.URL.Path)
	out.Header.Set("X-Signature", s.name+" "+base64.StdEncoding.EncodeToString(sum[:]))
	return nil
}

func TestFurtherKind(t *testing.T) {
	r := newRig()
	r.Methods = map[Kind]func(Binding) (Method, error){"sign": func(b Binding) (Method, error) {
		if b.Name == "" {
			return nil, berm.Errorf(berm.Invalid, "it needs a name")
		}
		return signer{b.Name}, nil
	}}
	b := bearer
	b.Kind = "sign"
	if _, err := r.Open(t.Context(), "i0", 1, []Binding{b}); berm.KindOf(err) != berm.Invalid {
		t.Error(err)
	}
	b.Name = "key1"
	s := r.open(t, b)
	out := request(t, "GET", "https://api.test/v1/x", "")
	out.Header.Set("X-Signature", "forged")
	if _, err := s.Attach(apiFlow, out); err != nil || !strings.HasPrefix(out.Header.Get("X-Signature"), "key1 ") {
		t.Error(out.Header, err)
	}
	var refusal *Refusal
	out = request(t, "GET", "https://api.test/v1/odd", "")
	if _, err := s.Attach(apiFlow, out); !errors.As(err, &refusal) || refusal.Reason != Slot || out.Context().Err() == nil {
		t.Error(err)
	}
}

// While bindings change and end, a request has the secret of its binding or none.
func TestChangesUnderWay(t *testing.T) {
	r := newRig()
	s := r.open(t, bearer)
	stop := make(chan struct{})
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				ctx, cancel := context.WithCancel(context.Background())
				out, _ := http.NewRequestWithContext(ctx, "GET", "https://api.test/v1/x", nil)
				_, err := s.Attach(apiFlow, out)
				got := out.Header.Get("Authorization")
				if err == nil && got != "" && got != "Bearer "+tokenSecret && got != "Bearer "+otherSecret || err != nil && got != "" {
					t.Errorf("%q %v", got, err)
				}
				cancel()
			}
		})
	}
	two := bearer
	two.Secret = "secret:other"
	for i := range 60 {
		if err := s.Update(t.Context(), uint64(i+2), [][]Binding{{bearer}, {two}, nil}[i%3]); err != nil {
			t.Error(err)
		}
	}
	s.Close()
	close(stop)
	group.Wait()
}

func TestUnrecordedUse(t *testing.T) {
	r := newRig()
	s := r.open(t, bearer)
	r.Report = func(Event) error { return errors.New("the disk is full") }
	out := request(t, "GET", "https://api.test/v1/x", "")
	_, err := s.Attach(apiFlow, out)
	var refusal *Refusal
	if !errors.As(err, &refusal) || refusal.Reason != Unrecorded || out.Context().Err() == nil {
		t.Error(err)
	}
}

// ended waits until a request has to end.
func ended(t *testing.T, out *http.Request) {
	t.Helper()
	select {
	case <-out.Context().Done():
	case <-time.After(10 * time.Second):
		t.Fatal("the request goes on")
	}
}

func TestRevocation(t *testing.T) {
	r := newRig()
	keep := bearer
	keep.ID, keep.Hosts = "keep", []string{"keep.test"}
	s := r.open(t, swap(bearer), keep)
	p := s.Env(host)["API_TOKEN"]
	send := func(host string) (*http.Request, error) {
		out := request(t, "GET", "https://"+host+"/v1/x", "")
		if host == "api.test" {
			out.Header.Set("Authorization", "Bearer "+p)
		}
		_, err := s.Attach(Flow{host, 443, host}, out)
		return out, err
	}
	gone, err := send("api.test")
	kept, err2 := send("keep.test")
	if err != nil || err2 != nil {
		t.Fatal(err, err2)
	}
	start := time.Now()
	if err := s.Update(t.Context(), 2, []Binding{keep}); err != nil {
		t.Fatal(err)
	}
	ended(t, gone)
	if d := time.Since(start); d > 10*time.Second {
		t.Errorf("it took %v", d)
	}
	if !errors.Is(context.Cause(gone.Context()), errRevoked) || kept.Context().Err() != nil {
		t.Error(context.Cause(gone.Context()), kept.Context().Err())
	}
	// The placeholder is known for one that was.
	var refusal *Refusal
	if _, err := send("api.test"); !errors.As(err, &refusal) || refusal.Reason != Misuse {
		t.Error(err)
	}
	// In another sandbox it is known too, before and after.
	again := r.open(t, swap(bearer))
	out := request(t, "GET", "https://api.test/v1/x", "")
	out.Header.Set("Authorization", "Bearer "+p)
	if _, err := again.Attach(apiFlow, out); !errors.As(err, &refusal) || refusal.Reason != Misuse {
		t.Error(err)
	}
	out = request(t, "GET", "https://any.test/", "")
	out.SetBasicAuth("user", again.Env(host)["API_TOKEN"])
	if _, err := s.Attach(Flow{"any.test", 443, "any.test"}, out); !errors.As(err, &refusal) || refusal.Reason != Misuse {
		t.Error(err)
	}
	s.Close()
	ended(t, kept)
	if _, err := send("keep.test"); !errors.As(err, &refusal) || refusal.Reason != Revoked {
		t.Error(err)
	}
	if err := s.Update(t.Context(), 3, nil); berm.KindOf(err) != berm.NotFound {
		t.Error(err)
	}
}

// An update that fails changes nothing; one that changes nothing ends nothing.
func TestUpdate(t *testing.T) {
	r := newRig()
	s := r.open(t, swap(bearer))
	p := s.Env(host)["API_TOKEN"]
	out := request(t, "GET", "https://api.test/v1/x", "")
	out.Header.Set("Authorization", "Bearer "+p)
	if _, err := s.Attach(apiFlow, out); err != nil {
		t.Fatal(err)
	}
	bad := bearer
	bad.ID, bad.Secret = "bad", "secret:none"
	if err := s.Update(t.Context(), 2, []Binding{bad}); berm.KindOf(err) != berm.NotFound || s.Revision() != 1 {
		t.Error(err)
	}
	if err := s.Update(t.Context(), 3, []Binding{swap(bearer)}); err != nil || s.Revision() != 3 || out.Context().Err() != nil {
		t.Error(err, out.Context().Err())
	}
	// Another value of the secret: what runs ends, the placeholder stays.
	r.Sources["secret"].(values)["token"] = "CANARY-next-token"
	if err := s.Update(t.Context(), 4, []Binding{swap(bearer)}); err != nil {
		t.Fatal(err)
	}
	ended(t, out)
	out = request(t, "GET", "https://api.test/v1/x", "")
	out.Header.Set("Authorization", "Bearer "+p)
	if _, err := s.Attach(apiFlow, out); err != nil || out.Header.Get("Authorization") != "Bearer CANARY-next-token" {
		t.Error(err, out.Header)
	}
}

func TestInvalidBindings(t *testing.T) {
	r := newRig()
	for name, change := range map[string]func(*Binding){
		"no id":             func(b *Binding) { b.ID = "" },
		"odd id":            func(b *Binding) { b.ID = "A/b" },
		"no kind":           func(b *Binding) { b.Kind = "" },
		"unknown kind":      func(b *Binding) { b.Kind = "x" },
		"no secret":         func(b *Binding) { b.Secret = "" },
		"no scheme":         func(b *Binding) { b.Secret = "token" },
		"unknown scheme":    func(b *Binding) { b.Secret = "env:PATH" },
		"short secret":      func(b *Binding) { b.Secret = "secret:short" },
		"secret with lines": func(b *Binding) { b.Secret = "secret:line" },
		"long secret":       func(b *Binding) { b.Secret = "secret:long" },
		"no host":           func(b *Binding) { b.Hosts = nil },
		"URL":               func(b *Binding) { b.Hosts = []string{"https://api.test"} },
		"upper case":        func(b *Binding) { b.Hosts = []string{"API.test"} },
		"last dot":          func(b *Binding) { b.Hosts = []string{"api.test."} },
		"everything":        func(b *Binding) { b.Hosts = []string{"*"} },
		"all of a top":      func(b *Binding) { b.Hosts = []string{"*.com"} },
		"relative path":     func(b *Binding) { b.Paths = []string{"v1/*"} },
		"** inside":         func(b *Binding) { b.Paths = []string{"/**/x"} },
		"mode":              func(b *Binding) { b.Mode = "both" },
		"response":          func(b *Binding) { b.Response = "x" },
		"swap without env":  func(b *Binding) { b.Mode = Swap },
		"env":               func(b *Binding) { b.Env = "A B" },
		"shape":             func(b *Binding) { b.Shape = "x" },
		"service":           func(b *Binding) { b.Service = "x" },
		"endpoint nowhere":  func(b *Binding) { b.Endpoint = true },
		"URL of none":       func(b *Binding) { b.URL = "X_URL" },
		"odd URL":           func(b *Binding) { b.Endpoint, b.URL = true, "X URL" },
		"odd endpoint":      func(b *Binding) { b.Endpoint, b.URL, b.ID = true, "X_URL", "-a" },
		"wild endpoint":     func(b *Binding) { b.Endpoint, b.URL, b.Hosts = true, "X_URL", []string{"*.api.test"} },
		"reflected field":   func(b *Binding) { b.Kind, b.Name = Header, "x-forwarded-token" },
		"user agent":        func(b *Binding) { b.Kind, b.Name = Header, "User-Agent" },
		"host field":        func(b *Binding) { b.Kind, b.Name = Header, "Host" },
		"odd field":         func(b *Binding) { b.Kind, b.Name = Header, "a b" },
		"prefix":            func(b *Binding) { b.Kind, b.Name, b.Prefix = Header, "X-A", "a\r\nb" },
		"pointer":           func(b *Binding) { b.Kind, b.Name = JSON, "key" },
		"git without rules": func(b *Binding) { b.Kind = Git },
		"rules without git": func(b *Binding) { b.Git = &Rules{Repositories: []string{"a/b"}} },
		"git swap": func(b *Binding) {
			b.Kind, b.Git, b.Mode, b.Env = Git, &Rules{Repositories: []string{"a/b"}}, Swap, "X"
		},
		"git repository": func(b *Binding) { b.Kind, b.Git = Git, &Rules{Repositories: []string{"a/b.git"}} },
		"git ref": func(b *Binding) {
			b.Kind, b.Git = Git, &Rules{Repositories: []string{"a/b"}, Push: []string{"main"}}
		},
		"negative uses": func(b *Binding) { b.MaxUses = -1 },
	} {
		b := bearer
		change(&b)
		s, err := r.Open(t.Context(), "i0", 1, []Binding{b})
		if err == nil || berm.KindOf(err) != berm.Invalid || strings.Contains(err.Error(), "CANARY") {
			t.Errorf("%s: %v", name, err)
		}
		if s != nil {
			s.Close()
		}
	}
	if _, err := r.Open(t.Context(), "i0", 1, []Binding{bearer, bearer}); berm.KindOf(err) != berm.Invalid {
		t.Error(err)
	}
	off := bearer
	off.Secret, off.Response = "secret:short", Off
	s := r.open(t, off)
	out := request(t, "GET", "https://api.test/v1/1234", "1234")
	filter, err := s.Attach(apiFlow, out)
	if err != nil || filter != nil {
		t.Error(filter, err)
	}
	if _, err := r.Open(t.Context(), s.sandbox, 1, nil); berm.KindOf(err) != berm.AlreadyExists {
		t.Error(err)
	}
}

func TestPlaceholders(t *testing.T) {
	for name, s := range shapes {
		seen := map[string]bool{}
		for range 50 {
			p := newPlaceholder(name, cryptorand.Reader)
			if seen[p] || len(p) != len(s.prefix)+s.length || !strings.HasPrefix(p, s.prefix) || strings.Trim(p[len(s.prefix):], s.alphabet) != "" || !isPlaceholder(p) {
				t.Fatalf("%s: %q", name, p)
			}
			seen[p] = true
		}
	}
	if got := len(newPlaceholder("github", cryptorand.Reader)); got != 40 {
		t.Errorf("a token of GitHub has 40 characters, not %d", got)
	}
}

func TestE2B(t *testing.T) {
	r := newRig()
	bindings, err := E2B(map[string]map[string]string{
		"*.ex.test":       {"authorization": "Bearer ${e2b.secrets.TOKEN}", "X-Env": "wide"},
		"api.ex.test":     {"X-Two": "a ${e2b.secrets.token} b ${e2b.secrets.other} c ${x}"},
		"*.sub.ex.test":   {"X-Env": "sub"},
		"*.a.sub.ex.test": {"X-Env": "a"},
		"a.sub.ex.test":   {"X-Env": "exact"},
	})
	if err != nil {
		t.Fatal(err)
	}
	s := r.open(t, bindings...)
	for host, want := range map[string]http.Header{
		"www.ex.test":     {"Authorization": {"Bearer " + tokenSecret}, "X-Env": {"wide"}},
		"api.ex.test":     {"X-Two": {"a " + tokenSecret + " b " + otherSecret + " c ${x}"}},
		"b.sub.ex.test":   {"X-Env": {"sub"}},
		"a.sub.ex.test":   {"X-Env": {"exact"}},
		"x.a.sub.ex.test": {"X-Env": {"a"}},
		"sub.ex.test":     {"Authorization": {"Bearer " + tokenSecret}, "X-Env": {"wide"}},
		"ex.test":         {},
	} {
		out := request(t, "GET", "https://"+host+"/", "")
		_, err := s.Attach(Flow{host, 443, host}, out)
		out.Header.Del("Accept-Encoding")
		if err != nil || fmt.Sprint(out.Header) != fmt.Sprint(want) {
			t.Errorf("%s: %v, want %v: %v", host, out.Header, want, err)
		}
	}
	// What is no secret goes by plain HTTP too; what is does not.
	out := request(t, "GET", "http://b.sub.ex.test/", "")
	if _, err := s.Attach(Flow{"b.sub.ex.test", 80, ""}, out); err != nil || out.Header.Get("X-Env") != "sub" {
		t.Error(out.Header, err)
	}
	out = request(t, "GET", "http://api.ex.test/", "")
	if _, err := s.Attach(Flow{"api.ex.test", 80, ""}, out); err != nil || len(out.Header) != 0 {
		t.Error(out.Header, err)
	}
	for value, kind := range map[string]berm.Kind{
		"${e2b.identity.tokens.aws}": berm.Unsupported,
		"${e2b.secrets.}":            berm.Invalid,
		"${e2b.secrets.a":            berm.Invalid,
		"${e2b.secrets.a b}":         berm.Invalid,
		"${e2b.other.a}":             berm.Invalid,
		"a\nb":                       berm.Invalid,
		"":                           berm.Invalid,
	} {
		if _, err := E2B(map[string]map[string]string{"api.ex.test": {"X-A": value}}); err == nil || berm.KindOf(err) != kind {
			t.Errorf("%q: %v", value, err)
		}
	}
	if _, err := E2B(map[string]map[string]string{"api.ex.test": {"User-Agent": "${e2b.secrets.a}"}}); berm.KindOf(err) != berm.Invalid {
		t.Error(err)
	}
	for _, name := range []string{"Date", "Host", "content-length", "Content_Length", "Connection", "Transfer-Encoding", "Upgrade", "Trailer", "TE", "Expect", "Keep-Alive", "Proxy-Connection", "HTTP2-Settings"} {
		for _, value := range []string{"${e2b.secrets.a}", "mine"} {
			if _, err := E2B(map[string]map[string]string{"api.ex.test": {name: value}}); berm.KindOf(err) != berm.Invalid {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	if _, err := E2B(map[string]map[string]string{"api.ex.test": {"User-Agent": "mine"}}); err != nil {
		t.Error(err)
	}
}

// Whatever is sent, where and how: the secret goes to its host by TLS alone, and never
// comes back.
func TestSecretsStayOutside(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	r := newRig()
	hosts := []string{"api.test", "other.test", "evil.test"}
	one := swap(bearer)
	one.Paths, one.Methods = nil, nil
	two := Binding{ID: "two", Kind: JSON, Name: "/k", Secret: "secret:other", Hosts: []string{"other.test"}, Mode: Swap, Env: "OTHER", Response: Block}
	three := Binding{ID: "three", Kind: Cookie, Name: "sid", Secret: "secret:token", Hosts: []string{"other.test"}}
	s := r.open(t, one, two, three)
	env := s.Env(host)
	texts := []string{env["API_TOKEN"], env["OTHER"], "x", tokenSecret, otherSecret, ""}
	var sentWith int
	for range 1000 {
		pick := func() string {
			text := texts[random.IntN(len(texts))]
			if random.IntN(4) > 0 {
				return text
			}
			forms := encodings(text)
			names := make([]string, 0, len(forms))
			for name := range forms {
				names = append(names, name)
			}
			slices.Sort(names)
			return forms[names[random.IntN(len(names))]]
		}
		host, at := hosts[random.IntN(3)], hosts[random.IntN(3)]
		if random.IntN(3) > 0 {
			at = host
		}
		scheme := "https"
		if random.IntN(5) == 0 {
			scheme = "http"
		}
		out := request(t, "POST", scheme+"://"+at+"/v1/", "")
		var inside []string // what the sandbox sends
		set := func(do func(string)) {
			if random.IntN(2) == 0 {
				text := pick()
				inside = append(inside, text)
				do(text)
			}
		}
		set(func(v string) { out.Header.Set("Authorization", "Bearer "+strings.Map(printable, v)) })
		set(func(v string) { out.Header.Set("Cookie", "sid="+strings.Map(printable, v)) })
		set(func(v string) { out.Header.Set("X-Any", strings.Map(printable, v)) })
		set(func(v string) { out.URL.RawQuery = "q=" + url.QueryEscape(v) })
		set(func(v string) { setJSON(out, `{"k":"`+jsonEscape(v)+`"}`) })
		filter, err := s.Attach(Flow{host, 443, host}, out)
		if err != nil {
			continue
		}
		sent, err := wire(out)
		if err != nil {
			continue
		}
		m := newMatcher([]needle{{tokenSecret, secret, "token"}, {otherSecret, secret, "other"}})
		if n := m.first(sent); n != nil {
			sentWith++
			allowed := n.binding == "token" && (host == "api.test" || host == "other.test") || n.binding == "other" && host == "other.test"
			if !allowed || at != host || scheme != "https" {
				t.Fatalf("%s went to %s (%s, %s): %q after %q", n.binding, host, at, scheme, sent, inside)
			}
			// The server sends all of it back, in some form.
			forms := encodings(sent[strings.Index(sent, "CANARY")-1:])
			for name, form := range forms {
				reply, err := filter.Body(nil, []byte(form), true)
				if err == nil && m.first(string(reply)) != nil {
					t.Fatalf("%s came back as %s", n.binding, name)
				}
				break
			}
		}
	}
	if sentWith < 30 {
		t.Errorf("only %d requests went with a secret", sentWith)
	}
}

func printable(r rune) rune {
	if r < ' ' || r == ';' || r == '"' || r > '~' {
		return '_'
	}
	return r
}

func TestFilter(t *testing.T) {
	for _, response := range []Response{Mask, Block, Off} {
		r := newRig()
		b := bearer
		b.Response = response
		s := r.open(t, b)
		out := request(t, "GET", "https://api.test/v1/x", "")
		out.Header.Set("Accept-Encoding", "gzip")
		out.Header.Set("Range", "bytes=1-2")
		filter, err := s.Attach(apiFlow, out)
		if err != nil {
			t.Fatal(err)
		}
		if response == Off {
			if filter != nil || out.Header.Get("Range") == "" || out.Header.Get("Accept-Encoding") != "gzip" {
				t.Error("off:", filter, out.Header)
			}
			continue
		}
		if out.Header.Get("Range") != "" || out.Header.Get("Accept-Encoding") != "identity" {
			t.Error(out.Header)
		}
		h := http.Header{"X-Echo": {"a " + tokenSecret + " b"}, "Location": {"/?t=" + base64.StdEncoding.EncodeToString([]byte(tokenSecret))}, "X-Other": {"x"}, http.CanonicalHeaderKey(tokenSecret): {"y"}}
		err = filter.Header(h)
		if response == Block {
			if berm.KindOf(err) != berm.Denied || r.last().Type != Echo {
				t.Error(err, r.last())
			}
			if _, err := filter.Body(nil, []byte("x "+tokenSecret), true); err == nil {
				t.Error("the body is not blocked")
			}
			continue
		}
		if err != nil || h.Get("X-Echo") != "a "+strings.Repeat("*", len(tokenSecret))+" b" || h.Get("X-Other") != "x" {
			t.Error(h, err)
		}
		if s.state.Load().replyNames.first(fmt.Sprint(h)) != nil {
			t.Error("it is in", h)
		}
		body, err := filter.Body([]byte("kept "), []byte("x"+tokenSecret+"y"), true)
		if err != nil || string(body) != "kept x"+strings.Repeat("*", len(tokenSecret))+"y" {
			t.Errorf("%q %v", body, err)
		}
		if e := r.last(); e.Type != Echo || e.Binding != "api" || len(r.events) != 2 {
			t.Error(r.events)
		}
		if h := (http.Header{http.CanonicalHeaderKey("v-" + strings.ToUpper(tokenSecret)): {"y"}}); filter.Header(h) != nil || len(h) > 0 {
			t.Error("the name of a field shows it in another case:", h)
		}
		if err := filter.Header(http.Header{"Content-Encoding": {"gzip"}}); berm.KindOf(err) != berm.Unsupported {
			t.Error(err)
		}
	}
	r := newRig()
	filter := r.open(t, bearer).Filter()
	if out, err := filter.Body(nil, []byte(tokenSecret), true); err != nil || bytes.Contains(out, []byte("CANARY")) {
		t.Errorf("%q %v", out, err)
	}
	filter = r.open(t, bearer).Filter()
	next := strings.Repeat("\x00 the next frame", 8)
	if out, err := filter.Body(nil, []byte(tokenSecret[:len(tokenSecret)/2+3]+next), true); err != nil || !bytes.HasPrefix(out, []byte("****")) || !bytes.HasSuffix(out, []byte("*"+next)) {
		t.Errorf("after the start of a secret: %q %v", out, err)
	}
	if text := string(r.open(t, bearer).Mask([]byte(`{"a":"` + tokenSecret[:len(tokenSecret)-2] + `","b":"what follows"}`))); !strings.HasSuffix(text, `*","b":"what follows"}`) {
		t.Errorf("a record with the start of a secret: %s", text)
	}
	if r.open(t).Filter() != nil {
		t.Error("there is nothing to look for")
	}
}

func BenchmarkAttach(b *testing.B) {
	for _, mode := range []Mode{Attach, Swap} {
		b.Run(string(mode), func(b *testing.B) {
			r := newRig()
			r.Report = func(Event) error { return nil }
			binding := bearer
			if mode == Swap {
				binding = swap(bearer)
			}
			s := r.open(b, binding)
			p := s.Env(host)["API_TOKEN"]
			header := http.Header{
				"Accept": {"application/json"}, "User-Agent": {"OpenAI/Python 1.2.3 (linux; x86_64)"}, "X-Stainless-Lang": {"python"}, "X-Stainless-Os": {"Linux"},
				"Content-Type": {"application/json"}, "Accept-Encoding": {"gzip, deflate, br"}, "Cookie": {"a=b; c=d"}, "Authorization": {"Bearer " + p},
			}
			b.ReportAllocs()
			for b.Loop() {
				ctx, cancel := context.WithCancel(context.Background())
				out, _ := http.NewRequestWithContext(ctx, "GET", "https://api.test/v1/things?limit=10", nil)
				out.Header = header.Clone()
				if _, err := s.Attach(apiFlow, out); err != nil {
					b.Fatal(err)
				}
				cancel()
			}
		})
	}
}

// A process that knows the seed makes the placeholders of the one before, and no others do.
func TestPlaceholdersOfASeed(t *testing.T) {
	env := func(seed byte, sandbox berm.SandboxID, change func(*Binding)) string {
		r := newRig()
		r.Seed = func(berm.SandboxID) []byte { return bytes.Repeat([]byte{seed}, 32) }
		b := swap(bearer)
		change(&b)
		s, err := r.Open(t.Context(), sandbox, 1, []Binding{b})
		if err != nil {
			t.Fatal(err)
		}
		return s.Env(host)[b.Env]
	}
	same := func(*Binding) {}
	first := env(1, "i0a", same)
	if len(first) < 20 || env(1, "i0a", same) != first {
		t.Errorf("%q, then another", first)
	}
	for what, other := range map[string]string{
		"seed": env(2, "i0a", same), "id": env(1, "i0a", func(b *Binding) { b.ID = "other" }), "variable": env(1, "i0a", func(b *Binding) { b.Env = "OTHER" }),
		"shape": env(1, "i0a", func(b *Binding) { b.Shape = "gitlab" }),
	} {
		if other == first {
			t.Errorf("with another %s it is the same", what)
		}
	}
}

// Requests of a binding whose secret is gone are refused, and get it when it is back.
func TestSecretGone(t *testing.T) {
	r := newRig()
	b := bearer
	b.Revoked, b.Secret = true, "secret:nowhere"
	s := r.open(t, b)
	var refusal *Refusal
	if _, err := s.Attach(apiFlow, request(t, "GET", "https://api.test/v1/x", "")); !errors.As(err, &refusal) || refusal.Reason != Revoked {
		t.Errorf("%v", err)
	}
	if err := s.Update(t.Context(), 2, []Binding{bearer}); err != nil {
		t.Fatal(err)
	}
	out := request(t, "GET", "https://api.test/v1/x", "")
	if _, err := s.Attach(apiFlow, out); err != nil || out.Header.Get("Authorization") != "Bearer "+tokenSecret {
		t.Errorf("%v, %v", out.Header, err)
	}
}
