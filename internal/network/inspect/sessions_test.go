package inspect

import (
	"crypto/tls"
	"fmt"
	"net/http"
	"testing"
)

// Flows with the same Sessions resume TLS on both sides, those with others do not, and nothing is
// shared between names or ports.
func TestSessions(t *testing.T) {
	r := newRig(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.TLS.DidResume) }),
		options{perFlow: true, change: func(c *Config) { c.Sessions = &Sessions{} }})
	tr := r.transport()
	tr.DisableKeepAlives, tr.TLSClientConfig.ClientSessionCache = true, tls.NewLRUClientSessionCache(1)
	get := func() (inside bool, outside string) {
		t.Helper()
		res, err := (&http.Client{Transport: tr}).Get(r.url("/"))
		if err != nil {
			t.Fatal(err)
		}
		return res.TLS.DidResume, read(t, res)
	}
	for i, want := range []bool{false, true, true} {
		if inside, outside := get(); inside != want || outside != fmt.Sprint(want) {
			t.Errorf("flow %d resumes inside %v, outside %s", i, inside, outside)
		}
	}
	key := siteKey{flow: r.flow, scheme: "https"}
	other, port := key, key
	other.flow.Name, port.flow.Port = "other.test", 8443
	p := NewProxy(r.config)
	defer p.Close()
	one, _ := p.site(key)
	for _, k := range []siteKey{other, port} {
		if s, _ := p.site(k); s.tls == one.tls || s.tls2 == one.tls2 || s.transport.TLSClientConfig.ClientSessionCache == one.transport.TLSClientConfig.ClientSessionCache {
			t.Errorf("%+v shares sessions with another", k)
		}
	}
	q := NewProxy(r.config)
	defer q.Close()
	if same, _ := q.site(key); same.tls != one.tls {
		t.Error("another flow to the same does not")
	}
}
