package router

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"testing"
)

// A server that refuses a request before it has read it, and closes, is heard.
func TestEarlyAnswer(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "socket")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			for lines := bufio.NewReaderSize(conn, 16); ; {
				if line, err := lines.ReadString('\n'); err != nil || line == "\r\n" {
					break
				}
			}
			io.WriteString(conn, "HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno")
			conn.Close()
		}
	}()
	var dialer net.Dialer
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		conn, err := dialer.DialContext(ctx, "unix", socket)
		return answered{conn}, err
	}}
	for range 20 {
		r, err := http.NewRequest(http.MethodPost, "http://sandbox", bytes.NewReader(make([]byte, 8<<20)))
		if err != nil {
			t.Fatal(err)
		}
		answer, err := transport.RoundTrip(r)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		if answer.StatusCode != http.StatusBadRequest || string(text) != "no" || err != nil {
			t.Errorf("%s: %q, %v", answer.Status, text, err)
		}
	}
}
