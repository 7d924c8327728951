package notify

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// Whoever takes what a relay has may die: the next one gets what is left, and nobody waits.
func TestRelay(t *testing.T) {
	before := descriptors(t)
	path := filepath.Join(t.TempDir(), "s")
	listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	r, l := NewRelay(begin(t, cmd, `i=0; while [ $i -lt 300 ]; do /bin/true a$i; i=$((i+1)); done`), "")
	connect := func() *net.UnixConn {
		client, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
		if err != nil {
			t.Fatal(err)
		}
		conn, err := listener.AcceptUnix()
		if err != nil {
			t.Fatal(err)
		}
		r.Serve(conn)
		return client
	}
	told := map[string]int{}
	files, lost := 0, uint64(0)
	buffer := NewBuffer()
	take := func(conn *net.UnixConn, most int) error {
		for range most {
			got, err := Receive(conn, buffer)
			if err != nil {
				return err
			}
			if got.File != nil {
				files++
				got.File.Close()
			}
			lost = got.Lost
			if len(got.Argv) == 2 {
				told[got.Argv[1]]++
			}
		}
		return nil
	}
	first := connect()
	if err := take(first, 20); err != nil {
		t.Fatal(err)
	}
	first.Close() // with what it has not read
	time.Sleep(50 * time.Millisecond)
	second := connect()
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	wait(t, l)
	closed := make(chan struct{})
	go func() { defer close(closed); r.Close(10 * time.Second) }()
	if err := take(second, 10_000); !errors.Is(err, io.EOF) && !errors.Is(err, os.ErrClosed) {
		t.Error(err)
	}
	<-closed
	second.Close()
	listener.Close()
	if n := len(told); n < 200 || lost > 0 || files < 2 {
		t.Errorf("%d executions, %d files, %d lost", n, files, lost)
	}
	for i := range 300 {
		if n := told[fmt.Sprintf("a%d", i)]; n > 1 {
			t.Errorf("a%d: %d", i, n)
		}
	}
	for end := time.Now().Add(30 * time.Second); descriptors(t) > before; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d descriptors, %d before", descriptors(t), before)
		}
	}
}

// Without a listener, its reason is told.
func TestRelayRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	client, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	conn, err := listener.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	r, l := NewRelay(nil, "busy")
	r.Serve(conn)
	if got, err := Receive(client, NewBuffer()); err != nil || got.Refused != "busy" || l != nil {
		t.Errorf("%+v, %v", got, err)
	}
	r.Close(time.Minute)
}
