// Command berm-guest is the guest agent: the process inside a sandbox that carries
// out what the outside asks for, over E2B's envd protocol.
//
// In a sandbox its init starts it with descriptor 3 a listening Unix socket, 4 a file
// with its configuration, and 5 a pipe on which it writes one byte when it serves.
// By hand, for tests:
//
//	berm-guest --listen unix:PATH|tcp:ADDRESS [--config FILE]
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/guest/config"
	"github.com/berm-sandbox/berm/internal/guest/ports"
	"github.com/berm-sandbox/berm/internal/guest/server"
)

// The descriptors that the agent is started with.
const (
	fdListener = 3
	fdConfig   = 4
	fdReady    = 5
)

// gcPercent makes the heap smaller at the cost of collecting more often: it is paid
// for by every sandbox.
const gcPercent = 50

func main() {
	listen := flag.String("listen", "", "serve on `unix:PATH or tcp:ADDRESS` instead of the inherited descriptors")
	file := flag.String("config", "", "read the configuration from `FILE`, as JSON")
	flag.Parse()

	// Started through a descriptor, it would be listed under the descriptor's number.
	// The name of the process is that of its main thread, which runs main until the
	// first blocking call; /proc/self/comm belongs to nobody inside.
	name := []byte("berm-guest\x00")
	_ = unix.Prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(&name[0])), 0, 0, 0)
	// Root inside may trace what runs as root; the exec that started the agent made it
	// traceable again. Without this its memory and executable could be written through
	// /proc, as in CVE-2019-5736.
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)

	debug.SetGCPercent(gcPercent)
	syscall.Umask(0o022)
	// Nothing that the agent was given may reach its children. Not every seccomp
	// profile lets it be done at once.
	for _, fd := range []int{fdListener, fdConfig, fdReady} {
		syscall.CloseOnExec(fd)
	}
	_ = unix.CloseRange(fdReady+1, 1<<31-1, unix.CLOSE_RANGE_CLOEXEC)

	var err error
	if *listen != "" {
		err = serveByHand(*listen, *file)
	} else {
		err = serve()
	}
	fmt.Fprintln(os.Stderr, "berm-guest:", err)
	os.Exit(1)
}

// serve runs the agent in a sandbox.
func serve() error {
	c, err := config.Open(os.NewFile(fdConfig, "config"), config.RunDir)
	if err != nil {
		return err
	}
	l, err := ports.File(fdListener, c.Renew)
	if err != nil {
		return fmt.Errorf("descriptor %d: %w", fdListener, err)
	}
	s := server.New(c)
	go serveInside(s)
	// Whoever connects from here on is answered, since the socket listens already.
	ready := os.NewFile(fdReady, "ready")
	if _, err := ready.Write([]byte{1}); err != nil {
		return fmt.Errorf("descriptor %d: %w", fdReady, err)
	}
	ready.Close()
	return s.Serve(ports.Listen(l))
}

// serveInside answers programs in the sandbox, such as the code interpreter. A
// sandbox in which that cannot be had is still reached from outside.
func serveInside(s *server.Server) {
	var plain net.ListenConfig
	plain.SetMultipathTCP(false) // which has one path here, and takes longer to make
	l, err := plain.Listen(context.Background(), "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(berm.AgentPort)))
	if err == nil {
		err = s.Serve(l)
	}
	fmt.Fprintln(os.Stderr, "berm-guest: inside:", err)
}

func serveByHand(address, file string) error {
	var f *os.File
	if file != "" {
		var err error
		if f, err = os.OpenFile(file, os.O_RDWR, 0); err != nil {
			return err
		}
	}
	c, err := config.Open(f, "")
	if err != nil {
		return err
	}
	if file == "" {
		if err := c.Init(nil); err != nil { // nobody will call /init
			return err
		}
	}
	network, address, ok := strings.Cut(address, ":")
	if !ok || network != "unix" && network != "tcp" {
		return errors.New("--listen wants unix:PATH or tcp:ADDRESS")
	}
	l, err := net.Listen(network, address)
	if err != nil {
		return err
	}
	if network == "unix" {
		l = ports.Listen(l)
	}
	return server.New(c).Serve(l)
}
