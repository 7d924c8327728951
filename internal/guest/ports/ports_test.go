package ports

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

func listen(t *testing.T) (*Listener, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	p := Listen(l)
	t.Cleanup(func() { p.Close() })
	return p, path
}

func dialPort(t *testing.T, path string, preface ...byte) (*net.UnixConn, byte) {
	t.Helper()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := c.Write(preface); err != nil {
		t.Fatal(err)
	}
	var status [1]byte
	if _, err := io.ReadFull(c, status[:]); err != nil {
		t.Fatalf("status: %v", err)
	}
	return c.(*net.UnixConn), status[0]
}

func preface(port int) []byte {
	return binary.BigEndian.AppendUint16([]byte{version}, uint16(port))
}

func TestForward(t *testing.T) {
	_, path := listen(t)
	for _, host := range []string{"127.0.0.1", "[::1]"} {
		t.Run(host, func(t *testing.T) {
			server, err := net.Listen("tcp", host+":0")
			if err != nil {
				if host == "[::1]" {
					t.Skip("no IPv6 loopback here:", err)
				}
				t.Fatal(err)
			}
			defer server.Close()
			// The server answers only after the end of its input: half-close must pass.
			go func() {
				for {
					c, err := server.Accept()
					if err != nil {
						return
					}
					data, _ := io.ReadAll(c)
					c.Write(bytes.ToUpper(data))
					c.Close()
				}
			}()
			c, status := dialPort(t, path, preface(server.Addr().(*net.TCPAddr).Port)...)
			if status != statusOK {
				t.Fatalf("status %d", status)
			}
			big := bytes.Repeat([]byte("abc"), 1<<20)
			go func() { c.Write(big); c.CloseWrite() }()
			got, err := io.ReadAll(c)
			if err != nil || !bytes.Equal(got, bytes.ToUpper(big)) {
				t.Errorf("%d bytes of %d back, %v", len(got), len(big), err)
			}
		})
	}
}

func TestRefused(t *testing.T) {
	_, path := listen(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	l.Close()
	if c, status := dialPort(t, path, preface(port)...); status != statusRefused {
		t.Errorf("closed port: status %d", status)
	} else if _, err := c.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("after refusal: %v", err)
	}
	for _, bad := range [][]byte{{0, 0, 80}, {2, 0, 80}, {1, 0, 0}, {'G', 'E', 'T'}} {
		if _, status := dialPort(t, path, bad...); status != statusFailed {
			t.Errorf("preface %v: status %d", bad, status)
		}
	}
}

func TestAgentPort(t *testing.T) {
	p, path := listen(t)
	accepted := make(chan net.Conn, 1)
	go func() {
		c, err := p.Accept()
		if err == nil {
			accepted <- c
		}
	}()
	c, status := dialPort(t, path, preface(berm.AgentPort)...)
	if status != statusOK {
		t.Fatalf("status %d", status)
	}
	s := <-accepted
	if _, ok := s.(*Conn); !ok {
		t.Errorf("accepted a %T", s)
	}
	c.Write([]byte("hi"))
	buf := make([]byte, 2)
	if _, err := io.ReadFull(s, buf); err != nil || string(buf) != "hi" {
		t.Errorf("%q, %v", buf, err)
	}
	p.Close()
	if _, err := p.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("accept after close: %v", err)
	}
}

// Whoever says nothing is not waited for, and holds up nobody meanwhile.
func TestSilentClient(t *testing.T) {
	_, path := listen(t)
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.Write([]byte{version})
	if _, status := dialPort(t, path, 9, 9, 9); status != statusFailed {
		t.Errorf("the next client got status %d", status)
	}
	c.SetDeadline(time.Now().Add(handshakeTimeout + 5*time.Second))
	if os.Getenv("BERM_TEST_ALL") == "" {
		return // the rest waits for the time limit
	}
	began := time.Now()
	io.ReadAll(c)
	if d := time.Since(began); d > handshakeTimeout+2*time.Second {
		t.Errorf("let go after %v", d)
	}
}

func FuzzPreface(f *testing.F) {
	f.Add([]byte{1, 195, 63})
	f.Add([]byte{1, 0})
	f.Fuzz(func(t *testing.T, in []byte) {
		port, ok := readPreface(bytes.NewReader(in))
		want := len(in) >= 3 && in[0] == 1 && (in[1] != 0 || in[2] != 0)
		if ok != want || ok && int(port) != int(in[1])<<8|int(in[2]) {
			t.Errorf("%v: port %d, %v", in, port, ok)
		}
	})
}

// Connections that somebody else accepted are served like those of a listener.
func TestReceivedConnections(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	renewed := make(chan string, 1)
	inner, err := File(uintptr(pair[1]), func(f *os.File) error {
		text, err := io.ReadAll(f)
		renewed <- string(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	l := Listen(inner)
	defer l.Close()
	connect := func() net.Conn {
		ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Sendmsg(pair[0], []byte{1}, unix.UnixRights(ends[1]), nil, 0); err != nil {
			t.Fatal(err)
		}
		_ = unix.Close(ends[1])
		f := os.NewFile(uintptr(ends[0]), "connection")
		defer f.Close()
		c, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	// A message without a connection is passed over.
	if err := unix.Send(pair[0], []byte{1}, 0); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		c := connect()
		if _, err := c.Write([]byte{1, byte(berm.AgentPort >> 8), byte(berm.AgentPort & 0xff)}); err != nil {
			t.Fatal(err)
		}
		theirs, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		status := []byte{9}
		if _, err := io.ReadFull(c, status); err != nil || status[0] != 0 {
			t.Errorf("status %d, %v", status[0], err)
		}
		if _, err := theirs.Write([]byte("x")); err != nil {
			t.Error(err)
		}
		if _, err := io.ReadFull(c, status); err != nil || status[0] != 'x' {
			t.Errorf("got %q, %v", status, err)
		}
		theirs.Close()
		c.Close()
	}
	// All are closed when that is answered, those of ports too, and a configuration is handed on.
	preface := []byte{1, byte(berm.AgentPort >> 8), byte(berm.AgentPort & 0xff)}
	open := []net.Conn{connect(), connect()}
	if _, err := open[0].Write(preface); err != nil {
		t.Fatal(err)
	}
	theirs, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.WriteString("new"); err != nil {
		t.Fatal(err)
	}
	w.Close()
	for _, m := range []struct {
		message byte
		rights  []byte
	}{{messageRelease, nil}, {messageRenew, unix.UnixRights(int(r.Fd()))}} {
		if err := unix.Sendmsg(pair[0], []byte{m.message}, m.rights, nil, 0); err != nil {
			t.Fatal(err)
		}
		answer := []byte{0}
		if n, err := unix.Read(pair[0], answer); n != 1 || err != nil || answer[0] != m.message {
			t.Errorf("message %d: answer %v, %v", m.message, answer, err)
		}
	}
	r.Close()
	if got := <-renewed; got != "new" {
		t.Errorf("renewed with %q", got)
	}
	for i, c := range open {
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		if _, err := io.Copy(io.Discard, c); err != nil && !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("connection %d: %v", i, err)
		}
		c.Close()
	}
	theirs.Close()
	_ = unix.Close(pair[0])
	if c, err := l.Accept(); err == nil {
		t.Errorf("a connection from nobody: %v", c)
	}
}
