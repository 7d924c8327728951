package probes

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
)

// holds says which of the secrets a process has in memory, or why that cannot be known.
func holds(pid int, secrets ...string) string {
	found, err := harness.Holds(pid, secrets...)
	switch {
	case err != nil:
		return err.Error()
	case found:
		return "a secret in the memory"
	}
	return ""
}

// TestNetworkLocal runs the probes of networks and credentials in `berm run`, as an ordinary
// user and as root.
func TestNetworkLocal(t *testing.T) {
	if !all {
		t.Skip("slow: set BERM_TEST_ALL=1")
	}
	v, j := newLocal(t)
	o := newOnlineLocal(t, v, j)
	o.controls(t, j)
	probes, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	probes = slices.DeleteFunc(probes, func(p Probe) bool { return !slices.Contains(p.Where, "local") || len(p.Needs) == 0 })
	network, credentials := split(probes)
	o.search = false
	j.each(t, o, network, "user", "root")
	o.search = true
	j.each(t, o, credentials, "user", "root")
	// What berm tells its user at the end has none of what programs inside said.
	for _, probe := range probes {
		if probe.ID == "NW-31" {
			args := append(append([]string{"run"}, o.flags...), "--env", "EVIL_IP="+evil, "--", "python3", "-c", probe.Script)
			told, _ := o.accounts["user"].do(args...)
			if !strings.Contains(told, "denied: ") || control.MatchString(told) {
				t.Errorf("told: %q", told)
			}
			if out, code := o.accounts["user"].do("discard", "--all"); code != 0 {
				t.Error(out)
			}
		}
	}
}

// split tells probes of networks from those of credentials.
func split(probes []Probe) (network, credentials []Probe) {
	for _, p := range probes {
		if slices.Contains(p.Needs, "credential") {
			credentials = append(credentials, p)
		} else {
			network = append(network, p)
		}
	}
	return network, credentials
}

// control is what terminals obey.
var control = regexp.MustCompile(`[\x00-\x08\x0b-\x1f\x7f\x{80}-\x{9f}\x{202e}]`)

// onlineLocal is a venue: `berm run` with a policy and credentials.
type onlineLocal struct {
	*local
	*world
	account *account // of the last run
	read    int64    // so much of its log was there before
	search  bool     // for secrets in memory
	harmed  string   // what was seen while a script waited at its end
}

func newOnlineLocal(t *testing.T, v *local, j *judge) *onlineLocal {
	o := &onlineLocal{local: v, world: newWorld(t, j), search: true}
	sibling := newAccount(t, j, userID+1)
	for _, a := range []*account{v.accounts["user"], v.accounts["root"], sibling} {
		a.write("work/net.json", o.text())
		a.environ = append(a.environ, "API_SECRET="+o.api, "GIT_SECRET="+o.git)
	}
	v.flags = []string{
		"--policy", "../net.json", "--cred", "api=env:API_SECRET,host=api.bound.test,host=selfsigned.bound.test,host=expired.bound.test,host=wronghost.bound.test,env=API_TOKEN",
		"--cred", "git=env:GIT_SECRET,host=git.bound.test,repo=org/allowed,push=refs/heads/agent/*",
	}
	for _, a := range v.accounts { // the first run leaves what later ones find
		if out, code := a.do(append(append([]string{"run"}, v.flags...), "--", "true")...); code != 0 {
			t.Fatal(out)
		}
	}
	o.neighbour(t, sibling, j)
	return o
}

// neighbour is what another sandbox does: it tells its placeholder and its authority, and serves.
const neighbour = `
import hashlib, os, re, socket, ssl
print(os.environ["API_TOKEN"])
pem = re.findall("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", open(os.environ["SSL_CERT_FILE"]).read(), re.S)[-1]
d = hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest().upper()
print(":".join(d[i:i + 2] for i in range(0, 64, 2)))
l = socket.create_server(("0.0.0.0", 47474))
while True:
    c, _ = l.accept()
    c.send(b"%s")
    c.close()`

// neighbour is another run with the same rights, beside which the probes run.
func (o *onlineLocal) neighbour(t *testing.T, a *account, j *judge) {
	t.Helper()
	j.env["SIBLING_PORT"] = "47474"
	cmd := a.command(append(append([]string{"run", "--quiet"}, o.flags...), "--", "python3", "-uc", fmt.Sprintf(neighbour, j.token("service of another sandbox")))...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	var placeholder, fingerprint string
	if _, err := fmt.Fscan(out, &placeholder, &fingerprint); err != nil {
		t.Fatal(err)
	}
	j.env["SIBLING_PLACEHOLDER"], j.env["SIBLING_CA"] = placeholder, fingerprint
}

func (o *onlineLocal) open(ctx context.Context, user string, lifetime time.Duration) (box, error) {
	o.forget()
	o.account, o.harmed = o.accounts[user], ""
	o.read = 0
	if info, err := os.Stat(o.log()); err == nil {
		o.read = info.Size()
	}
	b, err := o.local.open(ctx, user, lifetime)
	if err == nil && o.search {
		b.(*localBox).held = func() {
			o.harmed = o.holders(func(cmdline string) bool {
				return strings.HasPrefix(cmdline, o.account.berm+"\x00run\x00") || strings.Contains(cmdline, "/bin/berm\x00run\x00") || strings.Contains(cmdline, "berm\x00brokerd")
			})
		}
	}
	return b, err
}

func (o *onlineLocal) log() string { return o.account.home + "/.local/state/berm/audit/log.jsonl" }

func (o *onlineLocal) records() []byte {
	log, _ := os.ReadFile(o.log())
	return log[min(int(o.read), len(log)):]
}

func (o *onlineLocal) outside(probe Probe) (Verdict, string) {
	if o.harmed != "" {
		return Escaped, o.harmed
	}
	if why := o.stored(o.account.dir); why != "" {
		return Escaped, why
	}
	return o.judgement(probe, o.records)
}

// stored says where a secret lies in files that were not planted.
func (w *world) stored(dir string) (why string) {
	_ = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return nil //nolint:nilerr // it is gone
		}
		if info, err := entry.Info(); err != nil || info.Size() > 16<<20 {
			return nil //nolint:nilerr // the program
		}
		data, _ := os.ReadFile(path)
		for _, secret := range []string{w.api, w.git} {
			if bytes.Contains(data, []byte(secret)) {
				why = "a secret is in the file " + path
			}
		}
		return nil
	})
	return why
}

// controls lets the judge see what must not be, and what is missing.
func (o *onlineLocal) controls(t *testing.T, j *judge) {
	t.Helper()
	control := func(needs, script string) Probe {
		probe, err := parse("XX-00.sh", "# id: XX-00\n# title: control\n# expect: D\n# timeout: 10\n# needs: internet\n"+needs+"# safe: ^done\n\n"+script+"\necho done")
		if err != nil {
			t.Fatal(err)
		}
		return probe
	}
	check := func(what string, probe Probe, want Verdict) {
		t.Helper()
		if verdict, why, output := j.run(o, probe, "user"); verdict != want {
			t.Errorf("%s: %s (%s), not %s\n%s", what, verdict, why, want, output)
		} else {
			t.Logf("%s: %s", what, why)
		}
	}
	check("what is allowed", control("# passed: allowed.test/x\n", "curl -sS http://allowed.test/x"), Safe)
	check("what does not come", control("# passed: allowed.test/x\n", "true"), Unknown)
	check("no denial", control("# denied: evil.test not_listed\n", "true"), Unknown)
	flags := o.flags
	defer func() { o.flags = flags }()
	o.flags = append(slices.Clone(flags), "--allow", "evil.test", "--allow", evil+":9")
	check("a packet", control("", "curl -sS -m 2 http://"+evil+":9/"), Escaped)
	check("a name", control("", "curl -sSo /dev/null http://evil.test/"), Escaped)
	o.flags = append(slices.Clone(flags), "--env", "API_SECRET")
	check("a secret in memory", control("", "true"), Escaped)
}

// TestNetworkServer runs them in sandboxes of a server.
func TestNetworkServer(t *testing.T) {
	harness.Slow(t)
	probes, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	j := newJudge(t)
	w := newWorld(t, j)
	o := newOnlineServer(t, w, j)
	probes = slices.DeleteFunc(probes, func(p Probe) bool {
		return !slices.Contains(p.Where, "server") || len(p.Needs) == 0
	})
	network, credentials := split(probes)
	j.each(t, o, network, "user")
	o.search = true
	j.each(t, o, credentials, "user")
	// Root inside has no other way out than the link, and may do more with it.
	j.each(t, o, slices.DeleteFunc(probes, func(p Probe) bool {
		return !slices.Contains([]string{"CR-05", "CR-06", "NW-03", "NW-04", "NW-17", "NW-24", "NW-25", "NW-28", "NW-31"}, p.ID)
	}), "root")
	// What is printed of a sandbox has none of what programs inside said.
	b, err := o.open(t.Context(), "user", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := b.kill(context.Background()); err != nil {
			t.Error(err)
		}
	}()
	probe := probes[slices.IndexFunc(probes, func(p Probe) bool { return p.ID == "NW-31" })]
	if _, _, err := b.run(t.Context(), probe.Kind, probe.Script, j.env); err != nil {
		t.Fatal(err)
	}
	binary, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(binary, "net", "log", b.(onlineServerBox).ID)
	cmd.Env = append(os.Environ(), "E2B_API_URL="+o.URL, "E2B_API_KEY="+o.Key)
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "allowed.test") || control.Match(out) {
		t.Errorf("berm net log: %v, %q", err, out)
	}
}

// TestNetworkGVisor runs them at level gvisor.
func TestNetworkGVisor(t *testing.T) {
	harness.Slow(t)
	if !wholeLater {
		t.Skip("takes long: make test-probes runs it")
	}
	probes, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	j := newJudge(t)
	o := newOnlineServer(t, newWorld(t, j), j, "--level", "gvisor")
	probes = slices.DeleteFunc(probes, func(p Probe) bool {
		return !slices.Contains(p.Where, "server") || len(p.Needs) == 0
	})
	network, credentials := split(probes)
	// The memory of processes is not searched: to read that of gVisor's ends the sandbox.
	j.each(t, gvisorOnlineServer{o}, slices.Concat(network, credentials), "user")
}

// gvisorOnlineServer is one whose sandboxes are gVisor's.
type gvisorOnlineServer struct{ *onlineServer }

func (v gvisorOnlineServer) look() harness.Host { return gvisorServer{v.server}.look() }

// onlineServer is a venue: the sandboxes of a server that has an internet.
type onlineServer struct {
	*server
	*world
	read   int64 // so much of its log was there before
	search bool  // for secrets in memory
	harmed string
}

func newOnlineServer(t *testing.T, w *world, j *judge, args ...string) *onlineServer {
	t.Helper()
	o := &onlineServer{server: newServer(t, j, args...), world: w}
	for name, value := range map[string]string{"api": w.api, "git": w.git} {
		if err := o.Call(t.Context(), "POST", "/secrets", map[string]any{"name": name, "value": value}, nil); err != nil {
			t.Fatal(err)
		}
	}
	j.env["API_PORT"], j.env["SIBLING_PORT"] = o.URL[strings.LastIndexByte(o.URL, ':')+1:], "47474"
	// What looks into requests is started for the first who needs it.
	warm, err := o.open(t.Context(), "user", time.Minute)
	if err == nil {
		err = warm.kill(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	sibling, err := o.equip(t.Context(), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sibling.Kill(context.Background()) })
	if err := sibling.Write(t.Context(), "user", "neighbour.py", strings.NewReader(fmt.Sprintf(neighbour, j.token("service of another sandbox")))); err != nil {
		t.Fatal(err)
	}
	said, err := sibling.Run(t.Context(), harness.Shell("user", "setsid nohup python3 -u neighbour.py >said 2>&1 & until test $(wc -l <said) = 2; do sleep .1; done; cat said"))
	if err != nil {
		t.Fatal(err)
	}
	var placeholder, fingerprint string
	if _, err := fmt.Sscan(said.Stdout, &placeholder, &fingerprint); err != nil {
		t.Fatalf("%v: %+v", err, said)
	}
	j.env["SIBLING_PLACEHOLDER"], j.env["SIBLING_CA"] = placeholder, fingerprint
	return o
}

// equip makes a sandbox with the policy and the credentials of the probes.
func (o *onlineServer) equip(ctx context.Context, lifetime time.Duration) (*harness.Sandbox, error) {
	bound := []string{"api.bound.test", "selfsigned.bound.test", "expired.bound.test", "wronghost.bound.test"}
	sandbox, err := o.Create(ctx, lifetime, map[string]any{"allow_internet_access": false, "berm": map[string]any{"credentials": []map[string]any{
		{"name": "api", "secret": "secret:api", "hosts": bound, "env": "API_TOKEN"},
		{"name": "git", "secret": "secret:git", "hosts": []string{"git.bound.test"}, "repositories": []string{"org/allowed"}, "push": []string{"refs/heads/agent/*"}},
	}}})
	if err != nil {
		return nil, err
	}
	if err := o.Call(ctx, "PUT", "/berm/v1/sandboxes/"+sandbox.ID+"/network", json.RawMessage(o.text()), nil); err != nil {
		return nil, errors.Join(err, sandbox.Kill(ctx))
	}
	return sandbox, nil
}

func (o *onlineServer) open(ctx context.Context, user string, lifetime time.Duration) (box, error) {
	sandbox, err := o.equip(ctx, lifetime)
	if err != nil {
		return nil, err
	}
	o.forget()
	o.read, o.harmed = 0, ""
	if info, err := os.Stat(o.log()); err == nil {
		o.read = info.Size()
	}
	return onlineServerBox{serverBox{sandbox, user, lifetime}, o}, nil
}

// onlineServerBox is a box whose processes are searched for secrets after a probe.
type onlineServerBox struct {
	serverBox
	venue *onlineServer
}

func (b onlineServerBox) run(ctx context.Context, kind, script string, env map[string]string) (output, status string, err error) {
	output, status, err = b.serverBox.run(ctx, kind, script, env)
	if !b.venue.search {
		return output, status, err
	}
	// The server has the store of secrets, and was given them.
	b.venue.harmed = b.venue.holders(func(cmdline string) bool {
		return strings.Contains(cmdline, "berm\x00brokerd") || strings.Contains(cmdline, "/berm\x00serve\x00")
	})
	return output, status, err
}

func (o *onlineServer) log() string { return filepath.Join(o.Data, "audit", "log.jsonl") }

func (o *onlineServer) outside(probe Probe) (Verdict, string) {
	if o.harmed != "" {
		return Escaped, o.harmed
	}
	if why := o.stored(o.Data); why != "" {
		return Escaped, why
	}
	return o.judgement(probe, func() []byte {
		log, _ := os.ReadFile(o.log())
		return log[min(int(o.read), len(log)):]
	})
}
