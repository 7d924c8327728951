package builder

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/client"
	"github.com/berm-sandbox/berm/internal/control"
	"github.com/berm-sandbox/berm/internal/network/address"
	"github.com/berm-sandbox/berm/internal/template"
)

func TestSource(t *testing.T) {
	for src, want := range map[string]string{
		"folder/*": "folder", "a/b.txt": "a/b.txt", "**/*.go": ".", "*": ".", ".": ".", "./x/": "x", "a/{b,c}/d": "a", "../../etc/passwd": "etc/passwd", "/abs": "abs", "x[0-9]/y": ".",
	} {
		if got := source(src); got != want {
			t.Errorf("%q: %q, want %q", src, got, want)
		}
	}
}

func TestExpand(t *testing.T) {
	env := map[string]string{"A": "1", "LONG_NAME": "two"}
	for value, want := range map[string]string{
		"$A": "1", "${A}b": "1b", "$LONG_NAME": "two", "$LONG": "", `\$A`: "$A", "$(id)": "$(id)", "`id`": "`id`", "$": "$", "${": "${", "$1": "$1", "x${NONE}y": "xy", "$A$A": "11",
	} {
		if got := expand(value, env); got != want {
			t.Errorf("%q: %q, want %q", value, got, want)
		}
	}
}

// What two steps come to has one name only if they and all before them do the same.
func TestKeys(t *testing.T) {
	seen := map[string]string{}
	for _, s := range []Step{
		{Type: "RUN", Args: []string{"a", "b"}}, {Type: "RUN", Args: []string{"a b"}}, {Type: "RUN", Args: []string{"ab"}}, {Type: "COPY", Args: []string{"a", "b"}},
		{Type: "COPY", Args: []string{"a", "b"}, FilesHash: "x"}, {Type: "COPY", Args: []string{"a", "b", "x"}}, {Type: "RUN", Args: []string{"a\x00b"}}, {Type: "RUN", Args: []string{"a", "", "b"}},
	} {
		for _, before := range []string{"", "x"} {
			for _, from := range []string{"", "x"} {
				k := s.key(before, from)
				if other, ok := seen[k]; ok {
					t.Errorf("%+v after %q from %q has the key of %s", s, before, from, other)
				}
				seen[k] = fmt.Sprintf("%+v after %q from %q", s, before, from)
			}
		}
	}
}

// What clients think that a step may have.
func TestUploadLimit(t *testing.T) {
	if maxUpload != client.MaxUpload {
		t.Errorf("clients think %d, and it is %d", int64(client.MaxUpload), int64(maxUpload))
	}
}

func TestCheck(t *testing.T) {
	image := From{Image: "i"}
	run := Step{Type: "run", Args: []string{"x"}}
	copied := Step{Type: "COPY", Args: []string{"/a", "/b"}}
	copied.Berm.From = "a"
	shell := run
	shell.Berm.Shell, shell.Berm.Env = []string{"/bin/sh", "-c"}, map[string]string{"A": "1"}
	odd, env, user := copied, shell, Step{Type: "USER", Args: []string{"x"}}
	odd.Type = "ADD"
	env.Berm.Env = map[string]string{"A=": "1"}
	user.Berm.Shell = []string{"x"}
	stage := Stage{Name: "a", From: image, Steps: []Step{run}}
	for says, o := range map[string]Order{
		"":                       {From: From{Stage: "b"}, Stages: []Stage{stage, {Name: "b", From: From{Stage: "a"}, Steps: []Step{copied}}}, Steps: []Step{copied, shell}},
		"is needed":              {},
		"not more":               {From: From{Image: "i", Template: "t"}},
		"no stage \"b\" before":  {From: From{Stage: "b"}, Stages: []Stage{stage}},
		"step 1: there is no":    {From: image, Steps: []Step{copied}},
		"step 2: there is no":    {From: image, Stages: []Stage{{Name: "b", From: image, Steps: []Step{run, copied}}, stage}},
		"name of its own":        {From: image, Stages: []Stage{stage, stage}},
		"stage \"\": each":       {From: image, Stages: []Stage{{From: image}}},
		"copies from no stage":   {From: image, Stages: []Stage{stage}, Steps: []Step{odd}},
		"no name of a variable":  {From: image, Steps: []Step{env}},
		"has no shell":           {From: image, Steps: []Step{user}},
		"limited to 50 stages":   {From: image, Stages: make([]Stage, maxStages+1)},
		"limited to 500 steps":   {From: image, Stages: []Stage{{Name: "a", From: image, Steps: slices.Repeat([]Step{run}, maxSteps)}}, Steps: []Step{run}},
		"filesHash is no SHA-25": {From: image, Steps: []Step{{Type: "COPY", Args: []string{"a", "b"}}}},
	} {
		err := o.Check()
		if (err == nil) != (says == "") || err != nil && (berm.KindOf(err) != berm.Invalid || !strings.Contains(err.Error(), says)) {
			t.Errorf("%q: %v", says, err)
		}
	}
}

// A registry that a client names is not a way to what only the host reaches.
func TestOutside(t *testing.T) {
	for _, name := range []string{"http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"} {
		t.Setenv(name, "")
	}
	open := netip.MustParsePrefix("192.168.7.0/24")
	table, err := address.NewTable(address.Config{Open: []netip.Prefix{open}, Own: func(netip.Addr) bool { return false }})
	if err != nil {
		t.Fatal(err)
	}
	store, err := template.Open(filepath.Join(t.TempDir(), "templates"))
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{"127.0.0.1:5000", "[::1]:5000", "169.254.169.254", "10.0.0.1", "localhost:5000", "[::ffff:127.0.0.1]:5000"} {
		_, err := store.Image(t.Context(), host+"/image", template.ImportOptions{Transport: outside(table)}, nil)
		if err == nil || !strings.Contains(err.Error(), "a registry at a") {
			t.Errorf("%s: %v", host, err)
		}
	}
	// A mirror is where the operator has it, but does not open the way to its registry.
	nobody, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	host := nobody.Addr().String()
	nobody.Close()
	named, err := template.NewRegistries(map[string]template.RegistryConfig{"127.0.0.1:1": {Mirrors: []string{host}}})
	if err != nil {
		t.Fatal(err)
	}
	var said []string
	_, err = store.Image(t.Context(), "127.0.0.1:1/image", template.ImportOptions{Transport: outside(table), Registries: named}, func(s template.Step) { said = append(said, s.Message) })
	if err == nil || !strings.Contains(err.Error(), "a registry at a") || len(said) != 1 || !strings.Contains(said[0], "connection refused") {
		t.Errorf("a mirror that the operator names: %v, %q", err, said)
	}
}

// A build that fails at a base says in which stage.
func TestFailedStage(t *testing.T) {
	store, err := template.Open(filepath.Join(t.TempDir(), "templates"))
	if err != nil {
		t.Fatal(err)
	}
	missing := From{Template: "none"}
	for want, o := range map[string]Order{"a": {From: missing, Stages: []Stage{{Name: "a", From: missing}}}, "": {From: missing}} {
		r := &running{b: &Builder{Config: Config{Store: store}, turn: make(chan struct{}, 1)}, build: &build{}, order: o, made: map[string]template.Stage{}}
		if _, err := r.all(t.Context()); berm.KindOf(err) != berm.NotFound || r.name != want || r.step != stepBase {
			t.Errorf("stage %q, step %q, %v; want stage %q", r.name, r.step, err, want)
		}
	}
}

// entry is one thing of a tree, as a test compares it.
type entry struct {
	kind    byte
	mode    int64
	content string
	uid     int
}

// read takes a tree apart; whiteouts and opaque directories are entries of their own kind.
func read(t *testing.T, root string) map[string]entry {
	t.Helper()
	all := map[string]entry{}
	err := filepath.Walk(root, func(name string, info os.FileInfo, err error) error {
		if err != nil || name == root {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(name, &st); err != nil {
			return err
		}
		e := entry{kind: 'f', mode: int64(st.Mode & 0o7777), uid: int(st.Uid)}
		switch {
		case info.IsDir():
			e.kind = 'd'
			if n, err := unix.Lgetxattr(name, opaque, make([]byte, 8)); err == nil && n == 1 {
				e.content = "opaque"
			}
		case info.Mode()&os.ModeSymlink != 0:
			e.kind = 'l'
			e.content, _ = os.Readlink(name)
		case info.Mode()&os.ModeCharDevice != 0:
			e = entry{kind: 'w', content: "hides"}
		case info.Mode().IsRegular():
			b, err := os.ReadFile(name)
			if err != nil {
				return err
			}
			e.content = string(b)
		}
		all[strings.TrimPrefix(name, root+"/")] = e
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// Random trees of what a sandbox wrote are the same in the layer that is made of them.
func TestPackedTreesAreUnpackedAgain(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to make whiteouts and owners")
	}
	const base = 300000
	store, err := template.Open(filepath.Join(t.TempDir(), "templates"))
	if err != nil {
		t.Fatal(err)
	}
	for seed := range uint64(25) {
		r := rand.New(rand.NewPCG(seed, 1))
		upper, lower := t.TempDir(), t.TempDir()
		grow(t, r, upper, base, 0)
		if err := os.Chown(upper, base, base); err != nil {
			t.Fatal(err)
		}
		want := read(t, upper)
		for name, e := range want { // there must be something to hide
			below := filepath.Join(lower, name)
			if e.kind == 'd' && e.content != "" {
				below = filepath.Join(below, "hidden")
			} else if e.kind != 'w' {
				continue
			}
			if err := errors.Join(os.MkdirAll(filepath.Dir(below), 0o755), os.WriteFile(below, nil, 0o644)); err != nil {
				t.Fatal(err)
			}
		}
		release, err := store.Hold(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var layers []berm.Layer
		for _, dir := range []string{lower, upper} {
			w, ids := &berm.Written{Upper: open(t, dir)}, 0
			if dir == upper {
				w.Layers, ids = []*os.File{open(t, lower)}, base
			}
			var packed bytes.Buffer
			if _, err := pack(t.Context(), w, ids, &packed); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			w.Close()
			layer, _, err := store.AddLayer(t.Context(), layers, &packed)
			if err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			layers = append(layers, layer)
		}
		release()
		got := read(t, layers[1].Path)
		for name, e := range got {
			if e.kind == 'w' {
				e.content = ""
				got[name] = e
			}
		}
		for name, e := range want {
			e.uid -= base
			if e.kind == 'w' {
				e.uid = 0
			}
			// Below an opaque directory there is nothing to hide.
			for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
				if want[dir].content == "opaque" && (e.kind == 'w' || e.kind == 'd') {
					e.content = ""
				}
			}
			if _, ok := got[name]; e.kind == 'w' && e.content == "" && !ok {
				continue
			}
			if e.kind == 'w' {
				e.content = ""
			}
			if got[name] != e {
				t.Errorf("seed %d: %s is %+v, want %+v", seed, name, got[name], e)
			}
		}
		for name := range got {
			if _, ok := want[name]; !ok {
				t.Errorf("seed %d: %s came from nowhere", seed, name)
			}
		}
	}
}

func open(t *testing.T, name string) *os.File {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// grow fills a directory at random.
func grow(t *testing.T, r *rand.Rand, dir string, base, depth int) {
	t.Helper()
	try := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	var files []string
	for i := range 2 + r.IntN(5) {
		name := path.Join(dir, []string{"n", "long name ", "ü", "\xff", "-", "é\n"}[r.IntN(6)]+fmt.Sprint(i))
		owned := true
		switch k := r.IntN(7); {
		case k == 0 && depth < 4:
			try(os.Mkdir(name, 0o755))
			grow(t, r, name, base, depth+1)
			if r.IntN(2) == 0 {
				try(unix.Setxattr(name, opaque, []byte("y"), 0))
			}
			try(os.Chmod(name, os.FileMode(0o700+r.IntN(64))|os.ModeSticky))
		case k == 1:
			try(os.Symlink([]string{"../../etc/passwd", "/", "none"}[r.IntN(3)], name))
		case k == 2:
			try(unix.Mknod(name, unix.S_IFCHR, 0))
			owned = false
		case k == 3 && len(files) > 0:
			try(os.Link(files[r.IntN(len(files))], name))
			owned = false
		default:
			try(os.WriteFile(name, bytes.Repeat([]byte{byte(i)}, r.IntN(5000)), 0o600))
			files = append(files, name)
		}
		if owned {
			try(os.Lchown(name, base+r.IntN(2000), base+r.IntN(2000)))
		}
	}
	for _, f := range files {
		if r.IntN(3) == 0 { // after the owner, whose change takes it away
			try(os.Chmod(f, 0o755|os.ModeSetuid))
		}
	}
}

// Devices, FIFOs and sockets that are there make no layer fail, and are not in it; neither is what
// Berm writes into each sandbox, nor a directory that is as it was below.
func TestPackedIsWhatIsTheTemplates(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to make devices")
	}
	upper, lower := t.TempDir(), t.TempDir()
	for _, dir := range []string{"etc", "run/e2b", "var/log", "proc", "new"} {
		if err := os.MkdirAll(filepath.Join(upper, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{"etc", "run", "var/log", "proc"} {
		if err := os.MkdirAll(filepath.Join(lower, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range []string{"etc/hostname", "etc/machine-id", "run/e2b/.E2B_SANDBOX", "proc/x", "var/log/a"} {
		if err := os.WriteFile(filepath.Join(upper, file), []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(unix.Mkfifo(upper+"/fifo", 0o644), unix.Mknod(upper+"/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3)))); err != nil {
		t.Fatal(err)
	}
	w := &berm.Written{Upper: open(t, upper), Layers: []*os.File{open(t, lower)}}
	defer w.Close()
	var packed bytes.Buffer
	n, err := pack(t.Context(), w, 0, &packed)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for archive := tar.NewReader(&packed); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		names = append(names, h.Name)
	}
	if got := strings.Join(names, " "); got != "new/ var/ var/log/ var/log/a" || n != len(names) {
		t.Errorf("%d: %s", n, got)
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := pack(cancelled, w, 0, io.Discard); !errors.Is(err, context.Canceled) {
		t.Errorf("a build that was cancelled goes on: %v", err)
	}
}

// A server that stopped during a build says so of it, and old builds and files go.
func TestBuildsOfBefore(t *testing.T) {
	dir := t.TempDir()
	store, err := template.Open(filepath.Join(dir, "templates"))
	if err != nil {
		t.Fatal(err)
	}
	c := Config{Sessions: &control.Manager{}, Store: store, Audit: audit.Discard, Dir: filepath.Join(dir, "uploads"), Log: slog.New(slog.DiscardHandler)}
	b, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	made, err := b.New(Request{Name: "app"})
	if err != nil {
		t.Fatal(err)
	}
	hash := strings.Repeat("ab", 32)
	if err := b.Upload(made.TemplateID, hash, strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(b.uploadPath(made.TemplateID, hash), time.Time{}, time.Now().Add(-2*keepUploads)); err != nil {
		t.Fatal(err)
	}
	b.Close()
	if b, err = New(c); err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	again, err := b.Build(made.TemplateID, made.ID, 0, 10)
	if err != nil || again.State != template.Failed || again.Failure == nil || !strings.Contains(again.Failure.Message, "stopped") {
		t.Errorf("%+v, %v", again, err)
	}
	if there, err := b.Uploaded(made.TemplateID, hash); there || err != nil {
		t.Errorf("%t, %v", there, err)
	}
	for range 2 * keepFailed {
		n, err := b.New(Request{Name: "app"})
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Cancel(n.TemplateID, n.ID); err != nil {
			t.Fatal(err)
		}
	}
	b.forgetOld(made.TemplateID)
	if left := b.Builds(made.TemplateID); len(left) != keepFailed {
		t.Errorf("%d builds are kept", len(left))
	}
	stored, err := store.Builds()
	if err != nil || len(stored) != keepFailed {
		t.Errorf("%d are stored, %v", len(stored), err)
	}
}
