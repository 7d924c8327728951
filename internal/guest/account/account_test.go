package account

import (
	"errors"
	"os"
	"os/user"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestParsePasswd(t *testing.T) {
	for line, want := range map[string]*Account{
		"user:x:1000:1001::/home/user:/bin/bash": {Name: "user", UID: 1000, GID: 1001, Home: "/home/user"},
		"u:x:1:2:,,,:/h":                         {Name: "u", UID: 1, GID: 2, Home: "/h"},
		"norelative:x:1:2::home:/bin/sh":         {Name: "norelative", UID: 1, GID: 2, Home: "/"},
		"":                                       nil,
		"#c:x:1:2::/h:":                          nil,
		"short:x:1:2":                            nil,
		"neg:x:-1:2::/h:":                        nil,
		"all:x:4294967295:2::/h:":                nil, // chown would leave the owner as it is
		"big:x:4294967296:2::/h:":                nil,
		"+nis::::::":                             nil,
	} {
		got, ok := parsePasswd(line)
		if ok != (want != nil) || ok && (got.Name != want.Name || got.UID != want.UID || got.GID != want.GID || got.Home != want.Home) {
			t.Errorf("%q: %+v, %v; want %+v", line, got, ok, want)
		}
	}
}

func TestLookup(t *testing.T) {
	me, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	a, err := Lookup(me.Username)
	if err != nil || a.Home != me.HomeDir || UserName(a.UID) != me.Username || a.Groups[0] != a.GID {
		t.Errorf("%+v, %v; want %+v", a, err, me)
	}
	if _, err := Lookup("no-such-user"); !errors.Is(err, ErrUnknown) {
		t.Errorf("unknown user: %v", err)
	}
	if got := UserName(3_999_999_999); got != "3999999999" {
		t.Errorf("name of an unknown id: %q", got)
	}
}

func TestScan(t *testing.T) {
	file := filepath.Join(t.TempDir(), "f")
	long := strings.Repeat("x", maxLine+10)
	if err := os.WriteFile(file, []byte("one\r\n"+strings.Repeat("y", 5000)+"\n"+long+"\nlast"), 0o600); err != nil {
		t.Fatal(err)
	}
	var got []int
	if err := scan(file, func(line string) bool { got = append(got, len(line)); return true }); err != nil {
		t.Fatal(err)
	}
	if len(got) != 3 || got[0] != 3 || got[1] != 5000 || got[2] != 4 {
		t.Errorf("lengths of lines: %v", got)
	}
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	scan(fifo, func(string) bool { return true }) // must return
}

func TestResolve(t *testing.T) {
	a := &Account{Home: "/home/u"}
	for _, tc := range [][3]string{
		{"f", "", "/home/u/f"},
		{"", "", "/home/u"},
		{"", "/work", "/work"},
		{"", "rel", "/home/u/rel"},
		{"~", "", "/home/u"},
		{"~/f", "", "/home/u/f"},
		{"/a/../b", "", "/b"},
		{"../../../x", "", "/x"},
		{"//a//b/", "", "/a/b"},
		{"a b\n", "", "/home/u/a b\n"},
	} {
		if got, err := a.Resolve(tc[0], tc[1]); err != nil || got != tc[2] {
			t.Errorf("Resolve(%q, %q) = %q, %v; want %q", tc[0], tc[1], got, err, tc[2])
		}
	}
	for _, bad := range []string{"~root", "~root/x", "a\x00b"} {
		if got, err := a.Resolve(bad, ""); err == nil {
			t.Errorf("Resolve(%q) = %q", bad, got)
		}
	}
}

func TestMakeDirs(t *testing.T) {
	a := &Account{UID: uint32(os.Getuid()), GID: uint32(os.Getgid())}
	if os.Geteuid() == 0 {
		a.UID, a.GID = 1234, 1235
	}
	dir := t.TempDir()
	if err := a.MakeDirs(dir + "/a/b"); err != nil {
		t.Fatal(err)
	}
	for path, uid := range map[string]uint32{dir: uint32(os.Getuid()), dir + "/a": a.UID, dir + "/a/b": a.UID} {
		if fi, err := os.Stat(path); err != nil || fi.Sys().(*syscall.Stat_t).Uid != uid {
			t.Errorf("%s: owner %v, %v; want %d", path, fi.Sys(), err, uid)
		}
	}
	os.WriteFile(dir+"/f", nil, 0o600)
	os.Symlink("nowhere", dir+"/dangling")
	for _, bad := range []string{dir + "/f", dir + "/f/x", dir + "/dangling", dir + "/dangling/x"} {
		if err := a.MakeDirs(bad); !errors.Is(err, syscall.ENOTDIR) {
			t.Errorf("MakeDirs(%s): %v", bad, err)
		}
	}
}

func FuzzParsePasswd(f *testing.F) {
	f.Add("user:x:1000:1001::/home/user:/bin/bash")
	f.Add("g:x:10:a,b")
	f.Fuzz(func(t *testing.T, line string) {
		if a, ok := parsePasswd(line); ok && (a.Name == "" || a.Home[0] != '/' || a.UID == 1<<32-1 || a.GID == 1<<32-1) {
			t.Errorf("%q: %+v", line, a)
		}
		if g, ok := parseGroup(line); ok && (g.name == "" || g.gid == 1<<32-1) {
			t.Errorf("%q: %+v", line, g)
		}
	})
}

func FuzzResolve(f *testing.F) {
	f.Add("~/x", "/home/u", "/w")
	f.Add("../..", "/", "")
	f.Fuzz(func(t *testing.T, path, home, workdir string) {
		if !strings.HasPrefix(home, "/") {
			home = "/" + home
		}
		got, err := (&Account{Home: home}).Resolve(path, workdir)
		if err == nil && (!filepath.IsAbs(got) || filepath.Clean(got) != got) {
			t.Errorf("Resolve(%q, %q, home %q) = %q", path, workdir, home, got)
		}
	})
}
