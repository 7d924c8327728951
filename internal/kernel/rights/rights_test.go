package rights

import (
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func pair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ends := make([]*net.UnixConn, 2)
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "end")
		conn, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		ends[i] = conn.(*net.UnixConn)
	}
	return ends[0], ends[1]
}

// open counts this process's descriptors.
func open(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func TestFiles(t *testing.T) {
	a, b := pair(t)
	before := open(t)
	for sent := range 4 {
		fds := make([]int, sent) // standard input, each time
		var control []byte
		if sent > 0 {
			control = unix.UnixRights(fds...)
		}
		receive := func() []byte {
			if _, _, err := a.WriteMsgUnix([]byte{1}, control, nil); err != nil {
				t.Fatal(err)
			}
			room := Space(4)
			_, n, _, _, err := b.ReadMsgUnix(make([]byte, 1), room)
			if err != nil {
				t.Fatal(err)
			}
			return room[:n]
		}
		files := Files(receive(), "many")
		if len(files) != sent {
			t.Errorf("%d sent, %d came", sent, len(files))
		}
		for _, f := range files {
			flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0)
			if err != nil || flags&unix.FD_CLOEXEC == 0 {
				t.Errorf("flags %#x, %v", flags, err)
			}
			f.Close()
		}
		one := File(receive(), "one")
		if (one != nil) != (sent == 1) {
			t.Errorf("%d sent: %v", sent, one)
		}
		if one != nil {
			one.Close()
		}
		if now := open(t); now != before {
			t.Errorf("%d sent: %d descriptors, %d before", sent, now, before)
		}
	}
	if Files([]byte{1, 2, 3}, "bad") != nil || File(nil, "none") != nil {
		t.Error("descriptors of no message")
	}
}
