package inspect

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/websocket"
)

func read(t testing.TB, res *http.Response) string {
	t.Helper()
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func get(t testing.TB, c *http.Client, url string) (*http.Response, string) {
	t.Helper()
	res, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	return res, read(t, res)
}

// echo tells what the upstream saw.
var echo = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	json.NewEncoder(w).Encode(map[string]any{
		"proto": r.Proto, "method": r.Method, "host": r.Host, "target": r.RequestURI,
		"header": r.Header, "body": string(body), "trailer": r.Trailer, "length": r.ContentLength,
	})
})

type seen struct {
	Proto, Method, Host, Target, Body string
	Header, Trailer                   http.Header
	Length                            int64
}

func parse(t testing.TB, s string) (v seen) {
	t.Helper()
	if err := json.Unmarshal([]byte(s), &v); err != nil {
		t.Fatalf("%q: %v", s, err)
	}
	return v
}

func TestProxyPassesRequestsOn(t *testing.T) {
	r := newRig(t, echo, options{})
	for proto, client := range map[string]*http.Client{"HTTP/2.0": r.client, "HTTP/1.1": r.http1(t)} {
		req, _ := http.NewRequest("POST", r.url("/a%2Fb/c?x=1;y&z=%zz"), strings.NewReader("hello"))
		req.Header.Set("X-Forwarded-For", "1.2.3.4")
		req.Header.Set("Forwarded", "for=1.2.3.4")
		req.Header.Set("X-Forwarded-Prefix", "/admin")
		req.Header.Set("Connection", "X-Hop")
		req.Header.Set("X-Hop", "1")
		req.Header.Set("X-Kept", "1")
		req.Header.Set("Accept-Encoding", "br")
		if proto == "HTTP/2.0" {
			req.Header.Del("Connection")
			req.Header.Del("X-Hop")
		}
		res, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if res.Proto != proto {
			t.Errorf("the client got %s, want %s", res.Proto, proto)
		}
		v := parse(t, read(t, res))
		if v.Method != "POST" || v.Target != "/a%2Fb/c?x=1;y&z=%zz" || v.Body != "hello" || v.Length != 5 || v.Host != r.flow.Address() {
			t.Errorf("the upstream saw %+v", v)
		}
		if v.Proto != "HTTP/2.0" {
			t.Errorf("the upstream was asked by %s", v.Proto)
		}
		if v.Header.Get("X-Kept") != "1" || v.Header.Get("Accept-Encoding") != "br" {
			t.Errorf("fields are missing: %v", v.Header)
		}
		for _, gone := range []string{"X-Forwarded-For", "X-Forwarded-Prefix", "Forwarded", "X-Hop", "Connection"} {
			if v.Header.Get(gone) != "" {
				t.Errorf("%s was passed on", gone)
			}
		}
	}
	rec := r.last(t, 2)
	if rec.Status != 200 || rec.Sent != 5 || rec.Received == 0 || rec.Rule != "all" || rec.Path != "/a%2Fb/c" {
		t.Errorf("record %+v", rec)
	}
}

// TestProxyTellsWhy sends what is denied and looks at the reply.
func TestProxyTellsWhy(t *testing.T) {
	r := newRig(t, echo, options{change: func(c *Config) {
		c.Judge = judgeFunc(func(_ context.Context, r Request) Verdict {
			switch {
			case strings.HasPrefix(r.Target, "/admin"):
				return Verdict{Rule: "api", Reason: "path", Hint: "add it", Detail: "not listed"}
			case r.Target == "/elsewhere":
				return Verdict{Allow: true, Target: "http://evil.test/"}
			case r.Target == "/nothing":
				return Verdict{Allow: true}
			}
			return Verdict{Allow: true, Target: r.Target, MaxBody: 10, Rule: "api"}
		})
	}})
	for _, client := range []*http.Client{r.client, r.http1(t)} {
		for _, test := range []struct {
			name   string
			change func(*http.Request)
			status int
			reason string
		}{
			{"a path", func(r *http.Request) { r.URL.Path = "/admin/x" }, 403, "path"},
			{"another host", func(r *http.Request) { r.Host = "evil.test" }, 421, "authority_mismatch"},
			{"a name with user", func(r *http.Request) { r.Host = "localhost@evil.test" }, 421, "authority_mismatch"},
			{"another port", func(r *http.Request) { r.Host = "localhost:1" }, 421, "authority_mismatch"},
			{"TRACE", func(r *http.Request) { r.Method = "TRACE" }, 403, "method"},
			{"a long body", func(r *http.Request) {
				r.Method, r.Body, r.ContentLength = "PUT", io.NopCloser(strings.NewReader("01234567890")), 11
			}, 413, "body"},
			{"a long body of unknown length", func(r *http.Request) {
				r.Method, r.Body, r.ContentLength = "PUT", io.NopCloser(strings.NewReader(strings.Repeat("0", 100))), -1
			}, 413, "body"},
			{"a target that is not a path", func(r *http.Request) { r.URL.Path = "/elsewhere" }, 403, "policy_error"},
			{"no target", func(r *http.Request) { r.URL.Path = "/nothing" }, 403, "policy_error"},
			{"nothing wrong", func(r *http.Request) { r.Host = "LOCALHOST.:" + r.URL.Port() }, 200, ""},
		} {
			req, _ := http.NewRequest("GET", r.url("/"), nil)
			if test.change(req); client == r.client && strings.Contains(req.Host, "@") {
				continue // Go's own client does not send it over HTTP/2
			}
			res, err := client.Do(req)
			if err != nil {
				t.Errorf("%s: %v", test.name, err)
				continue
			}
			body := read(t, res)
			if res.StatusCode != test.status || res.Header.Get("X-Berm-Deny") != test.reason {
				t.Errorf("%s over %s: %d %s, want %d %s: %s", test.name, res.Proto, res.StatusCode, res.Header.Get("X-Berm-Deny"), test.status, test.reason, body)
			}
			if test.name == "a path" {
				want := `{"error":"GET /admin/x at ` + r.flow.Address() + ` is not allowed: not listed","reason":"path","rule":"api","hint":"add it"}`
				if strings.TrimSpace(body) != want {
					t.Errorf("%s, want %s", body, want)
				}
			}
		}
	}
}

// TestProxyBoundsBodies does so towards an upstream of HTTP/1.1, too.
func TestProxyBoundsBodies(t *testing.T) {
	r := newRig(t, echo, options{plain: true, change: func(c *Config) {
		c.Judge = judgeFunc(func(_ context.Context, r Request) Verdict {
			return Verdict{Allow: true, Target: r.Target, MaxBody: 10}
		})
	}})
	for body, status := range map[string]int{"0123456789": 200, "0123456789a": 413} {
		for _, reader := range []io.Reader{strings.NewReader(body), io.MultiReader(strings.NewReader(body))} {
			res, err := r.client.Post(r.url("/"), "text/plain", reader)
			if err != nil {
				t.Fatal(err)
			}
			if text := read(t, res); res.StatusCode != status {
				t.Errorf("%d %s", res.StatusCode, text)
			}
		}
	}
}

// TestProxyRefusesSmuggling is NW-22 and NW-23: nothing but what was judged reaches the
// upstream.
func TestProxyRefusesSmuggling(t *testing.T) {
	admin := make(chan string, 100)
	r := newRig(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/v1/a" {
			admin <- r.URL.Path
		}
		io.Copy(io.Discard, r.Body)
	}), options{change: func(c *Config) {
		c.Judge = judgeFunc(func(_ context.Context, r Request) Verdict {
			return Verdict{Allow: r.Target == "/v1/a", Target: r.Target, Reason: "path"}
		})
	}})
	host := "Host: localhost\r\n"
	for request, status := range map[string]int{
		"POST /v1/a HTTP/1.1\r\n" + host + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n5c\r\nGET /admin HTTP/1.1\r\nHost: localhost\r\n\r\n\r\n0\r\n\r\n": 400,
		"GET /v1/a HTTP/1.1\nHost: localhost\n\nGET /admin HTTP/1.1\r\n" + host + "\r\n":                                                                              400,
		"GET /v1/a HTTP/1.1\r\n" + host + "Transfer-Encoding: xchunked\r\n\r\n":                                                                                       400,
		"GET /v1/a HTTP/1.1\r\n" + host + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n":                                                                         400,
		"GET /v1/a HTTP/1.1\r\nHost : localhost\r\n\r\n":                                                                                                              400,
		"GET /v1/a HTTP/1.1\r\n" + host + "X: a\r\n Host: evil.test\r\n\r\n":                                                                                          400,
		"GET /v1/a HTTP/1.1\r\n" + host + host + "\r\n":                                                                                                               400,
		"GET /v1/a HTTP/1.1\r\n\r\n": 400,
		"POST /v1/a HTTP/1.1\r\n" + host + "Content-Length: 4\r\nContent-Length: 4\r\n\r\nabcd":                                 400,
		"POST /v1/a HTTP/1.1\r\n" + host + "Content-Length: +4\r\n\r\nabcd":                                                     400,
		"POST /v1/a HTTP/1.1\r\n" + host + "Content-Length: 4, 4\r\n\r\nabcd":                                                   400,
		"POST /v1/a HTTP/1.0\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n":                                        400,
		"POST /v1/a HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n4;x=y\r\nabcd\r\n0\r\n\r\n":                       400,
		"POST /v1/a HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n0x4\r\nabcd\r\n0\r\n\r\n":                         400,
		"POST /v1/a HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n4\r\nabcdX0\r\n\r\n":                              400,
		"POST /v1/a HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 4\r\n\r\n":                   400,
		"GET  /v1/a HTTP/1.1\r\n" + host + "\r\n":                                                                               400,
		"GET /v1/a HTTP/1.1 \r\n" + host + "\r\n":                                                                               400,
		"GET /v1/a HTTP/1.2\r\n" + host + "\r\n":                                                                                505,
		"GET /v1/a HTTP/1.1\r\n" + host + "X: " + strings.Repeat("a", 70<<10) + "\r\n\r\n":                                      431,
		"GET /v1/a HTTP/1.1\r\n" + host + strings.Repeat("X: a\r\n", 101) + "\r\n":                                              431,
		"CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test:443\r\n\r\n":                                                         403,
		"GET http://evil.test/ HTTP/1.1\r\n" + host + "\r\n":                                                                    421,
		"GET https://169.254.169.254/ HTTP/1.1\r\n" + host + "\r\n":                                                             421,
		"GET http://localhost/v1/a HTTP/1.1\r\n" + host + "\r\n":                                                                421,
		"GET https://localhost/v1/a HTTP/1.1\r\n" + host + "\r\n":                                                               200,
		"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n":                                                                             421,
		"GET /v1/a HTTP/1.1\r\n" + host + "Connection: Upgrade\r\nUpgrade: h2c, websocket\r\n\r\n":                              403,
		"GET /v1/a HTTP/1.1\r\n" + host + "Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n":                                         403,
		"GET /v1/a HTTP/1.1\r\n" + host + "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAAA\r\n\r\n": 200,
		"GET /v1/a HTTP/1.1\r\n" + host + "\r\nGET /admin HTTP/1.1\r\n" + host + "\r\n":                                         200,
	} {
		c := r.dial(t)
		go io.WriteString(c, request)
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Errorf("%.150q: %v", request, err)
			continue
		}
		body, _ := io.ReadAll(res.Body)
		if res.StatusCode != status {
			t.Errorf("%.150q: %d, want %d: %s", request, res.StatusCode, status, body)
		}
		if denied := res.Header.Get("X-Berm-Deny") != ""; denied != (status != 200) {
			t.Errorf("%.150q: %d, denied %t: %s", request, res.StatusCode, denied, body)
		}
		c.Close()
	}
	select {
	case path := <-admin:
		t.Errorf("the upstream was asked for %s", path)
	default:
	}
}

// TestProxyKeepsOrder answers pipelined requests in their order, the refused one last.
func TestProxyKeepsOrder(t *testing.T) {
	r := newRig(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/1" {
			time.Sleep(50 * time.Millisecond)
		}
		io.WriteString(w, r.URL.Path)
	}), options{})
	c := r.dial(t)
	io.WriteString(c, "GET /1 HTTP/1.1\r\nHost: localhost\r\n\r\nGET /2 HTTP/1.1\r\nHost: localhost\r\n\r\nGET /3 HTTP/1.1\r\nHost: localhost\r\nX : 1\r\n\r\nGET /4 HTTP/1.1\r\nHost: localhost\r\n\r\n")
	reader := bufio.NewReader(c)
	for i := 1; i <= 3; i++ {
		res, err := http.ReadResponse(reader, nil)
		if err != nil {
			t.Fatal(err)
		}
		body := read(t, res)
		if i == 3 {
			if res.StatusCode != 400 {
				t.Errorf("reply 3 is %d %s", res.StatusCode, body)
			}
		} else if body != "/"+strconv.Itoa(i) {
			t.Errorf("reply %d is %q", i, body)
		}
	}
	if _, err := reader.ReadByte(); !errors.Is(err, io.EOF) {
		t.Errorf("after a refusal: %v", err)
	}
}

func TestProxyStreams(t *testing.T) {
	step := make(chan struct{})
	r := newRig(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		w.WriteHeader(200)
		w.(http.Flusher).Flush()
		for i := range 3 {
			<-step
			fmt.Fprintf(w, "data: %d\n\n", i)
			w.(http.Flusher).Flush()
		}
		<-r.Context().Done()
		step <- struct{}{}
	}), options{})
	for _, client := range []*http.Client{r.client, r.http1(t)} {
		res, err := client.Get(r.url("/")) // comes back before there is a body
		if err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewReader(res.Body)
		for i := range 3 {
			start := time.Now()
			step <- struct{}{}
			line, err := lines.ReadString('\n')
			if err != nil || line != fmt.Sprintf("data: %d\n", i) {
				t.Fatalf("%q %v", line, err)
			}
			lines.ReadString('\n')
			if d := time.Since(start); d > 5*time.Second {
				t.Errorf("event %d took %v", i, d)
			}
		}
		res.Body.Close()
		select {
		case <-step: // the upstream learned that the client left
		case <-time.After(5 * time.Second):
			t.Fatal("the upstream still sends to a client that left")
		}
	}
}

// TestProxyFullDuplex answers while the request's body is still sent, as gRPC does.
func TestProxyFullDuplex(t *testing.T) {
	r := newRig(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).EnableFullDuplex()
		w.Header().Set("Trailer", "Grpc-Status")
		w.WriteHeader(200)
		w.(http.Flusher).Flush()
		buf := make([]byte, 100)
		for {
			n, err := r.Body.Read(buf)
			w.Write(buf[:n])
			w.(http.Flusher).Flush()
			if err != nil {
				break
			}
		}
		w.Header().Set("Grpc-Status", "0 "+r.Trailer.Get("X-End"))
	}), options{})
	for _, client := range []*http.Client{r.client, r.http1(t)} {
		in, out := io.Pipe()
		req, _ := http.NewRequest("POST", r.url("/service/method"), in)
		req.Trailer = http.Header{"X-End": nil}
		req.Header.Set("Te", "trailers")
		req.Header.Set("Content-Type", "application/grpc")
		type reply struct {
			res *http.Response
			err error
		}
		replies := make(chan reply, 1)
		go func() {
			res, err := client.Do(req)
			replies <- reply{res, err}
		}()
		io.WriteString(out, "ping 0")
		got := <-replies
		if got.err != nil {
			t.Fatal(got.err)
		}
		buf := make([]byte, 6)
		for i := range 5 {
			if i > 0 {
				fmt.Fprintf(out, "ping %d", i)
			}
			if _, err := io.ReadFull(got.res.Body, buf); err != nil || string(buf) != fmt.Sprintf("ping %d", i) {
				t.Fatalf("%q %v", buf, err)
			}
		}
		req.Trailer.Set("X-End", "yes")
		out.Close()
		if rest, err := io.ReadAll(got.res.Body); err != nil || len(rest) > 0 {
			t.Errorf("%q %v", rest, err)
		}
		if s := got.res.Trailer.Get("Grpc-Status"); s != "0 yes" {
			t.Errorf("trailers over %s: %q", got.res.Proto, s)
		}
	}
}

func TestProxyKeepsTheRestOfHTTP(t *testing.T) {
	content := make([]byte, 100_000)
	rand.Read(content)
	continued := make(chan bool, 1)
	r := newRig(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/file":
			http.ServeContent(w, r, "file", time.Unix(1, 0), bytes.NewReader(content))
		case "/hints":
			w.Header().Set("Link", "</style.css>; rel=preload")
			w.WriteHeader(103)
			w.Header().Set("Alt-Svc", `h3=":443"`)
			w.WriteHeader(204)
		case "/refuse":
			w.WriteHeader(417) // without reading the body
		case "/take":
			n, _ := io.Copy(io.Discard, r.Body)
			fmt.Fprint(w, n)
		case "/break":
			w.Header().Set("Content-Length", "100")
			w.Write([]byte("half"))
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		case "/redirect":
			http.Redirect(w, r, "http://evil.test/", http.StatusFound)
		}
	}), options{})
	for _, client := range []*http.Client{r.client, r.http1(t)} {
		client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		res, _ := client.Head(r.url("/file"))
		if res == nil || res.ContentLength != 100_000 {
			t.Errorf("HEAD: %+v", res)
		}
		req, _ := http.NewRequest("GET", r.url("/file"), nil)
		req.Header.Set("Range", "bytes=5-9")
		res, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if body := read(t, res); res.StatusCode != 206 || body != string(content[5:10]) {
			t.Errorf("Range: %d %q", res.StatusCode, body)
		}
		if _, body := get(t, client, r.url("/file")); body != string(content) {
			t.Error("a file came out different")
		}

		var hint string
		req, _ = http.NewRequestWithContext(httptrace.WithClientTrace(context.Background(), &httptrace.ClientTrace{
			Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
				hint = fmt.Sprint(code, h.Get("Link"))
				return nil
			},
			Got100Continue: func() { continued <- true },
		}), "GET", r.url("/hints"), nil)
		res, err = client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if hint != "103</style.css>; rel=preload" || res.StatusCode != 204 || res.Header.Get("Alt-Svc") != "" {
			t.Errorf("hints: %q %d %v", hint, res.StatusCode, res.Header)
		}

		for path, status := range map[string]int{"/take": 200, "/refuse": 417} {
			req, _ = http.NewRequestWithContext(req.Context(), "PUT", r.url(path), bytes.NewReader(content))
			req.Header.Set("Expect", "100-continue")
			res, err = client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			if body := read(t, res); res.StatusCode != status || path == "/take" && body != "100000" {
				t.Errorf("%s: %d %q", path, res.StatusCode, body)
			}
			select {
			case <-continued:
				// Go's server answers an expectation of HTTP/2 by itself.
				if path == "/refuse" && res.ProtoMajor == 1 {
					t.Error("the client was told to send a body that the upstream had refused")
				}
			default:
				if path == "/take" {
					t.Error("the client was not told to send its body")
				}
			}
		}

		if res, err = client.Get(r.url("/break")); err == nil {
			if _, err = io.ReadAll(res.Body); err == nil {
				t.Error("half a reply came as a whole one")
			}
			res.Body.Close()
		}
		if res, _ = get(t, client, r.url("/redirect")); res.Header.Get("Location") != "http://evil.test/" {
			t.Errorf("redirect: %v", res.Header)
		}
	}
}

func TestProxyVerifiesUpstreams(t *testing.T) {
	r := newRig(t, echo, options{change: func(c *Config) { c.Roots = x509.NewCertPool() }})
	res, body := get(t, r.client, r.url("/"))
	if res.StatusCode != 502 || !strings.Contains(body, `"upstream_certificate"`) {
		t.Errorf("%d %s", res.StatusCode, body)
	}
	for reason, dial := range map[Reason]error{"dns_private_answer": &Denial{Reason: "dns_private_answer", Message: "no"}, "upstream": errors.New("10.1.2.3 is down")} {
		r := newRig(t, echo, options{change: func(c *Config) {
			c.Dial = func(context.Context, Flow) (net.Conn, error) { return nil, dial }
		}})
		res, body := get(t, r.client, r.url("/"))
		want := 502
		if reason == "dns_private_answer" {
			want = 403
		}
		if res.StatusCode != want || !strings.Contains(body, string(reason)) || strings.Contains(body, "10.1.2.3") {
			t.Errorf("%s: %d %s", reason, res.StatusCode, body)
		}
		if rec := r.last(t, 1); rec.Reason != reason || rec.Status != want || !strings.Contains(rec.Err, dial.Error()) {
			t.Errorf("record %+v", rec)
		}
	}
}

func TestProxyRefusesOtherNames(t *testing.T) {
	r := newRig(t, echo, options{})
	for _, name := range []string{"other.test", ""} {
		c, err := net.Dial("tcp", r.flow.Address())
		if err != nil {
			t.Fatal(err)
		}
		err = tls.Client(c, &tls.Config{ServerName: name, InsecureSkipVerify: true}).Handshake()
		if err == nil || !strings.Contains(err.Error(), "unrecognized name") {
			t.Errorf("SNI %q: %v", name, err)
		}
		c.Close()
		if d := (*Denial)(nil); !errors.As(<-r.served, &d) || d.Reason != ReasonSNI {
			t.Errorf("SNI %q: %v", name, d)
		}
	}
	// A client that does not trust the authority is told so to the operator.
	c, _ := net.Dial("tcp", r.flow.Address())
	tls.Client(c, &tls.Config{ServerName: "localhost"}).Handshake()
	c.Close()
	if err := <-r.served; err == nil || !strings.Contains(err.Error(), "TLS with the client") {
		t.Error(err)
	}
	// Other protocols do not pass.
	c, _ = net.Dial("tcp", r.flow.Address())
	io.WriteString(c, "SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n")
	if b, _ := io.ReadAll(c); len(b) > 0 {
		t.Errorf("SSH was answered %q", b)
	}
	if d := (*Denial)(nil); !errors.As(<-r.served, &d) || d.Reason != ReasonProtocol {
		t.Error(d)
	}
}

func TestProxyPlain(t *testing.T) {
	r := newRig(t, echo, options{plain: true, change: func(c *Config) { c.CA = nil }})
	res, body := get(t, r.client, r.url("/x"))
	if v := parse(t, body); res.StatusCode != 200 || v.Target != "/x" || v.Proto != "HTTP/1.1" {
		t.Errorf("%+v", v)
	}
	h2c := &http.Transport{Protocols: new(http.Protocols)}
	h2c.Protocols.SetUnencryptedHTTP2(true)
	defer h2c.CloseIdleConnections()
	c, err := net.Dial("tcp", r.flow.Address())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := tls.Client(c, &tls.Config{ServerName: "localhost"}).Handshake(); err == nil || !strings.Contains(err.Error(), "access denied") {
		t.Errorf("TLS to a proxy without an authority: %v", err)
	}
	if res, body = get(t, &http.Client{Transport: h2c}, r.url("/x")); res.StatusCode != 403 || res.Header.Get("X-Berm-Deny") != "proto" {
		t.Errorf("h2c: %d %s", res.StatusCode, body)
	}

	r = newRig(t, echo, options{plain: true, h2c: true})
	if _, body = get(t, &http.Client{Transport: h2c}, r.url("/x")); parse(t, body).Proto != "HTTP/2.0" {
		t.Errorf("h2c by rule: %s", body)
	}
	if _, body = get(t, r.client, r.url("/x")); parse(t, body).Proto != "HTTP/1.1" {
		t.Errorf("HTTP/1 beside h2c: %s", body)
	}
}

// TestProxyRejudges changes the policy while requests wait, stream and are a tunnel.
func TestProxyRejudges(t *testing.T) {
	begun := make(chan struct{}, 10)
	left := make(chan struct{}, 10)
	var closed atomic.Bool
	r := newRig(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/tunnel":
			websocket.Handler(func(c *websocket.Conn) {
				begun <- struct{}{}
				io.Copy(io.Discard, c)
			}).ServeHTTP(w, r)
			left <- struct{}{}
			return
		case "/stream", "/kept":
			io.WriteString(w, "begin\n")
			w.(http.Flusher).Flush()
		}
		begun <- struct{}{}
		<-r.Context().Done()
		left <- struct{}{}
	}), options{change: func(c *Config) {
		c.Judge = judgeFunc(func(_ context.Context, r Request) Verdict {
			return Verdict{Allow: !closed.Load() || r.Target == "/kept", Target: r.Target, Reason: "not_listed"}
		})
	}})
	for _, client := range []*http.Client{r.client, r.http1(t)} {
		closed.Store(false)
		waited := make(chan *http.Response, 1)
		go func() {
			res, err := client.Get(r.url("/wait"))
			if err != nil {
				t.Error(err)
			}
			waited <- res
		}()
		<-begun
		var streams []*http.Response
		for _, path := range []string{"/stream", "/kept"} {
			res, err := client.Get(r.url(path))
			if err != nil {
				t.Fatal(err)
			}
			<-begun
			streams = append(streams, res)
		}
		config, _ := websocket.NewConfig(strings.Replace(r.url("/tunnel"), "http", "ws", 1), "http://localhost/")
		tunnel, err := websocket.NewClient(config, r.dial(t))
		if err != nil {
			t.Fatal(err)
		}
		<-begun

		closed.Store(true)
		start := time.Now()
		r.proxy.Rejudge(context.Background())
		if res := <-waited; res != nil {
			if body := read(t, res); res.StatusCode != 403 || res.Header.Get("X-Berm-Deny") != "not_listed" {
				t.Errorf("%d %s", res.StatusCode, body)
			}
		}
		if b, err := io.ReadAll(streams[0].Body); err == nil {
			t.Errorf("a stream went on to its end: %q", b)
		}
		if b, err := io.ReadAll(tunnel); err == nil && len(b) > 0 {
			t.Errorf("a tunnel went on: %q", b)
		}
		for range 3 {
			<-left
		}
		if d := time.Since(start); d > 10*time.Second {
			t.Errorf("it took %v", d)
		}
		select {
		case <-left:
			t.Error("a request that is still allowed was cut")
		case <-time.After(20 * time.Millisecond):
		}
		streams[1].Body.Close()
		<-left
		tunnel.Close()
	}
	denied := 0
	for i := range 8 {
		if rec := r.last(t, i+1); rec.Reason == "not_listed" {
			denied++
		}
	}
	if denied != 6 {
		t.Errorf("%d records tell of it: %+v", denied, r.records)
	}
}

// TestProxyRejudgesAtOnce changes the policy while the judge answers.
func TestProxyRejudgesAtOnce(t *testing.T) {
	var r *rig
	asked := 0
	r = newRig(t, echo, options{change: func(c *Config) {
		c.Judge = judgeFunc(func(_ context.Context, q Request) Verdict {
			if asked++; asked == 1 {
				r.proxy.Rejudge(context.Background())
				return Verdict{Allow: true, Target: q.Target}
			}
			return Verdict{Reason: "not_listed"}
		})
	}})
	if res, body := get(t, r.client, r.url("/")); res.StatusCode != 403 {
		t.Errorf("%d %s", res.StatusCode, body)
	}
}

// TestProxyClose ends flows in the middle of a reply.
func TestProxyClose(t *testing.T) {
	left := make(chan struct{}, 1)
	r := newRig(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		left <- struct{}{}
	}), options{})
	res, err := r.client.Get(r.url("/"))
	if err != nil {
		t.Fatal(err)
	}
	r.proxy.Close()
	if _, err := io.ReadAll(res.Body); err == nil {
		t.Error("the flow ended as if it was complete")
	}
	select {
	case <-left:
	case <-time.After(10 * time.Second):
		t.Error("the upstream was not told")
	}
	if err := <-r.served; err != nil {
		t.Error(err)
	}
	a, b := net.Pipe()
	defer a.Close()
	if err := r.proxy.Serve(b, r.flow); !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
}
