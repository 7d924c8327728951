package inspect

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"testing/iotest"
	"time"
)

// stream is a connection that only reads.
type stream struct {
	net.Conn
	io.Reader
}

func (s stream) Read(p []byte) (int, error) { return s.Reader.Read(p) }

// requests reads what a framing lets through with net/http's parser.
func requests(f *framing) (found []string, err error) {
	in := bufio.NewReader(f)
	for {
		r, err := http.ReadRequest(in)
		if errors.Is(err, io.EOF) {
			return found, nil
		}
		if err != nil {
			return found, err
		}
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return found, err
		}
		found = append(found, r.Method+" "+r.RequestURI+" "+string(body)+r.Trailer.Get("X-T"))
	}
}

const wellFormed = "GET /a HTTP/1.1\r\nHost: x\r\n\r\n" +
	"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc" +
	"PUT /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: Chunked\r\n\r\n2\r\nde\r\n0A\r\n0123456789\r\n0\r\nX-T: t\r\n\r\n" +
	"POST /d HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n" +
	"PUT /e HTTP/1.1\r\nHost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" +
	"GET /f HTTP/1.0\r\nHost: x\r\nEmpty:\r\n\r\n"

func TestFramingPassesWhatIsWellFormed(t *testing.T) {
	const want = "GET /a |POST /b abc|PUT /c de0123456789t|POST /d |PUT /e |GET /f "
	for name, r := range map[string]io.Reader{
		"at once":     strings.NewReader(wellFormed),
		"by bytes":    iotest.OneByteReader(strings.NewReader(wellFormed)),
		"with an end": iotest.DataErrReader(strings.NewReader(wellFormed)),
		"in halves":   iotest.HalfReader(strings.NewReader(wellFormed)),
	} {
		f := &framing{Conn: stream{Reader: r}}
		found, err := requests(f)
		if got := strings.Join(found, "|"); got != want || err != nil {
			t.Errorf("%s: %q %v", name, got, err)
		}
		for n := range 7 {
			if d := f.refused(n); d != nil {
				t.Errorf("%s: %v", name, d)
			}
		}
	}
}

// TestFramingGoesOnAfterDeadline reads as net/http does when it waits for the next request
// while a handler works: it ends the read by a deadline, and reads again.
func TestFramingGoesOnAfterDeadline(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	f := &framing{Conn: b}
	go io.WriteString(a, "GET / HTTP/1.1\r\nHo")
	b.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if n, err := f.Read(make([]byte, 1)); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("%d %v", n, err)
	}
	b.SetReadDeadline(time.Time{})
	go io.WriteString(a, "st: x\r\n\r\n")
	r, err := http.ReadRequest(bufio.NewReader(f))
	if err != nil || r.Host != "x" {
		t.Fatal(err)
	}
	// The same when it has left HTTP meanwhile.
	go io.WriteString(a, "abc")
	b.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	f.Read(make([]byte, 1))
	b.SetReadDeadline(time.Time{})
	f.raw = true
	go io.WriteString(a, "def\n")
	if line, err := bufio.NewReader(f).ReadString('\n'); line != "abcdef\n" || err != nil {
		t.Errorf("%q %v", line, err)
	}
}

// FuzzFraming holds what passes against net/http: it must find the same requests and
// bodies, and never less or more.
func FuzzFraming(f *testing.F) {
	f.Add([]byte(wellFormed))
	for _, seed := range []string{
		"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"GET / HTTP/1.1\nHost: x\n\n", "GET / HTTP/1.1\r\nHost : x\r\n\r\n", "GET / HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nabcde\r\n0\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\nContent-Length: 1\r\n\r\n",
		"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n", "GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 18446744073709551615\r\n\r\n",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		whole := &framing{Conn: stream{Reader: bytes.NewReader(data)}}
		var passed bytes.Buffer
		_, err := io.Copy(&passed, whole)
		if err != nil && whole.refusal == nil {
			t.Fatalf("an error that is no refusal: %v", err)
		}
		// Splitting the bytes changes nothing.
		split := &framing{Conn: stream{Reader: iotest.OneByteReader(bytes.NewReader(data))}}
		var again bytes.Buffer
		io.Copy(&again, split)
		if !bytes.Equal(passed.Bytes(), again.Bytes()) || whole.heads != split.heads {
			t.Fatalf("whole %q, by bytes %q", passed.Bytes(), again.Bytes())
		}
		good := passed.Bytes()
		complete := err == nil && whole.state == inHead && len(whole.buf) == 0
		if whole.refusal != nil && whole.state == inHead {
			if !bytes.HasSuffix(good, []byte(replacement)) {
				t.Fatalf("%q does not end with the replacement", good)
			}
			complete = true
		} else if !bytes.HasPrefix(data, good) {
			t.Fatalf("%q was changed to %q", data, good)
		}
		in := bufio.NewReader(bytes.NewReader(good))
		n := 0
		for {
			r, err := http.ReadRequest(in)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("net/http refuses %q: %v", good, err)
			}
			n++
			if _, err := io.Copy(io.Discard, r.Body); err != nil {
				if complete {
					t.Fatalf("net/http misses something of %q: %v", good, err)
				}
				break
			}
		}
		if n != whole.heads {
			t.Fatalf("%d requests, net/http sees %d in %q", whole.heads, n, good)
		}
	})
}
