package inspect

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"slices"
	"testing"
	"testing/iotest"
	"time"
)

// recorder is a connection that keeps what is written.
type recorder struct {
	net.Conn
	bytes.Buffer
}

func (r *recorder) Write(p []byte) (int, error)      { return r.Buffer.Write(p) }
func (r *recorder) Read([]byte) (int, error)         { return 0, io.EOF }
func (r *recorder) SetDeadline(time.Time) error      { return nil }
func (r *recorder) SetReadDeadline(time.Time) error  { return nil }
func (r *recorder) SetWriteDeadline(time.Time) error { return nil }

// clientHello returns the first bytes of a client.
func clientHello(t testing.TB, c *tls.Config) []byte {
	var r recorder
	tls.Client(&r, c).HandshakeContext(context.Background())
	if r.Len() == 0 {
		t.Fatal("no hello")
	}
	return r.Bytes()
}

// deaf is a connection without deadlines that only reads.
type deaf struct{ stream }

func (deaf) SetReadDeadline(time.Time) error { return nil }

func ahead(r io.Reader) *Conn { return Ahead(deaf{stream{Reader: r}}) }

// fragment puts a hello of one record into records of n bytes.
func fragment(hello []byte, n int) (out []byte) {
	for rest := hello[5:]; len(rest) > 0; {
		part := rest[:min(n, len(rest))]
		rest = rest[len(part):]
		out = append(out, 0x16, 3, 1, byte(len(part)>>8), byte(len(part)))
		out = append(out, part...)
	}
	return out
}

func TestHello(t *testing.T) {
	plain := clientHello(t, &tls.Config{ServerName: "a.test", NextProtos: []string{"h2", "http/1.1"}, MinVersion: tls.VersionTLS12})
	for name, in := range map[string]io.Reader{
		"at once":         bytes.NewReader(plain),
		"by bytes":        iotest.OneByteReader(bytes.NewReader(plain)),
		"in records of 1": bytes.NewReader(fragment(plain, 1)),
		"in records of 7": iotest.OneByteReader(bytes.NewReader(fragment(plain, 7))),
		"with more":       bytes.NewReader(append(slices.Clone(plain), "more"...)),
	} {
		all, _ := io.ReadAll(in)
		c := ahead(bytes.NewReader(all))
		if name == "by bytes" || name == "in records of 7" {
			c = ahead(iotest.OneByteReader(bytes.NewReader(all)))
		}
		if p, err := c.Protocol(); p != TLS || err != nil {
			t.Errorf("%s: %v %v", name, p, err)
		}
		h, err := c.Hello()
		if err != nil || h.ServerName != "a.test" || h.ECH || !slices.Equal(h.ALPN, []string{"h2", "http/1.1"}) || !slices.Contains(h.Versions, tls.VersionTLS13) {
			t.Errorf("%s: %+v %v", name, h, err)
		}
		var again bytes.Buffer
		if n, err := io.Copy(&again, c); !bytes.Equal(again.Bytes(), all) || n != int64(len(all)) || err != nil {
			t.Errorf("%s: the hello was not left as it was: %d %v", name, n, err)
		}
	}
}

func TestHelloCheck(t *testing.T) {
	for _, test := range []struct {
		sent, name string
		ok         bool
	}{
		{"a.test", "a.test", true},
		{"A.Test", "a.test", true},
		{"b.test", "a.test", false},
		{"", "a.test", false},
		{"a.test.evil.test", "a.test", false},
		{"xa.test", "a.test", false},
		{"\u212a.test", "k.test", false},
		{"", "203.0.113.1", true},
		{"", "2001:db8::1", true},
		{"a.test", "203.0.113.1", false},
	} {
		d := Hello{ServerName: test.sent}.Check(Flow{Name: test.name, Port: 443})
		if (d == nil) != test.ok {
			t.Errorf("%q for %s: %v", test.sent, test.name, d)
		}
	}
}

func TestHelloECH(t *testing.T) {
	// Of a list of one key (RFC 9849 section 4): its version, its length, and a public key
	// for X25519 with HKDF-SHA256 and AES-128-GCM.
	config := []byte{1, 0, 0x20, 0, 0x20}
	config = append(config, 9)
	config = append(config, bytes.Repeat([]byte{0}, 31)...)
	config = append(config, 0, 4, 0, 1, 0, 1, 0, 6)
	config = append(config, "a.test"...)
	config = append(config, 0, 0)
	entry := append([]byte{0xfe, 0x0d, byte(len(config) >> 8), byte(len(config))}, config...)
	list := append([]byte{byte(len(entry) >> 8), byte(len(entry))}, entry...)
	hello := clientHello(t, &tls.Config{ServerName: "hidden.test", MinVersion: tls.VersionTLS13, EncryptedClientHelloConfigList: list})
	h, err := ahead(bytes.NewReader(hello)).Hello()
	if err != nil || !h.ECH || h.ServerName != "a.test" {
		t.Errorf("%+v %v", h, err)
	}
}

func TestHelloRefuses(t *testing.T) {
	hello := clientHello(t, &tls.Config{ServerName: "a.test"})
	huge := bytes.Repeat([]byte{0x16, 3, 1, 0, 1, 1}, 20_000) // a message of 64 KiB in records of one byte
	for name, b := range map[string][]byte{
		"another message": append([]byte{0x16, 3, 1, 0, 4}, 2, 0, 0, 0),
		"an alert":        {0x15, 3, 1, 0, 2, 2, 0},
		"garbage":         append([]byte{0x16}, "GET / HTTP/1.1\r\n"...),
		"too much":        huge,
		"a wrong length":  func() []byte { b := slices.Clone(hello); b[8]--; return b }(),
	} {
		_, err := ahead(bytes.NewReader(b)).Hello()
		if d := (*Denial)(nil); !errors.As(err, &d) || d.Reason != ReasonProtocol {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := ahead(bytes.NewReader(hello[:60])).Hello(); !errors.Is(err, io.EOF) {
		t.Errorf("half a hello: %v", err)
	}
}

func TestProtocol(t *testing.T) {
	for in, want := range map[string]Protocol{
		"GET / HTTP/1.1\r\n":         HTTP1,
		"M-SEARCH * HTTP/1.1\r\n":    HTTP1,
		preface:                      HTTP2,
		"PRI / HTTP/1.1\r\n":         HTTP1,
		"\x16\x03":                   TLS,
		"SSH-2.0-OpenSSH_9 Debian":   Other,
		"*1\r\n$4\r\nPING\r\n":       Other,
		" GET / HTTP/1.1":            Other,
		"ABCDEFGHIJKLMNOPQRSTUVWXYZ": Other,
		"\x00\x00\x00\x08\x04\xd2":   Other,
	} {
		if got, err := ahead(iotest.OneByteReader(bytes.NewReader([]byte(in)))).Protocol(); got != want || err != nil {
			t.Errorf("%q: %v %v, want %v", in, got, err, want)
		}
	}
	if _, err := ahead(bytes.NewReader([]byte("GET"))).Protocol(); !errors.Is(err, io.EOF) {
		t.Errorf("too little: %v", err)
	}
}

func FuzzHello(f *testing.F) {
	hello := clientHello(f, &tls.Config{ServerName: "a.test", NextProtos: []string{"h2"}})
	f.Add(hello)
	f.Add(fragment(hello, 100))
	f.Add(hello[:100])
	f.Fuzz(func(t *testing.T, data []byte) {
		c := ahead(bytes.NewReader(data))
		h, err := c.Hello()
		slow := ahead(iotest.OneByteReader(bytes.NewReader(data)))
		again, errAgain := slow.Hello()
		if (err == nil) != (errAgain == nil) || h.ServerName != again.ServerName || h.ECH != again.ECH {
			t.Fatalf("at once %+v %v, by bytes %+v %v", h, err, again, errAgain)
		}
		if left, _ := io.ReadAll(c); !bytes.Equal(left, data) {
			t.Fatal("the bytes changed")
		}
	})
}
