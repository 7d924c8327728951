// Package packages lets package managers fetch through a policy that names exactly the hosts
// that each needs, from registries that the test makes.
package packages

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
	"github.com/berm-sandbox/berm/test/internet"
)

func TestMain(m *testing.M) { harness.Main(m) }

// manager is a package manager, and how it gets the package tiny.
type manager struct {
	name    string
	program string   // must be there
	hosts   []string // that it needs
	files   map[string]string
	script  string // prints 42, which is in the package
	// credential is the argument of --cred with which its registry lets it in, without SOURCE.
	credential string
	// granted is the same for a sandbox of a server.
	granted map[string]any
	// posts says that it does not only read.
	posts bool
}

var managers = []manager{
	{
		name: "pip", program: "python3", hosts: []string{"pypi.org", "files.pythonhosted.org"},
		script:     `python3 -m pip install -q --root-user-action=ignore --target out tiny && PYTHONPATH=out python3 -c 'import tiny; print(tiny.answer)'`,
		credential: "pypi=%s", granted: map[string]any{"service": "pypi"},
	},
	{
		name: "npm", program: "npm", hosts: []string{"registry.npmjs.org"}, files: map[string]string{"package.json": `{"name":"x","version":"1.0.0"}`},
		script:     `npm install tiny >&2 && node -e 'console.log(require("tiny"))'`,
		credential: "npm=%s", granted: map[string]any{"service": "npm"},
	},
	{
		name: "go", program: "go", hosts: []string{"proxy.golang.org", "sum.golang.org"}, files: map[string]string{"go.mod": "module x\n\ngo 1.21\n\nrequire example.com/tiny v1.0.0\n"},
		script:     `GOTOOLCHAIN=local GOFLAGS=-mod=mod go mod download example.com/tiny && grep -o 42 $(GOTOOLCHAIN=local go env GOMODCACHE)/example.com/tiny@v1.0.0/tiny.go`,
		credential: "goproxy=%s",
	},
	{
		name: "cargo", program: "cargo", hosts: []string{"index.crates.io", "static.crates.io"},
		files:      map[string]string{"Cargo.toml": "[package]\nname = \"x\"\nversion = \"1.0.0\"\nedition = \"2021\"\n[dependencies]\ntiny = \"1\"\n", "src/lib.rs": ""},
		script:     `cargo fetch && grep -oh 42 ${CARGO_HOME:-$HOME/.cargo}/registry/src/*/tiny-1.0.0/src/lib.rs`,
		credential: "crates=%s,host=index.crates.io,header=Authorization",
	},
	{
		name: "git", program: "git", hosts: []string{"github.com"}, posts: true,
		script:     `git clone -q https://github.com/org/tiny.git out && cat out/answer`,
		credential: "github=%s,repo=org/tiny", granted: map[string]any{"service": "github", "repositories": []string{"org/tiny"}},
	},
}

// bench is where they are tried: a project of one user.
type bench struct {
	*registries
	t       *testing.T
	uid     int
	berm    string
	project string
	environ []string
	flags   []string // of every run
	rust    string   // where Rust is, or nothing
}

func newBench(t *testing.T, r *registries, uid int) *bench {
	t.Helper()
	dir, err := os.MkdirTemp("", "berm-packages-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	b := &bench{registries: r, t: t, uid: uid, berm: filepath.Join(dir, "berm"), project: filepath.Join(dir, "project")}
	if root, err := exec.Command("rustc", "--print", "sysroot").Output(); err == nil {
		b.rust = strings.TrimSpace(string(root))
	}
	binary, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(binary)
	if err == nil {
		err = errors.Join(os.WriteFile(b.berm, program, 0o755), os.Mkdir(b.project, 0o755), os.Mkdir(dir+"/home", 0o755),
			os.Chmod(dir, 0o755))
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{b.project, dir + "/home"} {
		if err := os.Chown(path, uid, uid); err != nil {
			t.Fatal(err)
		}
	}
	b.environ = []string{"HOME=" + dir + "/home", "PATH=" + b.path(), "LANG=C.UTF-8", "TERM=xterm", "REGISTRY_SECRET=" + r.secret}
	if b.rust != "" && b.has("cargo") {
		b.flags = append(b.flags, "--ro", b.rust)
	}
	// Those that have authorities of their own; and nobody tries again for minutes.
	for _, variable := range []string{"PIP_CERT=" + internet.Bundle, "NODE_EXTRA_CA_CERTS=" + internet.Bundle, "PIP_RETRIES=0", "npm_config_fetch_retries=0", "CARGO_NET_RETRY=0"} {
		b.flags = append(b.flags, "--env", variable)
	}
	return b
}

// path is a PATH with the programs that the user can execute.
func (b *bench) path() string {
	path := []string{"/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"}
	var programs []string
	for _, name := range []string{"go", "npm"} {
		if found, err := exec.LookPath(name); err == nil {
			programs = append(programs, found)
		}
	}
	if b.rust != "" { // not the one that chooses a version by what is in home
		programs = append(programs, filepath.Join(b.rust, "bin", "cargo"))
	}
	for _, found := range programs {
		if (b.uid == 0 || !strings.HasPrefix(found, "/root/")) && !slices.Contains(path, filepath.Dir(found)) {
			path = append(path, filepath.Dir(found))
		}
	}
	return strings.Join(path, ":")
}

// has says whether the user has a program.
func (b *bench) has(program string) bool {
	for dir := range strings.SplitSeq(b.path(), ":") {
		if info, err := os.Stat(filepath.Join(dir, program)); err == nil && info.Mode().IsRegular() {
			return true
		}
	}
	return false
}

// outcome is what came of a run.
type outcome struct {
	stdout, stderr string
	err            error
	took           time.Duration
	reached        []string // hosts that got packets
}

func (o outcome) String() string {
	return fmt.Sprintf("%v after %v, reached %q\n%s%s", o.err, o.took.Round(time.Millisecond), o.reached, o.stdout, o.stderr)
}

// install lets a manager do what it does, with flags for berm run.
func (b *bench) install(t *testing.T, m manager, flags ...string) outcome {
	t.Helper()
	for name, content := range m.files {
		path := filepath.Join(b.project, name)
		err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o644), os.Chown(path, b.uid, b.uid), os.Chown(filepath.Dir(path), b.uid, b.uid))
		if err != nil {
			t.Fatal(err)
		}
	}
	defer func() {
		for name := range m.files {
			os.RemoveAll(filepath.Join(b.project, strings.Split(name, "/")[0]))
		}
	}()
	b.Packets()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if m.name == "go" {
		flags = append(slices.Clone(flags), "--env", "GOSUMDB="+b.sums)
	}
	cmd := exec.CommandContext(ctx, b.berm, slices.Concat([]string{"run"}, b.flags, flags, []string{"--", "sh", "-c", m.script})...)
	cmd.Dir, cmd.Env, cmd.WaitDelay = b.project, b.environ, 5*time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(b.uid), Gid: uint32(b.uid)}}
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	start := time.Now()
	err := cmd.Run()
	o := outcome{stdout: stdout.String(), stderr: stderr.String(), err: err, took: time.Since(start), reached: b.reached()}
	// What the run changed is not kept.
	discard := exec.Command(b.berm, "discard", "--all")
	discard.Dir, discard.Env, discard.SysProcAttr = b.project, b.environ, cmd.SysProcAttr
	if out, err := discard.CombinedOutput(); err != nil {
		t.Errorf("discard: %v: %s", err, out)
	}
	return o
}

// reached lists the hosts that got packets since the last time.
func (r *registries) reached() []string {
	time.Sleep(20 * time.Millisecond)
	found := map[string]bool{}
	for packet := range r.Packets() {
		if packet.Port == 53 {
			continue
		}
		name := packet.String()
		for host, address := range hosts {
			if packet.To.String() == address {
				name = host
			}
		}
		found[name] = true
	}
	return slices.Sorted(maps.Keys(found))
}

// check fails the test unless the package was installed from just these hosts.
func (o outcome) installed(t *testing.T, m manager) {
	t.Helper()
	if o.err != nil || strings.TrimSpace(o.stdout) != "42" {
		t.Errorf("not installed: %v", o)
	}
	if want := slices.Sorted(slices.Values(m.hosts)); !slices.Equal(o.reached, want) {
		t.Errorf("reached %q, wants %q", o.reached, want)
	}
}

func allow(hosts ...string) (flags []string) {
	for _, host := range hosts {
		flags = append(flags, "--allow", host)
	}
	return flags
}

// document is a policy that looks into what a manager asks.
func (m manager) document() string {
	methods := `["GET", "HEAD"]`
	if m.posts {
		methods = `["GET", "POST"]`
	}
	var rules []string
	for _, host := range m.hosts {
		rules = append(rules, fmt.Sprintf(`{"to": [%q], "http": {"allow": [{"methods": %s}]}}`, host, methods))
	}
	return `{"version": 1, "rules": [` + strings.Join(rules, ", ") + "]}" // which is YAML too
}

func TestLocal(t *testing.T) {
	harness.Slow(t)
	r := newRegistries(t)
	for name, uid := range map[string]int{"root": 0, "user": 1_987_658} {
		b := newBench(t, r, uid)
		for _, m := range managers {
			t.Run(name+"/"+m.name, func(t *testing.T) {
				if !b.has(m.program) {
					t.Skipf("missing: %s, for this user", m.program)
				}
				if b.uid == 0 {
					b.try(t, m)
				} else {
					b.install(t, m, allow(m.hosts...)...).installed(t, m)
				}
			})
		}
	}
}

func (b *bench) try(t *testing.T, m manager) {
	t.Run("allowed", func(t *testing.T) {
		b.install(t, m, allow(m.hosts...)...).installed(t, m)
	})
	// Each host that is left out is what berm and the manager tell.
	for _, without := range m.hosts {
		t.Run("without "+without, func(t *testing.T) {
			rest := slices.DeleteFunc(slices.Clone(m.hosts), func(h string) bool { return h == without })
			o := b.install(t, m, allow(append(rest, "unrelated.test")...)...)
			if o.err == nil || slices.Contains(o.reached, without) {
				t.Errorf("%v", o)
			}
			if want := "denied: " + without + " (not_listed); --allow " + without; !strings.Contains(o.stderr, want) {
				t.Errorf("not %q: %v", want, o)
			}
		})
	}
	t.Run("inspected", func(t *testing.T) {
		policy := filepath.Join(b.project, "..", "net.yaml")
		if err := os.WriteFile(policy, []byte(m.document()), 0o644); err != nil {
			t.Fatal(err)
		}
		b.install(t, m, "--policy", policy).installed(t, m)
	})
	t.Run("private", func(t *testing.T) {
		b.private.Store(true)
		defer b.private.Store(false)
		if o := b.install(t, m, allow(m.hosts...)...); o.err == nil {
			t.Errorf("the registry lets everybody in: %v", o)
		}
		o := b.install(t, m, slices.Concat(allow(m.hosts...), []string{"--cred", fmt.Sprintf(m.credential, "env:REGISTRY_SECRET")})...)
		o.installed(t, m)
		if strings.Contains(o.stdout+o.stderr, b.secret) {
			t.Errorf("the secret is told: %v", o)
		}
	})
}

// debian is what a sandbox of a server has beside: a root of its own.
var debian = manager{
	name: "apt", hosts: []string{"deb.debian.org"},
	script: `rm -rf /etc/apt/sources.list.d && echo 'deb [trusted=yes] http://deb.debian.org/debian stable main' >/etc/apt/sources.list &&
apt-get update -q >&2 && apt-get install -yq tiny >&2 && cat /etc/tiny`,
}

func TestServer(t *testing.T) {
	harness.Slow(t)
	r := newRegistries(t)
	s := harness.Serve(t)
	if err := s.Call(t.Context(), "POST", "/secrets", map[string]any{"name": "registry", "value": r.secret}, nil); err != nil {
		t.Fatal(err)
	}
	for _, m := range append(slices.Clone(managers), debian) {
		if m.name == "go" || m.name == "cargo" { // base has neither
			continue
		}
		t.Run(m.name, func(t *testing.T) {
			r.inside(t, s, m, reach(m.hosts...), "").installed(t, m)
			// The last one is what the first leads to.
			without := m.hosts[len(m.hosts)-1]
			o := r.inside(t, s, m, reach(append(slices.Clone(m.hosts[:len(m.hosts)-1]), "unrelated.test")...), "")
			if o.err == nil || slices.Contains(o.reached, without) {
				t.Errorf("without %s: %v", without, o)
			}
			// Looked into, programs trust the service by what the guest agent tells them.
			looked := m
			looked.script = strings.ReplaceAll(m.script, "http://", "https://")
			r.inside(t, s, looked, nil, m.document()).installed(t, m)
			if m.granted == nil {
				return
			}
			r.private.Store(true)
			defer r.private.Store(false)
			if o := r.inside(t, s, m, reach(m.hosts...), ""); o.err == nil {
				t.Errorf("the registry lets everybody in: %v", o)
			}
			m.granted["name"], m.granted["secret"] = m.name, "secret:registry"
			o = r.inside(t, s, m, map[string]any{"berm": map[string]any{"credentials": []any{m.granted}}}, m.document())
			o.installed(t, m)
			if strings.Contains(o.stdout+o.stderr, r.secret) {
				t.Errorf("the secret is told: %v", o)
			}
		})
	}
}

// reach is what a create says to reach hosts alone.
func reach(hosts ...string) map[string]any {
	return map[string]any{"network": map[string]any{"allowOut": hosts, "denyOut": []string{"0.0.0.0/0"}}}
}

// inside lets a manager do what it does in a sandbox that is made with these options and then
// gets a policy that looks into requests, or none.
func (r *registries) inside(t *testing.T, s *harness.Server, m manager, options map[string]any, policy string) outcome {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	sandbox, err := s.Create(ctx, time.Minute, options)
	if err != nil {
		t.Fatal(err)
	}
	if policy != "" {
		if err := s.Call(ctx, "PUT", "/berm/v1/sandboxes/"+sandbox.ID+"/network", json.RawMessage(policy), nil); err != nil {
			t.Fatal(err)
		}
	}
	defer func() {
		if err := sandbox.Kill(ctx); err != nil {
			t.Error(err)
		}
	}()
	user, dir := "user", "/home/user/"
	if m.name == debian.name {
		user, dir = "root", "/root/"
	}
	authority := dir + "authority.pem"
	if err := sandbox.Write(ctx, user, authority, bytes.NewReader(r.Authority.PEM)); err != nil {
		t.Fatal(err)
	}
	for name, content := range m.files {
		if err := sandbox.Write(ctx, user, dir+name, strings.NewReader(content)); err != nil {
			t.Fatal(err)
		}
	}
	r.Packets()
	command := harness.Shell(user, "cd "+dir+" && "+m.script)
	command.Env = map[string]string{"PIP_RETRIES": "0", "npm_config_fetch_retries": "0"}
	if policy == "" {
		for _, name := range []string{"PIP_CERT", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO"} {
			command.Env[name] = authority
		}
	}
	start := time.Now()
	result, err := sandbox.Run(ctx, command)
	if err == nil && result.Code != 0 {
		err = errors.New(result.Status)
	}
	return outcome{stdout: result.Stdout, stderr: result.Stderr, err: err, took: time.Since(start), reached: r.reached()}
}
