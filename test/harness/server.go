// Package harness starts a real Berm server for tests and benchmarks and speaks
// the E2B protocol to it with nothing but HTTP and JSON, so that what it finds
// does not depend on Berm's own client.
package harness

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Server is a running `berm serve` on a loopback port with a data directory of
// its own.
type Server struct {
	URL  string // such as http://127.0.0.1:40123
	Key  string
	Data string

	listen string
	args   []string
	cmd    *exec.Cmd
	log    *tail
	done   chan struct{}
	client *http.Client
}

// Binary is the berm under test: $BERM_BINARY, or bin/berm of this work tree.
func Binary() (string, error) {
	if path := os.Getenv("BERM_BINARY"); path != "" {
		return path, nil
	}
	_, file, _, _ := runtime.Caller(0)
	path := filepath.Join(filepath.Dir(file), "..", "..", "bin", "berm")
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("no %s: run `make build` first", filepath.Base(path))
	}
	return path, nil
}

// Start runs a server in data with the extra flags given and returns when it
// answers. The caller ends it with Stop.
func Start(ctx context.Context, data string, args ...string) (*Server, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	listen := listener.Addr().String()
	_ = listener.Close()
	return StartAt(ctx, listen, data, args...)
}

// StartAt is Start at an address of this machine that is free.
func StartAt(ctx context.Context, listen, data string, args ...string) (*Server, error) {
	_, port, err := net.SplitHostPort(listen)
	if err != nil {
		return nil, err
	}
	random := make([]byte, 20)
	rand.Read(random)
	s := &Server{
		URL: "http://127.0.0.1:" + port, Key: "e2b_" + hex.EncodeToString(random), Data: data,
		listen: listen, args: args,
		client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}},
	}
	return s, s.Restart(ctx)
}

// Restart starts the server again on the same port and data, after Stop or Crash.
func (s *Server) Restart(ctx context.Context) error {
	binary, err := Binary()
	if err != nil {
		return err
	}
	s.cmd = exec.Command(binary, append([]string{
		"serve", "--listen", s.listen, "--data", s.Data,
		"--spares", "0", // they come and go by themselves, which looks like a leak
	}, s.args...)...)
	s.cmd.Env = append(os.Environ(), "BERM_BOOTSTRAP_KEY="+s.Key)
	s.log = &tail{max: 64 << 10}
	s.cmd.Stdout, s.cmd.Stderr = s.log, s.log
	// Monitors outlive the server and hold its output pipe no longer than this.
	s.cmd.WaitDelay = time.Second
	if err := s.cmd.Start(); err != nil {
		return err
	}
	s.done = make(chan struct{})
	go func(cmd *exec.Cmd, done chan struct{}) {
		_ = cmd.Wait()
		close(done)
	}(s.cmd, s.done)

	for {
		response, err := s.client.Get(s.URL + "/health")
		if err == nil {
			response.Body.Close()
			if response.StatusCode < 300 {
				return nil
			}
		}
		select {
		case <-s.done:
			return fmt.Errorf("berm serve ended at once:\n%s", s.log)
		case <-ctx.Done():
			s.Crash()
			return fmt.Errorf("berm serve does not answer: %w\n%s", ctx.Err(), s.log)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// RestartWith is Restart with other extra flags.
func (s *Server) RestartWith(ctx context.Context, args ...string) error {
	s.args = args
	return s.Restart(ctx)
}

// PID is the server's process id.
func (s *Server) PID() int { return s.cmd.Process.Pid }

// Log is the end of what the server printed.
func (s *Server) Log() string { return s.log.String() }

// Alive says whether the server process still runs.
func (s *Server) Alive() bool {
	select {
	case <-s.done:
		return false
	default:
		return true
	}
}

// Crash ends the server with SIGKILL. Its sandboxes live on.
func (s *Server) Crash() {
	_ = s.cmd.Process.Kill()
	<-s.done
	s.client.CloseIdleConnections()
}

// Stop kills every sandbox and then ends the server in good order.
func (s *Server) Stop(ctx context.Context) error {
	killed := s.KillAll(ctx)
	s.client.CloseIdleConnections()
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-s.done:
		return killed
	case <-time.After(10 * time.Second):
		s.Crash()
		return errors.Join(killed, errors.New("berm serve did not end within 10 s of SIGTERM"))
	}
}

// KillAll kills every sandbox of the server.
func (s *Server) KillAll(ctx context.Context) error {
	for {
		var listed []struct{ SandboxID string }
		if err := s.Call(ctx, "GET", "/v2/sandboxes?limit=100", nil, &listed); err != nil {
			return err
		}
		if len(listed) == 0 {
			return nil
		}
		for _, l := range listed {
			var status *StatusError
			err := s.Call(ctx, "DELETE", "/sandboxes/"+l.SandboxID, nil, nil)
			if errors.As(err, &status) && status.Status == http.StatusNotFound {
				continue
			}
			if err != nil {
				return err
			}
		}
	}
}

// tail keeps the last max bytes written to it.
type tail struct {
	mu  sync.Mutex
	buf []byte
	max int
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, p...)
	if len(t.buf) > 2*t.max {
		t.buf = bytes.Clone(t.buf[len(t.buf)-t.max:])
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.buf)
}

// RSS is the resident memory of a process in bytes.
func RSS(pid int) int64 { return statusKiB(pid, "VmRSS:") }

// PeakRSS is the highest resident memory that a process had, in bytes.
func PeakRSS(pid int) int64 { return statusKiB(pid, "VmHWM:") }

// ResetPeakRSS makes PeakRSS count from now on.
func ResetPeakRSS(pid int) error {
	return os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0)
}

func statusKiB(pid int, field string) int64 {
	file, err := os.Open(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), field); ok {
			var kib int64
			_, _ = fmt.Sscan(rest, &kib)
			return kib << 10
		}
	}
	return 0
}

// drain reads what is left of a body so that its connection can be used again.
func drain(body io.ReadCloser) {
	_, _ = io.Copy(io.Discard, io.LimitReader(body, 1<<20))
	body.Close()
}

// Processes lists the processes of the machine, as the caller's pid namespace
// shows it, whose command line holds text.
func Processes(text string) []int {
	var pids []int
	entries, _ := os.ReadDir("/proc")
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		line, err := os.ReadFile("/proc/" + entry.Name() + "/cmdline")
		if err == nil && bytes.Contains(line, []byte(text)) {
			pids = append(pids, pid)
		}
	}
	return pids
}
