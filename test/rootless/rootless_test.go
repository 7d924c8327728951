// Package rootless uses Berm as an ordinary user of a host does: with the command line
// alone, without any right that the user's account does not have.
package rootless

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/drivertest"
	"github.com/berm-sandbox/berm/internal/kernel/notify"
	"github.com/berm-sandbox/berm/test/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }

const (
	userID      = 1_987_655 // no account has it
	subordinate = 0x51000000
	key         = "e2b_0123456789abcdef0123456789abcdef01234567"
)

// A user with subordinate ids, one without, and one with control groups, as a session
// of systemd's has them.
func TestOrdinaryUser(t *testing.T) {
	harness.Slow(t)
	t.Run("SubordinateIDs", func(t *testing.T) {
		if _, err := exec.LookPath("newuidmap"); err != nil {
			t.Skip("newuidmap is not installed (package uidmap)")
		}
		use(newUser(t, fmt.Sprintf("laptop:%d:%d\n", subordinate, berm.IDsPerSandbox)))
	})
	t.Run("SingleID", func(t *testing.T) { use(newUser(t, "")) })
	t.Run("DelegatedGroups", func(t *testing.T) {
		u := newUser(t, "")
		u.delegate()
		unlimited := use(u)
		for _, limit := range []string{"memory", "cpu", "pids"} {
			if why, missing := unlimited[limit]; missing && u.cgroups > 1 { // version 1
				t.Errorf("limit %s: %s", limit, why)
			}
		}
	})
}

// user is an ordinary user at work.
type user struct {
	t    *testing.T
	home string
	ids  string
	url  string
	// unified is the user's group of version 2, into which processes are started, and
	// cgroups counts the hierarchies with a group.
	unified *os.File
	cgroups int
	cmd     *exec.Cmd
	done    chan struct{}
}

func newUser(t *testing.T, ids string) *user {
	t.Helper()
	home, err := os.MkdirTemp("", "berm-rootless-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(home) })
	// The tables of the system are covered for this thread and its children alone. It is
	// never unlocked, so it ends with the test.
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		t.Fatal(err)
	}
	for path, content := range map[string]string{
		"/etc/passwd": fmt.Sprintf("root:x:0:0::/root:/bin/sh\nlaptop:x:%d:%[1]d::%s:/bin/sh\n", userID, home),
		"/etc/group":  fmt.Sprintf("root:x:0:\nlaptop:x:%d:\n", userID),
		"/etc/subuid": ids, "/etc/subgid": ids,
	} {
		file := filepath.Join(t.TempDir(), "table")
		if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount(file, path, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
	}
	// Distributions let everybody open this device.
	tun := filepath.Join(t.TempDir(), "tun")
	err = unix.Mknod(tun, unix.S_IFCHR, int(unix.Mkdev(10, 200)))
	if err == nil {
		err = os.Chmod(tun, 0o666)
	}
	if err == nil {
		err = unix.Mount(tun, "/dev/net/tun", "", unix.MS_BIND, "")
	}
	if err != nil {
		t.Fatal(err)
	}
	// The tree of the project may lie where this user cannot look.
	binary, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	for _, program := range []string{binary, filepath.Join(filepath.Dir(binary), "runsc")} { // which `make build runsc` makes
		content, err := os.ReadFile(program)
		if err == nil {
			err = os.WriteFile(filepath.Join(home, filepath.Base(program)), content, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	err = os.Chown(home, userID, userID)
	if err != nil {
		t.Fatal(err)
	}
	return &user{t: t, home: home, ids: ids}
}

// delegate gives the user a control group in each hierarchy and starts all later
// commands there.
func (u *user) delegate() {
	for _, own := range harness.Cgroups() {
		if _, err := os.Stat(filepath.Join(own, "cpuset.cpus")); err == nil || strings.Contains(own, "/systemd") {
			continue // groups of cpusets take no process before they have processors
		}
		dir := filepath.Join(own, "laptop")
		if err := os.Mkdir(dir, 0o755); err != nil {
			u.t.Fatal(err)
		}
		u.t.Cleanup(func() {
			_ = os.WriteFile(filepath.Join(own, "tasks"), []byte(fmt.Sprint(unix.Gettid())), 0)
			for _, group := range []string{"berm-host", "berm", ""} {
				_ = os.Remove(filepath.Join(dir, group))
			}
			if _, err := os.Stat(dir); err == nil {
				u.t.Errorf("%s is left", dir)
			}
		})
		for _, file := range []string{"", "cgroup.procs", "tasks", "cgroup.threads", "cgroup.subtree_control"} {
			if err := os.Chown(filepath.Join(dir, file), userID, userID); err != nil && !os.IsNotExist(err) {
				u.t.Fatal(err)
			}
		}
		u.cgroups++
		if _, err := os.Stat(filepath.Join(dir, "tasks")); err == nil { // version 1: threads, and what they start
			if err := os.WriteFile(filepath.Join(dir, "tasks"), []byte(fmt.Sprint(unix.Gettid())), 0); err != nil {
				u.t.Fatal(err)
			}
			continue
		}
		var err error
		if u.unified, err = os.Open(dir); err != nil {
			u.t.Fatal(err)
		}
		u.t.Cleanup(func() { _ = u.unified.Close() })
	}
}

func (u *user) command(args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(u.home, "berm"), args...)
	cmd.Dir = u.home
	cmd.Env = []string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=" + u.home, "TMPDIR=" + u.home, "BERM_URL=" + u.url, "BERM_API_KEY=" + key, "BERM_BOOTSTRAP_KEY=" + key}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: userID, Gid: userID}}
	if u.unified != nil {
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(u.unified.Fd())
	}
	return cmd
}

// try runs a command and returns what it printed.
func (u *user) try(args ...string) (stdout, stderr string, err error) {
	u.t.Helper()
	cmd := u.command(args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	cmd.WaitDelay = time.Second
	if err := cmd.Start(); err != nil { // not by a context: this thread has to start it
		u.t.Fatal(err)
	}
	patience := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() })
	defer patience.Stop()
	err = cmd.Wait()
	return strings.TrimSpace(out.String()), strings.TrimSpace(errs.String()), err
}

// berm runs a command that must succeed.
func (u *user) berm(args ...string) string {
	u.t.Helper()
	stdout, stderr, err := u.try(args...)
	if err != nil {
		u.t.Fatalf("berm %s: %v\n%s\n%s", strings.Join(args, " "), err, stdout, stderr)
	}
	return stdout
}

// refused runs a command that must fail, with an error that has text in it and a hint.
func (u *user) refused(text string, args ...string) {
	u.t.Helper()
	stdout, stderr, err := u.try(args...)
	if err == nil || !strings.Contains(stderr, text) || !strings.Contains(stderr, "\nhint: ") {
		u.t.Errorf("berm %s: %v\n%s\n%s", strings.Join(args, " "), err, stdout, stderr)
	}
}

var served = regexp.MustCompile(`serves at (http://\S+)`)

// serve starts the server and returns what it printed when it answers.
func (u *user) serve(args ...string) string {
	u.t.Helper()
	file, err := os.CreateTemp(u.home, "serve-")
	if err != nil {
		u.t.Fatal(err)
	}
	defer file.Close()
	u.cmd = u.command(append([]string{"serve", "--listen", "127.0.0.1:0"}, args...)...)
	u.cmd.Stdout, u.cmd.Stderr = file, file
	if err := u.cmd.Start(); err != nil {
		u.t.Fatal(err)
	}
	u.done = make(chan struct{})
	go func(cmd *exec.Cmd, done chan struct{}) {
		_ = cmd.Wait()
		close(done)
	}(u.cmd, u.done)
	u.t.Cleanup(u.end)
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		text, err := os.ReadFile(file.Name())
		if err != nil {
			u.t.Fatal(err)
		}
		if found := served.FindSubmatch(text); found != nil {
			u.url = string(found[1])
			return string(text)
		}
		select {
		case <-u.done:
			u.t.Fatalf("the server ended:\n%s", text)
		default:
		}
		if time.Now().After(end) {
			u.t.Fatalf("the server does not serve:\n%s", text)
		}
	}
}

// end is SIGKILL for the server.
func (u *user) end() {
	_ = u.cmd.Process.Kill()
	<-u.done
}

// image writes a small image. With one id, every file must be root's.
func (u *user) image(single bool) string {
	u.t.Helper()
	root := drivertest.Root(u.t, u.t.TempDir(), 0)
	if !single {
		if err := os.Chown(filepath.Join(root, "home/user"), 1000, 1000); err != nil {
			u.t.Fatal(err)
		}
	}
	path := filepath.Join(u.home, "box.tar")
	if err := harness.WriteImage(root, path); err != nil {
		u.t.Fatal(err)
	}
	return path
}

// flags of `berm create` for limits that templates have by default.
var flags = map[string][]string{"memory": {"--memory", "128MiB"}, "cpu": {"--cpus", "1"}, "pids": {"--pids", "100"}, "disk": {"--disk", "32MiB"}}

// recorded looks for the records of what recorded's caller executed: few can be lost, with the
// server that had not read them yet.
func recorded(u *user, id string) {
	u.t.Helper()
	if err := notify.Check(); err != nil {
		u.t.Log(err)
		return
	}
	wait(u.t, func() string {
		n, ends := map[string]bool{}, 0
		for line := range strings.Lines(u.berm("audit", "--sandbox", id, "--type", "proc", "--json")) {
			var r struct {
				Type, Src, Trust string
				Data             struct {
					Argv   []string
					Exe    string
					SHA256 string
					PID    int
					PPID   int
				}
			}
			if err := json.Unmarshal([]byte(line), &r); err != nil || r.Src != "seccomp" || r.Trust != "host" {
				u.t.Errorf("%v: %s", err, line)
			}
			if r.Type == "proc.exit" {
				ends++
			}
			if d := r.Data; len(d.Argv) == 3 && strings.HasPrefix(d.Argv[2], "gone-") && d.Exe == "/bin/busybox" && d.PID > 1 && d.PPID > 1 {
				n[d.Argv[2]] = true
			}
		}
		if len(n) < 90 || ends < 90 {
			return fmt.Sprintf("%d of 100 executions are recorded, and %d ends", len(n), ends)
		}
		return ""
	})
}

// use is the user's day. It returns which limits could not be had.
func use(u *user) (unlimited map[string]string) {
	t := u.t
	before := harness.Look(nil)
	single := u.ids == ""

	var probes []berm.Probe
	if err := json.Unmarshal([]byte(u.berm("doctor", "--json")), &probes); err != nil {
		t.Fatal(err)
	}
	if len(probes) != 2 || probes[0].Level != berm.Namespace || probes[1].Level != berm.GVisor || probes[1].Usable == single {
		t.Fatalf("levels of an ordinary user: %+v", probes)
	}
	unlimited = probes[0].Unlimited
	freezer := false
	for _, f := range probes[0].Features {
		freezer = freezer || f.Found && f.Name == "control group freezer"
	}
	t.Logf("not enforced here: %v; freezer: %v", unlimited, freezer)

	u.berm("template", "import", u.image(single), "--name", "box")
	log := u.serve()
	for limit := range flags {
		if _, missing := unlimited[limit]; missing != strings.Contains(log, "limit="+limit+" ") {
			t.Errorf("limit %s is missing: %v; the server said\n%s", limit, missing, log)
		}
	}
	if single {
		u.refused("could not be built", "create")
	}

	// What the template asks for and the host cannot give is told, and in force is the rest.
	var made struct {
		ID   string `json:"sandboxID"`
		Berm struct{ Degraded []string }
	}
	if err := json.Unmarshal([]byte(u.berm("create", "--json", "box")), &made); err != nil {
		t.Fatal(err)
	}
	told := strings.Join(made.Berm.Degraded, "\n")
	inspected := u.berm("inspect", "--json", made.ID)
	for limit := range flags {
		_, missing := unlimited[limit]
		if said := strings.Contains(told, "limit "+limit+" of "); said != missing {
			t.Errorf("limit %s is missing: %v; the answer said %q", limit, missing, told)
		}
		if said := strings.Contains(inspected, "limit "+limit+" of "); said != missing {
			t.Errorf("limit %s is missing: %v; the policy said %s", limit, missing, inspected)
		}
	}
	if said := strings.Contains(told, "the only user id inside is 0"); said != single {
		t.Errorf("a single id: %v; the answer said %q", single, told)
	}
	if _, stderr, err := u.try("create", "--timeout", "1s", "box"); err != nil || !strings.Contains(stderr, "warning: ") {
		t.Errorf("%v, %q", err, stderr)
	}

	// What a user asks for is in force or refused.
	for limit, args := range flags {
		args = append(append([]string{"create"}, args...), "box")
		if _, missing := unlimited[limit]; missing {
			u.refused("limit "+limit+" cannot be enforced", args...)
			continue
		}
		id := u.berm(args...)
		if limit == "disk" {
			if out, _, err := u.try("exec", id, "--", "sh", "-c", "dd if=/dev/zero of=/tmp/big bs=1M count=64 2>&1"); err == nil || !strings.Contains(out, "No space left") {
				t.Errorf("64 MiB on a disk of 32: %v, %s", err, out)
			}
		}
		u.berm("kill", id)
	}
	if !freezer {
		u.refused("pause", "create", "--auto-pause", "box")
	}

	// The work.
	if out := u.berm("exec", made.ID, "--", "sh", "-c", "id -u; cat /proc/1/comm; echo kept >/tmp/kept"); out != "0\ninit" {
		t.Errorf("inside: %q", out)
	}
	if !single {
		if out := u.berm("exec", "--user", "user", made.ID, "--", "sh", "-c", "id -u; touch ~/mine; stat -c %u ~/mine"); out != "1000\n1000" {
			t.Errorf("as user: %q", out)
		}
	}
	var samples []struct{ MemUsed, MemTotal int64 }
	if err := json.Unmarshal([]byte("["+strings.ReplaceAll(u.berm("metrics", "--json", made.ID), "\n", ",")+"]"), &samples); err != nil || len(samples) == 0 || samples[0].MemUsed < 1<<20 || samples[0].MemUsed > samples[0].MemTotal {
		t.Errorf("metrics: %+v, %v", samples, err)
	}
	note := filepath.Join(u.home, "note")
	if err := os.WriteFile(note, []byte("there and back"), 0o644); err != nil {
		t.Fatal(err)
	}
	u.berm("cp", note, made.ID+":/tmp/note")
	u.berm("cp", made.ID+":/tmp/note", filepath.Join(u.home, "back"))
	if back, err := os.ReadFile(filepath.Join(u.home, "back")); err != nil || string(back) != "there and back" {
		t.Errorf("%q, %v", back, err)
	}
	if freezer {
		u.berm("pause", made.ID)
		u.berm("resume", made.ID)
	} else if _, stderr, err := u.try("pause", made.ID); err == nil || !strings.Contains(stderr, "freez") {
		t.Errorf("pause: %v, %s", err, stderr)
	}

	// What looks into requests is trusted inside, and holds what the sandbox does not.
	const secret = "CANARY-secret-of-an-ordinary-user"
	store := u.command("secret", "set", "token")
	store.Stdin = strings.NewReader(secret + "\n")
	if out, err := store.CombinedOutput(); err != nil {
		t.Fatalf("berm secret set: %v\n%s", err, out)
	}
	looked := u.berm("create", "--cred", "api=secret:token,host=api.example.com,env=API_TOKEN", "box")
	looked = looked[strings.LastIndexByte(looked, '\n')+1:]
	if out := u.berm("exec", looked, "--", "sh", "-c", "echo $API_TOKEN; grep -c BEGIN $SSL_CERT_FILE"); !regexp.MustCompile(`^berm[a-z0-9]+\n1$`).MatchString(out) {
		t.Errorf("a placeholder and an authority: %q", out)
	}
	for _, pid := range harness.Processes("berm\x00egressd") {
		if has, err := harness.Holds(pid, secret); has || err != nil {
			t.Errorf("the network service has the secret: %v, %v", has, err)
		}
	}
	u.berm("kill", looked)

	// What leaves goes through the network service, which denies and tells.
	denied := func() {
		t.Helper()
		if out, _, err := u.try("exec", made.ID, "--", "sh", "-c", "echo | nc -w 3 169.254.169.254 80"); err == nil {
			t.Errorf("metadata: %q", out)
		}
		wait(t, func() string {
			log := u.berm("net", "log", "--json", made.ID)
			if strings.Contains(log, `"reason":"metadata"`) {
				return ""
			}
			return "no denial in " + log
		})
	}
	denied()

	if single {
		u.refused("no subordinate ids", "template", "build", u.dockerfile("FROM box"), "--name", "app")
		u.refused("the only user id inside is 0", "create", "--level", "gvisor", "box")
	} else {
		builds(u)
		gvisor(u)
	}

	// The server dies, and the next one requires limits. What runs inside goes on meanwhile, and is
	// kept for the next one.
	const script = `setsid sh -c 'i=0; while [ $i -lt 100 ]; do /bin/busybox true gone-$i; sleep 0.02; i=$((i+1)); done; echo >/tmp/went' >/dev/null 2>&1 &`
	u.berm("exec", made.ID, "--", "sh", "-c", script)
	u.end()
	time.Sleep(time.Second)
	u.serve("--require-limits")
	denied()
	wait(t, func() string {
		if _, _, err := u.try("exec", made.ID, "--", "cat", "/tmp/went"); err != nil {
			return "what ran inside did not go on without the server"
		}
		return ""
	})
	recorded(u, made.ID)
	if out := u.berm("exec", made.ID, "--", "cat", "/tmp/kept"); out != "kept" {
		t.Errorf("after the crash: %q", out)
	}
	if slices.ContainsFunc(slices.Collect(maps.Keys(flags)), func(limit string) bool { return unlimited[limit] != "" }) {
		u.refused("cannot be enforced", "create", "box")
	}

	// Nothing is left.
	u.berm("kill", made.ID)
	wait(t, func() string { return u.berm("ls", "--quiet") })
	wait(t, func() string {
		dirs, err := filepath.Glob(filepath.Join(u.home, ".local/share/berm/sandboxes/*"))
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(dirs, " ")
	})
	u.end()
	left := slices.DeleteFunc(before.Settle(nil, 30*time.Second), func(what string) bool {
		return strings.HasSuffix(strings.TrimSpace(what), "/laptop/berm") // the parent of sandboxes' groups stays
	})
	if len(left) > 0 {
		t.Errorf("left behind:\n%s", strings.Join(left, "\n"))
	}
	u.berm("template", "rm", "--local", "box")
	if layers, err := filepath.Glob(filepath.Join(u.home, ".cache/berm/templates/layers/*")); err != nil || len(layers) > 0 {
		t.Errorf("layers left: %v, %v", layers, err)
	}
	return unlimited
}

// dockerfile writes one into a directory with a file "data".
func (u *user) dockerfile(text string) (dir string) {
	u.t.Helper()
	dir = filepath.Join(u.home, "context")
	err := os.MkdirAll(dir, 0o755)
	for name, content := range map[string]string{"Dockerfile": text, "data": "copied"} {
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644)
		}
	}
	if err != nil {
		u.t.Fatal(err)
	}
	return dir
}

// builds has the server build a template, whose layers hold files of several owners that neither this
// user nor the others inside may read, and hide some of those below.
func builds(u *user) {
	u.t.Helper()
	dir := u.dockerfile(`FROM box
RUN mkdir /kept /gone && echo below >/gone/file && echo secret >/kept/mine && chmod 0600 /kept/mine && chown user:user /kept/mine && chmod 0 /kept
RUN rm -r /gone && mkdir /gone && (sleep 1000 </dev/null >/dev/null 2>&1 &) && ln /kept/mine /kept/linked
COPY --chown=user:user data /srv/data
`)
	u.berm("template", "build", dir, "--name", "app")
	_, progress, err := u.try("template", "build", dir, "--name", "app")
	if err != nil || strings.Count(progress, "(cached)") != 3 {
		u.t.Errorf("again: %v\n%s", err, progress)
	}
	id := u.berm("create", "app")
	const look = `stat -c '%n %a %u' /kept /kept/mine /srv/data /bin/sh; stat -c %h /kept/mine; cat /kept/mine /srv/data; ls -A /gone | wc -l`
	if out := u.berm("exec", "--user", "root", id, "--", "sh", "-c", look); out != "/kept 0 0\n/kept/mine 600 1000\n/srv/data 644 1000\n/bin/sh 777 0\n2\nsecret\ncopied0" {
		u.t.Errorf("built: %q", out)
	}
	u.berm("kill", id)
	u.berm("template", "rm", "app")
}

// gvisor has a sandbox on a kernel of its own do what one on the host's does.
func gvisor(u *user) {
	u.t.Helper()
	id := u.berm("create", "--level", "gvisor", "--pids", "50", "box")
	id = id[strings.LastIndexByte(id, '\n')+1:]
	sh := func(user, script string) string {
		u.t.Helper()
		return u.berm("exec", "--user", user, id, "--", "sh", "-c", script)
	}
	if out := sh("root", "dmesg | grep -c gVisor; id -u; echo root >/kept; chown 1000:1000 /kept; cat /proc/1/comm"); out != "1\n0\ninit" {
		u.t.Errorf("as root: %q", out)
	}
	if out := sh("user", "id -u; stat -c %u /kept; echo mine >/kept; ls /dev/berm"); out != "1000\n1000\nberm-guest\nberm-init" {
		u.t.Errorf("as user: %q", out)
	}
	if out := sh("root", "(for i in $(seq 90); do sleep 30 >/dev/null </dev/null & done) 2>&1; killall sleep"); !strings.Contains(out, "fork") {
		u.t.Errorf("more than 50 processes: %q", out)
	}
	sh("user", "echo | nc -w 3 169.254.169.254 80 || true")
	wait(u.t, func() string {
		if log := u.berm("net", "log", "--json", id); !strings.Contains(log, `"reason":"metadata"`) {
			return "no denial in " + log
		}
		return ""
	})
	wait(u.t, func() string {
		if log := u.berm("audit", "--sandbox", id, "--type", "proc", "--json"); !strings.Contains(log, `"src":"gvisor"`) {
			return "nothing that ran is recorded: " + log
		}
		return ""
	})
	// gVisor stops what it runs by itself.
	u.berm("pause", id)
	u.berm("resume", id)
	u.refused("need a server of root", "snapshot", id)
	if out := sh("root", "cat /kept"); out != "mine" {
		u.t.Errorf("after a pause: %q", out)
	}
	u.end()
	u.serve()
	if out := sh("root", "cat /kept"); out != "mine" {
		u.t.Errorf("after the death of the server: %q", out)
	}
	u.berm("kill", id)
}

// wait returns when nothing is left.
func wait(t *testing.T, left func() string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for left() != "" {
		if ctx.Err() != nil {
			t.Fatalf("left: %s", left())
		}
		time.Sleep(20 * time.Millisecond)
	}
}
