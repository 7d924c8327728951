// Package faults breaks sandboxes in the five ways that agents break them, and
// measures how long it takes to work again.
package faults

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }

func within(t *testing.T, limit time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	t.Cleanup(cancel)
	return ctx
}

func create(t *testing.T, ctx context.Context, server *harness.Server, lives time.Duration) *harness.Sandbox {
	t.Helper()
	sandbox, err := server.Create(ctx, lives, nil)
	if err != nil {
		t.Fatalf("create: %v\n%s", err, server.Log())
	}
	return sandbox
}

func run(t *testing.T, ctx context.Context, sandbox *harness.Sandbox, user, text string) harness.Result {
	t.Helper()
	result, err := sandbox.Run(ctx, harness.Shell(user, text))
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return result
}

// recovered reports the time that a row of docs/recovery.md names.
func recovered(t *testing.T, start time.Time) {
	t.Helper()
	took := time.Since(start)
	t.Logf("recovered in %.1f ms", float64(took.Microseconds())/1000)
	if took > 30*time.Second {
		t.Errorf("recovery took %v", took)
	}
}

// exitReason waits for the record of a sandbox's death in the audit log.
func exitReason(t *testing.T, server *harness.Server, id string) string {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		file, err := os.Open(filepath.Join(server.Data, "audit", "log.jsonl"))
		if err != nil {
			t.Fatal(err)
		}
		reason := ""
		for lines := bufio.NewScanner(file); lines.Scan(); {
			var record struct {
				Sandbox, Type, Reason string
				Data                  struct{ Reason string }
			}
			if json.Unmarshal(lines.Bytes(), &record) == nil && record.Sandbox == id && record.Type == "sandbox.exit" {
				reason = record.Data.Reason + record.Reason
			}
		}
		file.Close()
		if reason != "" {
			return reason
		}
	}
	t.Errorf("no record of the death of %s", id)
	return ""
}

// TestEndlessLoop: a loop that never ends is cut by the deadline, one that takes
// memory by the limit; the next try starts clean.
func TestEndlessLoop(t *testing.T) {
	harness.Slow(t)
	server := harness.Serve(t)
	ctx := within(t, 2*time.Minute)
	t.Run("time", func(t *testing.T) {
		sandbox := create(t, ctx, server, 2*time.Second)
		if _, err := sandbox.Run(ctx, harness.Shell("user", "while :; do :; done")); err == nil {
			t.Fatal("the loop ended by itself")
		}
		start := time.Now()
		again := create(t, ctx, server, time.Minute)
		run(t, ctx, again, "user", "true")
		recovered(t, start)
		if reason := exitReason(t, server, sandbox.ID); !strings.Contains(reason, "timeout") {
			t.Errorf("reason %q, not timeout", reason)
		}
	})
	t.Run("memory", func(t *testing.T) {
		sandbox := create(t, ctx, server, time.Minute)
		result, err := sandbox.Run(ctx, harness.Command{User: "user", Path: "/usr/bin/python3", Args: []string{"-c", "a = []\nwhile True: a.append(bytearray(b'x' * (1 << 24)))"}})
		if err == nil && result.Code == 0 {
			t.Fatalf("the program was not ended: %+v", result)
		}
		start := time.Now()
		// The kernel ended the program or the whole sandbox: either way one more
		// call is all that is needed.
		if answer, err := sandbox.Run(ctx, harness.Shell("user", "echo alive")); err != nil || answer.Stdout != "alive\n" {
			again := create(t, ctx, server, time.Minute)
			run(t, ctx, again, "user", "true")
		}
		recovered(t, start)
	})
}

// TestDeletedFiles: the project is deleted inside; the host's copy is not touched
// and a fresh sandbox has it again.
func TestDeletedFiles(t *testing.T) {
	harness.Slow(t)
	server := harness.Serve(t)
	ctx := within(t, 2*time.Minute)
	project := strings.Repeat("line of the project\n", 5000)
	sandbox := create(t, ctx, server, time.Minute)
	if err := sandbox.Write(ctx, "user", "project/main.txt", strings.NewReader(project)); err != nil {
		t.Fatal(err)
	}
	sandbox.Run(ctx, harness.Shell("user", "sudo rm -rf --no-preserve-root / 2>/dev/null; rm -rf ~/project"))
	if _, err := sandbox.Read(ctx, "user", "project/main.txt"); err == nil {
		t.Fatal("the project was not deleted")
	}
	start := time.Now()
	if err := sandbox.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	again := create(t, ctx, server, time.Minute)
	if err := again.Write(ctx, "user", "project/main.txt", strings.NewReader(project)); err != nil {
		t.Fatal(err)
	}
	result := run(t, ctx, again, "user", "wc -l <project/main.txt; ls /usr/bin | wc -l")
	recovered(t, start)
	if fields := strings.Fields(result.Stdout); len(fields) != 2 || fields[0] != "5000" || len(fields[1]) < 3 {
		t.Errorf("restored: %q", result.Stdout)
	}
}

// TestInjection: an agent that follows hostile words is destroyed, and every token
// of its sandbox is worth nothing from then on.
func TestInjection(t *testing.T) {
	harness.Slow(t)
	server := harness.Serve(t)
	ctx := within(t, 2*time.Minute)
	sandbox := create(t, ctx, server, time.Minute)
	run(t, ctx, sandbox, "user", "(setsid sh -c 'while :; do sleep 0.1; done' >/dev/null 2>&1 &)")
	start := time.Now()
	if err := sandbox.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/envs", "/metrics", "/files?path=/etc/passwd"} {
		request, err := sandbox.Request(ctx, "GET", 49983, path, nil)
		if err != nil {
			t.Fatal(err)
		}
		response, err := sandbox.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, response.Body)
		response.Body.Close()
		if response.StatusCode != http.StatusBadGateway {
			t.Errorf("%s answers %d with the token of a dead sandbox", path, response.StatusCode)
		}
	}
	other := create(t, ctx, server, time.Minute)
	recovered(t, start)
	token := other.Token
	other.Token = sandbox.Token
	if _, err := other.Run(ctx, harness.Shell("user", "true")); err == nil {
		t.Error("the token of a dead sandbox opens another one")
	}
	other.Token = token
}

// TestHostilePackage: the install script of a package spoils what it can; the next
// sandbox is as new.
func TestHostilePackage(t *testing.T) {
	harness.Slow(t)
	server := harness.Serve(t)
	ctx := within(t, 2*time.Minute)
	sandbox := create(t, ctx, server, 2*time.Minute)
	install := `echo spoilt >>$HOME/.bashrc; echo spoilt >$HOME/.npmrc; sudo -n sh -c "echo spoilt >/etc/profile.d/spoilt.sh; echo spoilt >>/usr/bin/git; echo spoilt >>/etc/ld.so.preload"; true`
	pack, err := json.Marshal(map[string]any{"name": "hostile", "version": "1.0.0", "scripts": map[string]string{"postinstall": install}})
	if err != nil {
		t.Fatal(err)
	}
	if err := sandbox.Write(ctx, "user", "hostile/package.json", strings.NewReader(string(pack))); err != nil {
		t.Fatal(err)
	}
	run(t, ctx, sandbox, "user", "mkdir -p app && cd app && npm install --offline --no-audit --no-fund --install-links=false ../hostile && cd ../hostile && npm install --offline --no-audit --no-fund")
	if result := run(t, ctx, sandbox, "user", "cat ~/.bashrc"); !strings.Contains(result.Stdout, "spoilt") {
		t.Fatal("the install script did not run")
	}
	start := time.Now()
	if err := sandbox.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	again := create(t, ctx, server, time.Minute)
	result := run(t, ctx, again, "user", "grep -l spoilt ~/.bashrc ~/.npmrc /etc/profile.d/* /usr/bin/git /etc/ld.so.preload 2>/dev/null; git --version >/dev/null && echo works")
	recovered(t, start)
	if result.Stdout != "works\n" {
		t.Errorf("the next sandbox: %q", result.Stdout)
	}
}

// TestAgentCrash: the guest agent dies; it comes back by itself with its token,
// and a neighbour does not notice.
func TestAgentCrash(t *testing.T) {
	harness.Slow(t)
	server := harness.Serve(t)
	ctx := within(t, 2*time.Minute)
	neighbour := create(t, ctx, server, time.Minute)
	long := make(chan error, 1)
	go func() {
		result, err := neighbour.Run(ctx, harness.Shell("user", "sleep 3; echo undisturbed"))
		if err == nil && result.Stdout != "undisturbed\n" {
			err = errors.New("answered " + result.Stdout)
		}
		long <- err
	}()
	sandbox := create(t, ctx, server, time.Minute)
	if err := sandbox.Write(ctx, "user", "kept", strings.NewReader("kept")); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	// Root inside may kill the agent: it is only trusted as much as root inside.
	sandbox.Run(ctx, harness.Shell("root", `for p in /proc/[0-9]*; do tr '\0' ' ' <$p/cmdline 2>/dev/null | grep -q berm-guest && kill -9 ${p#/proc/}; done; grep -l berm-guest /proc/[0-9]*/comm 2>/dev/null | cut -d/ -f3 | xargs -r kill -9; sleep 5`))
	var err error
	var result harness.Result
	for range 200 {
		if result, err = sandbox.Run(ctx, harness.Shell("user", "cat kept")); err == nil {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if err != nil || result.Stdout != "kept" {
		t.Fatalf("after the crash: %v %+v", err, result)
	}
	recovered(t, start)
	token := sandbox.Token
	sandbox.Token = "wrong"
	if _, err := sandbox.Run(ctx, harness.Shell("user", "true")); err == nil {
		t.Error("the restarted agent is open without its token")
	}
	sandbox.Token = token
	if err := <-long; err != nil {
		t.Errorf("the neighbour: %v", err)
	}
}

// TestServerCrash: the server dies while commands run; a new one finds the
// sandboxes, their processes and exit codes.
func TestServerCrash(t *testing.T) {
	harness.Slow(t)
	server := harness.Serve(t)
	ctx := within(t, 2*time.Minute)
	sandbox := create(t, ctx, server, time.Minute)
	started := make(chan int, 1)
	go func() {
		command := harness.Shell("user", "sleep 1.5; echo finished >done")
		command.Started = func(pid int) { started <- pid }
		sandbox.Run(ctx, command)
	}()
	<-started
	short := create(t, ctx, server, 2*time.Second)
	server.Crash()
	time.Sleep(2500 * time.Millisecond) // the short one's deadline passes with no server
	start := time.Now()
	if err := server.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	result := run(t, ctx, sandbox, "user", "cat done")
	recovered(t, start)
	if result.Stdout != "finished\n" {
		t.Errorf("the command that ran meanwhile: %q", result.Stdout)
	}
	if _, err := short.Run(ctx, harness.Shell("user", "true")); err == nil {
		t.Error("a sandbox outlived its deadline because the server was dead")
	}
}

// TestMonitorCrash: without the process that watches it a sandbox must not live.
func TestMonitorCrash(t *testing.T) {
	harness.Slow(t)
	server := harness.Serve(t)
	ctx := within(t, 2*time.Minute)
	sandbox := create(t, ctx, server, time.Minute)
	// The shell ends before its child has become the sleep.
	run(t, ctx, sandbox, "user", "(setsid sleep 4242 >/dev/null 2>&1 &); until pgrep -x sleep; do sleep 0.01; done")
	monitors := harness.Processes("berm-monitor")
	if len(monitors) != 1 || len(harness.Processes("4242")) == 0 {
		t.Fatalf("%d monitors", len(monitors))
	}
	start := time.Now()
	monitor, err := os.FindProcess(monitors[0])
	if err != nil {
		t.Fatal(err)
	}
	monitor.Kill()
	for range 200 {
		if len(harness.Processes("4242")) == 0 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if pids := harness.Processes("4242"); len(pids) > 0 {
		t.Errorf("processes %v live on without a monitor", pids)
	}
	again := create(t, ctx, server, time.Minute)
	run(t, ctx, again, "user", "true")
	recovered(t, start)
	if reason := exitReason(t, server, sandbox.ID); !strings.Contains(reason, "crash") {
		t.Errorf("reason %q, not crash", reason)
	}
}
