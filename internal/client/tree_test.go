package client_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/berm-sandbox/berm/internal/client"
)

func TestTreeRoundTrip(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	make := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	make(os.MkdirAll(filepath.Join(from, "a/b/empty"), 0o700))
	make(os.WriteFile(filepath.Join(from, "a/b/file"), []byte("text"), 0o640))
	make(os.WriteFile(filepath.Join(from, "run.sh"), []byte("#!"), 0o755))
	make(os.WriteFile(filepath.Join(from, "read-only"), nil, 0o444))
	make(os.WriteFile(filepath.Join(from, "name\n\x1b[31m"), bytes.Repeat([]byte("x"), 1<<20), 0o600))
	make(os.Symlink("../run.sh", filepath.Join(from, "a/link")))
	make(os.Symlink("/etc/passwd", filepath.Join(from, "a/outside")))
	make(syscall.Mkfifo(filepath.Join(from, "fifo"), 0o600))

	r, w := io.Pipe()
	var notSent, notMade []string
	go func() {
		w.CloseWithError(client.WriteTree(w, from, func(name, _ string) { notSent = append(notSent, name) }))
	}()
	if err := client.ReadTree(r, to, func(name, _ string) { notMade = append(notMade, name) }); err != nil {
		t.Fatal(err)
	}
	io.Copy(io.Discard, r)
	if diff := cmp.Diff([][]string{{"fifo"}, {"a/outside"}}, [][]string{notSent, notMade}); diff != "" {
		t.Errorf("left out (-want +got):\n%s", diff)
	}
	make(os.Remove(filepath.Join(from, "fifo")))
	make(os.Remove(filepath.Join(from, "a/outside")))
	if diff := cmp.Diff(listing(t, from), listing(t, to)); diff != "" {
		t.Errorf("(-sent +received):\n%s", diff)
	}
}

// No time is later than it was: tar inside warns of those in the future.
func TestTreeTimes(t *testing.T) {
	dir, at := t.TempDir(), time.Unix(1_700_000_000, 900_000_000)
	name := filepath.Join(dir, "file")
	if err := errors.Join(os.WriteFile(name, nil, 0o600), os.Chtimes(name, at, at)); err != nil {
		t.Fatal(err)
	}
	var stream bytes.Buffer
	if err := client.WriteTree(&stream, dir, nil); err != nil {
		t.Fatal(err)
	}
	h, err := tar.NewReader(&stream).Next()
	if err != nil || h.ModTime.After(at) {
		t.Errorf("%v, %v", h, err)
	}
}

// listing maps each path to its mode, size and target.
func listing(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(dir, func(name string, e fs.DirEntry, err error) error {
		if err != nil || name == dir {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		text := info.Mode().String()
		if info.Mode().IsRegular() {
			content, err := os.ReadFile(name)
			if err != nil {
				return err
			}
			text += " " + string(content[:min(10, len(content))])
		}
		if target, err := os.Readlink(name); err == nil {
			text += " " + target
		}
		all[strings.TrimPrefix(name, dir)] = text
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

type entry struct {
	kind          byte
	name, to, sum string
}

func archive(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		if err := w.WriteHeader(&tar.Header{Typeflag: e.kind, Name: e.name, Linkname: e.to, Size: int64(len(e.sum)), Mode: 0o6755, Uid: 12345}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(e.sum)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// hostileTrees try to write to, or lead to, a file beside the directory.
var hostileTrees = map[string][]entry{
	"parent":             {{tar.TypeReg, "../canary", "", "x"}},
	"absolute":           {{tar.TypeReg, "/canary", "", "x"}},
	"inner parent":       {{tar.TypeReg, "a/../../canary", "", "x"}},
	"the directory":      {{tar.TypeReg, ".", "", "x"}},
	"through a link":     {{tar.TypeSymlink, "l", "..", ""}, {tar.TypeReg, "l/canary", "", "x"}},
	"through a dir link": {{tar.TypeDir, "d", "", ""}, {tar.TypeSymlink, "l", "d", ""}, {tar.TypeSymlink, "l/up", "../..", ""}, {tar.TypeReg, "l/up/canary", "", "x"}},
	"over a link":        {{tar.TypeSymlink, "l", "../canary", ""}, {tar.TypeReg, "l", "", "x"}},
	"absolute link":      {{tar.TypeSymlink, "l", "/etc", ""}},
	"dot, then up":       {{tar.TypeSymlink, "d", ".", ""}, {tar.TypeSymlink, "l", "d/../canary", ""}},
	"deep by name only":  {{tar.TypeSymlink, "d", ".", ""}, {tar.TypeSymlink, "d/d/d/l", "../../canary", ""}},
	"hard link out":      {{tar.TypeLink, "l", "../canary", ""}, {tar.TypeReg, "l", "", "x"}},
	"hard link absolute": {{tar.TypeLink, "l", "/canary", ""}},
	"hard link of link":  {{tar.TypeDir, "a/b", "", ""}, {tar.TypeSymlink, "a/b/l", "../../canary", ""}, {tar.TypeLink, "l", "a/b/l", ""}},
	"device":             {{tar.TypeBlock, "disk", "", ""}, {tar.TypeChar, "null", "", ""}, {tar.TypeFifo, "fifo", "", ""}},
	"file becomes link":  {{tar.TypeReg, "a", "", "x"}, {tar.TypeSymlink, "a", "..", ""}, {tar.TypeReg, "a/canary", "", "x"}},
	"dir becomes link":   {{tar.TypeDir, "a", "", ""}, {tar.TypeSymlink, "a", "..", ""}, {tar.TypeReg, "a/../../canary", "", "x"}},
	"set-uid":            {{tar.TypeReg, "su", "", "x"}, {tar.TypeDir, "d", "", ""}},
}

func TestHostileTrees(t *testing.T) {
	for name, entries := range hostileTrees {
		t.Run(name, func(t *testing.T) { unpackHostile(t, archive(t, entries...)) })
	}
}

// A map of holes makes a file of any size from a stream of a few bytes.
func TestSparseBomb(t *testing.T) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	holes := "1\n1099511627775\n1\n" // one byte at the end of 1 TiB
	body := holes + strings.Repeat("\x00", 512-len(holes)) + "x"
	records := "22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n37 GNU.sparse.realsize=1099511627776\n23 GNU.sparse.name=big\n"
	// The writer refuses such records, so they go in as a plain header of type "x".
	raw := func(kind byte, content string) {
		h := make([]byte, 512)
		copy(h, "big")
		copy(h[100:], "0000644\x000000000\x000000000\x00")
		copy(h[124:], fmt.Sprintf("%011o\x0000000000000\x00        ", len(content)))
		h[156] = kind
		copy(h[257:], "ustar\x0000")
		sum := 0
		for _, c := range h {
			sum += int(c)
		}
		copy(h[148:], fmt.Sprintf("%06o\x00 ", sum))
		b.Write(h)
		b.WriteString(content + strings.Repeat("\x00", (512-len(content)%512)%512))
	}
	raw('x', records)
	raw('0', body)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	h, err := tar.NewReader(bytes.NewReader(b.Bytes())).Next()
	if err != nil || h.Size != 1<<40 {
		t.Fatalf("the test is no bomb: %+v, %v", h, err)
	}
	dir, why := t.TempDir(), ""
	if err := client.ReadTree(&b, dir, func(_, w string) { why = w }); err != nil || why != "a sparse file" {
		t.Errorf("%q, %v", why, err)
	}
	if left := listing(t, dir); len(left) != 0 {
		t.Errorf("written: %v", left)
	}
}

// unpackHostile unpacks and fails when anything beside the directory changed, or
// anything in it leads out or has special rights.
func unpackHostile(t *testing.T, stream []byte) {
	t.Helper()
	parent := t.TempDir()
	canary, dir := filepath.Join(parent, "canary"), filepath.Join(parent, "dir")
	if err := os.WriteFile(canary, []byte("safe"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	client.ReadTree(bytes.NewReader(stream), dir, func(string, string) {}) // may fail, must not escape
	if text, err := os.ReadFile(canary); err != nil || string(text) != "safe" {
		t.Errorf("the canary is %q, %v", text, err)
	}
	if beside, err := os.ReadDir(parent); err != nil || len(beside) != 2 {
		t.Errorf("beside the directory: %v, %v", beside, err)
	}
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		t.Fatal(err)
	}
	err = filepath.WalkDir(dir, func(name string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		if info.Mode()&(fs.ModeSetuid|fs.ModeSetgid|fs.ModeDevice|fs.ModeNamedPipe) != 0 {
			t.Errorf("%s is %v", name, info.Mode())
		}
		if info.Mode()&fs.ModeSymlink != 0 {
			if got, err := filepath.EvalSymlinks(name); err == nil && got != real && !strings.HasPrefix(got, real+"/") {
				t.Errorf("%s leads to %s", name, got)
			}
			// Dangling now, but it may be filled later.
			target, err := os.Readlink(name)
			if err != nil {
				return err
			}
			if filepath.IsAbs(target) {
				t.Errorf("%s is an absolute link", name)
			}
		}
		if st := info.Sys().(*syscall.Stat_t); st.Uid == 12345 {
			t.Errorf("%s has the owner of the stream", name)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func FuzzReadTree(f *testing.F) {
	for _, entries := range hostileTrees {
		f.Add(archive(f, entries...))
	}
	f.Fuzz(func(t *testing.T, stream []byte) { unpackHostile(t, stream) })
}
