package cart

import (
	"net"
	"os"
	"path/filepath"
	"testing"
)

func TestSame(t *testing.T) {
	if !Same([]int{1}, []int{1}) || Same([]int{1}, []int{2}) {
		t.Fatal("not the same")
	}
}

func TestFiles(t *testing.T) {
	if err := os.WriteFile(filepath.Join(t.TempDir(), "a"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestServer(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	conn, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
}
