// Package builds builds and tests real projects inside berm run, without a network, and
// holds what comes of it against the same command outside.
package builds

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// project is one of testdata.
type project struct {
	name  string
	fetch string   // run with a network, before; "" is nothing
	build string   // run inside and outside
	says  string   // is in its output
	made  []string // some of what it makes
	same  []string // of which the bytes are the same inside and outside
	flags string   // what of it is only applied when that is asked for; "" is nothing
	look  string   // changes nothing, so that it leaves no session; "" is nothing
	after string   // works in the project once all is applied; "" is build again
}

var projects = []project{
	{
		name:  "pytest",
		fetch: "python3 -m venv fetch && fetch/bin/pip --disable-pip-version-check download -q -d wheels -r requirements.txt && rm -rf fetch",
		build: "python3 -m venv .venv && .venv/bin/pip --disable-pip-version-check install -q --no-index --find-links wheels -r requirements.txt && .venv/bin/pytest",
		says:  "4 passed",
		made:  []string{".venv/bin/pytest", ".pytest_cache/README.md"},
		same:  []string{".venv/bin/pytest"},
		flags: ".venv",
		after: ".venv/bin/pytest",
	},
	{
		name:  "npm",
		fetch: "npm install --no-omit-lockfile-registry-resolved --cache $CACHES/.npm && rm -rf node_modules",
		build: "npm ci --offline && npm test",
		says:  "# pass 3",
		made:  []string{"node_modules/semver/package.json"},
		same:  []string{"node_modules/semver/package.json", "node_modules/semver/bin/semver.js"},
	},
	{
		name: "go",
		// The standard library is compiled here, once: see "Compilers' caches" in docs/presets.md.
		fetch: "export GOPATH=$CACHES/go GOCACHE=$CACHES/.cache/sandbox/go-build && go test ./... && go build -o /dev/null ./cmd/cart",
		build: "go test ./... && go build -o bin/ ./cmd/cart && bin/cart 1 1",
		says:  "ok  \texample.org/cart\t",
		made:  []string{"bin/cart"},
		same:  []string{"bin/cart"},
	},
	{
		name:  "cargo",
		fetch: "CARGO_HOME=$CACHES/.cargo cargo fetch",
		build: "cargo build && cargo test && target/debug/cart",
		says:  "test result: ok. 1 passed",
		made:  []string{"target/debug/cart"},
		same:  []string{"target/debug/cart"},
	},
	{
		name:  "make",
		build: "make -j2 check",
		says:  "passed",
		made:  []string{"cart", "dist/cart", "dist.tar"},
		same:  []string{"cart", "libcart.so", "libcart.a", "dist/bin/cart"},
	},
	{
		name:  "git",
		fetch: "git init -q -b main && git add . && git -c user.name=dev -c user.email=dev@localhost commit -q -m Start --date 2024-01-01T00:00:00Z",
		build: "./story",
		look:  "git status && git diff && git log", // git status makes a lock file and removes it
		says:  "Rebasing (1/1)",
		made:  []string{"one", "two", "src/README.md"},
		same:  []string{".git/packed-refs", ".git/HEAD", "one"},
		after: "git fsck && git status --porcelain && git switch -c next && echo 3 >three && git add . && git stash",
	},
}

// ordinary is the id of a user whom no account has.
const ordinary = 1987654

func TestBuilds(t *testing.T) {
	if os.Getenv("BERM_TEST_ALL") == "" {
		t.Skip("slow: set BERM_TEST_ALL=1")
	}
	top, err := os.MkdirTemp("/var/tmp", "berm-builds-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { remove(t, top) })
	// Others may go through it: the ordinary user's home lies in it.
	if err := os.Chmod(top, 0o755); err != nil {
		t.Fatal(err)
	}
	binary := os.Getenv("BERM_BINARY")
	if binary == "" {
		binary = "../../bin/berm"
	}
	sh(t, self(t), "cp "+binary+" "+top+"/berm && cp -a testdata "+top+"/projects")
	f := &fetched{top: top, missing: map[string]string{}}
	f.fetch(t)
	t.Run("self", func(t *testing.T) { f.as(t, -1) })
	if os.Geteuid() == 0 {
		t.Run("ordinary", func(t *testing.T) { f.as(t, ordinary) })
	}
}

// fetched is what was fetched while there was a network: top/projects, and top/caches as
// it lies in a home directory.
type fetched struct {
	top     string
	missing map[string]string // why a project cannot be built here
}

func (f *fetched) fetch(t *testing.T) {
	for _, dir := range []string{"caches", "self", "ordinary"} {
		if err := os.Mkdir(filepath.Join(f.top, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := exec.LookPath("cargo"); err != nil {
		f.missing["cargo"] = "cargo is not installed"
	} else if rustup, err := exec.LookPath("rustup"); err == nil {
		// The toolchain of who runs the test, in the form in which rustup installs one.
		script := `set -e
			from=$(rustc --print sysroot) to=$CACHES/.rustup/toolchains/own
			mkdir -p $to $CACHES/.cargo $CACHES/.rustup/update-hashes $CACHES/.rustup/tmp
			cp -al $(dirname ` + rustup + `) $CACHES/.cargo/bin
			for part in bin lib libexec; do [ ! -e $from/$part ] || cp -al $from/$part $to/; done
			printf 'version = "12"\ndefault_toolchain = "own"\n' >$CACHES/.rustup/settings.toml`
		w := self(t)
		w.env = append(w.env, "CACHES="+f.top+"/caches")
		if r := w.run(script); r.code != 0 {
			f.missing["cargo"] = "the toolchain of rustup lies on another file system: " + r.text
		}
	}
	for _, p := range projects {
		if p.fetch == "" || f.missing[p.name] != "" {
			continue
		}
		w := self(t)
		w.dir = filepath.Join(f.top, "projects", p.name)
		w.env = append(w.env, "CACHES="+f.top+"/caches")
		sh(t, w, p.fetch)
	}
}

// as builds every project as a user; -1 is the one who runs the test.
func (f *fetched) as(t *testing.T, id int) {
	name := filepath.Base(t.Name())
	home := filepath.Join(f.top, name, "home")
	for _, p := range projects {
		t.Run(p.name, func(t *testing.T) {
			if f.missing[p.name] != "" {
				t.Skip(f.missing[p.name])
			}
			w := who{
				t: t, id: id, dir: filepath.Join(home, "src", p.name),
				env: []string{
					"HOME=" + home, "PATH=" + home + "/.cargo/bin:" + programs("go", "node"), "LANG=C.UTF-8", "GOTOOLCHAIN=local",
					"GOFLAGS=-mod=mod", "GOPROXY=off", "GOCACHE=" + home + "/.cache/sandbox/go-build", "CARGO_NET_OFFLINE=true", "CARGO_INCREMENTAL=0",
				},
			}
			defer remove(t, home)
			f.lay(t, p, home, id)
			outside := w.run(p.build)
			if outside.code != 0 {
				t.Fatalf("outside: exit code %d\n%s", outside.code, outside.text)
			}
			wanted := tree(t, w.dir)
			remove(t, home)

			f.lay(t, p, home, id)
			berm := f.top + "/berm "
			if p.look != "" {
				sh(t, w, p.look) // the files are copies, of which git's index takes note
				sh(t, w, berm+"run --preset build -- sh -c '"+p.look+"'")
				if sessions := sh(t, w, berm+"sessions"); !strings.Contains(sessions, "there are no sessions") {
					t.Errorf("after %s:\n%s", p.look, sessions)
				}
			}
			before := tree(t, w.dir)
			inside := w.run(berm + "run --preset build --rw ../../.cache/sandbox --env GOCACHE --env GOPROXY -- sh -c '" + p.build + "'")
			if inside.code != 0 {
				t.Fatalf("inside: exit code %d\n%s", inside.code, inside.text)
			}
			t.Logf("outside %v, inside %v", outside.took.Round(time.Millisecond), inside.took.Round(time.Millisecond))
			if !strings.Contains(inside.text, p.says) || !strings.Contains(outside.text, p.says) {
				t.Errorf("inside:\n%s\noutside:\n%s\nwant %q", inside.text, outside.text, p.says)
			}
			compare(t, "the project after the run", tree(t, w.dir), before, true, nil)
			diff := sh(t, w, berm+"diff --name-status")
			for _, made := range p.made {
				if !strings.Contains(diff, made+"\n") {
					t.Errorf("berm diff has no %s:\n%s", made, diff)
				}
			}
			r := w.run(berm + "apply")
			if p.flags != "" && r.code == 1 {
				r = w.run(berm + "apply --flagged " + p.flags)
			}
			if r.code != 0 {
				t.Errorf("berm apply: exit code %d\n%s", r.code, r.text)
			}
			compare(t, "what was applied", tree(t, w.dir), wanted, false, p.same)
			if p.after == "" {
				p.after = p.build
			}
			sh(t, w, p.after)
		})
	}
}

// lay makes a home with the fetched caches and one project in it.
func (f *fetched) lay(t *testing.T, p project, home string, id int) {
	t.Helper()
	// Hard links: the toolchain is large, and nobody may write it.
	script := fmt.Sprintf("mkdir -p %[2]s/src && cp -a %[1]s/projects/%[3]s %[2]s/src/ && cp -al %[1]s/caches/. %[2]s/", f.top, home, p.name)
	// But for what is written in place.
	script += fmt.Sprintf(" && rm -r %[2]s/.cache && cp -a %[1]s/caches/.cache %[2]s/", f.top, home)
	if id >= 0 {
		script += fmt.Sprintf(" && chown %[1]d:%[1]d %[2]s && chown -R %[1]d:%[1]d %[2]s/src %[2]s/.cache && find %[2]s -type d -exec chown %[1]d:%[1]d {} +", id, home)
	}
	sh(t, self(t), script)
}
