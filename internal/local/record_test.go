package local

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/local/preset"
)

// Records are masked together, and stay apart; what could not be looked through is withheld.
func TestMaskedRecords(t *testing.T) {
	stars := func(text []byte) ([]byte, error) {
		return bytes.ReplaceAll(text, []byte("hidden"), []byte("******")), nil
	}
	for name, c := range map[string]struct {
		mask func([]byte) ([]byte, error)
		want string
	}{
		"masked": {stars, `{"at":"x ****** y %d"}`},
		"failed": {func([]byte) ([]byte, error) { return nil, errors.New("gone") }, `"withheld"`},
		"nobody": {nil, `"withheld"`},
		"longer": {func(text []byte) ([]byte, error) { return append(text, 'x'), nil }, `"withheld"`},
	} {
		path := filepath.Join(t.TempDir(), "log.jsonl")
		j := &records{
			request: &Request{Network: true, Grant: preset.Grant{Credentials: []preset.Credential{{}}}},
			path:    path, full: make(chan struct{}, 1),
		}
		const n = 300
		for i := range n {
			j.add(audit.Record{Data: map[string]string{"at": fmt.Sprintf("x hidden y %d", i), "much": strings.Repeat("z", 4<<10*(i%2))}}, false)
		}
		j.add(audit.Record{Data: map[string]string{"at": "its own"}}, true)
		late := false
		if j.mask = c.mask; j.mask != nil {
			j.mask = func(text []byte) ([]byte, error) {
				if !late { // the service tells something meanwhile
					late = true
					j.add(audit.Record{Data: "late"}, true)
				}
				return c.mask(text)
			}
		}
		j.write()
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(strings.TrimSpace(string(content)), "\n")
		if len(lines) != n+1 || !strings.Contains(lines[n], `"its own"`) || len(j.waiting) != map[bool]int{true: 1}[late] {
			t.Fatalf("%s: %d records, %d wait", name, len(lines), len(j.waiting))
		}
		for i, line := range lines[:n] {
			want := c.want
			if strings.Contains(want, "%d") {
				want = fmt.Sprintf(`"x ****** y %d"`, i)
			}
			if !strings.Contains(line, want) || strings.Contains(line, "hidden") {
				t.Fatalf("%s %d: %.200s", name, i, line)
			}
		}
	}
}

// What there is no place for is lost, and that is told.
func TestRecordsAreBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log.jsonl")
	j := &records{request: &Request{}, path: path, full: make(chan struct{}, 1)}
	for range maxWaiting + 7 {
		j.add(audit.Record{Type: audit.NetFlow}, false)
	}
	if j.write(); j.failed != nil {
		t.Fatal(j.failed)
	}
	content, err := os.ReadFile(path)
	if err != nil || bytes.Count(content, []byte("\n")) != maxWaiting+1 || !bytes.Contains(content, []byte(`"count":7`)) {
		t.Errorf("%d lines, %v", bytes.Count(content, []byte("\n")), err)
	}
}
