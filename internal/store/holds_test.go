package store

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
)

// A hold that a command sets beside the server counts at once, outlives the server, and is told
// by records when it begins and ends.
func TestHolds(t *testing.T) {
	ctx, dir := t.Context(), t.TempDir()
	db := open(t, dir)
	shared := must(OpenShared(dir))
	h := Hold{Sandbox: "i1", Team: "blue", Reason: "case \"7\"", User: "anna"}
	if err := shared.SetHold(ctx, h); err != nil {
		t.Fatal(err)
	}
	if err := shared.SetHold(ctx, h); berm.KindOf(err) != berm.AlreadyExists {
		t.Errorf("once more: %v", err)
	}
	shared.Close()
	holds := must(db.Holds(ctx))
	if len(holds) != 1 || holds[0].Sandbox != "i1" || holds[0].Reason != h.Reason || holds[0].User != "anna" || holds[0].Since.IsZero() {
		t.Errorf("%+v", holds)
	}
	db.Close()
	db = open(t, dir)
	if got := must(db.Holds(ctx)); len(got) != 1 || got[0] != holds[0] {
		t.Errorf("after a restart %+v", got)
	}
	if err := db.EndHold(ctx, Hold{Sandbox: "i2"}); berm.KindOf(err) != berm.NotFound {
		t.Errorf("end of none: %v", err)
	}
	if err := db.EndHold(ctx, Hold{Sandbox: "i1", Reason: "closed", User: "bob"}); err != nil {
		t.Fatal(err)
	}
	if got := must(db.Holds(ctx)); len(got) != 0 {
		t.Errorf("after its end %+v", got)
	}
	path := filepath.Join(t.TempDir(), "log")
	log := must(audit.Open(path, nil))
	if err := db.DrainOutbox(ctx, log); err != nil {
		t.Fatal(err)
	}
	log.Close()
	lines := strings.Split(string(must(os.ReadFile(path))), "\n")
	for i, want := range []string{`"type":"audit.hold"`, `"type":"audit.release"`} {
		if !strings.Contains(lines[i], want) || !strings.Contains(lines[i], `"sandbox":"i1"`) {
			t.Errorf("record %d is %s", i, lines[i])
		}
	}
	if !strings.Contains(lines[0], `"team":"blue"`) || !strings.Contains(lines[0], `"id":"anna"`) || !strings.Contains(lines[1], `"reason":"closed"`) {
		t.Errorf("%s", lines)
	}
}
