package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	pb "github.com/berm-sandbox/berm/internal/proto/process"
	"github.com/berm-sandbox/berm/internal/proto/process/processconnect"
)

// asGuest makes the test binary the agent.
const asGuest = "BERM_TEST_AS_GUEST"

func TestMain(m *testing.M) {
	if os.Getenv(asGuest) == "" {
		os.Exit(m.Run())
	}
	// The agent writes to /run: not to this machine's.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		panic(err)
	}
	if err := unix.Mount("tmpfs", "/run", "tmpfs", 0, "size=64k"); err != nil {
		panic(err)
	}
	os.Args = os.Args[:1]
	main()
}

// sandbox holds what outlives an agent.
type sandbox struct {
	t      testing.TB
	socket string
	l      *os.File
	config *os.File
	agent  *exec.Cmd
	http   *http.Client
}

func newSandbox(t testing.TB) *sandbox {
	t.Helper()
	s := &sandbox{t: t, socket: filepath.Join(t.TempDir(), "s")}
	l, err := net.Listen("unix", s.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	if s.l, err = l.(*net.UnixListener).File(); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.MemfdCreate("config", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	s.config = os.NewFile(uintptr(fd), "config")
	s.http = &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, "unix", s.socket)
		if err != nil {
			return nil, err
		}
		c.Write([]byte{1, berm.AgentPort >> 8, berm.AgentPort & 0xff})
		_, err = io.ReadFull(c, make([]byte, 1))
		return c, err
	}}}
	t.Cleanup(func() {
		s.kill()
		s.http.CloseIdleConnections()
		s.l.Close()
		s.config.Close()
	})
	return s
}

// start starts an agent and returns how long it took until it was ready.
func (s *sandbox) start() time.Duration {
	s.t.Helper()
	ready, w, err := os.Pipe()
	if err != nil {
		s.t.Fatal(err)
	}
	defer ready.Close()
	s.agent = exec.Command("/proc/self/exe")
	s.agent.Env = append(os.Environ(), asGuest+"=1")
	s.agent.ExtraFiles = []*os.File{s.l, s.config, w}
	s.agent.Stderr = os.Stderr
	// Namespaces of its own: it mounts, and listens on a fixed port.
	attr := &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() != 0 {
		attr.Cloneflags |= unix.CLONE_NEWUSER
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	s.agent.SysProcAttr = attr
	began := time.Now()
	err = s.agent.Start()
	w.Close()
	if err != nil {
		s.agent = nil
		s.t.Skip("needs user namespaces, or root:", err)
	}
	ready.SetReadDeadline(time.Now().Add(10 * time.Second))
	data, err := io.ReadAll(ready)
	if err != nil || len(data) != 1 {
		s.t.Fatalf("ready: %q, %v", data, err)
	}
	return time.Since(began)
}

func (s *sandbox) kill() {
	if s.agent != nil {
		s.agent.Process.Kill()
		s.agent.Wait()
		s.agent = nil
	}
}

func (s *sandbox) do(method, path string, body io.Reader, header ...string) (int, string) {
	s.t.Helper()
	req, err := http.NewRequest(method, "http://agent"+path, body)
	if err != nil {
		s.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := s.http.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return resp.StatusCode, string(data)
}

func (s *sandbox) run(script string, each func([]byte)) {
	s.t.Helper()
	c := processconnect.NewProcessClient(s.http, "http://agent")
	req := connect.NewRequest(&pb.StartRequest{Process: &pb.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", script}}})
	req.Header().Set("X-Access-Token", "secret")
	stream, err := c.Start(context.Background(), req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer stream.Close()
	for stream.Receive() {
		each(stream.Msg().GetEvent().GetData().GetStdout())
	}
	if stream.Err() != nil {
		s.t.Fatal(stream.Err())
	}
}

// An agent that was lost is replaced by one that knows the same.
func TestAgentIsReplaced(t *testing.T) {
	s := newSandbox(t)
	s.start()
	if code, _ := s.do("GET", "/envs", nil); code != 503 {
		t.Errorf("without a configuration: %d", code)
	}
	if code, body := s.do("POST", "/init", strings.NewReader(`{"accessToken":"secret","defaultUser":"root","defaultWorkdir":"/","sandboxID":"itest"}`)); code != 204 {
		t.Fatalf("init: %d %s", code, body)
	}
	for range 2 {
		if code, _ := s.do("GET", "/envs", nil); code != 401 {
			t.Errorf("without the token: %d", code)
		}
		if code, body := s.do("GET", "/envs", nil, "X-Access-Token", "secret"); code != 200 || !strings.Contains(body, `"E2B_SANDBOX_ID":"itest"`) {
			t.Errorf("with the token: %d %s", code, body)
		}
		var out []byte
		s.run("cat /run/e2b/.E2B_SANDBOX_ID; echo; ls /proc/self/fd | tr '\\n' ' '; cat /proc/$PPID/comm", func(b []byte) { out = append(out, b...) })
		if string(out) != "itest\n0 1 2 3 berm-guest\n" {
			t.Errorf("ids, descriptors of a child (3 is ls's own) and name of the agent: %q", out)
		}
		s.kill()
		s.http.CloseIdleConnections()
		s.start()
	}
	var kept berm.GuestConfig
	data, err := io.ReadAll(io.NewSectionReader(s.config, 0, 1<<20))
	if err != nil || json.Unmarshal(data, &kept) != nil || kept.AccessToken != "secret" {
		t.Errorf("kept: %s, %v", data, err)
	}
}

// memory is what the agent has for itself, in bytes.
func (s *sandbox) memory() int {
	s.t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.agent.Process.Pid))
	if err != nil {
		s.t.Fatal(err)
	}
	_, rest, _ := bytes.Cut(data, []byte("RssAnon:"))
	n, err := strconv.Atoi(string(bytes.Fields(rest)[0]))
	if err != nil {
		s.t.Fatal(err)
	}
	return n << 10
}

// zeros is an endless body.
type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// Transfers of any size in either direction take no memory to speak of. (The race
// detector multiplies it: without it the agent stays below 8 MiB.)
func TestConstantMemory(t *testing.T) {
	if os.Getenv("BERM_TEST_ALL") == "" {
		t.Skip("slow: set BERM_TEST_ALL=1")
	}
	const size, limit = 256 << 20, 56 << 20
	s := newSandbox(t)
	fmt.Fprint(s.config, `{"accessToken":"secret","defaultUser":"root"}`)
	s.start()
	dir := t.TempDir()
	most := 0
	watch := func(what string) {
		if most = max(most, s.memory()); most > limit {
			t.Errorf("%s: %d MiB", what, most>>20)
		}
	}
	code, body := s.do("POST", "/files?path="+dir+"/f", io.LimitReader(zeros{}, size), "X-Access-Token", "secret", "Content-Type", "application/octet-stream")
	if code != 200 {
		t.Fatalf("up: %d %s", code, body)
	}
	watch("up")
	req, _ := http.NewRequest("GET", "http://agent/files?path="+dir+"/f", nil)
	req.Header.Set("X-Access-Token", "secret")
	resp, err := s.http.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	n, err := io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
	if n != size || err != nil {
		t.Errorf("down: %d bytes, %v", n, err)
	}
	watch("down")
	n = 0
	chunks := 0
	s.run(fmt.Sprintf("head -c %d /dev/zero", size), func(b []byte) {
		n += int64(len(b))
		if chunks++; chunks%1000 == 0 {
			watch("output")
		}
	})
	if n != size {
		t.Errorf("output: %d bytes", n)
	}
	watch("output")
	t.Logf("%d MiB each way: at most %d KiB", size>>20, most>>10)
}

// BenchmarkStart is from fork to the ready byte.
func BenchmarkStart(b *testing.B) {
	s := newSandbox(b)
	fmt.Fprint(s.config, `{"accessToken":"secret","defaultUser":"root"}`)
	for b.Loop() {
		s.start()
		b.StopTimer()
		s.kill()
		b.StartTimer()
	}
}
