package process

import (
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/guest/config"
	"github.com/berm-sandbox/berm/internal/proto/process/processconnect"
)

// With no task left to be had, commands fail and the agent lives. The limit is that
// of a user who has no other process, so the test runs itself as one.
func TestNoTaskLeft(t *testing.T) {
	const inside = "BERM_TEST_NO_TASK_LEFT"
	if os.Getenv(inside) == "" {
		if os.Geteuid() != 0 {
			t.Skip("as root only: becomes another user")
		}
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestNoTaskLeft$", "-test.v")
		cmd.Env = append(os.Environ(), inside+"=1")
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "PASS") {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	c, _ := config.Open(nil, "")
	if err := c.Init([]byte(`{"defaultUser":"nobody"}`)); err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle(processconnect.NewProcessHandler(NewService(c)))
	srv := httptest.NewServer(mux)
	defer srv.Close()
	b := &bench{client: processconnect.NewProcessClient(srv.Client(), srv.URL)}
	if r := b.run(t, sh("echo hi")); r.stdout != "hi\n" {
		t.Fatalf("before: %+v", r)
	}
	var none unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NPROC, &none); err != nil {
		t.Fatal(err)
	}
	none.Cur = 1
	if err := unix.Setrlimit(unix.RLIMIT_NPROC, &none); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for range 32 {
		all.Go(func() {
			if code := b.startCode(t, sh("echo hi")); code != connect.CodeResourceExhausted {
				t.Errorf("with no task left: %v", code)
			}
		})
		all.Go(func() { os.ReadFile("/proc/self/smaps") }) // takes long in the kernel
	}
	all.Wait()
}
