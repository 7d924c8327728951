package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
)

// Team is a team as it is stored. Teams are never removed: records go on to name them. One without valid
// keys can do nothing.
type Team struct {
	Name    berm.Team  `json:"name"`
	ID      string     `json:"id"` // a UUID, by which E2B's clients name it
	Created time.Time  `json:"created,omitzero"`
	Limits  TeamLimits `json:"limits"`
}

// MarshalJSON names the server's own team as people do.
func (t Team) MarshalJSON() ([]byte, error) {
	type plain Team
	t.Name = berm.Team(t.Name.String())
	return json.Marshal(plain(t))
}

// TeamLimits bounds what a team has at a time, beside the bounds of the server. 0 does not bound.
type TeamLimits struct {
	Sandboxes int     `json:"sandboxes,omitempty"` // running, or paused with their memory in use
	CPU       float64 `json:"cpu,omitempty"`       // processors of these together
	Memory    int64   `json:"memory,omitempty"`    // bytes of these together
	Disk      int64   `json:"disk,omitempty"`      // bytes that all its sandboxes may write, together
	// AuditKeep is how long the audit log keeps what it has of a sandbox after its end, and AuditLimit
	// how many bytes it keeps of the team's sandboxes together.
	AuditKeep  time.Duration `json:"auditKeep,omitempty"`
	AuditLimit int64         `json:"auditLimit,omitempty"`
}

// CreateTeam makes a team in the name of a user of the host. AlreadyExists when there is one of that name.
func (db *DB) CreateTeam(ctx context.Context, by string, name berm.Team, limits TeamLimits) (Team, error) {
	t := Team{Name: name, ID: berm.NewUUID(), Created: time.Now().UTC(), Limits: limits}
	return t, db.change(ctx, func(tx *sql.Tx) error {
		switch err := tx.QueryRowContext(ctx, "SELECT id FROM teams WHERE name = ?", string(name)).Scan(new(string)); {
		case err == nil:
			return berm.Errorf(berm.AlreadyExists, "there is a team %s already", name)
		case !errors.Is(err, sql.ErrNoRows):
			return err
		}
		if _, err := tx.ExecContext(ctx, "INSERT INTO teams (name, id, created) VALUES (?, ?, ?)", string(name), t.ID, t.Created.UnixNano()); err != nil {
			return err
		}
		return t.set(ctx, tx, by)
	})
}

// LimitTeam gives a team, in the name of a user of the host, the limits that change makes of its present
// ones. NotFound when there is no such team.
func (db *DB) LimitTeam(ctx context.Context, by string, name berm.Team, change func(*TeamLimits)) (Team, error) {
	var t Team
	err := db.change(ctx, func(tx *sql.Tx) error {
		var err error
		if t, err = scanTeam(tx.QueryRowContext(ctx, selectTeam+" WHERE name = ?", string(name))); err != nil {
			return missingTeam(name, err)
		}
		change(&t.Limits)
		return t.set(ctx, tx, by)
	})
	return t, err
}

// set stores the limits of a team.
func (t *Team) set(ctx context.Context, tx *sql.Tx, by string) error {
	limits, err := json.Marshal(t.Limits)
	if err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, "UPDATE teams SET limits = ? WHERE name = ?", string(limits), string(t.Name)); err != nil {
		return err
	}
	return outbox(ctx, tx, audit.Record{Team: t.Name, Actor: audit.Actor{Type: "user", ID: by}, Type: audit.TeamSet, Data: t})
}

// Team returns a team. NotFound when there is none of that name.
func (db *DB) Team(ctx context.Context, name berm.Team) (Team, error) {
	s, err := db.prepare(ctx, db.read, selectTeam+" WHERE name = ?")
	if err != nil {
		return Team{}, berm.Errorf(berm.Internal, "database: %w", err)
	}
	t, err := scanTeam(s.QueryRowContext(ctx, string(name)))
	return t, missingTeam(name, err)
}

// Teams lists the teams, the server's own first.
func (db *DB) Teams(ctx context.Context) ([]Team, error) {
	return collect(ctx, db, scanTeam, selectTeam+" ORDER BY name")
}

const selectTeam = "SELECT name, id, created, limits FROM teams"

func scanTeam(row scanner) (Team, error) {
	var t Team
	var created int64
	var limits []byte
	err := row.Scan(&t.Name, &t.ID, &created, &limits)
	if err == nil {
		err = json.Unmarshal(limits, &t.Limits)
	}
	t.Created = moment(created)
	return t, err
}

// missingTeam makes of an error one that a caller can use.
func missingTeam(name berm.Team, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, sql.ErrNoRows):
		return berm.Errorf(berm.NotFound, "there is no team %s", name).WithHint("`berm team ls` lists them, `berm team create` makes one")
	}
	return berm.Errorf(berm.Internal, "database: %w", err)
}
