package template

import (
	"archive/tar"
	"bytes"
	"encoding/hex"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	securejoin "github.com/cyphar/filepath-securejoin"
	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/umoci/oci/layer"
	"golang.org/x/sys/unix"
)

// Layers as builders write them must give, stacked as a sandbox sees them, what
// another implementation gives: umoci, which applies them one after the other to one
// directory. What TestRandomStacks does with names that meet within a layer the
// format leaves open; here each layer says everything once.
func TestAgainstReference(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("gives files to several users and mounts an overlay: needs root")
	}
	rounds, size := 25, 14
	if os.Getenv("BERM_TEST_ALL") != "" {
		rounds, size = 150, 30
	}
	seed := rand.Uint64()
	for round := range rounds {
		t.Run(fmt.Sprintf("%d-%d", seed, round), func(t *testing.T) {
			compareWithReference(t, rand.New(rand.NewPCG(seed, uint64(round))), size)
		})
		if t.Failed() {
			return
		}
	}
}

func compareWithReference(t *testing.T, r *rand.Rand, size int) {
	reference := t.TempDir()
	if err := os.Chmod(reference, 0o755); err != nil {
		t.Fatal(err)
	}
	var layers []string
	var told strings.Builder
	var last []string
	for n := range 1 + r.IntN(6) {
		w := &writer{t: t, r: r, root: reference, tree: names(t, reference), said: map[string]bool{}, crossed: map[string]bool{}}
		for range r.IntN(size + 1) {
			w.step()
		}
		for _, e := range w.entries {
			fmt.Fprintf(&told, "layer %d: %c %s -> %s %o %d:%d %.20q\n", n, e.Typeflag, e.Name, e.Linkname, e.Mode, e.Uid, e.Gid, e.content)
		}
		data := archive(t, w.entries...)
		if err := layer.UnpackLayer(reference, bytes.NewReader(data), nil); err != nil {
			t.Fatalf("%s\nthe reference: %v", told.String(), err)
		}
		dir, _, err := unpackTo(t, data, layers, DefaultBudget)
		if err != nil {
			t.Fatalf("%s\n%v", told.String(), err)
		}
		layers, last = append(layers, dir), w.linked
	}
	want, times, one := describe(t, reference)
	var got, gotTimes, same map[string]string
	mounted(t, layers, func(dir string) { got, gotTimes, same = describe(t, dir) })
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("%s\n(-reference +sandbox):\n%s", told.String(), diff)
	}
	for name, want := range times {
		// The reference leaves directories that no archive describes at the present.
		if got := gotTimes[name]; got != want && want < fmt.Sprint(modTime(1e6).Unix()) {
			t.Errorf("%s\n%s has time %s, in the reference %s", told.String(), name, got, want)
		}
	}
	// An overlay parts the names of a file that a higher layer touches, and never joins
	// those of two.
	for a, b := range same {
		if one[a] != one[b] {
			t.Errorf("%s\n%s and %s are one file, and two in the reference", told.String(), a, b)
		}
	}
	for i := 0; i+1 < len(last); i += 2 {
		if a, b := last[i], last[i+1]; one[a] != "" && one[a] == one[b] && same[a] != same[b] {
			t.Errorf("%s\n%s and %s were linked by the last layer and are two files", told.String(), a, b)
		}
	}
}

// writer makes up one layer over a tree that is there. All paths are relative to the
// root and without links, but for the names of entries, which may cross some.
type writer struct {
	t       *testing.T
	r       *rand.Rand
	root    string
	tree    map[string]uint32 // type of each file of the tree, and mode
	said    map[string]bool   // what the layer has said something about
	crossed map[string]bool   // links that names of the layer go through
	entries []entry
	linked  []string // pairs of names of one file
}

// step adds what a builder could have done next, or nothing where it met itself.
func (w *writer) step() {
	r := w.r
	switch n := r.IntN(20); {
	case n < 5: // a new file, or another in the place of one
		if name, at, ok := w.free(); ok {
			w.add(tar.TypeReg, name, at, "", fmt.Sprint(strings.Repeat("x", r.IntN(3)*r.IntN(5000)), r.IntN(1000)))
		}
	case n < 8:
		if name, at, ok := w.free(); ok {
			w.add(tar.TypeSymlink, name, at, w.target(at), "")
		}
	case n < 11:
		if name, at, ok := w.free(); ok {
			w.add(tar.TypeDir, name, at, "", "")
		}
	case n < 12: // what a directory is, once more
		if at, ok := w.pick(unix.S_IFDIR); ok && w.fresh(at) {
			w.add(tar.TypeDir, w.through(at), at, "", "")
		}
	case n < 14: // a hard link to a file or to a link, of a lower layer or of this one
		from, ok := w.pick(unix.S_IFREG, unix.S_IFLNK)
		target := w.through(from) // before the name is chosen, which may be of a link on this way
		if name, at, free := w.free(); ok && free && at != from && !strings.HasPrefix(from, at+"/") {
			w.said[from] = true // no longer to be replaced
			w.add(tar.TypeLink, name, at, target, "")
			w.linked = append(w.linked, from, at)
		}
	case n < 17: // gone
		if at, ok := w.pick(unix.S_IFREG, unix.S_IFLNK, unix.S_IFDIR); ok && w.fresh(at) && w.below(at) == 0 {
			dir, base := path.Split(w.through(at))
			w.said[at] = true
			w.put(tar.TypeReg, path.Join(dir, whiteoutPrefix+base), "", "")
			w.forget(at)
		} else if r.IntN(3) == 0 {
			w.put(tar.TypeReg, whiteoutPrefix+"never", "", "")
		}
	case n < 19: // a directory of which nothing is left, with something in it
		at, ok := w.pick(unix.S_IFDIR)
		if !ok || !w.fresh(at) || w.below(at) > 0 {
			return
		}
		name := w.through(at)
		order := []func(){
			func() { w.put(tar.TypeReg, path.Join(name, opaqueMarker), "", "") },
			func() { w.add(tar.TypeReg, path.Join(name, "new"), path.Join(at, "new"), "", "new") },
		}
		for _, child := range slices.Sorted(maps.Keys(w.tree)) { // said twice
			if path.Dir(child) == at && r.IntN(2) == 0 {
				order = append(order, func() { w.put(tar.TypeReg, path.Join(name, whiteoutPrefix+path.Base(child)), "", "") })
			}
		}
		mode := w.tree[at]
		w.forget(at)
		w.tree[at] = mode
		r.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		for _, f := range order {
			f()
		}
		w.said[at] = true
	default: // the same by a whiteout of it beside it
		at, ok := w.pick(unix.S_IFDIR)
		if !ok || !w.fresh(at) || w.below(at) > 0 {
			return
		}
		name := w.through(at)
		w.put(tar.TypeReg, path.Join(path.Dir(name), whiteoutPrefix+path.Base(name)), "", "")
		w.forget(at)
		w.add(tar.TypeDir, name, at, "", "")
	}
}

// pick draws a file of one of the types.
func (w *writer) pick(types ...uint32) (string, bool) {
	var all []string
	for name, mode := range w.tree {
		if slices.Contains(types, mode&unix.S_IFMT) {
			all = append(all, name)
		}
	}
	if len(all) == 0 {
		return "", false
	}
	slices.Sort(all)
	return all[w.r.IntN(len(all))], true
}

// fresh says whether the layer may still say something about a path.
func (w *writer) fresh(at string) bool { return !w.said[at] && !w.crossed[at] }

// below counts what the layer has said about what is below a path, or leads through it.
func (w *writer) below(at string) (n int) {
	for name := range w.said {
		if strings.HasPrefix(name, at+"/") {
			n++
		}
	}
	for name := range w.crossed {
		if strings.HasPrefix(name, at+"/") {
			n++
		}
	}
	return n
}

func (w *writer) forget(at string) {
	maps.DeleteFunc(w.tree, func(name string, _ uint32) bool { return name == at || strings.HasPrefix(name, at+"/") })
}

// free draws a path for a new file: its name for the archive, and where that leads. A
// file, a link or a directory that is there may be replaced.
func (w *writer) free() (name, at string, ok bool) {
	dir, base := ".", string(rune('a'+w.r.IntN(8)))
	if d, ok := w.pick(unix.S_IFDIR); ok && w.r.IntN(4) > 0 {
		dir = d
	}
	name = path.Join(w.through(dir), base)
	at = path.Join(dir, base)
	// Below directories that nobody describes. In one that is set-gid the reference lets the
	// kernel hand that on.
	if w.tree[dir]&unix.S_ISGID == 0 && w.r.IntN(6) == 0 {
		deep := strings.Repeat("deep/", 1+w.r.IntN(3)*w.r.IntN(8))
		if _, there := w.tree[path.Join(dir, "deep")]; there {
			deep = fmt.Sprintf("deep%d/", w.r.Uint32())
		}
		name, at = path.Join(path.Dir(name), deep, base), path.Join(dir, deep, base)
		for d := path.Dir(at); d != dir; d = path.Dir(d) {
			w.tree[d] = unix.S_IFDIR
			w.said[d] = true
		}
	}
	if !w.fresh(at) || w.below(at) > 0 {
		return "", "", false
	}
	return name, at, true
}

// through spells a path: as it is, or through links that lead to a directory above it.
func (w *writer) through(at string) string {
	if w.r.IntN(3) > 0 {
		return at
	}
	var links []string
	for name, mode := range w.tree {
		if mode&unix.S_IFMT == unix.S_IFLNK && !w.said[name] {
			links = append(links, name)
		}
	}
	slices.Sort(links)
	w.r.Shuffle(len(links), func(i, j int) { links[i], links[j] = links[j], links[i] })
	for _, link := range links {
		full, err := securejoin.SecureJoin(w.root, link)
		if err != nil {
			continue
		}
		to, err := filepath.Rel(w.root, full)
		if err != nil || w.tree[to]&unix.S_IFMT != unix.S_IFDIR {
			continue
		}
		// Other links on the way would have to stay too: one step is told from a chain by
		// what its text says.
		target, err := os.Readlink(filepath.Join(w.root, link))
		if err != nil {
			continue
		}
		plain := path.Join(path.Dir(link), target)
		if path.IsAbs(target) {
			plain = path.Clean(target[1:])
		}
		if link == at || strings.HasPrefix(link, at+"/") {
			continue // which goes with what it leads to
		}
		if rest, below := strings.CutPrefix(at, to+"/"); below && path.Clean(plain) == to {
			w.crossed[link] = true
			return path.Join(link, rest)
		}
	}
	return at
}

// target is what a link may say.
func (w *writer) target(at string) string {
	to, ok := w.pick(unix.S_IFDIR)
	switch n := w.r.IntN(8); {
	case n == 0 || !ok:
		return "../../../../../nowhere"
	case n == 1:
		return path.Base(at) // itself
	case n < 5:
		return "/" + to
	}
	relative, err := filepath.Rel(filepath.Join("/", path.Dir(at)), filepath.Join("/", to))
	if err != nil {
		w.t.Fatal(err)
	}
	return relative
}

// add appends an entry that makes the file at a path.
func (w *writer) add(kind byte, name, at, linkname, content string) {
	w.said[at] = true
	h := w.put(kind, name, linkname, content)
	if kind == tar.TypeDir {
		w.tree[at] = unix.S_IFDIR | uint32(h.Mode)
	} else {
		w.forget(at)
	}
}

func (w *writer) put(kind byte, name, linkname, content string) *tar.Header {
	r := w.r
	h := &tar.Header{
		Typeflag: kind, Name: name, Linkname: linkname, Format: tar.FormatPAX,
		Mode: []int64{0o644, 0o755, 0o4755, 0o6711, 0o1777, 0o2775, 0, 0o7777, 0o111}[r.IntN(9)],
		Uid:  []int{0, 0, 1000, 65535}[r.IntN(4)], Gid: []int{0, 5, 65534}[r.IntN(3)],
		ModTime: modTime(r.Int64N(1000)).Add(time.Duration(r.IntN(1e9))),
	}
	if prefix := r.IntN(6); prefix == 0 {
		h.Name = "./" + name
	} else if prefix == 1 {
		h.Name = "/" + name
	}
	if kind == tar.TypeDir {
		h.Name += "/"
	}
	if (kind == tar.TypeDir || kind == tar.TypeReg) && r.IntN(3) == 0 {
		h.PAXRecords = map[string]string{"SCHILY.xattr.user.k": string([]byte{0, byte(r.IntN(256)), '=', '\n'})}
		if r.IntN(3) == 0 {
			h.PAXRecords["SCHILY.xattr.user.long.name"] = strings.Repeat("v", 1+r.IntN(300)) // empty is none to some
		}
	}
	w.entries = append(w.entries, entry{h, content})
	return h
}

// names lists a tree, without its root.
func names(t *testing.T, root string) map[string]uint32 {
	t.Helper()
	all := map[string]uint32{}
	for _, name := range find(t, root) {
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(root, name), &st); err != nil {
			t.Fatal(err)
		}
		all[name] = st.Mode
	}
	return all
}

// describe tells all that a process can see of a tree, by name: what a file is, when it
// was changed, and under which name it came first.
func describe(t *testing.T, root string) (what, times, one map[string]string) {
	t.Helper()
	what, times, one = map[string]string{}, map[string]string{}, map[string]string{}
	inodes := map[uint64]string{}
	for _, name := range append([]string{"."}, find(t, root)...) {
		full := filepath.Join(root, name)
		var st unix.Stat_t
		if err := unix.Lstat(full, &st); err != nil {
			t.Fatal(err)
		}
		times[name] = fmt.Sprintf("%010d.%09d", st.Mtim.Sec, st.Mtim.Nsec)
		line := fmt.Sprintf("%o %d:%d", st.Mode, st.Uid, st.Gid)
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			content, err := os.ReadFile(full)
			if err != nil {
				t.Fatal(err)
			}
			line += fmt.Sprintf(" %q", content)
		case unix.S_IFLNK:
			target, err := os.Readlink(full)
			if err != nil {
				t.Fatal(err)
			}
			line += " -> " + target
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			if inodes[st.Ino] == "" {
				inodes[st.Ino] = name
			}
			one[name] = inodes[st.Ino]
		}
		what[name] = line + attributes(t, full)
	}
	return what, times, one
}

func attributes(t *testing.T, name string) string {
	t.Helper()
	list := make([]byte, 64<<10)
	n, err := unix.Llistxattr(name, list)
	if err != nil {
		t.Fatal(err)
	}
	keys := strings.Split(string(list[:n]), "\x00")
	slices.Sort(keys)
	all := ""
	for _, key := range keys {
		if !strings.HasPrefix(key, "user.") {
			continue
		}
		value := make([]byte, 64<<10)
		n, err := unix.Lgetxattr(name, key, value)
		if err != nil {
			t.Fatal(err)
		}
		all += " " + key + "=" + hex.EncodeToString(value[:n])
	}
	return all
}
