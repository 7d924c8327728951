package audit

import (
	"bufio"
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/berm-sandbox/berm"
)

// Many programs append to one log, and the chain has no hole.
func TestAppendByMany(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit", "log.jsonl")
	const writers, each = 8, 20
	var wg sync.WaitGroup
	for range writers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for range each {
				two := Record{Type: SandboxCreate, Src: "local", Trust: TrustUser, Outcome: OK}
				if err := Append(path, two, two); err != nil {
					t.Error(err)
				}
			}
		}()
	}
	wg.Wait()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	prev, n := Chain(nil), uint64(0)
	for lines := bufio.NewScanner(bytes.NewReader(content)); lines.Scan(); {
		var r Record
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			t.Fatal(err)
		}
		if n++; r.Seq != n || r.Prev != prev {
			t.Fatalf("record %d has number %d and is chained to %s, not %s", n, r.Seq, r.Prev, prev)
		}
		prev = Chain(lines.Bytes())
	}
	if n != 2*writers*each {
		t.Errorf("%d records, want %d", n, 2*writers*each)
	}
}

// A log that a server keeps open is not written by others.
func TestAppendToALogInUse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log.jsonl")
	l, err := Open(path, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if testing.Short() || os.Getenv("BERM_TEST_ALL") == "" {
		t.Skip("waits for five seconds; BERM_TEST_ALL=1 runs it")
	}
	if err := Append(path, Record{Type: SandboxCreate}); berm.KindOf(err) != berm.Conflict {
		t.Errorf("got %v, want conflict", err)
	}
}
