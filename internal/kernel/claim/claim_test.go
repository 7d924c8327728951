package claim

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/berm-sandbox/berm"
)

func open(t *testing.T, path string) *File {
	t.Helper()
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func expect(t *testing.T, want bool) func(bool, error) {
	return func(got bool, err error) {
		t.Helper()
		if err != nil || got != want {
			t.Errorf("got %v, %v; want %v", got, err, want)
		}
	}
}

func TestRangesHaveOneServer(t *testing.T) {
	path := filepath.Join(t.TempDir(), "berm", "ids")
	ours, theirs := open(t, path), open(t, path)
	r := berm.IDRange{Base: 0xfffe0000, Count: berm.IDsPerSandbox} // ids beyond 31 bits
	expect(t, true)(ours.Take(r))
	expect(t, false)(theirs.Take(r))
	// Servers with ranges of another beginning overlap in part.
	expect(t, false)(theirs.Take(berm.IDRange{Base: r.Base - 1000, Count: berm.IDsPerSandbox}))
	expect(t, true)(theirs.Take(berm.IDRange{Base: r.Base - berm.IDsPerSandbox, Count: berm.IDsPerSandbox}))

	// A monitor keeps the claim of its server.
	monitor := open(t, path)
	expect(t, true)(monitor.Share(r))
	if err := ours.Close(); err != nil {
		t.Fatal(err)
	}
	expect(t, false)(theirs.Take(r))
	if err := monitor.Close(); err != nil {
		t.Fatal(err)
	}
	expect(t, true)(theirs.Take(r))
	if err := theirs.Drop(r); err != nil {
		t.Fatal(err)
	}
	expect(t, true)(open(t, path).Take(r))

	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file: %v, %v", info.Mode(), err)
	}
}

func TestNowhereToClaim(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(filepath.Join(file, "ids")); err == nil || berm.HintOf(err) == "" {
		t.Errorf("%v, hint %q", err, berm.HintOf(err))
	}
}

// A process that is killed leaves no claim behind.
func TestClaimsEndWithTheirHolder(t *testing.T) {
	r := berm.IDRange{Base: 70000, Count: berm.IDsPerSandbox}
	if path := os.Getenv("BERM_TEST_CLAIM"); path != "" { // the holder
		expect(t, true)(open(t, path).Take(r))
		_, _ = os.Stdout.WriteString("x")
		_, _ = os.Stdin.Read(make([]byte, 1)) // until it is killed
		return
	}
	path := filepath.Join(t.TempDir(), "ids")
	cmd := exec.Command(os.Args[0], "-test.run=^TestClaimsEndWithTheirHolder$")
	cmd.Env = append(os.Environ(), "BERM_TEST_CLAIM="+path)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := stdout.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	f := open(t, path)
	expect(t, false)(f.Take(r))
	_ = cmd.Process.Kill()
	_ = cmd.Wait() // with the signal that killed it
	expect(t, true)(f.Take(r))
}
