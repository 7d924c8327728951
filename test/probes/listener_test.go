package probes

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/kernel/notify"
	"github.com/berm-sandbox/berm/test/harness"
)

// What `berm run` of an ordinary user records of processes, without any right: AU-02.
func TestAuditLocal(t *testing.T) {
	if err := notify.Check(); err != nil {
		t.Skip(err)
	}
	v, _ := newLocal(t)
	host := v.look()
	for name, test := range map[string]func(*testing.T, *account){
		"Ways": localWays, "Flood": localFlood, "Long": localLong, "Debuggers": localDebuggers,
		"Stopped": localStopped, "Killed": localKilled, "Unwatched": localUnwatched,
	} {
		for user, a := range v.accounts {
			t.Run(name+"/"+user, func(t *testing.T) {
				if err := os.RemoveAll(a.home + "/.local/state/berm/audit"); err != nil {
					t.Fatal(err)
				}
				a := *a
				a.t = t
				test(t, &a)
			})
		}
	}
	var diff []string
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if diff = host.Diff(v.look()); len(diff) == 0 {
			return
		}
	}
	t.Errorf("is left: %s", strings.Join(diff, "\n"))
}

// log is what the account's log has of its only run.
func (a *account) log(t *testing.T) recorded {
	t.Helper()
	return endedIn(t, a.home+"/.local/state/berm/audit", "")
}

// sh runs a script in a sandbox.
func (a *account) sh(t *testing.T, script string, flags ...string) {
	t.Helper()
	if out, code := a.do(append(append([]string{"run", "--quiet"}, flags...), "--", "/bin/sh", "-c", script)...); code != 0 {
		t.Fatalf("%d: %s", code, out)
	}
}

func localWays(t *testing.T, a *account) {
	harness.Slow(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	programs := waysPrograms(ctx, t)
	dir := publicDir(t)
	for name, path := range programs {
		content, err := os.ReadFile(path)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), content, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	a.sh(t, "cp "+dir+"/* /tmp; "+waysScript, "--ro", dir)
	log := a.log(t)
	log.ways(t, programs, true)
	ended := map[int]int{}
	for _, r := range log.all {
		var p audit.Process
		raw, err := json.Marshal(r.Data)
		if err == nil {
			err = json.Unmarshal(raw, &p)
		}
		switch {
		case err != nil || r.Trust != audit.TrustUser || r.Type == audit.Gap || r.Type == audit.ProcSum:
			t.Errorf("%+v, %v", r, err)
		case r.Type == audit.ProcExit:
			ended[p.Host]++
		}
	}
	for _, p := range log.execs {
		if ended[p.Host] != 1 || p.PID == 0 || p.UID != a.uid {
			t.Errorf("%d ends of %+v", ended[p.Host], p)
		}
	}
}

// localFlood executes more than can be recorded one by one: each is counted.
func localFlood(t *testing.T, a *account) {
	harness.Slow(t)
	const loops, each = 4, 1500
	a.sh(t, fmt.Sprintf(`for l in $(seq %d); do (i=0; while [ $i -lt %d ]; do /bin/true flood; i=$((i+1)); done) & done; wait`, loops, each))
	log := a.log(t)
	n := len(log.ran(t, "flood"))
	for _, r := range log.all {
		raw, err := json.Marshal(r.Data)
		if err != nil {
			t.Fatal(err)
		}
		var s audit.ProcessSum
		var lost struct{ Count int }
		switch r.Type {
		case audit.ProcSum:
			if err := json.Unmarshal(raw, &s); err != nil {
				t.Fatal(err)
			}
			if s.Type == audit.ProcExec {
				n += s.Count
			}
		case audit.Gap:
			if err := json.Unmarshal(raw, &lost); err != nil {
				t.Fatal(err)
			}
			t.Logf("lost: %d", lost.Count)
			n += lost.Count
		}
	}
	if n < loops*each {
		t.Errorf("%d of %d are recorded or counted", n, loops*each)
	}
}

func localLong(t *testing.T, a *account) {
	a.sh(t, `/bin/true long $(seq 20000); /bin/true long "$(seq 20000)"`)
	n := 0
	for _, p := range a.log(t).execs {
		if len(p.Argv) < 2 || p.Argv[1] != "long" {
			continue
		}
		n++
		if text := strings.Join(p.Argv, " "); !p.Cut || len(text) > 5<<10 {
			t.Errorf("cut: %v, %d bytes", p.Cut, len(text))
		}
	}
	if n != 2 {
		t.Errorf("%d records", n)
	}
}

// localDebuggers has programs traced, whose executions the listener hears of all the same.
func localDebuggers(t *testing.T, a *account) {
	for _, tool := range []string{"strace", "gdb"} {
		if _, err := os.Stat("/usr/bin/" + tool); err != nil {
			t.Skipf("%s is not installed", tool)
		}
	}
	a.sh(t, `set -e
		strace -f -e trace=execve -o /tmp/trace sh -c '/bin/true traced; :'
		grep -q 'execve("/bin/true", \["/bin/true", "traced"\].* = 0' /tmp/trace
		gdb -nx -batch -ex run -ex 'info program' --args /bin/true debugged >/tmp/gdb 2>&1
		grep -q 'exited normally' /tmp/gdb`)
	log := a.log(t)
	for _, name := range []string{"traced", "debugged"} {
		if len(log.ran(t, name)) == 0 {
			t.Errorf("%s is not recorded", name)
		}
	}
}

// localStopped stops who listens for a while. What runs inside waits, and goes on.
func localStopped(t *testing.T, a *account) {
	cmd := a.command("run", "--quiet", "--", "/bin/sh", "-c", `i=0; while [ $i -lt 300 ]; do /bin/true a$i; i=$((i+1)); done`)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(200 * time.Millisecond)
	for range 3 {
		_ = cmd.Process.Signal(unix.SIGSTOP)
		time.Sleep(200 * time.Millisecond)
		_ = cmd.Process.Signal(unix.SIGCONT)
		time.Sleep(20 * time.Millisecond)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	log := a.log(t)
	for i := range 300 {
		if n := len(log.ran(t, fmt.Sprintf("a%d", i))); n != 1 {
			t.Errorf("a%d: %d records", i, n)
		}
	}
}

// localKilled kills who listens, and with it the sandbox: nobody is left that waits for an answer.
func localKilled(t *testing.T, a *account) {
	cmd := a.command("run", "--quiet", "--rw", ".", "--", "/bin/sh", "-c", `while :; do /bin/true; done`)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(500 * time.Millisecond)
	_ = cmd.Process.Kill()
	_ = cmd.Wait() // what is left is looked for at the end
}

func localUnwatched(t *testing.T, a *account) {
	a.sh(t, "/bin/true", "--no-process-records")
	for _, r := range a.log(t).all {
		if strings.HasPrefix(string(r.Type), "proc.") || r.Type == audit.Gap {
			t.Errorf("%+v", r)
		}
	}
}
