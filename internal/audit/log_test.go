package audit

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
)

// verify reads the whole log and fails the test when the chain or the numbers have
// a hole.
func verify(t *testing.T, path string) []Record {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var records []Record
	prev := Chain(nil)
	lines := bufio.NewScanner(bytes.NewReader(content))
	lines.Buffer(nil, 2*MaxLine)
	for lines.Scan() {
		var r Record
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			t.Fatalf("line %d: %v", len(records)+1, err)
		}
		if r.Seq != uint64(len(records)+1) || r.Prev != prev || r.V != Version || r.Time.IsZero() {
			t.Fatalf("line %d does not continue the chain: %+v", len(records)+1, r)
		}
		prev = Chain(lines.Bytes())
		records = append(records, r)
	}
	return records
}

func open(t *testing.T, path string) *Log {
	t.Helper()
	l, err := Open(path, nil)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestLogChainsAcrossReopen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit", "log.jsonl")
	for range 3 {
		l := open(t, path)
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				if err := l.Emit(Record{Type: APICall, Reason: fmt.Sprint(i)}); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(verify(t, path)); n != 60 {
		t.Errorf("%d records, want 60", n)
	}
}

// A log can be shown on a terminal, and says the same all the same.
func TestLogActsOnNoTerminal(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log.jsonl")
	l := open(t, path)
	const name = "a\x1b[2J\u009b31m\u202ecod\x7f\u2066ü\U000e0001"
	if err := l.Emit(Record{Type: NetFlow, Data: map[string]string{"name": name}}); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	line := verify(t, path)[0]
	if data, ok := line.Data.(map[string]any); !ok || data["name"] != name {
		t.Errorf("read as %+v", line.Data)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range strings.TrimSuffix(string(text), "\n") {
		if !strconv.IsPrint(c) {
			t.Errorf("%U in %q", c, text)
		}
	}
}

func TestLogRecoversFromTornLine(t *testing.T) {
	for _, reason := range []string{"", strings.Repeat("r", 7<<10), strings.Repeat("r", 20<<10)} {
		for cut := 1; cut < 200; cut += 37 {
			path := filepath.Join(t.TempDir(), "log.jsonl")
			l := open(t, path)
			for range 2 {
				if err := l.Emit(Record{Type: APICall, Reason: reason}); err != nil {
					t.Fatal(err)
				}
			}
			l.Close()
			info, _ := os.Stat(path)
			if err := os.Truncate(path, info.Size()-int64(cut)); err != nil {
				t.Fatal(err)
			}
			open(t, path).Close()
			records := verify(t, path)
			if len(records) != 2 || records[1].Type != Gap {
				t.Errorf("lines of %d bytes, cut by %d: %+v", len(reason), cut, records)
			}
		}
	}
}

func TestLogRefusesDamage(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log.jsonl")
	for _, content := range []string{"not a record\n", strings.Repeat("x", 3*MaxLine)} {
		os.WriteFile(path, []byte(content), 0o600)
		if l, err := Open(path, nil); err == nil {
			l.Close()
			t.Errorf("a log that holds %.20q was opened", content)
		}
	}
}

func TestLogHasOneWriter(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log.jsonl")
	l := open(t, path)
	defer l.Close()
	if _, err := Open(path, nil); berm.KindOf(err) != berm.Conflict {
		t.Errorf("second writer: %v", err)
	}
}

func TestLogCutsLongData(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log.jsonl")
	l := open(t, path)
	if err := l.Emit(Record{Type: APICall, Reason: strings.Repeat("r", MaxLine), Data: strings.Repeat("d", MaxLine)}); err != nil {
		t.Fatal(err)
	}
	l.Close()
	open(t, path).Close()
	if n := len(verify(t, path)); n != 1 {
		t.Errorf("%d records", n)
	}
}

func TestLogStaysClosedAfterFailure(t *testing.T) {
	l := open(t, filepath.Join(t.TempDir(), "log.jsonl"))
	l.file.Close() // what a lost disk looks like
	for range 2 {
		if err := l.Emit(Record{Type: APICall}); berm.KindOf(err) != berm.Unavailable {
			t.Errorf("Emit on a broken log: %v", err)
		}
	}
	l.Close()
}

// A disk that was full for a while costs the records of that while, which is told.
func TestLogGoesOnWhenThereIsSpaceAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log.jsonl")
	l := open(t, path)
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skip("no /dev/full: ", err)
	}
	defer full.Close()
	if err := l.Emit(Record{Type: APICall}); err != nil {
		t.Fatal(err)
	}
	time.Sleep(3 * syncEvery) // the file is in nobody's hands now
	l.mu.Lock()
	file := l.file
	l.file = full
	l.mu.Unlock()
	for range 3 {
		if err := l.Emit(Record{Type: SandboxCreate}); berm.KindOf(err) != berm.Unavailable {
			t.Errorf("Emit without space: %v", err)
		}
	}
	l.mu.Lock()
	l.file = file
	l.mu.Unlock()
	for range 2 {
		if err := l.Emit(Record{Type: APICall}); err != nil {
			t.Errorf("Emit with space again: %v", err)
		}
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	var types []Type
	records := verify(t, path)
	for _, r := range records {
		types = append(types, r.Type)
	}
	if !slices.Equal(types, []Type{APICall, Gap, APICall, APICall}) {
		t.Fatalf("%v", types)
	}
	if count := records[1].Data.(map[string]any)["count"]; count != 3.0 {
		t.Errorf("the gap tells of %v records", count)
	}
}

func BenchmarkEmit(b *testing.B) {
	l, err := Open(filepath.Join(b.TempDir(), "log.jsonl"), nil)
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	for b.Loop() {
		l.Emit(Record{Type: SandboxCreate, Sandbox: "i0aaaaaaaaaaaaaaaaaaa", Actor: Actor{Type: "key", ID: "k"}})
	}
}
