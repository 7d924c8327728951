package probes

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
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

// TestMain runs all in an outer wall when it can: a probe that gets out meets another one.
func TestMain(m *testing.M) {
	if os.Geteuid() == 0 {
		if _, err := harness.Isolate(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

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

// venue is where probes run.
type venue interface {
	// look takes a snapshot of the host, and of what the venue has there.
	look() harness.Host
	// open makes a fresh sandbox.
	open(ctx context.Context, user string, lifetime time.Duration) (box, error)
	// watch keeps an eye on what lives beside the sandboxes, until the function it returns
	// is called, which says what was harmed.
	watch(ctx context.Context, abuse bool) (harm func() string)
}

// box is a sandbox for one probe.
type box interface {
	run(ctx context.Context, kind, script string, env map[string]string) (output, status string, err error)
	kill(ctx context.Context) error
}

// online is a venue with a network.
type online interface {
	venue
	// outside says what came out of a sandbox that may not, or what is missing of what a
	// probe must have led to.
	outside(probe Probe) (verdict Verdict, why string)
}

// judge holds what is planted on the host.
type judge struct {
	dir    string            // for what is planted
	tokens map[string]string // token → where it is planted
	env    map[string]string // what probes are told

	mu   sync.Mutex
	hits []string // calls at the host's listeners
}

func newJudge(t *testing.T) *judge {
	j := &judge{dir: publicDir(t), tokens: map[string]string{}, env: map[string]string{}}

	// Files of the host: one that everybody may read and one for root alone.
	for name, mode := range map[string]os.FileMode{"HOST_CANARY": 0o644, "HOST_CANARY_SECRET": 0o600} {
		path := filepath.Join(j.dir, strings.ToLower(name))
		if err := os.WriteFile(path, []byte(j.token("file "+name)), mode); err != nil {
			t.Fatal(err)
		}
		j.env[name] = path
	}

	// A process of the host with tokens in its arguments and environment.
	j.decoy(t, 0)

	// Listeners of the host: TCP on every address, and an abstract Unix socket,
	// which belongs to a network namespace.
	port := fmt.Sprint(j.listen(t, "tcp", ":0").(*net.TCPAddr).Port)
	j.listen(t, "unix", "@canary-"+port)
	j.env["HOST_PORT"] = port
	return j
}

// publicDir makes a directory that every user can enter.
func publicDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "berm-canary-")
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func (j *judge) token(where string) string {
	random := make([]byte, 16)
	rand.Read(random)
	token := "CANARY" + hex.EncodeToString(random)
	j.tokens[token] = where
	return token
}

// found tells which token of the host a text has.
func (j *judge) found(text string) (where string) {
	for token, where := range j.tokens {
		if strings.Contains(text, token) {
			return where
		}
	}
	return ""
}

// decoy starts a process of a user of the host.
func (j *judge) decoy(t *testing.T, uid int) *os.Process {
	t.Helper()
	decoy := exec.Command("sleep", "3600")
	decoy.Args[0] = "decoy-" + j.token("arguments of a process")
	decoy.Env = []string{"DECOY=" + j.token("environment of a process")}
	decoy.SysProcAttr = as(uid)
	if err := decoy.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = decoy.Process.Kill(); _ = decoy.Wait() })
	return decoy.Process
}

// listen has a listener of the host report who calls.
func (j *judge) listen(t *testing.T, network, address string) net.Addr {
	t.Helper()
	listener, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
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
	return listener.Addr()
}

// called returns the calls since the last time.
func (j *judge) called() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	hits := j.hits
	j.hits = nil
	return hits
}

// run runs one probe in a fresh sandbox and judges what came of it.
func (j *judge) run(v venue, probe Probe, user string) (verdict Verdict, why, output string) {
	// What does no harm ends by itself, however busy the machine is.
	limit := probe.Timeout
	if !probe.Abuse {
		limit = max(limit, 2*time.Minute)
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit+time.Minute)
	defer cancel()
	j.called()
	before := v.look()
	harm := v.watch(ctx, probe.Abuse)

	b, err := v.open(ctx, user, limit+time.Minute)
	if err != nil {
		return Unknown, "open: " + err.Error(), ""
	}
	inside, stop := context.WithTimeout(ctx, limit)
	output, status, err := b.run(inside, probe.Kind, probe.Script, j.env)
	stop()
	if err != nil && !probe.Abuse {
		_ = b.kill(ctx)
		return Unknown, "run: " + err.Error(), output
	}
	harmed := harm()
	start := time.Now()
	err = b.kill(ctx)
	killed := time.Since(start)
	var left []string
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if left = before.Diff(v.look()); len(left) == 0 || time.Now().After(deadline) {
			break
		}
	}

	// The oracles, in order of gravity.
	if where := j.found(output); where != "" {
		return Escaped, "token in the output: " + where, output
	}
	if hits := j.called(); len(hits) > 0 {
		return Escaped, fmt.Sprint("calls at listeners of the host: ", hits), output
	}
	for _, difference := range left {
		if kind, _, _ := strings.Cut(difference[2:], " "); kind == "sysctl" || kind == "file" {
			return Escaped, "host changed: " + difference, output
		}
	}
	missing := ""
	if o, ok := v.(online); ok {
		if verdict, why := o.outside(probe); verdict == Escaped {
			return verdict, why, output
		} else if verdict != Safe {
			missing = why
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
	case harmed != "":
		return Degraded, harmed, output
	case err != nil:
		return Degraded, "kill: " + err.Error(), output
	case killed > 20*time.Second:
		return Degraded, fmt.Sprintf("kill took %v", killed), output
	case len(left) > 0:
		return Degraded, "left behind:\n" + strings.Join(left, "\n"), output
	}
	for _, re := range probe.Safe {
		if !re.MatchString(output) {
			return Unknown, fmt.Sprintf("output does not match %q (%s)", re, status), output
		}
	}
	if missing != "" {
		return Unknown, missing, output
	}
	if probe.Next != "" {
		next, err := v.open(ctx, "user", time.Minute)
		if err != nil {
			return Unknown, "next: " + err.Error(), output
		}
		defer next.kill(ctx)
		text, status, err := next.run(ctx, "sh", probe.Next, nil)
		if err != nil || strings.TrimSpace(text) != "CLEAN" {
			return Escaped, fmt.Sprintf("the next sandbox is not clean: %v %s %s", err, status, text), output
		}
	}
	return Safe, "", output
}

// each runs the probes of a venue as their users, and reports those that are not safe.
func (j *judge) each(t *testing.T, v venue, probes []Probe, users ...string) {
	counts := map[Verdict]int{}
	for _, probe := range probes {
		for _, user := range probe.Users {
			if !slices.Contains(users, user) {
				continue
			}
			t.Run(probe.ID+"/"+user, func(t *testing.T) {
				verdict, why, output := j.run(v, probe, user)
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
func (j *judge) test(t *testing.T, v venue) {
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
		if verdict, why, output := j.run(v, control(script), "user"); verdict != want {
			t.Errorf("the judge calls %q %s (%s), not %s\n%s", script, verdict, why, want, output)
		}
	}
	// A file left on the host is seen.
	before := v.look()
	if err := os.WriteFile("/dev/shm/left", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if diff := before.Diff(v.look()); len(diff) != 1 {
		t.Errorf("a file that was left shows as %v", diff)
	}
	os.Remove("/dev/shm/left")
}

func tail(text string, n int) string {
	if len(text) > n {
		return "… " + text[len(text)-n:]
	}
	return text
}
