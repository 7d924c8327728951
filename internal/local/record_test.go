package local

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
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
		"longer": {func(text []byte) ([]byte, error) { return append(text, 'x'), nil }, `"withheld"`},
	} {
		j := &records{request: &Request{Network: true, Grant: preset.Grant{Credentials: []preset.Credential{{}}}}}
		const n = 300
		for i := range n {
			j.add(audit.Record{Data: map[string]string{"at": fmt.Sprintf("x hidden y %d", i), "much": strings.Repeat("z", 4<<10*(i%2))}})
		}
		late := false
		j.mask(func(text []byte) ([]byte, error) {
			if !late { // the service tells something meanwhile
				late = true
				j.add(audit.Record{Data: "late"})
			}
			return c.mask(text)
		})
		if len(j.more) != n+1 || j.more[n].Data != "late" {
			t.Fatalf("%s: %d records", name, len(j.more))
		}
		for i, r := range j.more[:n] {
			text, err := json.Marshal(r.Data)
			want := c.want
			if strings.Contains(want, "%d") {
				want = fmt.Sprintf(`"x ****** y %d"`, i)
			}
			if err != nil || !strings.Contains(string(text), want) || strings.Contains(string(text), "hidden") {
				t.Fatalf("%s %d: %.200s, %v", name, i, text, err)
			}
		}
	}
}
