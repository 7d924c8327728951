package store

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
)

func TestTeams(t *testing.T) {
	ctx := t.Context()
	db := open(t, t.TempDir())
	if own, err := db.Team(ctx, ""); err != nil || own.ID != "00000000-0000-4000-8000-000000000000" || own.Limits != (TeamLimits{}) {
		t.Errorf("the server's own team: %+v, %v", own, err)
	}
	blue, err := db.CreateTeam(ctx, "root", "blue", TeamLimits{Sandboxes: 3})
	if err != nil || blue.ID == "" || blue.Created.IsZero() {
		t.Fatalf("%+v, %v", blue, err)
	}
	if _, err := db.CreateTeam(ctx, "root", "blue", TeamLimits{}); berm.KindOf(err) != berm.AlreadyExists {
		t.Errorf("the same again: %v", err)
	}
	if _, err := db.Team(ctx, "red"); berm.KindOf(err) != berm.NotFound {
		t.Errorf("a team that is not there: %v", err)
	}
	if _, err := db.LimitTeam(ctx, "root", "red", func(*TeamLimits) {}); berm.KindOf(err) != berm.NotFound {
		t.Errorf("limits of a team that is not there: %v", err)
	}
	limited, err := db.LimitTeam(ctx, "root", "blue", func(l *TeamLimits) { l.AuditKeep = time.Hour })
	if want := (TeamLimits{Sandboxes: 3, AuditKeep: time.Hour}); err != nil || limited.Limits != want {
		t.Errorf("%+v, %v", limited, err)
	}
	again, err := db.Team(ctx, "blue")
	if err != nil || again.ID != blue.ID || again.Limits != limited.Limits || !again.Created.Equal(blue.Created) {
		t.Errorf("%+v, %v", again, err)
	}
	if all, err := db.Teams(ctx); err != nil || len(all) != 2 || all[0].Name != "" || all[1].Name != "blue" {
		t.Errorf("%+v, %v", all, err)
	}

	key, secret, err := db.CreateKey(ctx, Key{Name: "ci", Team: "blue"})
	if err != nil {
		t.Fatal(err)
	}
	if found, err := db.Authenticate(ctx, secret); err != nil || found != key || found.Team != "blue" {
		t.Errorf("%+v, %v", found, err)
	}
	if _, _, err := db.CreateKey(ctx, Key{Name: "ci", Team: "red"}); berm.KindOf(err) != berm.NotFound {
		t.Errorf("a key of a team that is not there: %v", err)
	}
	var told []audit.Record
	if err := db.DrainOutbox(ctx, emitter(func(r audit.Record) error { told = append(told, r); return nil })); err != nil {
		t.Fatal(err)
	}
	if len(told) != 3 || told[0].Type != audit.TeamSet || told[1].Type != audit.TeamSet || told[2].Type != audit.KeyCreate {
		t.Fatalf("%+v", told)
	}
	for _, r := range told {
		if r.Team != "blue" || r.Actor.Type != "user" {
			t.Errorf("%+v", r)
		}
	}
}

func TestTeamInJSON(t *testing.T) {
	text, err := json.Marshal(Team{ID: "1", Limits: TeamLimits{CPU: 1.5}})
	if want := `{"name":"default","id":"1","limits":{"cpu":1.5}}`; err != nil || string(text) != want {
		t.Errorf("%s, %v", text, err)
	}
}

// emitter is an audit.Emitter of a function.
type emitter func(audit.Record) error

func (e emitter) Emit(r audit.Record) error { return e(r) }
