package preset

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// seen is what a toolchain shows below home, as "access path" or "path -> target".
func seen(place Place, paths []Path) (list []string) {
	for _, p := range paths {
		if name, ok := strings.CutPrefix(p.Path, place.Home+"/"); ok {
			if p.Target != "" {
				list = append(list, name+" -> "+strings.TrimPrefix(p.Target, place.Home+"/"))
			} else {
				list = append(list, string(p.Access)+" "+name)
			}
		}
	}
	return list
}

func TestToolchainBelowHome(t *testing.T) {
	place := newPlace(t)
	home := place.Home
	for _, file := range []string{
		"/.ssh/id", "/.aws/credentials", "/.cargo/bin/cargo", "/.cargo/credentials.toml", "/.rustup/settings.toml", "/.pyenv/shims/python",
		"/.nvm/versions/node/v24/bin/node", "/.npm-global/bin/x", "/.npm-global/etc/npmrc", "/go/bin/gopls", "/go/pkg/mod/x",
		"/.local/bin/plain", "/.local/share/claude/versions/1/claude", "/.local/share/keyrings/login", "/.local/share/other/x",
		"/.local/share/uv/python/3.14/bin/python", "/.local/share/uv/credentials/x", "/.local/lib/python3/site.py", "/.local/pipx/venvs/x/bin/x",
		"/bin/mine", "/src/other/bin/tool", "/jdk/bin/java", "/.gem/ruby/x", "/.gem/credentials", "/real/tools/t", "/.deno/bin/deno",
	} {
		write(t, home+file, "")
	}
	symlink(t, "../share/claude/versions/1/claude", home+"/.local/bin/claude")
	symlink(t, home+"/.local/share/keyrings/login", home+"/.local/bin/evil")
	symlink(t, home+"/.ssh/id", home+"/.local/bin/key")
	symlink(t, home+"/src/other/bin/tool", home+"/.local/bin/tool")
	symlink(t, home+"/.local/pipx/venvs/x/bin/x", home+"/.local/bin/x")
	symlink(t, "real", home+"/link")
	symlink(t, home+"/.ssh", place.Workspace+"/bin")

	for _, c := range []struct {
		name string
		env  []string
		want []string
	}{
		{"nothing", nil, nil},
		{"nothing that exists", []string{"PATH=" + home + "/none:" + home + "/.volta/bin"}, nil},
		{"rust", []string{"PATH=" + home + "/.cargo/bin"}, []string{"ro .cargo/bin", "ro .rustup"}},
		{"pyenv", []string{"PATH=" + home + "/.pyenv/plugins/none:" + home + "/.pyenv/shims/"}, []string{"ro .pyenv"}},
		{"nvm", []string{"PATH=" + home + "/.nvm/versions/node/v24/bin"}, []string{"ro .nvm"}},
		{"nvm before it is used", []string{"NVM_DIR=" + home + "/.nvm"}, []string{"ro .nvm"}},
		{"npm", []string{"PATH=" + home + "/.npm-global/bin"}, []string{"ro .npm-global", "hide .npm-global/etc/npmrc"}},
		{"go", []string{"GOPATH=" + home + "/go:" + home + "/src", "PATH=" + home + "/go/bin"}, []string{"ro go/bin"}},
		{"gems", []string{"PATH=" + home + "/.gem/ruby"}, []string{"ro .gem", "hide .gem/credentials"}},
		{"variable", []string{"JAVA_HOME=" + home + "/jdk"}, []string{"ro jdk"}},
		{"relative", []string{"JAVA_HOME=jdk", "PATH=.:bin::" + home + "/bin"}, []string{"ro bin"}},
		{"programs", []string{"PATH=" + home + "/.local/bin"}, []string{
			"ro .local/bin", "ro .local/lib", "ro .local/pipx", "ro .local/share/claude", "ro .local/share/uv", "hide .local/share/uv/credentials"}},
		{"link", []string{"PATH=" + home + "/link/tools"}, []string{"link/tools -> real/tools", "ro real/tools"}},
		{"workspace", []string{"PATH=" + place.Workspace + "/bin:" + place.Workspace, "VIRTUAL_ENV=" + place.Workspace}, nil},
		{"around the workspace", []string{"PATH=" + home + "/src"}, []string{"?"}},
		{"plugin", []string{"PATH=" + home + "/src/other/bin"}, []string{"ro src/other/bin"}},
		{"secrets", []string{"PATH=" + home + "/.ssh:" + home + "/.aws", "JAVA_HOME=" + home + "/.ssh"}, []string{"?", "?"}},
		{"home", []string{"PATH=" + home + ":/", "GOROOT=" + home, "JAVA_HOME=/", "NVM_DIR=" + home + "/"}, []string{"?", "?"}},
	} {
		paths, notices := Toolchain(c.env, place)
		want := slices.DeleteFunc(slices.Clone(c.want), func(s string) bool { return s == "?" })
		if got := seen(place, paths); !slices.Equal(got, want) {
			t.Errorf("%s shows\n%q, want\n%q", c.name, got, want)
		}
		if named := strings.Count(strings.Join(notices, ""), " ("); named != len(c.want)-len(want) {
			t.Errorf("%s says %q", c.name, notices)
		}
		for _, p := range paths {
			if p.Path == "/" || within(place.Home, p.Path) {
				t.Errorf("%s shows %s", c.name, p.Path)
			}
			if p.Access == ReadWrite {
				t.Errorf("%s lets %s be written", c.name, p.Path)
			}
			if _, err := resolve(p.Path, "/"); p.Target == "" && err != nil {
				t.Errorf("%s: nothing can be mounted at %s: %v", c.name, p.Path, err)
			}
		}
	}
}

func TestToolchainOfTheSystem(t *testing.T) {
	place := newPlace(t)
	paths, notices := Toolchain([]string{"PATH=/usr/local/bin:/usr/bin:/bin"}, place)
	if len(notices) != 0 {
		t.Errorf("notices %q", notices)
	}
	g := Grant{Paths: paths, Workspace: WorkspaceCopyOnWrite}
	for path, want := range map[string]Access{
		"/usr/bin/env": ReadOnly, "/etc/passwd": ReadOnly, "/etc/ssl/certs": ReadOnly,
		"/root": Hide, "/home": Hide, "/run": Hide, "/var/run": Hide, "/tmp": Hide, "/proc": Hide, "/sys": Hide, "/dev": Hide,
		"/var/lib/docker": Hide, "/mnt": Hide, "/media": Hide, "/srv": Hide, place.Home: Hide, "/": Hide,
	} {
		if got := g.access(place, path); got != want {
			t.Errorf("%s is %s, want %s", path, got, want)
		}
	}
	for _, dir := range []string{"/bin", "/lib", "/etc/shadow"} {
		info, err := os.Lstat(dir)
		if err != nil {
			continue
		}
		i := slices.IndexFunc(paths, func(p Path) bool { return p.Path == dir })
		switch {
		case dir == "/etc/shadow":
			readable := os.Geteuid() == 0
			if (i >= 0 && paths[i].Access == Hide) != readable {
				t.Errorf("%s: readable %v, listed at %d", dir, readable, i)
			}
		case i < 0:
			t.Errorf("%s is missing", dir)
		case info.Mode()&os.ModeSymlink != 0:
			if target, _ := os.Readlink(dir); paths[i].Target != target {
				t.Errorf("%s leads to %q, want %q", dir, paths[i].Target, target)
			}
		case paths[i].Target != "":
			t.Errorf("%s became a link", dir)
		}
	}
}

func TestToolchainOutsideHome(t *testing.T) {
	place := newPlace(t)
	outside := t.TempDir()
	mkdir(t, outside+"/tools/bin", outside+"/open", outside+"/foreign", outside+"/shared/bin")
	symlink(t, outside+"/shared", outside+"/link")
	if err := os.Chmod(outside+"/open", 0o777); err != nil {
		t.Fatal(err)
	}
	list := []string{outside + "/tools/bin", outside + "/open", outside + "/link/bin", outside + "/gone"}
	foreign := os.Geteuid() == 0 // only root can give a directory away
	if foreign {
		if err := os.Chown(outside+"/foreign", 12345, -1); err != nil {
			t.Fatal(err)
		}
		list = append(list, outside+"/foreign")
	}
	environ := []string{"PATH=" + strings.Join(list, ":")}

	paths, notices := Toolchain(environ, place)
	if slices.ContainsFunc(paths, func(p Path) bool { return within(p.Path, outside) }) || len(notices) != 1 {
		t.Errorf("of the temporary directory %v is shown, notices %q", paths, notices)
	}

	usual := never
	defer func() { never = usual }()
	never = slices.DeleteFunc(slices.Clone(never), func(dir string) bool { return within(outside, dir) })
	paths, notices = Toolchain(environ, place)
	paths = slices.DeleteFunc(paths, func(p Path) bool { return !within(p.Path, outside) })
	want := []Path{
		{Path: outside + "/link/bin", Access: ReadOnly, Target: outside + "/shared/bin"},
		{Path: outside + "/shared/bin", Access: ReadOnly},
		{Path: outside + "/tools/bin", Access: ReadOnly},
	}
	if !slices.Equal(paths, want) {
		t.Errorf("shown is %v, want %v", paths, want)
	}
	for reason, wanted := range map[string]bool{"/open\" (every user can write it)": true, "/foreign\" (it belongs to another user)": foreign, "/gone": false} {
		if strings.Contains(strings.Join(notices, ""), reason) != wanted {
			t.Errorf("notices %q, with %s: %v", notices, reason, wanted)
		}
	}
}

func BenchmarkToolchain(b *testing.B) {
	home, err := os.UserHomeDir()
	if err != nil {
		b.Fatal(err)
	}
	place, environ := Place{Home: home, Workspace: b.TempDir()}, os.Environ()
	for b.Loop() {
		Toolchain(environ, place)
	}
}

func BenchmarkResolve(b *testing.B) {
	place, environ := Place{Home: b.TempDir(), Workspace: b.TempDir()}, os.Environ()
	for b.Loop() {
		if _, err := Resolve(Request{Place: place, Environ: environ}); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkBuiltin(b *testing.B) {
	for b.Loop() {
		if _, err := builtins(); err != nil {
			b.Fatal(err)
		}
	}
}
