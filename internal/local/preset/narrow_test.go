package preset

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
)

func project(t *testing.T, content string) *Rights {
	t.Helper()
	r, err := parseProject(ProjectFile, []byte("version: 1\n"+content))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestProjectTakesAway(t *testing.T) {
	place := newPlace(t)
	mkdir(t, place.Home+"/a/b", place.Home+"/c", place.Workspace+"/vendor")
	write(t, place.Workspace+"/.env", "")
	grant := Grant{
		Workspace: WorkspaceReadWrite, Network: NetworkHost, Profile: "default", Env: []string{"*"},
		Limits: berm.Limits{Memory: 8 << 30, CPU: 4}, Timeout: time.Hour,
		Paths: []Path{{Path: place.Home + "/a", Access: ReadWrite}, {Path: place.Home + "/a/b", Access: ReadWrite}, {Path: place.Home + "/c", Access: ReadOnly}},
	}
	before := fmt.Sprint(grant)
	g := Narrow(grant, project(t, `
workspace: cow
ro: [~/a, vendor]
hide: [.env, ~/c, nothing]
env: [-SECRET]
memory: 1GiB
cpus: 4
pids: 99
timeout: 1m
profile: strict
network: none
checkpoint: true
`), place)
	want := Grant{
		Workspace: WorkspaceCopyOnWrite, Network: NetworkNone, Profile: "strict", Env: []string{"*", "-SECRET"},
		Limits: berm.Limits{Memory: 1 << 30, CPU: 4, PIDs: 99}, Timeout: time.Minute, Checkpoint: true,
		Paths: []Path{
			{Path: place.Home + "/a", Access: ReadOnly}, {Path: place.Home + "/a/b", Access: ReadOnly}, {Path: place.Home + "/c", Access: Hide},
			{Path: place.Workspace + "/.env", Access: Hide}, {Path: place.Workspace + "/vendor", Access: ReadOnly},
		},
	}
	if fmt.Sprint(g) != fmt.Sprint(want) {
		t.Errorf("narrowed to\n%v, want\n%v", g, want)
	}
	if fmt.Sprint(grant) != before {
		t.Errorf("the grant itself became %v", grant)
	}
	if g := Narrow(grant, nil, place); fmt.Sprint(g) != before {
		t.Errorf("without a file %v", g)
	}
}

func TestProjectGetsNothing(t *testing.T) {
	place := newPlace(t)
	mkdir(t, place.Home+"/a", place.Workspace+"/out")
	grant := Grant{
		Workspace: WorkspaceCopyOnWrite, Network: NetworkNone, Profile: "strict", Checkpoint: true, Env: []string{"TERM", "LC_*", "GONE", "-GONE"},
		Limits: berm.Limits{Memory: 1 << 20, CPU: 1, PIDs: 1}, Timeout: time.Second,
		Paths: []Path{{Path: place.Home + "/a", Access: ReadOnly}},
	}
	for content, flag := range map[string]string{
		"workspace: rw":                  "--rw .",
		"rw: [.]":                        "--rw .",
		"rw: [out]":                      "--rw out",
		"rw: [~/a]":                      "--rw ~/a",
		"rw: [/]":                        "--rw /",
		"ro: [\"~\"]":                    "--ro ~",
		"ro: [../../../.ssh]":            "--ro ../../../.ssh",
		"ro: [~/.ssh/$(id)]":             "--ro '~/.ssh/$(id)'",
		"ro: [\"~/'; id\"]":              "add --ro with it",
		"env: [HOME]":                    "--env HOME",
		"env: [GONE]":                    "--env GONE",
		"env: [TERM=dumb]":               "--env TERM=dumb",
		"env: [ANTHROPIC_BASE_URL=evil]": "--env ANTHROPIC_BASE_URL=evil",
		"env: ['*']":                     "--env '*'",
		"memory: 2MiB":                   "--memory 2097152",
		"cpus: 1.5":                      "--cpus 1.5",
		"pids: 2":                        "--pids 2",
		"timeout: 1h":                    "--timeout 1h0m0s",
		"profile: default":               "--profile default",
		"network: host":                  "--network host",
		"allow: [a.test]":                "--allow a.test",
		"checkpoint: false":              "--checkpoint=false",
		"hide: [.]":                      "hides the workspace itself",
	} {
		g := Narrow(grant, project(t, content), place)
		if len(g.Notices) != 1 || !strings.Contains(g.Notices[0], flag) {
			t.Errorf("%s says %q, want %s", content, g.Notices, flag)
		}
		if g.Notices = nil; fmt.Sprint(g) != fmt.Sprint(grant) {
			t.Errorf("%s gives %+v", content, g)
		}
	}
	// What it has already is no reason for a notice.
	if g := Narrow(grant, project(t, "workspace: cow\nro: [~/a, ~/a/x, out]\nenv: [TERM, LC_ALL, 'LC_*']\nmemory: 1MiB\nnetwork: none\n"), place); len(g.Notices) != 0 {
		t.Errorf("notices %q", g.Notices)
	}
}

func TestHideLeavesNoWiderPlaceBehind(t *testing.T) {
	place := newPlace(t)
	mkdir(t, place.Home+"/a/b")
	grant := Grant{Workspace: WorkspaceCopyOnWrite, Profile: "default", Network: NetworkNone, Paths: []Path{
		{Path: place.Home + "/a", Access: ReadWrite}, {Path: place.Home + "/a/b", Access: ReadOnly},
	}}
	// Nothing can be mounted over what went away, so what was read-only must not become writable.
	os.Remove(place.Home + "/a/b")
	g := Narrow(grant, project(t, "hide: [~/a/b]"), place)
	if got := g.access(place, place.Home+"/a/b/x"); got != Hide {
		t.Errorf("access %s to what the project hides", got)
	}
	// Around the workspace, only the workspace stays.
	g = Narrow(grant, project(t, "hide: [\"~\"]"), place)
	if len(g.Paths) != 0 || g.access(place, place.Workspace) != copyOnWrite {
		t.Errorf("paths %v", g.Paths)
	}
}

func TestProjectsLinksAreNotFollowed(t *testing.T) {
	place := newPlace(t)
	mkdir(t, place.Home+"/.ssh")
	symlink(t, place.Home+"/.ssh", place.Workspace+"/evil")
	grant := Grant{Workspace: WorkspaceReadWrite, Profile: "default", Network: NetworkNone}
	for _, key := range []string{"ro", "hide"} {
		for _, path := range []string{"evil", "evil/id", "./evil/../evil"} {
			g := Narrow(grant, project(t, key+": ["+path+"]"), place)
			if len(g.Paths) != 0 {
				t.Errorf("%s: [%s] gives %v", key, path, g.Paths)
			}
			if path != "evil/id" && len(g.Notices) != 1 {
				t.Errorf("%s: [%s] says %q", key, path, g.Notices)
			}
		}
	}
}

// judge says what a grant gives, in another way than the package does: every path of a
// list is looked up by walking up its parents.
type judge struct {
	place    Place
	universe []string
	environ  []string
}

func (j judge) rights(g Grant) map[string]float64 {
	rank := map[string]float64{"": 0, "hide": 0, "ro": 1, "cow": 2, "rw": 3}
	listed := map[string]string{j.place.Workspace: string(g.Workspace)}
	for _, p := range g.Paths {
		if p.Target == "" {
			listed[p.Path] = string(p.Access)
		}
	}
	rights := map[string]float64{}
	for _, path := range j.universe {
		for at := path; ; at = filepath.Dir(at) {
			if access, ok := listed[at]; ok {
				rights[path] = rank[access]
				break
			}
			if at == "/" {
				break
			}
		}
	}
	infinite := func(v float64) float64 {
		if v == 0 {
			return 1e300
		}
		return v
	}
	rights["memory"] = infinite(float64(g.Limits.Memory))
	rights["cpus"] = infinite(g.Limits.CPU)
	rights["pids"] = infinite(float64(g.Limits.PIDs))
	rights["timeout"] = infinite(float64(g.Timeout))
	rights["profile"] = map[string]float64{"default": 1, "strict": 0}[g.Profile]
	rights["network"] = map[Network]float64{NetworkHost: 1, NetworkNone: 0}[g.Network]
	for _, entry := range []string{"pypi", "a.test", "*.b.test:8443"} {
		rights["allow "+entry] = 0
		if g.Network == NetworkHost || slices.Contains(g.Allow, entry) {
			rights["allow "+entry] = 1
		}
	}
	if !g.Checkpoint {
		rights["no checkpoints"] = 1
	}
	for _, variable := range CleanEnv(j.environ, g.Env) {
		rights["env "+variable] = 1
	}
	return rights
}

// wider names what a gives and b does not.
func (j judge) wider(a, b Grant) (what []string) {
	given := j.rights(b)
	for name, v := range j.rights(a) {
		if v > given[name] {
			what = append(what, fmt.Sprintf("%s: %v, was %v", name, v, given[name]))
		}
	}
	return what
}

func TestNarrowIsNeverWider(t *testing.T) {
	place := newPlace(t)
	j := judge{place: place, environ: []string{"A=1", "AB=2", "TOKEN=3", "PATH=4", "B=5"}}
	// A tree around, in and beside the workspace, with links.
	var dirs []string
	for _, a := range []string{"/a", "/b", "/src", "/src/project", "/src/other", "/.ssh"} {
		for _, b := range []string{"", "/x", "/y", "/x/z"} {
			dirs = append(dirs, place.Home+a+b)
		}
	}
	mkdir(t, dirs...)
	symlink(t, place.Home+"/.ssh", place.Workspace+"/evil")
	symlink(t, place.Workspace, place.Home+"/b/alias")
	dirs = append(dirs, "/", place.Home, filepath.Dir(place.Home))
	for _, dir := range dirs {
		j.universe = append(j.universe, dir, filepath.Join(dir, "new"), filepath.Join(dir, "x/new/deeper"))
	}

	seed := uint64(time.Now().UnixNano())
	r := rand.New(rand.NewPCG(seed, 0))
	pick := func(of ...string) string { return of[r.IntN(len(of))] }
	some := func(n int, one func() string) (list []string) {
		for range r.IntN(n) {
			list = append(list, one())
		}
		return list
	}
	env := func() string {
		return pick("A", "A*", "*", "TOKEN", "PATH", "A=9", "NEW=1", "-A", "-A*", "-*", "-TOKEN", "B", "AB=2")
	}
	written := func() string {
		switch path := dirs[r.IntN(len(dirs))]; r.IntN(5) {
		case 0:
			return pick(".", "..", "~", "evil", "evil/x", "~/b/alias/x", "../other/x", "x/../..", "new", "~/a/new", "/etc")
		case 1:
			if rel, err := filepath.Rel(place.Workspace, path); err == nil {
				return rel
			}
			return path
		default:
			return path
		}
	}
	rounds := 150
	if os.Getenv("BERM_TEST_ALL") != "" {
		rounds = 5000
	}
	for i := range rounds {
		g := Grant{
			Workspace: Workspace(pick("ro", "cow", "rw")), Profile: pick("default", "strict"), Network: Network(pick("none", "host")), Allow: []string{pick("pypi", "a.test")},
			Checkpoint: r.IntN(2) == 0, Env: some(4, env), Timeout: time.Duration(r.IntN(3)),
			Limits: berm.Limits{Memory: int64(r.IntN(3)), CPU: float64(r.IntN(3)), PIDs: int64(r.IntN(3))},
		}
		for range r.IntN(6) {
			if path := dirs[r.IntN(len(dirs))]; path != place.Workspace {
				g.Paths = append(g.Paths, Path{Path: path, Access: Access(pick("hide", "ro", "rw"))})
			}
		}
		g.Paths = sorted(g.Paths)
		yes := r.IntN(2) == 0
		p := Rights{
			Workspace: Workspace(pick("", "ro", "cow", "rw")), Profile: pick("", "default", "strict"), Network: Network(pick("", "none", "host")), Allow: []string{pick("pypi", "a.test", "*.b.test:8443")},
			ReadOnly: some(4, written), ReadWrite: some(3, written), Hide: some(4, written), Env: some(4, env), Timeout: time.Duration(r.IntN(3)),
			Limits: berm.Limits{Memory: int64(r.IntN(3)), CPU: float64(r.IntN(3)), PIDs: int64(r.IntN(3))}, Checkpoint: &yes,
		}
		n := Narrow(g, &p, place)
		if what := j.wider(n, g); len(what) > 0 {
			t.Fatalf("seed %d, round %d: the project gained %q\ngrant   %+v\nproject %+v\nresult  %+v", seed, i, what, g, p, n)
		}
		for _, path := range n.Paths {
			if _, err := resolve(path.Path, "/"); err != nil {
				t.Fatalf("seed %d, round %d: nothing can be mounted at %s: %v", seed, i, path.Path, err)
			}
		}
		if again := Narrow(n, &p, place); len(j.wider(again, n)) > 0 || len(j.wider(n, again)) > 0 {
			t.Fatalf("seed %d, round %d: a second time changes\n%+v into\n%+v\nproject %+v", seed, i, n, again, p)
		}
	}
}

// TestJudgeSeesWiderGrants keeps the judge above honest.
func TestJudgeSeesWiderGrants(t *testing.T) {
	place := Place{Home: "/h", Workspace: "/h/w"}
	j := judge{place: place, universe: []string{"/h/a/b", "/h/w/x", "/h/a"}, environ: []string{"A=1"}}
	base := Grant{Workspace: "cow", Profile: "strict", Network: "none", Checkpoint: true, Limits: berm.Limits{Memory: 2, CPU: 2, PIDs: 2}, Timeout: 2, Paths: []Path{{Path: "/h/a", Access: ReadOnly}}}
	if what := j.wider(base, base); len(what) != 0 {
		t.Fatal(what)
	}
	for name, change := range map[string]func(*Grant){
		"workspace":  func(g *Grant) { g.Workspace = "rw" },
		"profile":    func(g *Grant) { g.Profile = "default" },
		"network":    func(g *Grant) { g.Network = "host" },
		"allow":      func(g *Grant) { g.Allow = []string{"pypi"} },
		"checkpoint": func(g *Grant) { g.Checkpoint = false },
		"memory":     func(g *Grant) { g.Limits.Memory = 0 },
		"cpus":       func(g *Grant) { g.Limits.CPU = 3 },
		"pids":       func(g *Grant) { g.Limits.PIDs = 0 },
		"timeout":    func(g *Grant) { g.Timeout = 0 },
		"env":        func(g *Grant) { g.Env = []string{"A"} },
		"set":        func(g *Grant) { g.Env = []string{"X=1"} },
		"path": func(g *Grant) {
			g.Paths = []Path{{Path: "/h/a", Access: ReadOnly}, {Path: "/h/a/b", Access: ReadWrite}}
		},
	} {
		g := base
		g.Paths = slices.Clone(base.Paths)
		change(&g)
		if len(j.wider(g, base)) == 0 || len(j.wider(base, g)) != 0 {
			t.Errorf("%s: %v and %v", name, j.wider(g, base), j.wider(base, g))
		}
	}
}
