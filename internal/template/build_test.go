package template

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// The base template is made from packages, holds what it promises and nothing of
// the host, is not made again, and is the same when it is.
func TestBuildBase(t *testing.T) {
	if os.Getenv("BERM_TEST_ALL") == "" {
		t.Skip("takes minutes: set BERM_TEST_ALL=1")
	}
	if hostIDs().own {
		t.Skip("needs root, or newuidmap and 65536 ids in /etc/subuid and /etc/subgid")
	}
	s := newStore(t)
	start := time.Now()
	made, err := s.Build(t.Context(), Base, false, func(step Step) { t.Logf("%5.1fs %s", time.Since(start).Seconds(), step.Message) })
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s, %d MiB, in %s", made.Layers[0].DiffID, made.Size>>20, time.Since(start).Round(time.Second))
	if made.Size > 600<<20 || made.User != "user" || !made.Setuid {
		t.Errorf("template %+v", made)
	}
	root := made.Layers[0].Path
	for _, name := range []string{"bash", "sudo", "python", "python3", "pip", "git", "curl", "node", "npm", "tput", "realpath", "rg", "jq", "ssh", "ip", "ps", "less", "unzip"} {
		if _, err := os.Lstat(filepath.Join(root, "usr/bin", name)); err != nil {
			t.Error(err)
		}
	}
	user := uint32(1000)
	if i := hostIDs(); i.shifted() {
		user += i.uids.Base
	}
	for name, want := range map[string]uint32{"home/user": unix.S_IFDIR | 0o755, "usr/bin/sudo": unix.S_IFREG | 0o4755} {
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(root, name), &st); err != nil || st.Mode != want {
			t.Errorf("%s has mode %o, want %o, %v", name, st.Mode, want, err)
		} else if name == "home/user" && st.Uid != user {
			t.Errorf("%s belongs to %d", name, st.Uid)
		}
	}
	for _, name := range []string{"etc/machine-id", "etc/resolv.conf", "etc/hostname"} {
		if b, err := os.ReadFile(filepath.Join(root, name)); err != nil || len(b) > 0 {
			t.Errorf("%s holds %q, %v", name, b, err)
		}
	}
	for _, name := range []string{"etc/apt/apt.conf.d/99mmdebstrap", ".setup"} {
		if _, err := os.Lstat(filepath.Join(root, name)); !os.IsNotExist(err) {
			t.Errorf("%s is there: %v", name, err)
		}
	}
	// The suite, its updates and its security updates, as the distribution names them.
	public := regexp.MustCompile(`^deb http://\S+ bookworm main\ndeb http://\S+ bookworm-updates main\ndeb http://\S+ bookworm-security main\n$`)
	if sources, err := os.ReadFile(filepath.Join(root, "etc/apt/sources.list")); err != nil || !public.Match(sources) {
		t.Errorf("apt asks %q, %v", sources, err)
	}
	r, err := s.find(Base)
	if err != nil || len(r.Packages) < 100 || !strings.Contains(strings.Join(r.Packages, "\n"), "\npython3 3.") {
		t.Errorf("%d packages, %v", len(r.Packages), err)
	}
	if got := find(t, filepath.Join(s.dir, "tmp")); len(got) > 0 {
		t.Errorf("the build left %q", got)
	}

	start = time.Now()
	again, err := s.Build(t.Context(), Base, false, nil)
	if took := time.Since(start); err != nil || again.BuildID != made.BuildID || took > 20*time.Second {
		t.Errorf("again: build %s in %s, %v", again.BuildID, took, err)
	}
	if os.Geteuid() != 0 {
		return // once is enough for a second build
	}
	forced, err := s.Build(t.Context(), Base, true, nil)
	if err != nil {
		t.Fatal(err)
	}
	if forced.ID != made.ID || forced.BuildID == made.BuildID || forced.Layers[0].DiffID != made.Layers[0].DiffID {
		t.Errorf("built again it is %s, was %s", forced.Layers[0].DiffID, made.Layers[0].DiffID)
	}
}

// A recipe whose packages are those of another template is made of its layer at once.
func TestBuildOfSameLayer(t *testing.T) {
	s := newStore(t)
	if s.ids.own {
		t.Skip("needs root, or subordinate ids")
	}
	layer := filepath.Join(s.dir, "layers", "x")
	if err := os.MkdirAll(layer, 0o755); err != nil {
		t.Fatal(err)
	}
	base, err := s.put(t.Context(), record{Template: berm.Template{Names: []string{Base}, Layers: []berm.Layer{{DiffID: "sha256:x", Path: layer}}, Size: 7}, Digest: base().key()})
	if err != nil {
		t.Fatal(err)
	}
	made, err := s.Build(t.Context(), "httpbin", false, nil)
	if err != nil {
		t.Fatal(err)
	}
	if made.Alias() != "httpbin" || made.ID == base.ID || len(made.Layers) != 1 || made.Layers[0] != base.Layers[0] || made.Size != 7 || made.Start == "" || made.Ready == "" || made.User != "user" {
		t.Errorf("%+v", made)
	}
	again, err := s.Build(t.Context(), "httpbin", false, nil)
	if err != nil || again.BuildID != made.BuildID {
		t.Errorf("it is made again: %v", err)
	}
	if _, err := os.Lstat(layer); err != nil {
		t.Error(err)
	}
	if _, err := s.Build(t.Context(), "nothing", false, nil); berm.KindOf(err) != berm.NotFound {
		t.Errorf("no recipe: %v", err)
	}
}

// What recipes hold is theirs alone.
func TestRecipeFiles(t *testing.T) {
	for name, want := range map[string][]string{
		Base:      nil,
		"browser": {"etc/chromium.d/berm", "etc/nginx/devtools.conf"},
		"desktop": {"etc/chromium.d/berm", "usr/share/applications/google-chrome.desktop"},
		"httpbin": nil,
	} {
		m := recipes[name]()
		var extra []string
		for file := range m.recipe.Files {
			if _, ok := base().Files[file]; !ok {
				extra = append(extra, file)
			}
		}
		if slices.Sort(extra); !slices.Equal(extra, want) || m.defaults.Alias() != name {
			t.Errorf("%s, %q, has the files %q, want %q", name, m.defaults.Alias(), extra, want)
		}
	}
}

// A build tells how far apt and dpkg are, and keeps their words for its error.
func TestBuildLog(t *testing.T) {
	var said []string
	log := &buildLog{progress: func(s Step) { said = append(said, s.Message) }}
	write := func(format string, args ...any) {
		for part := range slices.Chunk([]byte(fmt.Sprintf(format, args...)), 7) {
			if _, err := log.Write(part); err != nil {
				t.Fatal(err)
			}
		}
	}
	write("I: installing\nI: running --customize-hook\nUnpacking early (1) ...\n")
	write("0 upgraded, 60 newly installed, 0 to remove and 0 not upgraded.\n")
	for _, verb := range []string{"Unpacking", "Setting up"} {
		for i := range 60 {
			write("%s package-%d (1.0) ...\n", verb, i)
		}
	}
	want := []string{"installing", "unpacked 50 of 60 packages", "set up 50 of 60 packages"}
	if !slices.Equal(said, want) {
		t.Errorf("it said %q, want %q", said, want)
	}
	write("dpkg: error processing package-7\n")
	if err := log.explain(berm.Errorf(berm.Internal, "failed")); !strings.Contains(err.Error(), "error processing package-7") {
		t.Error(err)
	}
}
