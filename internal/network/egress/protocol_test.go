package egress

import (
	"io"
	"net"
	"os"
	"strconv"
	"testing"

	"github.com/berm-sandbox/berm/internal/service"
)

// Each message keeps its own descriptor, however the kernel hands them over.
func TestDescriptors(t *testing.T) {
	conn, file, err := service.Connect()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	other, err := net.FileConn(file)
	if file.Close(); err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	from, to := service.NewWire(conn), service.NewWire(other.(*net.UnixConn))
	const count = 100
	go func() {
		for i := range count {
			r, w, err := os.Pipe()
			if err != nil {
				t.Error(err)
				return
			}
			_, _ = w.WriteString(strconv.Itoa(i))
			w.Close()
			if err := from.Send(Flow{Port: uint16(i)}, r); err != nil {
				t.Error(err)
			}
			r.Close()
		}
	}()
	for range count {
		var f Flow
		if err := to.Receive(&f); err != nil {
			t.Fatal(err)
		}
		file := to.File()
		if file == nil {
			t.Fatal("no descriptor")
		}
		content, err := io.ReadAll(file)
		if file.Close(); err != nil || string(content) != strconv.Itoa(int(f.Port)) {
			t.Fatalf("message %d: descriptor %q, %v", f.Port, content, err)
		}
	}
}
