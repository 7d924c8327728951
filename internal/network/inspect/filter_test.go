package inspect

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/websocket"
)

const secret = "s3cr3t-value"

// broker puts a secret into requests and masks it in replies.
type broker struct{ filter func() Filter }

var errBroker = errors.New("the vault says " + secret)

func (b broker) Attach(r Request, _ Verdict, out *http.Request) (Filter, error) {
	switch {
	case strings.HasPrefix(r.Target, "/refused"):
		return nil, &Denial{Reason: "credential_used", Message: "used up"}
	case strings.HasPrefix(r.Target, "/failed"):
		return nil, errBroker
	case strings.HasPrefix(r.Target, "/body"):
		out.Body = io.NopCloser(io.MultiReader(strings.NewReader("part"), failing{errBody}))
		out.ContentLength = -1
		return nil, nil
	case strings.HasPrefix(r.Target, "/free"):
		return nil, nil
	}
	out.Header.Set("Authorization", "Bearer "+secret)
	return b.filter(), nil
}

var errBody = errors.New("the body shows something")

func (broker) Denial(err error) *Denial {
	if errors.Is(err, errBody) {
		return &Denial{Reason: "credential_misuse", Message: "no"}
	}
	return nil
}

func (broker) Missing(r Request, res *http.Response) *Denial {
	if strings.HasPrefix(r.Target, "/free") && res.StatusCode == http.StatusUnauthorized {
		return &Denial{Reason: "git_repository", Message: "it is for others"}
	}
	return nil
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

// mask is a filter that keeps back as much as could be the start of the secret.
type mask struct {
	block bool
	kept  []byte
}

func (m *mask) Header(h http.Header) error {
	for _, values := range h {
		for i := range values {
			values[i] = strings.ReplaceAll(values[i], secret, "************")
		}
	}
	return nil
}

func (m *mask) Body(dst, piece []byte, last bool) ([]byte, error) {
	all := slices.Concat(m.kept, piece)
	if m.block && bytes.Contains(all, []byte(secret)) {
		return nil, errBroker
	}
	all = bytes.ReplaceAll(all, []byte(secret), []byte("************"))
	keep := 0
	for n := 1; n < len(secret) && n <= len(all); n++ {
		if !last && bytes.HasSuffix(all, []byte(secret[:n])) {
			keep = n
		}
	}
	m.kept = bytes.Clone(all[len(all)-keep:])
	return append(dst, all[:len(all)-keep]...), nil
}

func (m *mask) Late(dst []byte) []byte { return dst }

func (m *mask) Waits() bool { return false }

func TestFilter(t *testing.T) {
	var ranges, encodings atomic.Value
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+secret && !strings.HasPrefix(r.URL.Path, "/body") && r.URL.Path != "/free" {
			t.Errorf("%s came without its secret", r.URL.Path)
		}
		ranges.Store(r.Header.Get("Range"))
		encodings.Store(r.Header.Get("Accept-Encoding"))
		switch r.URL.Path {
		case "/echo":
			w.Header().Set("X-Echo", secret)
			w.Header().Set("Content-Length", fmt.Sprint(len(secret)))
			w.Header().Set("Link", secret)
			w.WriteHeader(103)
			io.WriteString(w, secret)
		case "/split":
			w.Header().Set("Trailer", "X-End")
			for _, c := range "a " + secret + " b" {
				fmt.Fprintf(w, "%c", c)
				w.(http.Flusher).Flush()
			}
			w.Header().Set("X-End", secret)
		case "/gzip":
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(w)
			io.WriteString(z, "zipped "+secret)
			z.Close()
		case "/br":
			w.Header().Set("Content-Encoding", "br")
			io.WriteString(w, "compressed")
		case "/stream":
			io.WriteString(w, "event\n")
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		case "/body":
			io.Copy(io.Discard, r.Body)
		}
	})
	for _, plain := range []bool{false, true} { // HTTP/2 and HTTP/1.1 towards the upstream
		r := newRig(t, handler, options{plain: plain, change: func(c *Config) {
			c.Credentials = broker{func() Filter { return &mask{} }}
		}})
		do := func(path string) (*http.Response, string) {
			req, _ := http.NewRequest("GET", r.url(path), nil)
			req.Header.Set("Range", "bytes=0-5")
			req.Header.Set("Accept-Encoding", "gzip")
			res, err := r.client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			return res, read(t, res)
		}
		res, body := do("/echo")
		if body != "************" || res.Header.Get("X-Echo") != "************" || res.StatusCode != 200 {
			t.Errorf("%d %v %q", res.StatusCode, res.Header, body)
		}
		if ranges.Load() != "" || encodings.Load() != "identity" {
			t.Errorf("range %q, encoding %q", ranges.Load(), encodings.Load())
		}
		if res, body = do("/split"); body != "a ************ b" || res.Trailer.Get("X-End") != "************" {
			t.Errorf("%q %v", body, res.Trailer)
		}
		if _, body = do("/gzip"); body != "zipped ************" {
			t.Errorf("%q", body)
		}
		if res, body = do("/br"); res.StatusCode != 502 || strings.Contains(body, "compressed") {
			t.Errorf("%d %q", res.StatusCode, body)
		}
		do("/free")
		if ranges.Load() != "bytes=0-5" || encodings.Load() != "gzip" {
			t.Errorf("range %q, encoding %q without a secret", ranges.Load(), encodings.Load())
		}
		if res, body = do("/refused"); res.Header.Get("X-Berm-Deny") != "credential_used" {
			t.Errorf("%d %q", res.StatusCode, body)
		}
		if res, body = do("/failed"); res.StatusCode != 403 || res.Header.Get("X-Berm-Deny") != "credential" || strings.Contains(body, secret) {
			t.Errorf("%d %q", res.StatusCode, body)
		}
		res, err := r.client.Post(r.url("/body"), "text/plain", strings.NewReader("x"))
		if err != nil {
			t.Fatal(err)
		}
		if read(t, res); res.Header.Get("X-Berm-Deny") != "credential_misuse" {
			t.Errorf("a body that is refused: %d %v", res.StatusCode, res.Header)
		}
		// A stream is not held up.
		start := time.Now()
		res, err = r.client.Get(r.url("/stream"))
		if err != nil {
			t.Fatal(err)
		}
		if line, err := bufio.NewReader(res.Body).ReadString('\n'); line != "event\n" || err != nil || time.Since(start) > 10*time.Second {
			t.Errorf("%q %v after %v", line, err, time.Since(start))
		}
		res.Body.Close()
	}
	r := newRig(t, handler, options{change: func(c *Config) {
		c.Credentials = broker{func() Filter { return &mask{block: true} }}
	}})
	res, err := r.client.Get(r.url("/split"))
	if err == nil { // it may also be cut before its head is sent
		if body, err := io.ReadAll(res.Body); err == nil || strings.Contains(string(body), secret) {
			t.Errorf("a reply that is to be blocked: %q %v", body, err)
		}
		res.Body.Close()
	}
	if rec := r.last(t, 1); rec.Reason != ReasonSecret || rec.Err != errBroker.Error() {
		t.Errorf("%+v", rec)
	}
}

func TestWebSocket(t *testing.T) {
	handler := http.NewServeMux()
	handler.Handle("/ws", websocket.Handler(func(c *websocket.Conn) {
		var s string
		for websocket.Message.Receive(c, &s) == nil {
			websocket.Message.Send(c, "you said "+s)
		}
	}))
	handler.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { http.Error(w, "no", 404) })
	for _, plain := range []bool{false, true} {
		for _, filtered := range []bool{false, true} {
			r := newRig(t, handler, options{plain: plain, change: func(c *Config) {
				if filtered {
					c.Credentials = broker{func() Filter { return &mask{} }}
				}
			}})
			config, _ := websocket.NewConfig(strings.Replace(r.url("/ws"), "http", "ws", 1), "http://localhost/")
			c, err := websocket.NewClient(config, r.dial(t))
			if err != nil {
				t.Fatal(err)
			}
			for i := range 3 {
				var s string
				if err := websocket.Message.Send(c, fmt.Sprint(i, secret)); err != nil {
					t.Fatal(err)
				}
				if err := websocket.Message.Receive(c, &s); err != nil {
					t.Fatal(err)
				}
				want := fmt.Sprint("you said ", i, secret)
				if filtered {
					want = strings.ReplaceAll(want, secret, "************")
				}
				if s != want {
					t.Errorf("%q, want %q", s, want)
				}
			}
			c.Close()
			if err := <-r.served; err != nil {
				t.Error(err)
			}
			if rec := r.last(t, 1); rec.Status != 101 {
				t.Errorf("%+v", rec)
			}
			// Without an agreement there is no tunnel.
			config.Location.Path = "/other"
			if _, err := websocket.NewClient(config, r.dial(t)); err == nil {
				t.Error("an upgrade that the upstream refused passed")
			}
		}
	}
}

// TestWebSocketTooEarly sends a frame before the upstream has agreed.
func TestWebSocketTooEarly(t *testing.T) {
	got := make(chan string, 1)
	r := newRig(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(100 * time.Millisecond)
		w.Header().Set("Connection", "Upgrade")
		w.Header().Set("Upgrade", "websocket")
		w.WriteHeader(101)
		c, rw, _ := http.NewResponseController(w).Hijack()
		defer c.Close()
		b, _ := io.ReadAll(rw)
		got <- string(b)
	}), options{plain: true})
	c := r.dial(t)
	io.WriteString(c, "GET /ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	time.Sleep(20 * time.Millisecond)
	io.WriteString(c, "GET /admin HTTP/1.1\nHost: localhost\n\n")
	io.ReadAll(c)
	select {
	case b := <-got:
		if b != "" {
			t.Errorf("the upstream got %q", b)
		}
	case <-time.After(5 * time.Second):
		t.Error("the upstream waits")
	}
}
