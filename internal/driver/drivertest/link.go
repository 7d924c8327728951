package drivertest

import (
	"bytes"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
)

// linkCases look at the only way out of a sandbox.
var linkCases = []testCase{
	{name: "NoLinkUnlessAsked", run: func(t *testing.T, h Harness) {
		s := create(t, h)
		if f, err := s.Link(testContext(t)); berm.KindOf(err) != berm.Unsupported {
			t.Errorf("a link without asking: %v, %v", f, err)
		}
	}},
	{name: "Link", needs: []Feature{Link, Exec}, run: func(t *testing.T, h Harness) {
		s := create(t, h, func(spec *berm.Spec) { spec.Link = true })
		if out := sh(t, s, "cat /proc/net/route | wc -l; cat /etc/resolv.conf; cat /proc/net/if_inet6"); !strings.HasPrefix(out, "3\nnameserver 10.0.2.2\n") || strings.Contains(out, "eth0") {
			t.Errorf("routes, resolver and IPv6 addresses: %q", out)
		}
		// Every caller gets the same end: the service that had it may have died.
		for range 2 {
			f, err := s.Link(testContext(t))
			if err != nil {
				t.Fatal(err)
			}
			// An address of documentation (RFC 5737): nothing but the reader of the link gets it.
			sh(t, s, "timeout 1 nslookup canary.example 192.0.2.7 || true")
			packet := make([]byte, 1<<16)
			for end, found := time.Now().Add(30*time.Second), false; !found; {
				if time.Now().After(end) {
					t.Fatal("the packet did not arrive")
				}
				_ = f.SetReadDeadline(end)
				n, err := f.Read(packet)
				if err != nil {
					t.Fatal(err)
				}
				found = bytes.Contains(packet[:n], []byte("canary"))
			}
			f.Close()
		}
	}},
	// With a link there is a loopback beside it, and ports are reached as without one.
	{name: "LinkAndPorts", needs: []Feature{Link, Exec, Ports}, run: func(t *testing.T, h Harness) {
		s := create(t, h, func(spec *berm.Spec) { spec.Link = true })
		begin(t, s, "echo hello >/tmp/index.html; httpd -f -p 127.0.0.1:8080 -h /tmp & httpd -f -p 0.0.0.0:8081 -h /tmp")
		for _, port := range []uint16{8080, 8081} {
			var conn io.ReadWriteCloser
			eventually(t, patience, func() (err error) {
				conn, err = s.Dial(testContext(t), port)
				return err
			})
			_, _ = io.WriteString(conn, "GET /index.html HTTP/1.0\r\n\r\n")
			text, err := io.ReadAll(conn)
			if err != nil || !strings.HasSuffix(string(text), "hello\n") {
				t.Errorf("port %d: %q, %v", port, text, err)
			}
			conn.Close()
		}
		if out := sh(t, s, "wget -q -O - http://127.0.0.1:8080/index.html; wget -q -O - http://127.0.0.1:8081/index.html"); out != "hello\nhello" {
			t.Errorf("over loopback: %q", out)
		}
	}},
	{name: "Keep", needs: []Feature{Link}, run: func(t *testing.T, h Harness) {
		s := create(t, h, func(spec *berm.Spec) { spec.Link = true })
		ctx := testContext(t)
		if f, err := s.Kept(ctx); f != nil || err != nil {
			t.Errorf("before something was kept: %v, %v", f, err)
		}
		for _, text := range []string{"first", "second"} {
			r, w, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Keep(ctx, r); err != nil {
				t.Fatal(err)
			}
			r.Close()
			if _, err := w.WriteString(text); err != nil {
				t.Fatal(err)
			}
			w.Close()
			again, err := s.Kept(ctx)
			if err != nil || again == nil {
				t.Fatalf("%v, %v", again, err)
			}
			got, err := io.ReadAll(again)
			if again.Close(); err != nil || string(got) != text {
				t.Errorf("%q, %v", got, err)
			}
		}
	}},
}
