package preset

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

func write(t *testing.T, path, content string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

const everything = `# comment
version: 1
preset: mine
serve: {listen: "a:1", tokens: [1, {x: y}]}
registries: {docker.io: {mirrors: [/srv/images]}}
presets:
  mine:
    extends: build
    workspace: rw
    ro: [~/.cargo, /srv]
    rw:
      - ./out
    hide: [.env]
    env: [TERM, "LC_*", FOO=bar=baz, -HOME, "-X_*"]
    memory: 2GiB
    cpus: 2
    pids: 512
    timeout: 1h
    profile: strict
    network: host
    checkpoint: true
`

func TestConfig(t *testing.T) {
	config, err := LoadConfig(write(t, t.TempDir()+"/config.yaml", everything))
	if err != nil {
		t.Fatal(err)
	}
	yes := true
	want := Rights{
		Extends: "build", Workspace: WorkspaceReadWrite, ReadOnly: []string{"~/.cargo", "/srv"}, ReadWrite: []string{"./out"},
		Hide: []string{".env"}, Env: []string{"TERM", "LC_*", "FOO=bar=baz", "-HOME", "-X_*"},
		Limits: berm.Limits{Memory: 2 << 30, CPU: 2, PIDs: 512}, Timeout: time.Hour, Profile: "strict", Network: NetworkHost, Checkpoint: &yes,
	}
	if got := config.Presets["mine"]; config.Preset != "mine" || !reflect.DeepEqual(got, want) {
		t.Errorf("preset %q is\n%+v, want\n%+v", config.Preset, got, want)
	}
}

func TestConfigurationErrorsNameTheLine(t *testing.T) {
	dir := t.TempDir()
	for content, want := range map[string]string{
		"":                                         "1: the file is empty",
		"# only a comment\n":                       "1: the file is empty",
		"preset: x\n":                              "1: the version is missing",
		"version: 2\n":                             "1: want version: 1",
		"version: {}\n":                            "1: want version: 1",
		"- version: 1\n":                           "1: this must be a mapping",
		"version: 1\npreset: [a]\n":                "2: preset must be a single value",
		"version: 1\npreset:\n":                    "2: preset has no value",
		"version: 1\nversion: 1\n":                 `2: "version" stands here a second time`,
		"version: 1\nprests: {}\n":                 `2: unknown key "prests"`,
		"version: 1\n---\nversion: 1":              "a second document",
		"version: 1\n? [a]\n: b\n":                 "2: a key must be a word",
		"version: 1\npresets:\n  a b: {}\n":        `"a b" cannot be the name`,
		"version: 1\npresets:\n  a:\n":             "3: this must be a mapping",
		"version: 1\npresets:\n  a: {}\n  a: {}\n": `4: "a" stands here a second time`,
		"version: 1\npresets:\n  a:\n    workspace: rwx\n":                        "4: workspace \"rwx\": it must be one of ro, cow, rw",
		"version: 1\npresets:\n  a:\n    ro: ~/x\n":                               "4: ro must be a list",
		"version: 1\npresets:\n  a:\n    ro: [~]\n":                               "4: ro has no value",
		"version: 1\npresets:\n  a:\n    ro: [\"~root/x\"]\n":                     "4: ro \"~root/x\": only the own home",
		"version: 1\npresets:\n  a:\n    ro: [[a]]\n":                             "4: ro must be a single value",
		"version: 1\npresets:\n  a:\n    env: [\"A B\"]\n":                        "4: env \"A B\": it must be NAME",
		"version: 1\npresets:\n  a:\n    memory: 2XB\n":                           "4: memory \"2XB\": it must be a size",
		"version: 1\npresets:\n  a:\n    cpus: 0\n":                               "4: cpus \"0\"",
		"version: 1\npresets:\n  a:\n    pids: -1\n":                              "4: pids \"-1\"",
		"version: 1\npresets:\n  a:\n    timeout: soon\n":                         "4: timeout \"soon\"",
		"version: 1\npresets:\n  a:\n    profile: none\n":                         "4: profile \"none\"",
		"version: 1\npresets:\n  a:\n    network: public\n":                       "4: network \"public\"",
		"version: 1\npresets:\n  a:\n    checkpoint: \"true\"\n":                  "4: checkpoint must be true or false",
		"version: 1\npresets:\n  a: &x {}\n  b: *x\n":                             "4: aliases are not supported",
		"version: 1\npresets:\n  a: &x {pids: 1}\n  b:\n    <<: *x\n":             "aliases are not supported",
		"version: 1\npresets:\n  a:\n    ro: [" + strings.Repeat("a,", 300) + "]": "more than 256 entries",
		"version: 1\npresets:\n  a:\n    cred: [x=y]\n":                           "4: cred \"x=y\": credential x: it does not say where",
		"version: 1\npresets:\n  a:\n    keyless:\n      ro: [~/x]\n":             `5: unknown key "ro"`,
		"version: 1\npresets:\n  a:\n    keyless:\n      keyless: {}\n":           `5: unknown key "keyless"`,
		"version: 1\npresets: {":                                                  ": ",
		"version: 1\n" + strings.Repeat("#", maxFile):                             "larger than 256 KiB",
		"version: 1\nx: " + strings.Repeat("[", 20000):                            ": ",
	} {
		path := write(t, dir+"/config.yaml", content)
		_, err := LoadConfig(path)
		if berm.KindOf(err) != berm.Invalid || !strings.HasPrefix(err.Error(), path) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60q: %v, want %s", content, err, want)
		}
	}
}

func TestProjectFile(t *testing.T) {
	dir := t.TempDir()
	if r, err := LoadProject(dir); r != nil || err != nil {
		t.Errorf("without a file: %v, %v", r, err)
	}
	path := dir + "/" + ProjectFile
	write(t, path, "version: 1\nhide: [.env]\npids: 9\n")
	if r, err := LoadProject(dir); err != nil || !reflect.DeepEqual(*r, Rights{Hide: []string{".env"}, Limits: berm.Limits{PIDs: 9}}) {
		t.Errorf("%+v, %v", r, err)
	}
	for _, key := range []string{"extends: build", "preset: build", "presets: {}", "serve: {}"} {
		write(t, path, "version: 1\n"+key+"\n")
		if _, err := LoadProject(dir); berm.KindOf(err) != berm.Invalid {
			t.Errorf("%s: %v", key, err)
		}
	}
	for what, make := range map[string]func() error{
		"symbolic link": func() error { return os.Symlink(write(t, dir+"/real", "version: 1\n"), path) },
		"dangling link": func() error { return os.Symlink("nowhere", path) },
		"FIFO":          func() error { return unix.Mkfifo(path, 0o644) },
		"directory":     func() error { return os.Mkdir(path, 0o755) },
		"socket": func() error {
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			return unix.Bind(fd, &unix.SockaddrUnix{Name: path})
		},
	} {
		os.RemoveAll(path)
		if err := make(); err != nil {
			t.Fatal(err)
		}
		if _, err := LoadProject(dir); berm.KindOf(err) != berm.Denied || berm.HintOf(err) == "" {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestConfigurationBelongsToItsReader(t *testing.T) {
	path := write(t, t.TempDir()+"/config.yaml", "version: 1\n")
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadConfig(path); berm.KindOf(err) != berm.Denied {
		t.Errorf("written by everybody: %v", err)
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadConfig(path); err != nil {
		t.Errorf("my own: %v", err)
	}
	if os.Geteuid() == 0 { // only root can give a file away
		if err := os.Chown(path, 12345, -1); err != nil {
			t.Fatal(err)
		}
		if _, err := LoadConfig(path); berm.KindOf(err) != berm.Denied {
			t.Errorf("another user's: %v", err)
		}
	}
	if config, err := LoadConfig(path + ".missing"); err != nil || config.Preset != "" {
		t.Errorf("a missing file: %v", err)
	}
}

func TestValues(t *testing.T) {
	for in, want := range map[string]int64{"1": 1, "512MiB": 512 << 20, "2G": 2 << 30, "1.5GiB": 3 << 29, "10K": 10 << 10, "7B": 7} {
		if got, err := ParseSize(in); got != want || err != nil {
			t.Errorf("%s is %d, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "0", "-1", "x", "1X", "1e99", "NaN", "Inf", "1GG", "GiB", "1GiBiB"} {
		if got, err := ParseSize(in); err == nil {
			t.Errorf("%s is %d", in, got)
		}
	}
	for in, want := range map[string]time.Duration{"90": 90 * time.Second, "1h30m": 90 * time.Minute, "0": 0, "-1s": 0, "x": 0, "": 0} {
		if got, err := ParseDuration(in); got != want || (err == nil) != (want != 0) {
			t.Errorf("%s is %v, %v", in, got, err)
		}
	}
	for in, want := range map[string]float64{"2": 2, "0.5": .5, "0": 0, "NaN": 0, "Inf": 0, "-1": 0, "x": 0} {
		if got, err := ParseCPUs(in); err == nil && got != want || (err == nil) != (want != 0) {
			t.Errorf("%s is %v, %v", in, got, err)
		}
	}
}

func FuzzFile(f *testing.F) {
	f.Add([]byte(everything))
	f.Add([]byte("version: 1\nhide: [.env, ~/x]\nenv: [-A, 'B*']\n"))
	f.Add([]byte("version: 1\na: &a [*a, *a]\n<<: *a\n"))
	f.Add([]byte("%YAML 1.1\n--- !!map {version: !!int 1, ro: !!seq [!!str a]}\n...\n"))
	f.Fuzz(func(t *testing.T, content []byte) {
		for _, parse := range []func() error{
			func() error { _, err := parseConfig("f", content); return err },
			func() error {
				r, err := parseProject("f", content)
				if err == nil && len(r.ReadOnly)+len(r.ReadWrite)+len(r.Hide)+len(r.Env) > 4*maxList {
					t.Error("more entries than allowed")
				}
				return err
			},
		} {
			err := parse()
			if err == nil {
				continue
			}
			if berm.KindOf(err) != berm.Invalid || !strings.HasPrefix(err.Error(), "f:") {
				t.Errorf("%v is %v", err, berm.KindOf(err))
			}
			if strings.ContainsRune(err.Error(), '\x1b') {
				t.Errorf("an escape sequence in %q", err)
			}
		}
	})
}
