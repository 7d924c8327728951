// Package capture tries what the audit log holds of sandboxes of a real server.
package capture

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/test/harness"
)

// records reads what the log has of a sandbox, once it has n records of a type.
func records(t *testing.T, s *harness.Server, id string, n int, of audit.Type) (all []audit.Record) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		all = nil
		found := 0
		for line, err := range trail.Dir(filepath.Join(s.Data, "audit")).Records(0) {
			if err != nil {
				t.Fatal(err)
			}
			if line.Sandbox != berm.SandboxID(id) {
				continue
			}
			all = append(all, line.Record)
			if line.Type == of {
				found++
			}
		}
		if found >= n {
			return all
		}
		if time.Now().After(end) {
			t.Fatalf("%d records of type %s, want %d: %+v", found, of, n, all)
		}
	}
}

// data reads a record's data as what it is.
func data[T any](t *testing.T, r audit.Record) (v T) {
	t.Helper()
	raw, err := json.Marshal(r.Data)
	if err == nil {
		err = json.Unmarshal(raw, &v)
	}
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func only(all []audit.Record, of audit.Type) []audit.Record {
	return slices.DeleteFunc(slices.Clone(all), func(r audit.Record) bool { return r.Type != of })
}

// A sandbox is used, paused and killed; the log tells what was run, what it wrote and what
// changed, in this order.
func TestServer(t *testing.T) {
	harness.Slow(t)
	s := harness.Serve(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	box, err := s.Create(ctx, time.Minute, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := box.Write(ctx, "root", "/srv/up", strings.NewReader("uploaded")); err != nil {
		t.Fatal(err)
	}
	result, err := box.Run(ctx, harness.Shell("root", probe))
	if err != nil || result.Code != 7 {
		t.Fatalf("%+v, %v", result, err)
	}
	var looked struct {
		TraceID string
		Outcome audit.Outcome
		Data    audit.Changes
	}
	if err := s.Call(ctx, "POST", "/berm/v1/sandboxes/"+box.ID+"/changes", nil, &looked); err != nil {
		t.Fatal(err)
	}
	if looked.TraceID == "" || looked.Outcome != audit.OK || looked.Data.At != "request" || !slices.ContainsFunc(looked.Data.Changes, func(c audit.Change) bool { return c.Path == "srv/up" }) {
		t.Errorf("changes on request: %+v", looked)
	}
	for _, c := range looked.Data.Changes {
		if strings.HasPrefix(c.Path, "etc/") || strings.HasPrefix(c.Path, "run/e2b") {
			t.Errorf("a file of Berm's own is among the changes: %+v", c)
		}
	}
	if err := s.Call(ctx, "POST", "/sandboxes/"+box.ID+"/pause", nil, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Call(ctx, "POST", "/sandboxes/"+box.ID+"/resume", map[string]any{"timeout": 60}, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := box.Run(ctx, harness.Shell("root", "echo more >>/workspace/c")); err != nil {
		t.Fatal(err)
	}
	if err := box.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	all := records(t, s, box.ID, 1, audit.SandboxExit)
	var order []string
	for _, r := range all {
		switch r.Type {
		case audit.APICall, audit.PolicySet, audit.SandboxCreate, audit.ProcExec, audit.ProcExit, audit.ProcFork:
		default:
			order = append(order, string(r.Type))
		}
		if r.Trust != audit.TrustHost {
			t.Errorf("the source of %+v", r)
		}
	}
	if got, want := strings.Join(order, " "), "sandbox.start fs.api exec.start exec.exit fs.change sandbox.pause fs.change sandbox.resume exec.start exec.exit fs.change sandbox.exit"; got != want {
		t.Errorf("records %s, want %s", got, want)
	}
	exit := only(all, audit.ExecExit)[0]
	if c := data[audit.Command](t, exit); c.Code == nil || *c.Code != 7 || c.Output != 8 || c.User != "root" {
		t.Errorf("%+v", c)
	}
	blob, err := trail.Dir(filepath.Join(s.Data, "audit")).Blob(exit.Blobs[0].SHA256)
	if err != nil {
		t.Fatal(err)
	}
	defer blob.Close()
	output := map[audit.Stream]string{}
	for f := audit.NewFrameReader(blob); ; {
		frame, err := f.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		output[frame.Stream] += string(frame.Data)
	}
	if output[audit.Stdout] != "out\n" || output[audit.Stderr] != "err\n" {
		t.Errorf("%q", output)
	}
	for i, content := range []string{"2", "2", "2more\n"} {
		r := only(all, audit.FileChange)[i]
		got := map[string]audit.Change{}
		for _, c := range data[audit.Changes](t, r).Changes {
			got[c.Path] = c
		}
		c, d := got["workspace/c"], got["workspace/d"]
		if c.Op != "add" || c.Mode != "0777" || c.After != sum(content) || d.Kind != "link" || d.Target != "c" {
			t.Errorf("%+v, %+v", c, d)
		}
		for _, gone := range []string{"workspace/a", "workspace/b"} {
			if c, there := got[gone]; there {
				t.Errorf("%+v", c)
			}
		}
		if r.Outcome != audit.OK || got["srv/up"].After != sum("uploaded") {
			t.Errorf("%s: %+v", r.Reason, got)
		}
		if blob, err := trail.Dir(filepath.Join(s.Data, "audit")).Blob(sum(content)); err != nil {
			t.Error(err)
		} else {
			blob.Close()
		}
	}
}

func sum(s string) string {
	h := sha256.Sum256([]byte(s))
	return hex.EncodeToString(h[:])
}

// probe is AU-03 of the corpus, and some output.
const probe = `
mkdir -p /workspace && cd /workspace
head -c 4096 /dev/zero | tr '\0' 1 >a; printf 2 | dd of=a conv=notrunc status=none
mv a b; ln b c; truncate -s 1 c; chmod 777 c; touch -d @0 c; ln -s c d; rm b
echo out; echo err >&2; exit 7`

func TestMain(m *testing.M) { harness.Main(m) }

// The probe AU-02: whatever way a program is executed, the log has it, with the hash of the file
// that the kernel ran.
func TestProcesses(t *testing.T) {
	harness.Slow(t)
	s := harness.Serve(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	box, err := s.Create(ctx, time.Minute, nil)
	if err != nil {
		t.Fatal(err)
	}
	run := func(script string) string {
		t.Helper()
		r, err := box.Run(ctx, harness.Shell("root", script))
		if err != nil {
			t.Fatal(err)
		}
		return r.Stdout
	}
	sums := map[string]string{}
	for line := range strings.Lines(run("for f in /bin/true /bin/sh /bin/sleep /bin/bash /lib64/ld-linux-x86-64.so.2; do sha256sum $(readlink -f $f) | cut -d' ' -f1 | tr '\\n' ' '; echo $f; done")) {
		hash, path, _ := strings.Cut(strings.TrimSpace(line), " ")
		sums[path] = hash
	}
	const loops = 200
	run(`
		/lib64/ld-linux-x86-64.so.2 /bin/true ldso
		cp /bin/true /tmp/t && /tmp/t copy
		(exec -a kworker /bin/true faked)
		printf '#!/bin/sh\n/bin/true script\n' >/tmp/s; chmod +x /tmp/s; /tmp/s argument
		( (setsid sh -c 'sleep 0.05; exec /bin/true orphan' &) & )
		perl -e 'exec "/bin/true", "perl"' || true
		command -v python3 >/dev/null && python3 -c 'import os;f=os.memfd_create("m");os.write(f,open("/bin/sleep","rb").read());os.execve(f,["m","0.5"],{})'
		for i in $(seq ` + fmt.Sprint(loops) + `); do /bin/true loop; done
		sleep 0.2
		true`)
	begin := time.Now()
	if err := box.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took > 20*time.Second {
		t.Errorf("the end took %v", took)
	}
	all := records(t, s, box.ID, 1, audit.SandboxExit)
	found := map[string][]audit.Process{}
	unhashed, total := 0, 0
	for _, r := range only(all, audit.ProcExec) {
		p := data[audit.Process](t, r)
		found[strings.Join(p.Argv, " ")] = append(found[strings.Join(p.Argv, " ")], p)
		if total++; p.SHA256 == "" {
			unhashed++
			t.Logf("no hash: %+v", p)
		}
		if r.Trust != audit.TrustHost || p.PID == 0 || p.Host == 0 || p.UID != 0 && p.UID != 1000 {
			t.Errorf("%+v", r)
		}
	}
	for argv, w := range map[string]struct {
		exe, hash string
		n         int
	}{
		"/lib64/ld-linux-x86-64.so.2 /bin/true ldso": {"ld-linux-x86-64.so.2", sums["/lib64/ld-linux-x86-64.so.2"], 1},
		"/tmp/t copy":             {"/tmp/t", sums["/bin/true"], 1},
		"kworker faked":           {"true", sums["/bin/true"], 1},
		"/bin/sh /tmp/s argument": {"sh", sums["/bin/sh"], 1},
		"/bin/true script":        {"true", sums["/bin/true"], 1},
		"/bin/true orphan":        {"true", sums["/bin/true"], 1},
		"/bin/true loop":          {"true", sums["/bin/true"], loops},
	} {
		if len(found[argv]) != w.n {
			t.Errorf("%q: %d records, want %d", argv, len(found[argv]), w.n)
			continue
		}
		for _, p := range found[argv] {
			if filepath.Base(p.Exe) != filepath.Base(w.exe) && !strings.HasPrefix(filepath.Base(p.Exe), strings.TrimSuffix(filepath.Base(w.exe), ".2")) && w.exe != "sh" || p.SHA256 != w.hash {
				t.Errorf("%q: %+v, want %s", argv, p, w.hash)
				break
			}
		}
	}
	for _, p := range found["m 0.5"] {
		if p.SHA256 != sums["/bin/sleep"] || !strings.Contains(p.Exe, "memfd:m") {
			t.Errorf("memfd: %+v", p)
		}
	}
	t.Logf("%d executions, %d without a hash", total, unhashed)
	// Whoever began is known to have ended.
	live := map[int]int{}
	for _, r := range all {
		switch r.Type {
		case audit.ProcFork:
			live[data[audit.Process](t, r).PID]++
		case audit.ProcExit:
			live[data[audit.Process](t, r).PID]--
		case audit.ProcSum, audit.Gap:
			t.Errorf("%+v", r)
		}
	}
	for pid, n := range live {
		if n > 0 {
			t.Errorf("process %d has no end", pid)
		}
	}
}

// System calls that are asked for are recorded, also those that the wall refuses, and no others.
func TestCalls(t *testing.T) {
	harness.Slow(t)
	s := harness.Serve(t, "--record-calls", "chroot,unshare")
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	box, err := s.Create(ctx, time.Minute, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := box.Run(ctx, harness.Shell("root", "chroot / /bin/true; unshare -U /bin/true; true")); err != nil {
		t.Fatal(err)
	}
	if err := box.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	calls := map[string]string{}
	for _, r := range only(records(t, s, box.ID, 1, audit.SandboxExit), audit.ProcCall) {
		p := data[audit.Process](t, r)
		calls[p.Call] = p.Error
		if r.Outcome != audit.Failed || r.Trust != audit.TrustHost || p.PID == 0 {
			t.Errorf("%+v", r)
		}
	}
	if len(calls) != 2 || calls["chroot"] == "" || calls["unshare"] == "" {
		t.Errorf("%v", calls)
	}
}

// A flood is counted, and the log has what came before and after.
func TestFlood(t *testing.T) {
	harness.Slow(t)
	s := harness.Serve(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	box, err := s.Create(ctx, time.Minute, nil)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if _, err := box.Run(ctx, harness.Shell("root", "for i in $(seq 4000); do /bin/true; done")); err != nil {
		t.Fatal(err)
	}
	if err := box.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	all := records(t, s, box.ID, 1, audit.SandboxExit)
	n := map[audit.Type]int{}
	for _, r := range all {
		switch r.Type {
		case audit.ProcExec, audit.ProcFork, audit.ProcExit:
			n[r.Type]++
		case audit.ProcSum:
			sum := data[audit.ProcessSum](t, r)
			n[sum.Type] += sum.Count
			n[audit.ProcSum]++
		case audit.Gap:
			t.Errorf("%+v", r)
		}
	}
	if n[audit.ProcExec] < 4000 || n[audit.ProcFork] < 4000 || n[audit.ProcExit] < 4000 || len(all) > 6000+500*int(time.Since(began)/time.Second+1) {
		t.Errorf("%v in %d records", n, len(all))
	}
}

// Who records may stop or die: what runs inside goes on.
func TestReaderDies(t *testing.T) {
	harness.Slow(t)
	s := harness.Serve(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	box, err := s.Create(ctx, time.Minute, nil)
	if err != nil {
		t.Fatal(err)
	}
	// Its times tell when it ran, its output is what nobody reads.
	if _, err := box.Run(ctx, harness.Shell("root", "setsid sh -c 'while :; do date +%s%N >>/tmp/times; done' >/dev/null 2>&1 </dev/null &")); err != nil {
		t.Fatal(err)
	}
	ran := func(from, to time.Time) bool {
		t.Helper()
		content, err := box.Read(ctx, "root", "/tmp/times")
		if err != nil {
			t.Fatal(err)
		}
		defer content.Close()
		text, err := io.ReadAll(content)
		if err != nil {
			t.Fatal(err)
		}
		first, last := from.Add(to.Sub(from)/4), from.Add(to.Sub(from)*3/4)
		early, late := false, false
		for line := range strings.Lines(string(text)) {
			ns, _ := strconv.ParseInt(strings.TrimSpace(line), 10, 64)
			at := time.Unix(0, ns)
			early = early || at.After(from) && at.Before(first)
			late = late || at.After(last) && at.Before(to)
		}
		if !early || !late {
			t.Logf("between %d and %d: %d bytes, the end %q", from.UnixNano(), to.UnixNano(), len(text), text[max(0, len(text)-120):])
		}
		return early && late
	}
	process, err := os.FindProcess(s.PID())
	if err != nil {
		t.Fatal(err)
	}
	if err := process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	stopped := time.Now()
	time.Sleep(3 * time.Second)
	goes := time.Now()
	if err := process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if !ran(stopped, goes) {
		t.Error("it did not run while the server was stopped")
	}
	s.Crash()
	died := time.Now()
	time.Sleep(3 * time.Second) // the machine may be busy
	again := time.Now()
	if err := s.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	if !ran(died, again) {
		t.Error("it did not run while no server was there")
	}
	time.Sleep(time.Second) // for something to be seen
	if err := box.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	all := records(t, s, box.ID, 1, audit.SandboxExit)
	gaps := only(all, audit.Gap)
	if len(gaps) == 0 || gaps[len(gaps)-1].Data.(map[string]any)["source"] != "processes" {
		t.Errorf("gaps: %+v", gaps)
	}
	if after := all[slices.IndexFunc(all, func(r audit.Record) bool { return r.Type == audit.Gap }):]; len(only(after, audit.ProcExec))+len(only(after, audit.ProcSum)) == 0 {
		t.Error("after the gap no process is recorded")
	}
}

// A copy-on-write run of berm run tells in its user's log what it changed.
func TestRun(t *testing.T) {
	binary, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	project, state := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(project, "old"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), binary, "run", "-C", project, "--", "/bin/sh", "-c", "echo new >new; rm old")
	cmd.Env = append(os.Environ(), "XDG_STATE_HOME="+state, "HOME="+t.TempDir())
	if out, err := cmd.CombinedOutput(); err != nil {
		if strings.Contains(string(out), "cannot") || strings.Contains(string(out), "not support") {
			t.Skipf("%v: %s", err, out)
		}
		t.Fatalf("%v: %s", err, out)
	}
	var found []audit.Record
	for line, err := range trail.Dir(filepath.Join(state, "berm", "audit")).Records(0) {
		if err != nil {
			t.Fatal(err)
		}
		if line.Type == audit.FileChange {
			found = append(found, line.Record)
		}
	}
	if len(found) != 1 || found[0].Trust != audit.TrustUser {
		t.Fatalf("%+v", found)
	}
	got := map[string]string{}
	for _, c := range data[audit.Changes](t, found[0]).Changes {
		name, err := filepath.Rel(project, "/"+c.Path) // it has the same place inside
		if err != nil {
			t.Fatal(err)
		}
		got[name] = c.Op + " " + c.Kind
	}
	if len(got) != 2 || got["new"] != "add file" || got["old"] != "delete file" {
		t.Errorf("%+v", got)
	}
}
