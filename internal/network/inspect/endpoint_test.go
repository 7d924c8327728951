package inspect

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// A client without TLS reaches a server with TLS by the name of an endpoint, and no other
// way: what it sends is judged, authorised and looked through as if it had TLS.
func TestEndpoint(t *testing.T) {
	next := make(chan string)
	r := newRig(t, http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if q.TLS == nil {
			t.Error("it came without TLS")
		}
		switch q.URL.Path {
		case "/home":
			http.Redirect(w, q, "https://"+q.Host+"/v1/next?x=1", http.StatusFound)
		case "/away":
			http.Redirect(w, q, "https://other.test/", http.StatusFound)
		case "/stream":
			for text := range next {
				_, _ = io.WriteString(w, text)
				w.(http.Flusher).Flush()
			}
		default:
			fmt.Fprintf(w, "%s %s %s %s", q.Method, q.Host, q.RequestURI, q.Header.Get("Authorization"))
		}
	}), options{endpoint: "api.broker.test", change: func(c *Config) {
		c.Credentials = broker{func() Filter { return &mask{} }}
		c.Judge = judgeFunc(func(_ context.Context, q Request) Verdict {
			if q.Scheme != "https" || q.Authority != q.Flow.Address() {
				t.Errorf("judged as %s for %q", q.Scheme, q.Authority)
			}
			return Verdict{Allow: q.Method != http.MethodDelete, Target: q.Target}
		})
	}})
	real := r.flow.Address()
	client := &http.Client{
		Transport:     &http.Transport{DialContext: func(ctx context.Context, n, _ string) (net.Conn, error) { return dialTCP(ctx, n, real) }},
		CheckRedirect: r.client.CheckRedirect, Timeout: 20 * time.Second,
	}
	t.Cleanup(client.CloseIdleConnections)
	do := func(method, url string) (*http.Response, string) {
		t.Helper()
		request, err := http.NewRequestWithContext(t.Context(), method, url, nil)
		if err != nil {
			t.Fatal(err)
		}
		reply, err := client.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer reply.Body.Close()
		text, err := io.ReadAll(reply.Body)
		if err != nil {
			t.Fatal(err)
		}
		return reply, string(text)
	}
	const base = "http://api.broker.test"
	if reply, text := do("GET", base+"/v1/a%20b?x=%7E"); reply.StatusCode != 200 || text != "GET "+real+" /v1/a%20b?x=%7E Bearer ************" {
		t.Error(reply.Status, text)
	}
	if reply, _ := do("GET", base+"/home"); reply.Header.Get("Location") != base+"/v1/next?x=1" {
		t.Error(reply.Header)
	}
	if reply, _ := do("GET", base+"/away"); reply.Header.Get("Location") != "https://other.test/" {
		t.Error(reply.Header)
	}
	for _, wrong := range []string{"http://localhost/", "http://other.broker.test/", base + ":8080/"} {
		if reply, text := do("GET", wrong); reply.StatusCode != http.StatusMisdirectedRequest {
			t.Error(wrong, reply.Status, text)
		}
	}
	if reply, text := do("DELETE", base+"/"); reply.StatusCode != http.StatusForbidden || !strings.Contains(text, "DELETE / at "+real) {
		t.Error(reply.Status, text)
	}
	if err := r.dial(t).(interface{ Handshake() error }).Handshake(); err == nil {
		t.Error("an endpoint speaks TLS")
	}

	request, _ := http.NewRequestWithContext(t.Context(), "GET", base+"/stream", nil)
	got := make(chan *http.Response, 1)
	go func() {
		reply, err := client.Do(request)
		if err != nil {
			t.Error(err)
		}
		got <- reply
	}()
	next <- "data: 1\n"
	reply := <-got
	if reply == nil {
		t.FailNow()
	}
	defer reply.Body.Close()
	lines := bufio.NewReader(reply.Body)
	for i := 1; i < 4; i++ { // nothing more is sent before this piece has arrived
		if line, err := lines.ReadString('\n'); err != nil || line != fmt.Sprintf("data: %d\n", i) {
			t.Fatalf("%q, %v", line, err)
		}
		next <- fmt.Sprintf("data: %d\n", i+1)
	}
	close(next)
}
