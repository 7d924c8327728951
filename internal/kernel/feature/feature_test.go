package feature

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/kernel/cgroup"
	"github.com/berm-sandbox/berm/internal/kernel/mount"
)

// A role of the tests; the variable is set before the init function that looks for it.
var _ = func() bool {
	os.Setenv("GORACE", "atexit_sleep_ms=0") // children under the race detector need not wait for its reports
	roles["sleep"] = func([]string) (string, error) { time.Sleep(time.Minute); return "", nil }
	roles["with tables"] = withTables
	roles["subordinate ids"] = func([]string) (string, error) {
		err := SubordinateIDs.Check(context.Background())
		return SubordinateIDs.detail, err
	}
	return true
}()

func all(t *testing.T) []*Test {
	groups := cgroup.Config{Parent: fmt.Sprintf("/berm-feature-test-%d", os.Getpid())}
	if os.Geteuid() != 0 {
		groups = cgroup.Config{}
	}
	dir := t.TempDir()
	return []*Test{
		Kernel, UserNamespaces, UnprivilegedUserNamespaces, AllNamespaces, MountAPI, Overlay, TmpfsAttributes, IDMappedMounts(dir),
		Seccomp, Landlock, Pidfd, MemfdExec, RaiseLimits, SecurityModules,
		Cgroups(groups), Limit(groups, "memory"), Limit(groups, "cpu"), Limit(groups, "pids"), Limit(groups, "io"), Limit(groups, "freezer"), CgroupKill(groups),
		LoopDevices, Reflink(dir), Subvolumes(dir), DiskLimit, SubordinateIDs, Link, KVM,
	}
}

// Every feature is found, or is missing for a reason with a way out; that nobody knows
// the reason is a fault of the test of the feature.
func TestHost(t *testing.T) {
	for _, test := range all(t) {
		t.Run(test.Name, func(t *testing.T) {
			begin := time.Now()
			f := test.Probe(t.Context())
			t.Logf("found %v in %v: %s", f.Found, time.Since(begin).Round(time.Microsecond), f.Detail)
			if f.Found {
				return
			}
			if f.Fix == "" || f.Detail == "" {
				t.Errorf("no reason or no fix: %+v", f)
			}
			if err := test.Check(t.Context()); !test.Excused(err) {
				t.Errorf("nobody knows why: %v", err)
			}
		})
	}
}

// What every supported kernel has is never missing for root.
func TestBasics(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: others may be refused")
	}
	for _, test := range []*Test{UserNamespaces, AllNamespaces, MountAPI, Overlay, Seccomp, Pidfd, MemfdExec, IDMappedMounts(t.TempDir())} {
		if err := test.Check(t.Context()); err != nil {
			t.Errorf("%s: %v", test.Name, err)
		}
	}
}

func TestSince(t *testing.T) {
	for _, c := range []struct {
		release, version string
		want             bool
	}{
		{"6.1.0-57-amd64", "6.1", true}, {"6.1.0", "6.2", false}, {"5.15.3", "6.1", false}, {"10.0-rc1", "9.9", true},
		{"6.18.44-fc", "6.2", true}, {"nonsense", "5.1", false}, {"6.1", "", false},
	} {
		if got := since(c.release, c.version); got != c.want {
			t.Errorf("since(%q, %q) = %v", c.release, c.version, got)
		}
	}
}

func TestExcused(t *testing.T) {
	for _, c := range []struct {
		version string
		kind    berm.Kind
		want    bool
	}{
		{"", berm.Unsupported, true}, {"2.6", berm.Denied, true}, {"2.6", berm.Internal, false}, {"", berm.Internal, false}, {"99.0", berm.Internal, true},
	} {
		if got := (&Test{MinVersion: c.version}).Excused(berm.Errorf(c.kind, "no")); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}

func TestCheckRemembers(t *testing.T) {
	tries := 0
	test := &Test{Name: "x", Fix: "general", try: func(context.Context) (string, error) {
		tries++
		return "", berm.Errorf(berm.Denied, "no").WithHint("special")
	}}
	for range 2 {
		if f := test.Probe(t.Context()); f.Found || f.Detail != "no" || f.Fix != "special" {
			t.Errorf("%+v", f)
		}
	}
	if tries != 1 {
		t.Errorf("tried %d times", tries)
	}
}

// A try that was cut off says nothing about the host.
func TestCheckForgetsCut(t *testing.T) {
	test := &Test{Name: "x", try: func(ctx context.Context) (string, error) { return "fine", ctx.Err() }}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := test.Check(ctx); berm.KindOf(err) != berm.Unavailable {
		t.Errorf("cut: %v", err)
	}
	if err := test.Check(t.Context()); err != nil {
		t.Errorf("again: %v", err)
	}
}

func TestChildFails(t *testing.T) {
	if _, err := child(t.Context(), nil, "no such role"); berm.KindOf(err) != berm.Internal {
		t.Errorf("unknown role: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	begin := time.Now()
	if _, err := child(ctx, nil, "sleep"); err == nil || time.Since(begin) > 3*time.Second {
		t.Errorf("a child that hangs: %v after %v", err, time.Since(begin))
	}
}

func TestSubordinateRange(t *testing.T) {
	u := &user.User{Username: "alice", Uid: "1000"}
	for table, want := range map[string]berm.IDRange{
		"alice:100000:65536\n":                             {Base: 100000, Count: 65536},
		"1000:200000:131072":                               {Base: 200000, Count: 131072},
		"bob:1:65536\nalice:5:10\nalice:300000:65536\n":    {Base: 300000, Count: 65536},
		"alice:0:65536":                                    {},
		"alice:100000:1000":                                {},
		"alice:4294967295:65536":                           {},
		"alice:-1:65536\nalice:x:y\nalice\n::\n\nal:1:2\n": {},
		"": {},
	} {
		if got, ok := findRange(strings.NewReader(table), u); got != want || ok != (want.Count > 0) {
			t.Errorf("%q: %v, %v", table, got, ok)
		}
	}
	_, err := SubordinateRange("/no/such/file", u)
	if berm.KindOf(err) != berm.Unsupported || berm.HintOf(err) == "" {
		t.Errorf("no table: %v", err)
	}
}

// withTables puts tables of ids and users, of a directory of the test, over the host's in
// a mount namespace of its own, and tries as a user of these tables.
func withTables(args []string) (string, error) {
	if err := mount.Private("/"); err != nil {
		return "", err
	}
	for _, name := range []string{"passwd", "subuid", "subgid"} {
		fd, err := mount.Clone(unix.AT_FDCWD, filepath.Join(args[0], name), false)
		if err != nil {
			return "", err
		}
		if err := mount.Attach(fd, unix.AT_FDCWD, "/etc/"+name); err != nil {
			return "", err
		}
	}
	attr := &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 4321, Gid: 4321}}
	return child(context.Background(), attr, "subordinate ids")
}

func TestSubordinateIDs(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes a user with subordinate ids in a mount namespace")
	}
	for _, program := range []string{"newuidmap", "newgidmap"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("the host has no %s (package uidmap)", program)
		}
	}
	for name, c := range map[string]struct {
		subuid string
		kind   berm.Kind
		found  bool
	}{
		"range":       {"berm-tester:500000:65536\n", 0, true},
		"small range": {"berm-tester:500000:100\n", berm.Unsupported, false},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, text := range map[string]string{
				"passwd": "root:x:0:0::/:/bin/sh\nberm-tester:x:4321:4321::/:/bin/sh\n", "subuid": c.subuid, "subgid": c.subuid,
			} {
				if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			detail, err := child(t.Context(), &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}, "with tables", dir)
			if c.found && err != nil || !c.found && berm.KindOf(err) != c.kind {
				t.Errorf("%q, %v", detail, err)
			}
			t.Log(detail, err)
		})
	}
}

func FuzzFindRange(f *testing.F) {
	f.Add("alice:100000:65536\n")
	f.Add("1000:0:18446744073709551615")
	f.Fuzz(func(t *testing.T, table string) {
		r, ok := findRange(strings.NewReader(table), &user.User{Username: "alice", Uid: "1000"})
		if ok && (r.Base == 0 || r.Count < berm.IDsPerSandbox || uint64(r.Base)+uint64(r.Count) > 1<<32) {
			t.Errorf("%q: %v", table, r)
		}
	})
}
