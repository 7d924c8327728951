package template

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// entry is one entry of an archive that a test makes.
type entry struct {
	*tar.Header
	content string
}

func archive(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, e := range entries {
		h := *e.Header
		h.Size = int64(len(e.content))
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func file644(name, content string) entry {
	return entry{&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, ModTime: modTime(0)}, content}
}

func dir755(name string) entry {
	return entry{&tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: 0o755, ModTime: modTime(0)}, ""}
}

func link(kind byte, name, target string) entry {
	return entry{&tar.Header{Typeflag: kind, Name: name, Linkname: target, Mode: 0o777, ModTime: modTime(0)}, ""}
}

// testIDs stores owners as they are for root; an ordinary user can store only its
// own.
func testIDs() ids { return ids{own: os.Geteuid() != 0} }

// unpackTo unpacks an archive as a layer over others (lowest first) into a new
// directory.
func unpackTo(t testing.TB, data []byte, below []string, b Budget) (dir string, skipped []string, err error) {
	t.Helper()
	dir = t.TempDir()
	top, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer top.Close()
	var lower []*os.Root
	for _, l := range below {
		root, err := os.OpenRoot(l)
		if err != nil {
			t.Fatal(err)
		}
		defer root.Close()
		lower = append([]*os.Root{root}, lower...)
	}
	plain, err := decompress(bytes.NewReader(data), &b)
	if err != nil {
		return dir, nil, err
	}
	_, skipped, err = unpack(t.Context(), plain, top, lower, testIDs(), &b)
	return dir, skipped, err
}

// randomEntry draws from few names, so that entries meet.
func randomEntry(r *rand.Rand) entry {
	name := func() string {
		parts := make([]string, 1+r.IntN(3))
		for i := range parts {
			parts[i] = string(rune('a' + r.IntN(4)))
		}
		return path.Join(parts...)
	}
	owner := 0
	if os.Geteuid() == 0 {
		owner = r.IntN(3) * 1000
	}
	h := &tar.Header{Name: name(), Mode: []int64{0o644, 0o755, 0o4755, 0o2711, 0o1777, 0o700}[r.IntN(6)], Uid: owner, Gid: owner, ModTime: modTime(r.Int64N(1000)), Format: tar.FormatPAX}
	content := ""
	switch n := r.IntN(20); {
	case n < 6:
		h.Typeflag, content = tar.TypeReg, fmt.Sprint(r.IntN(1000))
		if r.IntN(3) == 0 {
			h.PAXRecords = map[string]string{"SCHILY.xattr.user.k": content}
		}
	case n < 11:
		h.Typeflag = tar.TypeDir
		if os.Geteuid() != 0 {
			h.Mode |= 0o700 // the test could not look inside
		}
		if r.IntN(10) == 0 {
			h.Name = "./"
		}
	case n < 15:
		h.Typeflag = tar.TypeSymlink
		h.Linkname = []string{"", "/", "../", "../../", "./"}[r.IntN(5)] + name()
	case n < 16:
		h.Typeflag, h.Linkname = tar.TypeLink, name()
	case n < 19:
		h.Typeflag, h.Name = tar.TypeReg, path.Join(path.Dir(h.Name), whiteoutPrefix+path.Base(h.Name))
	default:
		h.Typeflag, h.Name = tar.TypeReg, path.Join(path.Dir(h.Name), opaqueMarker)
	}
	return entry{h, content}
}

// Layers of random entries must merge to what the archives give when they are
// applied one after the other, both by the documented rules of overlayfs and by
// overlayfs itself.
func TestRandomStacks(t *testing.T) {
	rounds := 40
	if os.Getenv("BERM_TEST_ALL") != "" {
		rounds = 600
	}
	seed := rand.Uint64()
	for round := range rounds {
		r := rand.New(rand.NewPCG(seed, uint64(round)))
		t.Run(fmt.Sprintf("%d-%d", seed, round), func(t *testing.T) { randomStack(t, r) })
		if t.Failed() {
			return
		}
	}
}

func randomStack(t *testing.T, r *rand.Rand) {
	model, merged := newModel(), newModel()
	model.uid, model.gid, merged.uid, merged.gid = os.Geteuid(), os.Getegid(), os.Geteuid(), os.Getegid()
	var layers []string
	var told strings.Builder
	for layer := 1; layer <= 1+r.IntN(4); layer++ {
		var entries []entry
		refused := false
		for range 1 + r.IntN(12) {
			e := randomEntry(r)
			next := model.clone(map[*file]*file{})
			err := next.apply(e.Header, e.content, layer)
			if err != nil && r.IntN(10) > 0 {
				continue
			}
			fmt.Fprintf(&told, "layer %d: %c %s -> %s %q: %v\n", layer, e.Typeflag, e.Name, e.Linkname, e.content, err)
			entries = append(entries, e)
			if refused = err != nil; refused {
				break
			}
			model = next
		}
		dir, _, err := unpackTo(t, archive(t, entries...), layers, DefaultBudget)
		if refused {
			if berm.KindOf(err) != berm.Invalid {
				t.Fatalf("%s\nwant it refused, got %v", told.String(), err)
			}
			return
		}
		if err != nil {
			t.Fatalf("%s\n%v", told.String(), err)
		}
		layers = append(layers, dir)
		merged = merge(t, merged, dir)
	}
	if os.Geteuid() != 0 {
		ownedByMe(model)
	}
	want := model.lines("/")
	if diff := cmp.Diff(want, merged.lines("/")); diff != "" {
		t.Fatalf("%s\nmerged (-want +got):\n%s", told.String(), diff)
	}
	if os.Geteuid() == 0 {
		if diff := cmp.Diff(want, overlay(t, layers).lines("/")); diff != "" {
			t.Fatalf("%s\noverlay (-want +got):\n%s", told.String(), diff)
		}
	}
}

// ownedByMe makes the model what a user with a single id gets.
func ownedByMe(f *file) {
	f.uid, f.gid = os.Geteuid(), os.Getegid()
	for _, child := range f.children {
		ownedByMe(child)
	}
}

// An archive must not reach anything outside of its layer, nor make what only the
// kernel may.
func TestHostileArchives(t *testing.T) {
	outside := t.TempDir()
	if err := os.WriteFile(filepath.Join(outside, "secret"), []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	deep := strings.Repeat("d/", 3000)
	xattr := func(name, value string) entry {
		e := file644("f", "x")
		e.Format, e.PAXRecords = tar.FormatPAX, map[string]string{"SCHILY.xattr." + name: value}
		return e
	}
	node := func(kind byte) entry {
		return entry{&tar.Header{Typeflag: kind, Name: "n", Mode: 0o666}, ""}
	}
	cases := []struct {
		name    string
		entries []entry
		kind    berm.Kind // Internal: accepted
		want    []string  // then the files
	}{
		{"climbs", []entry{file644("../x", "x")}, berm.Invalid, nil},
		{"climbs from within", []entry{file644("a/../../x", "x")}, berm.Invalid, nil},
		{"climbs and stays", []entry{file644("a/../x", "x")}, berm.Invalid, nil},
		{"climbs as a directory", []entry{dir755("..")}, berm.Invalid, nil},
		{"absolute", []entry{file644("/x", "x")}, 0, []string{"x"}},
		{"absolute to the outside", []entry{file644(outside+"/x", "x")}, 0, nil},
		{"below a link to the root", []entry{link(tar.TypeSymlink, "l", "/"), file644("l/x", "x")}, 0, []string{"l", "x"}},
		{"below a link that climbs", []entry{link(tar.TypeSymlink, "l", "../../../.."), file644("l/x", "x")}, 0, []string{"l", "x"}},
		{"below a link to the outside", []entry{link(tar.TypeSymlink, "l", outside), file644("l/x", "x")}, 0, nil},
		{"over a link to the outside", []entry{link(tar.TypeSymlink, "l", outside+"/secret"), file644("l", "x")}, 0, []string{"l"}},
		{"directory over a link to the outside", []entry{link(tar.TypeSymlink, "l", outside), dir755("l"), file644("l/x", "x")}, 0, []string{"l", "l/x"}},
		{"links in a circle", []entry{link(tar.TypeSymlink, "a", "b"), link(tar.TypeSymlink, "b", "a"), file644("a/x", "x")}, berm.Invalid, nil},
		{"hard link to the outside", []entry{link(tar.TypeLink, "h", outside+"/secret")}, berm.Invalid, nil},
		{"hard link that climbs", []entry{link(tar.TypeLink, "h", "../../etc/shadow")}, berm.Invalid, nil},
		{"hard link through a link", []entry{link(tar.TypeSymlink, "l", outside), link(tar.TypeLink, "h", "l/secret")}, berm.Invalid, nil},
		{"hard link to a link to the outside, then written", []entry{link(tar.TypeSymlink, "l", outside+"/secret"), link(tar.TypeLink, "h", "l"), file644("h", "x")}, 0, []string{"h", "l"}},
		{"hard link to a directory", []entry{dir755("d"), link(tar.TypeLink, "h", "d")}, berm.Invalid, nil},
		{"hard link to the root", []entry{link(tar.TypeLink, "h", "/")}, berm.Invalid, nil},
		{"hard link to nothing", []entry{link(tar.TypeLink, "h", "x")}, berm.Invalid, nil},
		{"hard link over its target's directory", []entry{file644("d/f", "x"), link(tar.TypeLink, "d", "d/f")}, berm.Invalid, nil},
		{"below a file", []entry{file644("f", "x"), file644("f/x", "x")}, berm.Invalid, nil},
		{"the root as a file", []entry{file644(".", "x")}, berm.Invalid, nil},
		{"character device", []entry{node(tar.TypeChar)}, 0, nil},
		{"block device", []entry{node(tar.TypeBlock)}, 0, nil},
		{"FIFO", []entry{node(tar.TypeFifo)}, 0, nil},
		{"unknown type", []entry{{&tar.Header{Typeflag: 'Z', Name: "z"}, ""}}, berm.Invalid, nil},
		{"whiteout of nothing named", []entry{file644(".wh.", "")}, berm.Invalid, nil},
		{"whiteout of the parent", []entry{file644("a/.wh...", "")}, berm.Invalid, nil},
		{"whiteout of itself", []entry{file644("a/.wh..", "")}, berm.Invalid, nil},
		{"below a whiteout", []entry{file644(".wh.a/x", "x")}, berm.Invalid, nil},
		{"metadata of AUFS", []entry{dir755(".wh..wh.plnk"), file644(".wh..wh.plnk/1", "x"), file644(".wh..wh.aufs", "")}, 0, nil},
		{"long name", []entry{file644(strings.Repeat("n", 256), "x")}, berm.Invalid, nil},
		{"long path", []entry{file644(deep+"f", "x")}, berm.Invalid, nil},
		{"long path through links", []entry{dir755(strings.Repeat("d/", 1500)), link(tar.TypeSymlink, "l", strings.Repeat("d/", 1500)), link(tar.TypeSymlink, "m", "l/"+strings.Repeat("e/", 1500)), file644("m/x", "x")}, berm.Invalid, nil},
		{"long target", []entry{link(tar.TypeSymlink, "l", strings.Repeat("t", 4096))}, berm.Invalid, nil},
		{"owner beyond", []entry{{&tar.Header{Typeflag: tar.TypeReg, Name: "f", Uid: 65536}, ""}}, berm.Unsupported, nil},
		{"negative owner", []entry{{&tar.Header{Typeflag: tar.TypeReg, Name: "f", Uid: -1, Format: tar.FormatGNU}, ""}}, berm.Unsupported, nil},
		{"file capability", []entry{xattr("security.capability", "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00")}, 0, []string{"f"}},
		{"forged opaque directory", []entry{xattr("user.overlay.opaque", "y")}, 0, []string{"f"}},
		{"forged redirect", []entry{xattr("trusted.overlay.redirect", "/etc")}, 0, []string{"f"}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			dir, skipped, err := unpackTo(t, archive(t, c.entries...), nil, DefaultBudget)
			if c.kind != berm.Internal {
				if berm.KindOf(err) != c.kind {
					t.Fatalf("got %v, want it refused as %v", err, c.kind)
				}
				leavesNothing(t, archive(t, c.entries...), DefaultBudget, c.entries[len(c.entries)-1].Name)
			} else if err != nil {
				t.Fatal(err)
			} else if got := find(t, dir); c.want != nil && !cmp.Equal(got, c.want) {
				t.Errorf("files %q, want %q", got, c.want)
			}
			if strings.HasPrefix(c.entries[0].Name, "n") && len(c.entries[0].Name) == 1 && !cmp.Equal(skipped, []string{"n"}) {
				t.Errorf("left out %q, want it named", skipped)
			}
			if got := find(t, outside); !cmp.Equal(got, []string{"secret"}) {
				t.Errorf("outside there is now %q", got)
			}
			if b, err := os.ReadFile(filepath.Join(outside, "secret")); string(b) != "secret" {
				t.Errorf("the secret is now %q, %v", b, err)
			}
			for _, name := range []string{"security.capability", opaqueXattr, "trusted.overlay.redirect"} {
				if n, err := unix.Lgetxattr(filepath.Join(dir, "f"), name, make([]byte, 100)); err == nil {
					t.Errorf("attribute %s of %d bytes was kept", name, n)
				}
			}
		})
	}
}

// leavesNothing checks that a store refuses a layer, names the entry and keeps none of it.
func leavesNothing(t *testing.T, data []byte, b Budget, entry string) {
	t.Helper()
	s := newStore(t)
	before := find(t, s.dir)
	_, _, err := s.addLayer(t.Context(), nil, "", bytes.NewReader(data), &b)
	if kind := berm.KindOf(err); kind != berm.Invalid && kind != berm.Unsupported {
		t.Errorf("got %v, want the layer refused", err)
	}
	if named := strings.TrimSuffix(fmt.Sprintf("%.200q", entry), `"`); !strings.Contains(fmt.Sprint(err), named) {
		t.Errorf("got %v, want the entry %s named", err, named)
	}
	if got := find(t, s.dir); !cmp.Equal(got, before) {
		t.Errorf("it left %q of %q", got, before)
	}
}

// What is too much of something is refused at the entry that makes it so.
func TestHostileSizes(t *testing.T) {
	budget := Budget{Bytes: 8 << 20, FileBytes: 1 << 20, Entries: 1000, Memory: 1 << 20, Ratio: 50}
	many := func(last string, make func(i int) entry) []entry {
		var all []entry
		for i := range 1000 {
			all = append(all, make(i))
		}
		return append(all, file644(last, "x"))
	}
	after := func(data ...[]byte) []byte { // of a directory
		return append(archive(t, dir755("before"))[:512], bytes.Join(data, nil)...)
	}
	compress := func(data []byte) []byte {
		w, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
		if err != nil {
			t.Fatal(err)
		}
		return w.EncodeAll(data, nil)
	}
	for name, c := range map[string]struct {
		data  []byte
		entry string
	}{
		"files":              {archive(t, many("one more", func(i int) entry { return file644(fmt.Sprint(i), "") })...), "one more"},
		"links":              {archive(t, many("one more", func(i int) entry { return link(tar.TypeSymlink, fmt.Sprint(i), "x") })...), "one more"},
		"whiteouts":          {archive(t, many("one more", func(i int) entry { return file644(fmt.Sprintf(".wh.%d", i), "") })...), "one more"},
		"FIFOs":              {archive(t, many("one more", func(i int) entry { return entry{&tar.Header{Typeflag: tar.TypeFifo, Name: fmt.Sprint(i)}, ""} })...), "one more"},
		"the same name":      {archive(t, many("one more", func(int) entry { return file644("same", "x") })...), "one more"},
		"names of one file":  {archive(t, append([]entry{file644("f", "x")}, many("one more", func(i int) entry { return link(tar.TypeLink, fmt.Sprint(i), "f") })[1:]...)...), "one more"},
		"one large file":     {header('0', "zeros", 1<<20+1), "zeros"},
		"a file that ends":   {header('0', "zeros", 1<<20), "zeros"},
		"a compressed bomb":  {append(compress(header('0', "zeros", 1<<20)), bytes.Repeat(compress(make([]byte, 1<<20)), 9)...), "zeros"},
		"attributes":         {after(header('x', "pax", 2<<20), bytes.Repeat([]byte("19 user.a=bcdefghi\n"), 2<<20/19)), "before"},
		"a long name":        {after(header('L', "long", 2<<20), bytes.Repeat([]byte("n/"), 1<<20)), "before"},
		"a huge sparse file": {sparse(t, 1<<40), "f"},
		"garbage":            {after(bytes.Repeat([]byte("x"), 1024)), "before"},
	} {
		t.Run(name, func(t *testing.T) { leavesNothing(t, c.data, budget, c.entry) })
	}
}

// A directory that a lower layer links to, as pnpm lays out node_modules: what a
// later layer writes through the link belongs behind it.
func TestSymlinkedParents(t *testing.T) {
	first, _, err := unpackTo(t, archive(t, dir755("store/pkg"), file644("store/pkg/old", "1"), dir755("app"), link(tar.TypeSymlink, "app/dep", "../store/pkg")), nil, DefaultBudget)
	if err != nil {
		t.Fatal(err)
	}
	second, _, err := unpackTo(t, archive(t, file644("app/dep/new", "2"), file644("app/dep/.wh.old", ""), link(tar.TypeLink, "app/dep/hard", "app/dep/new")), []string{first}, DefaultBudget)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"store", "store/pkg", "store/pkg/hard", "store/pkg/new", "store/pkg/old"}
	if got := find(t, second); !cmp.Equal(got, want) {
		t.Errorf("the second layer holds %q, want %q", got, want)
	}
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join(second, "store/pkg/old"), &st); err != nil || !isWhiteout(&st) {
		t.Errorf("old is not whited out: mode %o, %v", st.Mode, err)
	}
}

// A directory that becomes opaque after files in it were whited out: overlayfs would
// list such a whiteout, and then not find it.
func TestOpaqueAfterWhiteout(t *testing.T) {
	first, _, err := unpackTo(t, archive(t, file644("d/e/x", "1"), file644("d/y", "1")), nil, DefaultBudget)
	if err != nil {
		t.Fatal(err)
	}
	second, _, err := unpackTo(t, archive(t, file644("d/e/.wh.x", ""), file644("d/.wh.y", ""), file644("d/"+opaqueMarker, ""), file644("d/z", "2")), []string{first}, DefaultBudget)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := find(t, second), []string{"d", "d/e", "d/z"}; !cmp.Equal(got, want) {
		t.Errorf("the second layer holds %q, want %q", got, want)
	}
}

func TestSetuidIsKept(t *testing.T) {
	e := file644("s", "x")
	e.Mode = 0o6755
	dir, _, err := unpackTo(t, archive(t, e), nil, DefaultBudget)
	if err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join(dir, "s"), &st); err != nil || st.Mode&0o7777 != 0o6755 {
		t.Errorf("mode %o, %v", st.Mode, err)
	}
}

func TestBudget(t *testing.T) {
	small := Budget{Bytes: 1 << 20, FileBytes: 1 << 18, Entries: 100, Memory: 1 << 20, Ratio: 50}
	many := make([]entry, 101)
	for i := range many {
		many[i] = file644(fmt.Sprint(i), "")
	}
	deep := make([]entry, 3)
	for i := range deep {
		deep[i] = file644(fmt.Sprint(i, "/", strings.Repeat("d/", 40), "f"), "")
	}
	big := make([]entry, 9)
	for i := range big {
		big[i] = file644(fmt.Sprint(i), strings.Repeat("x", 1<<17))
	}
	huge := file644("f", strings.Repeat("x", 1<<18+1))
	for name, entries := range map[string][]entry{"entries": many, "implicit directories": deep, "bytes": big, "one file": {huge}} {
		t.Run(name, func(t *testing.T) {
			if _, _, err := unpackTo(t, archive(t, entries...), nil, small); berm.KindOf(err) != berm.Invalid {
				t.Errorf("got %v, want it refused", err)
			}
		})
	}
	fits := append([]entry{dir755("d")}, big[:7]...)
	if _, _, err := unpackTo(t, archive(t, fits...), nil, small); err != nil {
		t.Errorf("what fits: %v", err)
	}
}

// A sparse file of eight exbibytes takes 1.5 KiB of archive.
// An archive that unpacks to little must not take much memory either.
func TestMemoryBudget(t *testing.T) {
	budget := Budget{Bytes: 1 << 30, FileBytes: 1 << 20, Entries: 10_000, Memory: 1 << 20, Ratio: 1000}
	long := strings.Repeat(strings.Repeat("n", 200)+"/", 15)
	for name, make := range map[string]func(i int) entry{
		"attributes of directories": func(i int) entry {
			e := dir755(fmt.Sprint(i))
			e.Format, e.PAXRecords = tar.FormatPAX, map[string]string{"SCHILY.xattr.user.k": strings.Repeat("x", 3000)}
			return e
		},
		"names of directories": func(i int) entry { return dir755(long + fmt.Sprint(i)) },
		"names of FIFOs": func(i int) entry {
			return entry{&tar.Header{Typeflag: tar.TypeFifo, Name: long + fmt.Sprint(i), Format: tar.FormatPAX}, ""}
		},
	} {
		var few, many []entry
		for i := range 500 {
			if many = append(many, make(i)); i < 10 {
				few = many
			}
		}
		if _, _, err := unpackTo(t, archive(t, few...), nil, budget); err != nil {
			t.Errorf("10 %s: %v", name, err)
		}
		if _, _, err := unpackTo(t, archive(t, many...), nil, budget); berm.KindOf(err) != berm.Invalid {
			t.Errorf("500 %s: %v", name, err)
		}
	}
	e := dir755("d")
	e.Format, e.PAXRecords = tar.FormatPAX, map[string]string{"SCHILY.xattr.user.k": strings.Repeat("x", maxXattr+1)}
	if _, _, err := unpackTo(t, archive(t, e), nil, budget); berm.KindOf(err) != berm.Invalid {
		t.Errorf("an attribute that is too long: %v", err)
	}
}

func TestSparseBomb(t *testing.T) {
	for _, size := range []int64{1 << 40, 1<<63 - 1} {
		dir, _, err := unpackTo(t, sparse(t, size), nil, DefaultBudget)
		if berm.KindOf(err) != berm.Invalid {
			t.Errorf("%d bytes: got %v, want it refused", size, err)
		}
		if got := find(t, dir); len(got) > 0 {
			t.Errorf("%d bytes: left %q", size, got)
		}
	}
	budget := DefaultBudget
	budget.Bytes = 1 << 20
	if _, _, err := unpackTo(t, sparse(t, 1<<20-1024), nil, budget); berm.KindOf(err) != berm.Invalid {
		t.Errorf("got %v: what a sparse file expands to must count", err)
	}
}

// sparse is an archive of one sparse file in the PAX 1.0 form: a map of no data.
func sparse(t *testing.T, size int64) []byte {
	t.Helper()
	data := fmt.Sprintf("1\n%d\n0\n", size)
	data += strings.Repeat("\x00", 512-len(data))
	records := ""
	for _, r := range [][2]string{{"GNU.sparse.major", "1"}, {"GNU.sparse.minor", "0"}, {"GNU.sparse.name", "f"}, {"GNU.sparse.realsize", fmt.Sprint(size)}} {
		body := " " + r[0] + "=" + r[1] + "\n"
		n := len(body) + len(fmt.Sprint(len(body)+3))
		records += fmt.Sprint(n) + body
	}
	var out bytes.Buffer
	out.Write(header('x', "pax", len(records)))
	out.WriteString(records + strings.Repeat("\x00", 512-len(records)))
	out.Write(header('0', "f", len(data)))
	out.WriteString(data)
	out.Write(make([]byte, 1024))
	return out.Bytes()
}

// header makes by hand what archive/tar does not write.
func header(kind byte, name string, size int) []byte {
	block := make([]byte, 512)
	copy(block, name)
	copy(block[100:], "0000644\x00")
	copy(block[108:], "0000000\x000000000\x00")
	copy(block[124:], fmt.Sprintf("%011o\x00", size))
	copy(block[136:], "00000000000\x00        ")
	block[156] = kind
	copy(block[257:], "ustar\x0000")
	sum := 0
	for _, b := range block {
		sum += int(b)
	}
	copy(block[148:], fmt.Sprintf("%06o\x00 ", sum))
	return block
}

func TestCompressionBombs(t *testing.T) {
	// Of members, and of frames, after each other: to compress so many zeros takes seconds.
	const pieces = 80
	var head bytes.Buffer
	if err := tar.NewWriter(&head).WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "f", Size: pieces << 20}); err != nil {
		t.Fatal(err)
	}
	bomb := func(compress func(plain []byte) []byte) []byte {
		return append(compress(head.Bytes()), bytes.Repeat(compress(make([]byte, 1<<20)), pieces)...)
	}
	gz := bomb(func(plain []byte) []byte {
		var b bytes.Buffer
		w := gzip.NewWriter(&b)
		w.Write(plain)
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	})
	zw, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		t.Fatal(err)
	}
	zs := bomb(func(plain []byte) []byte { return zw.EncodeAll(plain, nil) })
	// Frame header with a window of 2 GiB.
	window := append([]byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xa8}, make([]byte, 64)...)
	for name, c := range map[string]struct {
		data []byte
		want string
	}{
		"gzip": {gz, "times its size"}, "zstd": {zs, "times its size"}, "zstd window": {window, ""},
		"xz": {[]byte("\xfd7zXZ\x00"), ""}, "torn gzip": {gz[:1000], ""},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := unpackTo(t, c.data, nil, DefaultBudget)
			if berm.KindOf(err) != berm.Invalid && berm.KindOf(err) != berm.Unsupported || !strings.Contains(fmt.Sprint(err), c.want) {
				t.Errorf("got %v, want it refused: %s", err, c.want)
			}
		})
	}
}

func TestCompressions(t *testing.T) {
	plain := archive(t, file644("f", "content"))
	var gz, zs bytes.Buffer
	gw := gzip.NewWriter(&gz)
	gw.Write(plain)
	zw, err := zstd.NewWriter(&zs)
	if err != nil {
		t.Fatal(err)
	}
	zw.Write(plain)
	if err := errors.Join(gw.Close(), zw.Close()); err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{"none": plain, "gzip": gz.Bytes(), "zstd": zs.Bytes()} {
		dir, _, err := unpackTo(t, data, nil, DefaultBudget)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if b, err := os.ReadFile(filepath.Join(dir, "f")); string(b) != "content" {
			t.Errorf("%s: %q, %v", name, b, err)
		}
	}
}

// Whatever the bytes are, unpacking ends, stays in its directory and answers with
// a kind other than a fault of ours.
func FuzzUnpack(f *testing.F) {
	f.Add(archive(f, dir755("a"), file644("a/b", "x"), link(tar.TypeSymlink, "l", "a"), file644("l/c", "y"), link(tar.TypeLink, "h", "l/c")), archive(f, file644("a/.wh.b", ""), file644("l/.wh..wh..opq", "")))
	f.Add(archive(f, link(tar.TypeSymlink, "l", "/"), file644("l/l/x", "x")), archive(f, link(tar.TypeLink, "m", "l"), file644("../x", "")))
	f.Add([]byte{0x1f, 0x8b}, []byte{0x28, 0xb5, 0x2f, 0xfd})
	f.Fuzz(func(t *testing.T, first, second []byte) {
		budget := Budget{Bytes: 1 << 20, FileBytes: 1 << 18, Entries: 200, Memory: 1 << 20, Ratio: 50}
		outside := t.TempDir()
		below := []string{}
		for _, data := range [][]byte{first, second} {
			dir, _, err := unpackTo(t, data, below, budget)
			if err != nil {
				if berm.KindOf(err) == berm.Internal {
					t.Fatalf("%v", err)
				}
				continue
			}
			below = append(below, dir)
		}
		if got := find(t, outside); len(got) > 0 {
			t.Fatalf("outside there is %q", got)
		}
	})
}
