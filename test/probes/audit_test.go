package probes

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/test/harness"
)

// What is recorded of processes, by the probes AU-02 and AU-01: test/capture has what they need
// of an image's own programs.
func TestAudit(t *testing.T) {
	harness.Slow(t)
	if os.Geteuid() != 0 {
		t.Skip("processes are recorded by servers of root")
	}
	s := harness.Serve(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	t.Run("Ways", func(t *testing.T) {
		log := auditWays(ctx, t, s, "kernel", true)
		for pid, n := range log.forks {
			if log.exits[pid] != n {
				t.Errorf("process %d has %d beginnings and %d ends", pid, n, log.exits[pid])
			}
		}
	})
	t.Run("AgentKilled", func(t *testing.T) { auditWithoutAgent(ctx, t, s) })
	t.Run("Forged", func(t *testing.T) { auditForged(ctx, t, s) })
}

// TestAuditGVisor has processes told of by the kernel that they run on.
func TestAuditGVisor(t *testing.T) {
	harness.Slow(t)
	if os.Geteuid() != 0 {
		t.Skip("level gvisor is for servers of root")
	}
	s := harness.Serve(t, "--level", "gvisor")
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	t.Run("Ways", func(t *testing.T) { auditWays(ctx, t, s, "gvisor", false) })
	t.Run("GoesOn", func(t *testing.T) { auditGoesOn(ctx, t, s) })
	t.Run("Flood", func(t *testing.T) { auditFlood(ctx, t, s) })
}

// auditGoesOn pauses a sandbox, whose memory another gVisor goes on with, and restarts the server.
func auditGoesOn(ctx context.Context, t *testing.T, s *harness.Server) {
	box, err := s.Create(ctx, 2*time.Minute, nil)
	if err != nil {
		t.Fatal(err)
	}
	run := func(name string) {
		t.Helper()
		if r, err := box.Run(ctx, harness.Shell("root", "/bin/true "+name)); err != nil || r.Code != 0 {
			t.Fatalf("%v: %s", err, r.Stderr)
		}
	}
	run("before-pause")
	if err := s.Call(ctx, "POST", "/sandboxes/"+box.ID+"/pause", nil, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Call(ctx, "POST", "/sandboxes/"+box.ID+"/connect", map[string]any{"timeout": 120}, nil); err != nil {
		t.Fatal(err)
	}
	run("after-pause")
	s.Crash()
	if err := s.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	run("after-restart")
	if err := box.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	log := endedIn(t, filepath.Join(s.Data, "audit"), box.ID)
	for _, name := range []string{"before-pause", "after-pause", "after-restart"} {
		if n := len(log.ran(t, name)); n != 1 {
			t.Errorf("%s: %d records", name, n)
		}
	}
}

// auditFlood starts more than can be told of: what is missing is counted, and nothing waits.
func auditFlood(ctx context.Context, t *testing.T, s *harness.Server) {
	box, err := s.Create(ctx, 5*time.Minute, nil)
	if err != nil {
		t.Fatal(err)
	}
	const each, at = 900, 4
	script := fmt.Sprintf("for j in $(seq %d); do (i=0; while [ $i -lt %d ]; do (:); i=$((i+1)); done) & done; wait", at, each)
	if r, err := box.Run(ctx, harness.Shell("root", script)); err != nil || r.Code != 0 {
		t.Fatalf("%v: %s", err, r.Stderr)
	}
	if err := box.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	log := endedIn(t, filepath.Join(s.Data, "audit"), box.ID)
	told := 0
	for _, n := range log.forks {
		told += n
	}
	for _, r := range log.all {
		var sum struct {
			Type  audit.Type
			Count int
		}
		raw, err := json.Marshal(r.Data)
		if err == nil {
			err = json.Unmarshal(raw, &sum)
		}
		if err != nil {
			t.Fatal(err)
		}
		if r.Type == audit.ProcSum && sum.Type == audit.ProcFork || r.Type == audit.Gap {
			told += sum.Count
		}
	}
	if told < each*at {
		t.Errorf("of %d processes %d are told of", each*at, told)
	}
}

// auditWays has static programs run in all ways: children, threads, double forks, in memory, by
// the names that busybox goes by.
func auditWays(ctx context.Context, t *testing.T, s *harness.Server, source string, hashed bool) recorded {
	programs := waysPrograms(ctx, t)
	box, err := s.Create(ctx, 2*time.Minute, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, path := range programs {
		content, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		err = box.Write(ctx, "root", "/tmp/"+name, content)
		content.Close()
		if err != nil {
			t.Fatal(err)
		}
	}
	if r, err := box.Run(ctx, harness.Shell("root", waysScript)); err != nil || r.Code != 0 {
		t.Fatalf("%v: %d %s", err, r.Code, r.Stderr)
	}
	if err := box.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	log := ended(t, s, box.ID, source)
	for _, p := range log.ways(t, programs, hashed) {
		if log.forks[p.PID] == 0 || log.exits[p.PID] == 0 {
			t.Errorf("%v: process %d has %d beginnings and %d ends", p.Argv, p.PID, log.forks[p.PID], log.exits[p.PID])
		}
	}
	return log
}

// waysPrograms are the programs that waysScript wants in /tmp, by their names there.
func waysPrograms(ctx context.Context, t *testing.T) map[string]string {
	t.Helper()
	ways := filepath.Join(t.TempDir(), "ways")
	build := exec.CommandContext(ctx, "go", "build", "-o", ways, "./testdata/ways")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatal("the tests need busybox-static: install it, or run `make setup`")
	}
	return map[string]string{"ways": ways, "busybox": busybox}
}

const waysScript = `set -e
	cd /tmp; chmod 755 ways busybox; ln -s busybox true; ln -s busybox env
	./ways all
	./busybox true bb-by-name
	./true bb-by-link
	./env ./busybox true bb-by-bb
	./busybox sh -c './true bb-by-its-shell; ./busybox true bb-by-its-exec'
	printf '#!/tmp/busybox sh\n./true bb-by-script\n' >script; chmod 755 script; ./script
	sleep 1`

// ways checks that all is recorded that waysScript executed, and returns its records.
func (r recorded) ways(t *testing.T, programs map[string]string, hashed bool) (all []audit.Process) {
	t.Helper()
	sums := map[string]string{}
	for name, path := range programs {
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		hash := sha256.Sum256(content)
		sums["/tmp/"+name] = hex.EncodeToString(hash[:])
	}
	if !hashed {
		clear(sums)
	}
	want := map[string]string{}
	for _, name := range []string{"child", "stays", "double-fork", "exec-in-a-thread", "memfd-short", "memfd"} {
		want[name] = "/tmp/ways"
	}
	for i := range 16 {
		want[fmt.Sprintf("thread-%d", i)] = "/tmp/ways"
	}
	for _, name := range []string{"bb-by-name", "bb-by-link", "bb-by-its-shell", "bb-by-its-exec", "bb-by-script"} {
		want[name] = "/tmp/busybox"
	}
	for name, exe := range want {
		found := r.ran(t, name)
		if len(found) == 0 {
			t.Errorf("%s is not recorded", name)
			continue
		}
		// A command that executes another one by itself has the name too, in its arguments.
		p := found[len(found)-1]
		of := p.Exe
		if strings.HasPrefix(name, "memfd") {
			exe, of = "memfd:ways", strings.TrimPrefix(strings.TrimSuffix(p.Exe, " (deleted)"), "/")
			if !hashed {
				exe = "dev/fd/3" // as execveat(2) names it to an interpreter
			}
		}
		// Of a file in memory that was gone when it was looked at, nothing else is known.
		if hash := sums["/tmp/ways"]; of != exe || p.SHA256 != sums[exe] && p.SHA256 != hash && name != "memfd-short" {
			t.Errorf("%s: %+v, want %s %s", name, p, exe, sums[exe])
		}
		all = append(all, p)
	}
	return all
}

// auditWithoutAgent kills the guest agent, through which nothing of this goes: the kernel's
// records are complete, and the agent's end is one.
func auditWithoutAgent(ctx context.Context, t *testing.T, s *harness.Server) {
	box, err := s.Create(ctx, 2*time.Minute, nil)
	if err != nil {
		t.Fatal(err)
	}
	const script = `setsid sh -c '
		for n in 1 2 3; do
			for p in /proc/[0-9]*; do read c <$p/comm; case $c in berm-guest*) kill -9 ${p#/proc/};; esac; done
			for i in 1 2 3 4 5 6 7 8 9 10; do /bin/true unseen-$n-$i; done
		done' >/dev/null 2>&1 </dev/null &`
	if _, err := box.Run(ctx, harness.Shell("root", script)); err != nil {
		t.Logf("the stream ended with the agent: %v", err)
	}
	time.Sleep(3 * time.Second)
	if err := box.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	log := ended(t, s, box.ID, "kernel")
	for n := range 3 {
		for i := range 10 {
			if name := fmt.Sprintf("unseen-%d-%d", n+1, i+1); len(log.ran(t, name)) != 1 {
				t.Errorf("%s: %d records", name, len(log.ran(t, name)))
			}
		}
	}
	if !slices.ContainsFunc(log.all, func(r audit.Record) bool { return r.Type == audit.AgentLost }) {
		t.Error("the end of the agent is not recorded")
	}
}

// auditForged writes what looks like records to whatever listens inside, prints them, and tries
// to reach what makes the real ones.
func auditForged(ctx context.Context, t *testing.T, s *harness.Server) {
	box, err := s.Create(ctx, 2*time.Minute, nil)
	if err != nil {
		t.Fatal(err)
	}
	const line = `{"v":1,"type":"exec.exit","trust":"host","src":"kernel","outcome":"ok","data":{"argv":["forged-record"]}}`
	script := `
		find / -xdev -type s 2>/dev/null | while read s; do printf '%s\n' '` + line + `' | /tmp/busybox nc local:$s; done
		for d in /sys/fs/bpf /sys/kernel/tracing /sys/kernel/debug /var/lib/berm; do ls -A $d 2>/dev/null | sed "s|^|REACHED $d/|"; done
		find / -xdev -name log.jsonl -o -xdev -name checkpoints.jsonl 2>/dev/null | sed 's/^/REACHED /'
		printf '%s\n' '` + line + `'; printf 'x\n%s\033[2J\n' '` + line + `' >&2
		/bin/true "$(printf 'x\n%s' '` + line + `')"
		true`
	r, err := box.Run(ctx, harness.Shell("root", script))
	if err != nil || strings.Contains(r.Stdout, "REACHED") {
		t.Errorf("%v: %s", err, r.Stdout)
	}
	if err := box.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	for _, r := range ended(t, s, box.ID, "kernel").all {
		if r.Trust != audit.TrustHost {
			t.Errorf("%+v", r)
		}
		if c, err := json.Marshal(r.Data); err != nil || strings.Contains(string(c), `"argv":["forged-record"]`) {
			t.Errorf("a forged record, %v: %s", err, c)
		}
	}
	if problems := verify(ctx, s); problems != "" {
		t.Error(problems)
	}
}

// verify has the log checked while its server runs.
func verify(ctx context.Context, s *harness.Server) string {
	binary, err := harness.Binary()
	if err != nil {
		return err.Error()
	}
	if out, err := exec.CommandContext(ctx, binary, "audit", "verify", "--data", s.Data).CombinedOutput(); err != nil {
		return fmt.Sprintf("%v: %s", err, out)
	}
	return ""
}

// recorded is what the log has of a sandbox.
type recorded struct {
	all          []audit.Record
	execs        []audit.Process
	forks, exits map[int]int // by process id inside
}

// ended reads the log when it has the end of a sandbox, whose processes source told of.
func ended(t *testing.T, s *harness.Server, id, source string) recorded {
	t.Helper()
	log := endedIn(t, filepath.Join(s.Data, "audit"), id)
	for _, r := range log.all {
		switch {
		case r.Type == audit.ProcSum || r.Type == audit.Gap, strings.HasPrefix(string(r.Type), "proc.") && (r.Src != source || r.Trust != audit.TrustHost):
			t.Errorf("%+v", r)
		}
	}
	return log
}

// endedIn reads the log in a directory when it has the end of a sandbox; "" is the only one.
func endedIn(t *testing.T, dir, id string) recorded {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		log := recorded{forks: map[int]int{}, exits: map[int]int{}}
		over := false
		for line, err := range trail.Dir(dir).Records(0) {
			if err != nil {
				t.Fatal(err)
			}
			if id != "" && line.Sandbox != berm.SandboxID(id) {
				continue
			}
			log.all = append(log.all, line.Record)
			var p audit.Process
			switch line.Type {
			case audit.SandboxExit:
				over = true
				continue
			case audit.ProcExec, audit.ProcFork, audit.ProcExit:
			default:
				continue
			}
			raw, err := json.Marshal(line.Data)
			if err == nil {
				err = json.Unmarshal(raw, &p)
			}
			if err != nil {
				t.Fatal(err)
			}
			switch line.Type {
			case audit.ProcExec:
				log.execs = append(log.execs, p)
			case audit.ProcFork:
				log.forks[p.PID]++
			default:
				log.exits[p.PID]++
			}
		}
		if over {
			return log
		}
	}
	t.Fatalf("the log has no end of sandbox %s", id)
	return recorded{}
}

// ran are the executions whose last argument is name, in order.
func (r recorded) ran(t *testing.T, name string) (found []audit.Process) {
	t.Helper()
	for _, p := range r.execs {
		if len(p.Argv) > 0 && p.Argv[len(p.Argv)-1] == name {
			found = append(found, p)
		}
	}
	return found
}
