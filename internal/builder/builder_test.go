package builder

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

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
		_, err := store.Fetch(t.Context(), "", host+"/image", template.ImportOptions{Transport: outside(table)}, nil)
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
	_, err = store.Fetch(t.Context(), "", "127.0.0.1:1/image", template.ImportOptions{Transport: outside(table), Registries: named}, func(s template.Step) { said = append(said, s.Message) })
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
		r := &running{b: &Builder{Config: Config{Store: store}, turns: map[berm.Team]chan struct{}{}}, build: &build{}, order: o, made: map[string]template.Stage{}}
		if _, err := r.all(t.Context()); berm.KindOf(err) != berm.NotFound || r.name != want || r.step != stepBase {
			t.Errorf("stage %q, step %q, %v; want stage %q", r.name, r.step, err, want)
		}
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
	again, err := b.Build("", made.TemplateID, made.ID, 0, 10)
	if err != nil || again.State != template.Failed || again.Failure == nil || !strings.Contains(again.Failure.Message, "stopped") {
		t.Errorf("%+v, %v", again, err)
	}
	if there, err := b.Uploaded("", made.TemplateID, hash); there || err != nil {
		t.Errorf("%t, %v", there, err)
	}
	for range 2 * keepFailed {
		n, err := b.New(Request{Name: "app"})
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Cancel("", n.TemplateID, n.ID); err != nil {
			t.Fatal(err)
		}
	}
	b.forgetOld("", made.TemplateID)
	if left := b.Builds("", made.TemplateID); len(left) != keepFailed {
		t.Errorf("%d builds are kept", len(left))
	}
	stored, err := store.Builds()
	if err != nil || len(stored) != keepFailed {
		t.Errorf("%d are stored, %v", len(stored), err)
	}
}
