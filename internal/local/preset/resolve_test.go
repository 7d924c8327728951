package preset

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
)

// newPlace makes a home directory with a project in it.
func newPlace(t *testing.T) Place {
	t.Helper()
	place := Place{Home: t.TempDir() + "/home"}
	place.Workspace = place.Home + "/src/project"
	if err := os.MkdirAll(place.Workspace, 0o755); err != nil {
		t.Fatal(err)
	}
	return place
}

func mkdir(t *testing.T, dirs ...string) {
	t.Helper()
	for _, dir := range dirs {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

func symlink(t *testing.T, target, path string) {
	t.Helper()
	if err := os.Symlink(target, path); err != nil {
		t.Fatal(err)
	}
}

func config(t *testing.T, presets string) *Config {
	t.Helper()
	c, err := parseConfig("config.yaml", []byte("version: 1\n"+presets))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func mustResolve(t *testing.T, r Request) Grant {
	t.Helper()
	r.NoToolchain = true
	g, err := Resolve(r)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func TestBuiltinPresets(t *testing.T) {
	place := newPlace(t)
	for _, name := range []string{Default, "readonly", "build", "codex", "claude-code"} {
		g := mustResolve(t, Request{Place: place, Preset: name})
		if g.Network != NetworkNone || g.Profile != "default" || g.Limits != (berm.Limits{}) || g.Workspace == WorkspaceReadWrite {
			t.Errorf("%s gives %+v", name, g)
		}
		if len(g.Paths) != 0 || len(g.Notices) != 0 {
			t.Errorf("%s shows %v in an empty home, and says %q", name, g.Paths, g.Notices)
		}
		if env := CleanEnv([]string{"HOME=/h", "GITHUB_TOKEN=x", "AWS_SECRET_ACCESS_KEY=x", "SSH_AUTH_SOCK=x", "NPM_TOKEN=x", "DBUS_SESSION_BUS_ADDRESS=x"}, g.Env); slices.ContainsFunc(env, func(v string) bool { return strings.HasSuffix(v, "=x") }) {
			t.Errorf("%s passes %q", name, env)
		}
	}
	write(t, place.Home+"/.claude/.credentials.json", "")
	write(t, place.Home+"/.claude/settings.json", "")
	write(t, place.Home+"/.claude.json", "")
	mkdir(t, place.Home+"/.claude/projects", place.Home+"/go/pkg/mod")
	g := mustResolve(t, Request{Place: place, Preset: "claude-code"})
	want := []Path{
		{Path: place.Home + "/.claude/.credentials.json", Access: ReadOnly},
		{Path: place.Home + "/.claude/settings.json", Access: ReadOnly},
		{Path: place.Home + "/go/pkg/mod", Access: ReadOnly},
	}
	if !slices.Equal(g.Paths, want) {
		t.Errorf("claude-code shows %v, want %v", g.Paths, want)
	}
	env := CleanEnv([]string{"ANTHROPIC_BASE_URL=u", "ANTHROPIC_API_KEY=k", "OPENAI_API_KEY=o"}, g.Env)
	if !slices.Equal(env, []string{"ANTHROPIC_API_KEY=k", "ANTHROPIC_BASE_URL=u", "DISABLE_AUTOUPDATER=1", "IS_SANDBOX=1"}) {
		t.Errorf("claude-code passes %q", env)
	}
}

func TestLaterPartsWin(t *testing.T) {
	place := newPlace(t)
	mkdir(t, place.Home+"/a", place.Home+"/b")
	c := config(t, `
preset: mine
presets:
  default: {pids: 100, env: [D=default]}
  base: {extends: readonly, memory: 1GiB, pids: 5, timeout: 1m, ro: [~/a, ~/b], env: [A=1]}
  mine: {extends: base, memory: 2GiB, rw: [~/a], env: [A=2], checkpoint: true}
`)
	yes, no := true, false
	g := mustResolve(t, Request{Place: place, Config: c, Flags: Rights{Timeout: time.Second, Checkpoint: &no, Env: []string{"-A"}}})
	if g.Preset != "mine" || g.Workspace != WorkspaceReadOnly || g.Limits != (berm.Limits{Memory: 2 << 30, PIDs: 5}) || g.Timeout != time.Second || g.Checkpoint {
		t.Errorf("%+v", g)
	}
	if want := []Path{{Path: place.Home + "/a", Access: ReadWrite}, {Path: place.Home + "/b", Access: ReadOnly}}; !slices.Equal(g.Paths, want) {
		t.Errorf("paths %v, want %v", g.Paths, want)
	}
	if env := CleanEnv(nil, g.Env); len(env) != 0 {
		t.Errorf("environment %q", env)
	}
	// A preset that is named on the command line wins over the file's choice, and the
	// user's default is no base of it.
	if g := mustResolve(t, Request{Place: place, Config: c, Preset: "readonly", Flags: Rights{Checkpoint: &yes}}); g.Limits.PIDs != 0 || !g.Checkpoint {
		t.Errorf("%+v", g)
	}
	if g := mustResolve(t, Request{Place: place, Config: c, Preset: Default}); g.Limits.PIDs != 100 || !slices.Contains(g.Env, "PATH") || g.Workspace != WorkspaceCopyOnWrite {
		t.Errorf("%+v", g)
	}
	for flags, want := range map[string]Workspace{"ro": WorkspaceReadOnly, "rw": WorkspaceReadWrite} {
		r := Rights{ReadWrite: []string{"."}}
		if flags == "ro" {
			r = Rights{ReadOnly: []string{place.Workspace + "/"}}
		}
		if g := mustResolve(t, Request{Place: place, Flags: r}); g.Workspace != want || len(g.Paths) != 0 {
			t.Errorf("--%s . gives %+v", flags, g)
		}
	}
	// A flag wins over the path list of a preset.
	c = config(t, "presets: {mine: {rw: [.]}}")
	if g := mustResolve(t, Request{Place: place, Config: c, Preset: "mine", Flags: Rights{Workspace: WorkspaceReadOnly}}); g.Workspace != WorkspaceReadOnly {
		t.Errorf("%+v", g)
	}
}

func TestPresetsThatExtend(t *testing.T) {
	place := newPlace(t)
	// The user's preset of a built-in's name adds to it.
	c := config(t, "presets:\n  codex: {extends: codex, network: host}\n  more: {extends: codex}\n")
	for _, name := range []string{"codex", "more"} {
		if g := mustResolve(t, Request{Place: place, Config: c, Preset: name}); g.Network != NetworkHost || !slices.Contains(g.Env, "OPENAI_API_KEY") {
			t.Errorf("%s: %+v", name, g)
		}
	}
	for presets, name := range map[string]string{
		"presets: {a: {extends: b}, b: {extends: a}}": "a",
		"presets: {a: {extends: a}}":                  "a",
		"presets: {a: {extends: nope}}":               "a",
		"presets: {}":                                 "nope",
		"preset: nope":                                "",
		"presets: {a: {extends: b}, b: {extends: c}, c: {extends: b}}": "a",
	} {
		_, err := Resolve(Request{Place: place, Config: config(t, presets), Preset: name, NoToolchain: true})
		if berm.KindOf(err) != berm.Invalid {
			t.Errorf("%s: %v", presets, err)
		}
	}
	// A mistake is told with its place.
	c = config(t, "preset: nope\npresets:\n  mine:\n    extends: bild\n")
	for name, want := range map[string]string{"mine": `:5: preset "mine" extends "bild"`, "": `: there is no preset "nope"`} {
		_, err := Resolve(Request{Place: place, Config: c, Preset: name, NoToolchain: true})
		if err == nil || !strings.HasPrefix(err.Error(), c.path) || !strings.Contains(err.Error(), want) || !strings.Contains(berm.HintOf(err), "build, claude-code") {
			t.Errorf("%v; %s", err, berm.HintOf(err))
		}
	}
}

func TestMissingPaths(t *testing.T) {
	place := newPlace(t)
	c := config(t, "presets: {mine: {ro: [~/gone], hide: [~/gone, .env]}}")
	g := mustResolve(t, Request{Place: place, Config: c, Preset: "mine"})
	if len(g.Paths) != 0 || len(g.Notices) != 1 || !strings.Contains(g.Notices[0], "/gone") {
		t.Errorf("%+v", g)
	}
	for _, r := range []Rights{{ReadOnly: []string{"gone"}}, {ReadWrite: []string{"~/gone"}}, {Hide: []string{".evn"}}} {
		if _, err := Resolve(Request{Place: place, Flags: r, NoToolchain: true}); berm.KindOf(err) != berm.NotFound {
			t.Errorf("%v: %v", r, err)
		}
	}
	if _, err := Resolve(Request{Place: place, Flags: Rights{Hide: []string{"."}}, NoToolchain: true}); berm.KindOf(err) != berm.Invalid {
		t.Errorf("hidden workspace: %v", err)
	}
}

func TestLinks(t *testing.T) {
	place := newPlace(t)
	data := place.Home + "/data"
	mkdir(t, data+"/x", place.Home+"/.ssh")
	symlink(t, "data", place.Home+"/link")
	symlink(t, place.Home+"/.ssh", place.Workspace+"/evil")
	symlink(t, place.Home+"/.ssh", data+"/evil")
	symlink(t, place.Workspace, place.Home+"/alias")
	symlink(t, "loop", place.Home+"/loop")

	g := mustResolve(t, Request{Place: place, Flags: Rights{ReadOnly: []string{"~/link/x"}}})
	want := []Path{{Path: data + "/x", Access: ReadOnly}, {Path: place.Home + "/link/x", Access: ReadOnly, Target: data + "/x"}}
	if !slices.Equal(g.Paths, want) {
		t.Errorf("a link of the user's gives %v, want %v", g.Paths, want)
	}
	for _, c := range []struct {
		paths []string
		want  []Path
	}{
		{[]string{"~/link", "~/link/x", "~/link/x/y"}, []Path{
			{Path: data, Access: ReadOnly}, {Path: data + "/x", Access: ReadOnly}, {Path: data + "/x/y", Access: ReadOnly},
			{Path: place.Home + "/link", Access: ReadOnly, Target: data}}},
		{[]string{"~/dir", "~/dir/link"}, []Path{{Path: data, Access: ReadOnly}, {Path: place.Home + "/dir", Access: ReadOnly}}},
	} {
		mkdir(t, data+"/x/y", place.Home+"/dir")
		_ = os.Symlink("../data", place.Home+"/dir/link")
		if g := mustResolve(t, Request{Place: place, Flags: Rights{ReadOnly: c.paths}}); !slices.Equal(g.Paths, c.want) {
			t.Errorf("%q gives %v, want %v", c.paths, g.Paths, c.want)
		}
	}
	mkdir(t, place.Home+"/go/pkg")
	symlink(t, "mod", place.Home+"/go/pkg/mod")
	mustResolve(t, Request{Place: place, Preset: "build"}) // a loop is no directory of a tool
	for name, r := range map[string]Rights{
		"in the workspace":              {ReadOnly: []string{"evil"}},
		"hidden in the workspace":       {Hide: []string{"evil"}},
		"below it":                      {ReadOnly: []string{"evil/x"}},
		"by another name of it":         {ReadOnly: []string{"~/alias/evil"}},
		"in what is written":            {ReadOnly: []string{"~/data/evil"}, ReadWrite: []string{"~/data"}},
		"in what is written, by a link": {ReadOnly: []string{"~/link/evil"}, ReadWrite: []string{"~/link"}},
		"written in what is written":    {ReadWrite: []string{"~/data/evil", "~/data"}},
		"loop":                          {ReadOnly: []string{"~/loop"}},
	} {
		if _, err := Resolve(Request{Place: place, Flags: r, NoToolchain: true}); berm.KindOf(err) != berm.Denied {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Resolve(Request{Place: place, Flags: Rights{ReadOnly: []string{"~/alias"}}, NoToolchain: true}); berm.KindOf(err) != berm.Invalid {
		t.Errorf("another name of the workspace: %v", err)
	}
}

func TestSecretsBelowWiderPathsAreHidden(t *testing.T) {
	place := newPlace(t)
	mkdir(t, place.Home+"/.ssh", place.Home+"/.aws", place.Home+"/dotfiles/gnupg", place.Home+"/.config/gh")
	symlink(t, "dotfiles/gnupg", place.Home+"/.gnupg")
	write(t, place.Home+"/.ssh/known_hosts", "")
	hidden := func(g Grant, name string) bool { return g.access(place, place.Home+"/"+name) == Hide }

	g := mustResolve(t, Request{Place: place, Flags: Rights{ReadOnly: []string{"~", "~/.aws", "~/.ssh/known_hosts"}}})
	for name, want := range map[string]bool{".ssh": true, ".ssh/id": true, ".ssh/known_hosts": false, ".aws": false, "dotfiles/gnupg": true, "dotfiles": false, ".config/gh": true, ".config": false} {
		if hidden(g, name) != want {
			t.Errorf("%s hidden: %v", name, !want)
		}
	}
	around := Place{Home: place.Home, Workspace: place.Home}
	g, err := Resolve(Request{Place: around, NoToolchain: true})
	if err != nil {
		t.Fatal(err)
	}
	place = around
	if !hidden(g, ".ssh/id") || hidden(g, "src") {
		t.Errorf("a workspace around the secrets shows them: %v", g.Paths)
	}
}
