package template

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

func newStore(t *testing.T) *Store {
	t.Helper()
	s, err := Open(filepath.Join(t.TempDir(), "templates"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // files of subordinate ids are beyond the testing package
		var names []string
		for _, dir := range []string{"layers", "tmp"} {
			entries, err := os.ReadDir(filepath.Join(s.dir, dir))
			if err != nil {
				t.Error(err)
			}
			for _, e := range entries {
				names = append(names, filepath.Join(dir, e.Name()))
			}
		}
		if err := s.removeAll(context.WithoutCancel(t.Context()), names); err != nil {
			t.Error(err)
		}
	})
	return s
}

// addTemplate stores a template of one layer for each content.
func addTemplate(t *testing.T, s *Store, name string, contents ...string) berm.Template {
	t.Helper()
	unlock, err := s.lock(t.Context(), "lock", unix.LOCK_SH)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	r := record{Template: berm.Template{Names: []string{name}, User: "root", Workdir: "/", Env: map[string]string{"A": "b"}}}
	var chains []string
	for _, content := range contents {
		budget := DefaultBudget
		info, chain, err := s.addLayer(t.Context(), chains, "", bytes.NewReader(archive(t, file644("f", content))), &budget)
		if err != nil {
			t.Fatal(err)
		}
		chains = append(chains, chain)
		r.Layers = append(r.Layers, berm.Layer{DiffID: info.DiffID, Path: s.layerPath(chain)})
		r.Size += info.Size
	}
	made, err := s.put(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	return made
}

func layerNames(t *testing.T, s *Store) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(s.dir, "layers"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names
}

func TestResolve(t *testing.T) {
	s := newStore(t)
	made := addTemplate(t, s, "python", "1")
	tagged := addTemplate(t, s, "python:3.12", "2")
	latest := addTemplate(t, s, "node:latest", "3")
	for ref, want := range map[string]berm.Template{
		"python": made, string(made.ID): made, "python:latest": made, "python:default": made,
		"python:3.12": tagged, "node": latest, "node:latest": latest,
	} {
		got, err := s.Resolve(t.Context(), "", ref)
		if err != nil {
			t.Errorf("%s: %v", ref, err)
		} else if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", ref, diff)
		}
	}
	for _, ref := range []string{"", "pytho", "python:3.11", "../python", "python:3.12:latest", strings.ToUpper("python")} {
		_, err := s.Resolve(t.Context(), "", ref)
		if err == nil || berm.KindOf(err) != berm.NotFound || !strings.Contains(err.Error(), "'"+ref+"'") {
			t.Errorf("%q: got %v, want it not found by its name", ref, err)
		}
	}
	list, err := s.List(t.Context())
	if err != nil || len(list) != 3 || list[0].Alias() != "node:latest" {
		t.Errorf("list %v, %v", list, err)
	}
	list[0].Names[0] = "changed" // must not reach the cache
	if _, err := s.Resolve(t.Context(), "", "node"); err != nil {
		t.Error(err)
	}
}

func TestRebuildKeepsID(t *testing.T) {
	s := newStore(t)
	before := addTemplate(t, s, "a", "1")
	after := addTemplate(t, s, "a", "2")
	if before.ID != after.ID || before.BuildID == after.BuildID {
		t.Errorf("before %v %v, after %v %v", before.ID, before.BuildID, after.ID, after.BuildID)
	}
	if got, err := s.Resolve(t.Context(), "", "a"); err != nil || got.BuildID != after.BuildID {
		t.Errorf("got %v, %v", got, err)
	}
	if n := len(layerNames(t, s)); n != 2 {
		t.Fatalf("%d layers before the collection", n)
	}
	if err := s.Collect(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := layerNames(t, s); !cmp.Equal(got, []string{filepath.Base(after.Layers[0].Path)}) {
		t.Errorf("layers %v, want the new one alone", got)
	}
}

func TestRemoveKeepsSharedLayers(t *testing.T) {
	s := newStore(t)
	addTemplate(t, s, "a", "1", "2")
	b := addTemplate(t, s, "b", "1", "3")
	if n := len(layerNames(t, s)); n != 3 {
		t.Fatalf("%d layers, want 3: the first is shared", n)
	}
	if err := s.Remove(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	if n := len(layerNames(t, s)); n != 2 {
		t.Errorf("%d layers are left, want 2", n)
	}
	if err := s.Remove(t.Context(), "a"); berm.KindOf(err) != berm.NotFound {
		t.Errorf("again: %v", err)
	}
	if err := s.Remove(t.Context(), string(b.ID)); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"layers", "tmp", "leases"} {
		if got := find(t, filepath.Join(s.dir, dir)); len(got) > 0 {
			t.Errorf("%s holds %q", dir, got)
		}
	}
}

// The same content over another layer is another directory: what a layer unpacks
// to depends on what is below.
func TestLayersAreKeptByChain(t *testing.T) {
	s := newStore(t)
	a := addTemplate(t, s, "a", "1", "same")
	b := addTemplate(t, s, "b", "2", "same")
	if a.Layers[1].DiffID != b.Layers[1].DiffID || a.Layers[1].Path == b.Layers[1].Path {
		t.Errorf("a %v, b %v", a.Layers[1], b.Layers[1])
	}
	if want := s.layerPath(a.Layers[0].DiffID); a.Layers[0].Path != want {
		t.Errorf("the lowest layer is at %s, want %s", a.Layers[0].Path, want)
	}
}

func TestLease(t *testing.T) {
	s := newStore(t)
	made := addTemplate(t, s, "a", "1")
	sandbox := filepath.Join(t.TempDir(), "i0one")
	if err := os.Mkdir(sandbox, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := s.Lease(t.Context(), "i0one", sandbox, made); err != nil {
		t.Fatal(err)
	}
	err := s.Remove(t.Context(), "a")
	if berm.KindOf(err) != berm.Conflict || !strings.Contains(err.Error(), "i0one") {
		t.Fatalf("got %v, want a conflict that names the sandbox", err)
	}
	// A new build takes the name; the sandbox keeps its layer.
	addTemplate(t, s, "a", "2")
	if err := s.Collect(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(made.Layers[0].Path, "f")); err != nil {
		t.Fatalf("the layer of a living sandbox: %v", err)
	}
	if err := os.Remove(sandbox); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	if got := append(layerNames(t, s), find(t, filepath.Join(s.dir, "leases"))...); len(got) > 0 {
		t.Errorf("left %q", got)
	}
	if err := s.Lease(t.Context(), "i0two", sandbox, made); berm.KindOf(err) != berm.NotFound || err == nil {
		t.Errorf("a lease of a removed template: %v", err)
	}
}

// What a template is built on is in use by that one's sandboxes, which is no reason to keep it.
func TestSharedLayersAreNoUse(t *testing.T) {
	s := newStore(t)
	below := addTemplate(t, s, "below", "1")
	above := addTemplate(t, s, "above", "1", "2")
	if below.Layers[0].Path != above.Layers[0].Path {
		t.Fatal("nothing is shared")
	}
	sandbox := filepath.Join(t.TempDir(), "i0one")
	if err := os.Mkdir(sandbox, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := s.Lease(t.Context(), "i0one", sandbox, below); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(t.Context(), "above"); err != nil {
		t.Error(err)
	}
	if err := s.Remove(t.Context(), "below"); berm.KindOf(err) != berm.Conflict {
		t.Errorf("got %v, want a conflict", err)
	}
}

func TestWrongDiffIDIsRefused(t *testing.T) {
	s := newStore(t)
	budget := DefaultBudget
	_, _, err := s.addLayer(t.Context(), nil, "sha256:"+strings.Repeat("0", 64), bytes.NewReader(archive(t, file644("f", "x"))), &budget)
	if berm.KindOf(err) != berm.Invalid {
		t.Errorf("got %v", err)
	}
	if got := append(find(t, filepath.Join(s.dir, "layers")), find(t, filepath.Join(s.dir, "tmp"))...); len(got) > 0 {
		t.Errorf("left %q", got)
	}
}

// Many at once add, replace, remove and collect: what is found is always whole.
func TestConcurrentUse(t *testing.T) {
	dir := newStore(t).dir
	stop := time.Now().Add(time.Second)
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			s, err := Open(dir) // as a process of its own would
			if err != nil {
				t.Error(err)
				return
			}
			for round := 0; time.Now().Before(stop); round++ {
				name := string(rune('a' + (i+round)%3))
				switch i % 3 {
				case 0:
					addTemplate(t, s, name, "1", name)
				case 1:
					if err := s.Remove(t.Context(), name); err != nil && berm.KindOf(err) != berm.NotFound {
						t.Error(err)
					}
				default:
					if err := s.Collect(t.Context()); err != nil {
						t.Error(err)
					}
					unlock, err := s.lock(t.Context(), "lock", unix.LOCK_SH)
					if err != nil {
						t.Error(err)
						return
					}
					list, err := s.List(t.Context())
					if err != nil {
						t.Error(err)
					}
					for _, made := range list {
						for _, l := range made.Layers {
							if _, err := os.Stat(filepath.Join(l.Path, "f")); err != nil {
								t.Errorf("%s: %v", made.Alias(), err)
							}
						}
					}
					unlock()
				}
			}
		})
	}
	wg.Wait()
}

// Who writes down a build holds no lock, and others clean up meanwhile.
func TestSaveBuildWhileOthersCollect(t *testing.T) {
	s := newStore(t)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				if err := s.Collect(t.Context()); err != nil {
					t.Error(err)
					return
				}
			}
		}
	})
	for end := time.Now().Add(time.Second); time.Now().Before(end) && !t.Failed(); {
		if err := s.SaveBuild(Build{ID: "b", State: Waiting}); err != nil {
			t.Error(err)
		}
	}
	close(stop)
	wg.Wait()
}

func TestLockGivesUp(t *testing.T) {
	s := newStore(t)
	unlock, err := s.lock(t.Context(), "lock", unix.LOCK_SH)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := s.Remove(ctx, "a"); berm.KindOf(err) != berm.Unavailable {
		t.Errorf("got %v", err)
	}
}

func TestStoreIsPrivate(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir); err == nil || berm.KindOf(err) != berm.Denied {
		t.Errorf("a directory that others may enter: %v", err)
	}
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("its mode is now %v, %v", info.Mode(), err)
	}
	s, err := Open(filepath.Join(dir, "new"))
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(s.dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the store's mode is %v, %v", info.Mode(), err)
	}
}

func TestSubordinate(t *testing.T) {
	file := filepath.Join(t.TempDir(), "subuid")
	if err := os.WriteFile(file, []byte("# note\nother:1:2\nann:x:65536\nann:200000:65536\nann:1:1\n1001:300000:9\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		names []string
		want  berm.IDRange
	}{
		{[]string{"1000", "ann"}, berm.IDRange{Base: 200000, Count: 65536}},
		{[]string{"1001", "bob"}, berm.IDRange{Base: 300000, Count: 9}},
		{[]string{"1002", "eve"}, berm.IDRange{}},
	} {
		if got := subordinate(file, c.names); got != c.want {
			t.Errorf("%v: %v, want %v", c.names, got, c.want)
		}
	}
}

func TestCheckName(t *testing.T) {
	for name, ok := range map[string]bool{
		"base": true, "a": true, "0": true, "a.b_c-d": true, "python:3.12": true, "a:_X": true,
		"": false, "A": false, "-a": false, ".a": false, "a/b": false, "a:": false, ":a": false, "a:b:c": false,
		"a b": false, "a\n": false, "é": false, strings.Repeat("a", 129): false, "a:-b": false,
	} {
		if err := CheckName(name); (err == nil) != ok {
			t.Errorf("%q: %v", name, err)
		}
	}
}
