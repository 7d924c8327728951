package probes

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }

// Verdict is the judgement of one run of a probe.
type Verdict string

// The verdicts. Only Safe passes.
const (
	Safe     Verdict = "SAFE"
	Escaped  Verdict = "ESCAPED"  // something of the host was reached or changed
	Degraded Verdict = "DEGRADED" // the host or a neighbour was harmed, or something was left
	Unknown  Verdict = "UNKNOWN"  // the probe did not do what it should
)

func TestCorpus(t *testing.T) {
	probes, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	if len(probes) < 60 {
		t.Errorf("%d probes: some are missing", len(probes))
	}
}

// TestProbes runs every probe in a sandbox of its own, as user and as root
// inside, in random order.
func TestProbes(t *testing.T) {
	harness.Slow(t)
	probes, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	seed := mathrand.Uint64()
	t.Logf("order: seed %d", seed)
	mathrand.New(mathrand.NewPCG(seed, 0)).Shuffle(len(probes), func(i, j int) { probes[i], probes[j] = probes[j], probes[i] })

	judge := newJudge(t)
	judge.test(t)
	counts := map[Verdict]int{}
	for _, probe := range probes {
		for _, user := range probe.Users {
			t.Run(probe.ID+"/"+user, func(t *testing.T) {
				verdict, why, output := judge.run(t, probe, user)
				counts[verdict]++
				if verdict != Safe {
					t.Errorf("%s %s (%s): %s\n%s", verdict, probe.ID, probe.Title, why, tail(output, 3000))
				}
			})
		}
	}
	t.Logf("verdicts: %v", counts)
}

// test lets the judge see what is no longer safe: a judge that never finds anything
// is worth nothing.
func (j *judge) test(t *testing.T) {
	control := func(script string) Probe {
		probe, err := parse("XX-00.sh", "# id: XX-00\n# title: control\n# expect: D\n# timeout: 10\n# escaped: ^GOT\n# safe: ^done\n\n"+script)
		if err != nil {
			t.Fatal(err)
		}
		return probe
	}
	token := ""
	for token = range j.tokens {
		break
	}
	for script, want := range map[string]Verdict{
		"echo " + token: Escaped,
		"echo GOT it":   Escaped,
		"echo started":  Unknown,
		"echo done":     Safe,
	} {
		if verdict, why, _ := j.run(t, control(script), "user"); verdict != want {
			t.Errorf("the judge calls %q %s (%s), not %s", script, verdict, why, want)
		}
	}
	// A file left on the host is seen.
	before := harness.Look(j.server)
	if err := os.WriteFile("/dev/shm/left", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if diff := before.Diff(harness.Look(j.server)); len(diff) != 1 {
		t.Errorf("a file that was left shows as %v", diff)
	}
	os.Remove("/dev/shm/left")
}

// judge holds what is planted on the host.
type judge struct {
	server  *harness.Server
	sibling *harness.Sandbox
	tokens  map[string]string // token → where it is planted
	env     map[string]string // what probes are told

	mu   sync.Mutex
	hits []string // calls at the host's listeners
}

func newJudge(t *testing.T) *judge {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	j := &judge{tokens: map[string]string{}, env: map[string]string{}}

	// Files of the host: one that everybody may read and one for root alone.
	dir, err := os.MkdirTemp("", "berm-canary-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	os.Chmod(dir, 0o755)
	for name, mode := range map[string]os.FileMode{"HOST_CANARY": 0o644, "HOST_CANARY_SECRET": 0o600} {
		path := filepath.Join(dir, strings.ToLower(name))
		if err := os.WriteFile(path, []byte(j.token("file "+name)), mode); err != nil {
			t.Fatal(err)
		}
		j.env[name] = path
	}

	// A process of the host with tokens in its arguments and environment.
	decoy := exec.Command("sleep", "3600")
	decoy.Args[0] = "decoy-" + j.token("arguments of a process")
	decoy.Env = []string{"DECOY=" + j.token("environment of a process")}
	if err := decoy.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { decoy.Process.Kill(); decoy.Wait() })

	// Listeners of the host: TCP on every address, and an abstract Unix socket,
	// which belongs to a network namespace.
	tcp, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	port := fmt.Sprint(tcp.Addr().(*net.TCPAddr).Port)
	abstract, err := net.Listen("unix", "@canary-"+port)
	if err != nil {
		t.Fatal(err)
	}
	j.env["HOST_PORT"] = port
	for _, listener := range []net.Listener{tcp, abstract} {
		t.Cleanup(func() { listener.Close() })
		go func() {
			for {
				conn, err := listener.Accept()
				if err != nil {
					return
				}
				j.mu.Lock()
				j.hits = append(j.hits, listener.Addr().String())
				j.mu.Unlock()
				conn.Close()
			}
		}()
	}

	j.server = harness.Serve(t)
	if j.sibling, err = j.server.Create(ctx, time.Hour, nil); err != nil {
		t.Fatal(err)
	}
	if err := j.sibling.Write(ctx, "user", "sibling", strings.NewReader(j.token("file of another sandbox"))); err != nil {
		t.Fatal(err)
	}
	// The first sandbox of a server may load what later ones share.
	warm, err := j.server.Create(ctx, time.Minute, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := warm.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	return j
}

func (j *judge) token(where string) string {
	random := make([]byte, 16)
	rand.Read(random)
	token := "CANARY" + hex.EncodeToString(random)
	j.tokens[token] = where
	return token
}

// run runs one probe in a fresh sandbox and judges what came of it.
func (j *judge) run(t *testing.T, probe Probe, user string) (verdict Verdict, why, output string) {
	ctx, cancel := context.WithTimeout(context.Background(), probe.Timeout+time.Minute)
	defer cancel()
	j.mu.Lock()
	j.hits = nil
	j.mu.Unlock()
	before := harness.Look(j.server)
	pid, rss := j.server.PID(), harness.RSS(j.server.PID())

	sandbox, err := j.server.Create(ctx, probe.Timeout+time.Minute, nil)
	if err != nil {
		return Unknown, "create: " + err.Error(), ""
	}
	path, interpreter := "/tmp/probe.sh", "/bin/bash"
	if probe.Kind == "py" {
		path, interpreter = "/tmp/probe.py", "/usr/bin/python3"
	}
	if err := sandbox.Write(ctx, user, path, strings.NewReader(probe.Script)); err != nil {
		return Unknown, "write: " + err.Error(), ""
	}

	neighbour := watch(ctx, j.sibling, probe.Abuse)
	inside, stop := context.WithTimeout(ctx, probe.Timeout)
	result, err := sandbox.Run(inside, harness.Command{
		User: user, Path: interpreter, Args: []string{path}, Env: j.env, Timeout: probe.Timeout,
	})
	stop()
	output = result.Stdout + result.Stderr
	if err != nil && !probe.Abuse {
		sandbox.Kill(ctx)
		return Unknown, "run: " + err.Error(), output
	}
	slowest, neighbourErr := neighbour()
	grown := harness.RSS(pid) - rss

	start := time.Now()
	err = sandbox.Kill(ctx)
	killed := time.Since(start)
	left := before.Settle(j.server, 2*time.Second)

	// The oracles, in order of gravity.
	if !j.server.Alive() {
		return Degraded, "the server died:\n" + j.server.Log(), output
	}
	for token, where := range j.tokens {
		if strings.Contains(output, token) {
			return Escaped, "token in the output: " + where, output
		}
	}
	j.mu.Lock()
	hits := slices.Clone(j.hits)
	j.mu.Unlock()
	if len(hits) > 0 {
		return Escaped, fmt.Sprint("calls at listeners of the host: ", hits), output
	}
	for _, difference := range left {
		if strings.Contains(difference, "sysctl") {
			return Escaped, "host changed: " + difference, output
		}
	}
	for _, re := range probe.Escaped {
		if match := re.FindString(output); match != "" {
			return Escaped, fmt.Sprintf("output matches %q: %q", re, match), output
		}
	}
	for _, file := range probe.HostValue {
		value, err := os.ReadFile(file)
		if text := strings.TrimSpace(string(value)); err == nil && len(text) >= 8 && strings.Contains(output, text) {
			return Escaped, "content of the host's " + file, output
		}
	}
	switch {
	case err != nil:
		return Degraded, "kill: " + err.Error(), output
	case killed > 2*time.Second:
		return Degraded, fmt.Sprintf("kill took %v", killed), output
	case len(left) > 0:
		return Degraded, "left behind:\n" + strings.Join(left, "\n"), output
	case neighbourErr != nil:
		return Degraded, "the neighbour: " + neighbourErr.Error(), output
	case slowest > 5*time.Second:
		return Degraded, fmt.Sprintf("the neighbour waited %v", slowest), output
	case grown > 128<<20:
		return Degraded, fmt.Sprintf("the server grew by %d MiB", grown>>20), output
	}
	for _, re := range probe.Safe {
		if !re.MatchString(output) {
			return Unknown, fmt.Sprintf("output does not match %q (%s)", re, result.Status), output
		}
	}
	if probe.Next != "" {
		next, err := j.server.Create(ctx, time.Minute, nil)
		if err != nil {
			return Unknown, "next: " + err.Error(), output
		}
		defer next.Kill(ctx)
		result, err := next.Run(ctx, harness.Shell("user", probe.Next))
		if err != nil || strings.TrimSpace(result.Stdout) != "CLEAN" {
			return Escaped, fmt.Sprintf("the next sandbox is not clean: %v %+v", err, result), output
		}
	}
	return Safe, "", output
}

// watch lets a sandbox answer again and again, until the function it returns is
// called, which reports the slowest answer.
func watch(ctx context.Context, sandbox *harness.Sandbox, on bool) func() (time.Duration, error) {
	if !on {
		return func() (time.Duration, error) { return 0, nil }
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	var slowest time.Duration
	var failed error
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			start := time.Now()
			result, err := sandbox.Run(ctx, harness.Shell("user", "echo ok"))
			switch {
			case ctx.Err() != nil:
				return
			case err != nil:
				failed = errors.Join(failed, err)
				return
			case result.Stdout != "ok\n":
				failed = errors.Join(failed, fmt.Errorf("answered %+v", result))
				return
			}
			slowest = max(slowest, time.Since(start))
			time.Sleep(200 * time.Millisecond)
		}
	}()
	return func() (time.Duration, error) {
		cancel()
		<-done
		return slowest, failed
	}
}

func tail(text string, n int) string {
	if len(text) > n {
		return "… " + text[len(text)-n:]
	}
	return text
}
