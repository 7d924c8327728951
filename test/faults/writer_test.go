package faults

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/service"
	"github.com/berm-sandbox/berm/test/harness"
)

// A confined writer of the audit log that cannot make sense of what the server says signs what it has, says so, and
// ends by itself: not by a system call, which would look as if somebody had taken it over.
func TestWriterOfNonsense(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("missing: root, whose server has a writer")
	}
	binary, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.Open(binary)
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	path := t.TempDir()
	uid, gid := service.ID(service.Auditd)
	if err := os.Chown(path, int(uid), int(gid)); err != nil {
		t.Fatal(err)
	}
	dir, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	records, theirs, err := service.Connect()
	if err != nil {
		t.Fatal(err)
	}
	defer records.Close()
	defer theirs.Close()
	p, err := service.Start(service.Program{File: program, Command: service.Auditd, Files: []*os.File{theirs, dir}, Ended: func(error) {}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.End(time.Second)
	wire := service.NewWire(p.Conn)
	defer wire.Close()
	said := func() string {
		var m map[string]any
		if err := wire.Receive(&m); err != nil {
			t.Error(err)
		}
		return fmt.Sprint(m)
	}
	if m := said(); !strings.Contains(m, "ready") {
		t.Fatal(m)
	}
	if _, err := records.Write([]byte{255, 255, 255, 255}); err != nil {
		t.Fatal(err)
	}
	if m := said(); !strings.Contains(m, "a batch of") {
		t.Error(m)
	}
	select {
	case <-p.Exited:
	case <-time.After(30 * time.Second):
		t.Fatal("it does not end")
	}
	if !strings.Contains(p.Err.Error(), "exit status 1") {
		t.Error(p.Err)
	}
	if r, err := trail.Verify(path, trail.Trust{}); err != nil || len(r.Problems) > 0 {
		t.Errorf("%+v, %v", r, err)
	}
}

// A service that somebody starts by hand says what it is, and is not ended for a system call.
func TestServicesByHand(t *testing.T) {
	binary, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"egressd", "brokerd", service.Auditd} {
		out, err := exec.Command(binary, command).CombinedOutput()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(string(out), "started by berm") {
			t.Errorf("%s: %v, %s", command, err, out)
		}
	}
}
