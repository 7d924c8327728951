package serve

import (
	"fmt"
	"testing"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/trail"
)

// Records of a sandbox tell whose it is, one by one and together; what a caller says stands, and its
// records stay its own.
func TestRecordsTellWhoseASandboxIs(t *testing.T) {
	dir := t.TempDir()
	plain, err := trail.Open(dir, trail.Options{})
	if err != nil {
		t.Fatal(err)
	}
	owners := newOwners()
	log := ownedLog{plain, owners}
	owners.own("i0blue", "blue")
	owners.own("i0none", "")
	records := []audit.Record{
		{Sandbox: "i0blue"}, {Sandbox: "i0none"}, {Sandbox: "i0other"}, {}, {Sandbox: "i0blue", Team: "red"}, {Team: "red"},
	}
	for i := range records {
		records[i].Type = audit.LimitHit
	}
	for _, r := range records {
		if err := log.Emit(r); err != nil {
			t.Fatal(err)
		}
	}
	if err := audit.EmitAll(log, records); err != nil {
		t.Fatal(err)
	}
	if records[0].Team != "" {
		t.Error("the caller's records were changed")
	}
	if err := plain.Close(); err != nil {
		t.Fatal(err)
	}
	var got []berm.Team
	for line, err := range trail.Dir(dir).Records(0) {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, line.Team)
	}
	if want := []berm.Team{"blue", "", "", "", "red", "red", "blue", "", "", "", "red", "red"}; fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// Whose a sandbox was is known for a while after its end, and not for ever.
func TestOwnersForget(t *testing.T) {
	o := newOwners()
	o.own("i0ends", "blue")
	o.own("i0lives", "blue")
	living := map[berm.SandboxID]bool{"i0lives": true}
	for look, want := range []berm.Team{"blue", "", ""} {
		o.forget(living)
		if o.team("i0ends") != want || o.team("i0lives") != "blue" || look > 0 && len(o.of) != 1 {
			t.Errorf("after look %d: %q, %q of %d", look, o.team("i0ends"), o.team("i0lives"), len(o.of))
		}
	}
}
