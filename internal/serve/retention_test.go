package serve

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/index"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/audit/writer"
	"github.com/berm-sandbox/berm/internal/audit/writer/writertest"
	"github.com/berm-sandbox/berm/internal/store"
)

// The test is the writer of its logs, too.
func TestMain(m *testing.M) {
	writertest.Main()
	os.Exit(m.Run())
}

// keeper is what looks after the records of teams, without a server around it.
type keeper struct {
	*eraser
	t     *testing.T
	dir   string
	lives map[berm.SandboxID]bool
}

// eachKeeper runs a test with a log that the server writes, and with one that has a process of its own.
func eachKeeper(t *testing.T, test func(t *testing.T, k *keeper)) {
	for _, own := range []bool{false, true} {
		t.Run(fmt.Sprintf("a process of its own %v", own), func(t *testing.T) {
			db, err := store.Open(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { db.Close() })
			k := &keeper{t: t, dir: filepath.Join(t.TempDir(), "audit"), lives: map[berm.SandboxID]bool{}}
			holds := func() ([]berm.SandboxID, error) {
				holds, err := db.Holds(context.Background())
				var ids []berm.SandboxID
				for _, h := range holds {
					ids = append(ids, h.Sandbox)
				}
				return ids, err
			}
			quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
			var log auditLog
			if own {
				log, err = writer.Open(writer.Config{Dir: k.dir, Program: writertest.Program, Log: quiet, Holds: holds})
			} else {
				log, err = trail.Open(k.dir, trail.Options{Log: quiet, Holds: holds})
			}
			if err != nil {
				t.Fatal(err)
			}
			found, err := index.Open(filepath.Join(t.TempDir(), "index.db"), trail.Dir(k.dir))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { found.Close() })
			k.eraser = &eraser{ownedLog{log, newOwners()}, found, db}
			test(t, k)
			if err := log.Close(); err != nil {
				t.Error(err)
			}
			if r, err := trail.Verify(k.dir, trail.Trust{}); err != nil || len(r.Problems) > 0 {
				t.Errorf("the log does not verify: %+v, %v", r, err)
			}
		})
	}
}

func (k *keeper) team(name berm.Team, limits store.TeamLimits) {
	k.t.Helper()
	_, err := k.db.CreateTeam(k.t.Context(), "root", name, limits)
	if berm.KindOf(err) == berm.AlreadyExists {
		_, err = k.db.LimitTeam(k.t.Context(), "root", name, func(l *store.TeamLimits) { *l = limits })
	}
	if err != nil {
		k.t.Fatal(err)
	}
}

// sandbox is one of a team that has records of about size bytes.
func (k *keeper) sandbox(team berm.Team, id berm.SandboxID, size int) {
	k.t.Helper()
	for _, r := range []audit.Record{
		{Type: audit.SandboxCreate, Team: team, Sandbox: id, Outcome: audit.OK},
		{Type: audit.LimitHit, Sandbox: id, Team: team, Data: strings.Repeat("x", size)},
		{Type: audit.SandboxExit, Sandbox: id, Team: team},
	} {
		r.Src, r.Trust, r.Actor.Type = "test", audit.TrustHost, "system"
		if err := k.log.Emit(r); err != nil {
			k.t.Fatal(err)
		}
	}
	if err := k.db.SaveSandbox(k.t.Context(), store.Sandbox{ID: id, Killed: time.Now(), Record: []byte("{}")}); err != nil {
		k.t.Fatal(err)
	}
}

// look looks after some time, and returns the erasures of the log as SANDBOX TEAM: REASON.
func (k *keeper) look(after time.Duration) (all []string) {
	k.t.Helper()
	living := func(context.Context) (map[berm.SandboxID]bool, error) { return k.lives, nil }
	if err := k.retain(k.t.Context(), living, time.Now().Add(after)); err != nil {
		k.t.Fatal(err)
	}
	for line, err := range trail.Dir(k.dir).Records(0) {
		if err != nil {
			k.t.Fatal(err)
		}
		if line.Type == audit.Erase {
			all = append(all, fmt.Sprintf("%s %s: %s", line.Sandbox, line.Team, line.Reason))
			if line.Actor != (audit.Actor{Type: "system"}) {
				k.t.Errorf("erased by %+v", line.Actor)
			}
		}
	}
	return all
}

func (k *keeper) want(got []string, want ...string) {
	k.t.Helper()
	if !slices.Equal(got, want) {
		k.t.Errorf("erased are %q, want %q", got, want)
	}
	for _, e := range got {
		id, _, _ := strings.Cut(e, " ")
		if found, err := k.index.Query(k.t.Context(), index.Query{Sandbox: berm.SandboxID(id), Types: []string{"sandbox"}}); err != nil || len(found) > 0 {
			k.t.Errorf("%s is found: %d records, %v", id, len(found), err)
		}
		if _, err := k.db.Sandbox(k.t.Context(), berm.SandboxID(id)); berm.KindOf(err) != berm.NotFound {
			k.t.Errorf("the database has %s: %v", id, err)
		}
	}
}

// What a team keeps for a time goes after it, and nothing else: not of sandboxes that live, that are held or that are
// of other teams, nor what is of no sandbox.
func TestTeamKeepsRecordsForATime(t *testing.T) {
	eachKeeper(t, func(t *testing.T, k *keeper) {
		k.team("blue", store.TeamLimits{AuditKeep: 720 * time.Hour})
		k.team("red", store.TeamLimits{AuditKeep: 7200 * time.Hour})
		for id, team := range map[berm.SandboxID]berm.Team{"i0ended": "blue", "i0lives": "blue", "i0held": "blue", "i0red": "red", "i0own": ""} {
			k.sandbox(team, id, 100)
		}
		if err := k.log.Emit(audit.Record{Team: "blue", Actor: audit.Actor{Type: "key"}, Type: audit.SecretSet, Src: "api", Trust: audit.TrustHost, Outcome: audit.OK}); err != nil {
			t.Fatal(err)
		}
		k.lives["i0lives"] = true
		if err := k.db.SetHold(t.Context(), store.Hold{Sandbox: "i0held", Reason: "case 1"}); err != nil {
			t.Fatal(err)
		}
		k.want(k.look(719 * time.Hour))
		gone := []string{"i0ended blue: team blue keeps records for 720h0m0s"}
		k.want(k.look(721*time.Hour), gone...)
		seq := k.log.Seq()
		if k.want(k.look(721*time.Hour), gone...); k.log.Seq() != seq {
			t.Error("a look with nothing to erase makes records")
		}
		if err := k.db.EndHold(t.Context(), store.Hold{Sandbox: "i0held", Reason: "closed"}); err != nil {
			t.Fatal(err)
		}
		delete(k.lives, "i0lives")
		k.team("red", store.TeamLimits{}) // for ever from now on
		gone = append(gone, "i0held blue: team blue keeps records for 720h0m0s", "i0lives blue: team blue keeps records for 720h0m0s")
		got := k.look(99999 * time.Hour)
		slices.Sort(got)
		slices.Sort(gone)
		k.want(got, gone...)
		// The server's own team can have a limit too.
		if _, err := k.db.LimitTeam(t.Context(), "root", "", func(l *store.TeamLimits) { l.AuditKeep = time.Hour }); err != nil {
			t.Fatal(err)
		}
		got = k.look(2 * time.Hour)
		k.want(got[len(got)-1:], "i0own default: team default keeps records for 1h0m0s")
		blue := berm.Team("blue")
		if found, err := k.index.Query(t.Context(), index.Query{Team: &blue, Types: []string{"secret"}}); err != nil || len(found) != 1 {
			t.Errorf("of no sandbox: %d records, %v", len(found), err)
		}
	})
}

// Of what is more than a team's limit the oldest that has ended goes, until a tenth is free; what ended a moment ago
// stays, and what is held does not take the place of the rest.
func TestTeamKeepsSoMuch(t *testing.T) {
	eachKeeper(t, func(t *testing.T, k *keeper) {
		const size = 10_000
		k.team("blue", store.TeamLimits{AuditLimit: 6 * (size + 2000)})
		k.sandbox("red", "i0red", 3*size)
		for i := range 5 {
			k.sandbox("blue", berm.SandboxID(fmt.Sprint("i0n", i)), size)
		}
		k.want(k.look(time.Hour))
		k.lives["i0n0"] = true
		if err := k.db.SetHold(t.Context(), store.Hold{Sandbox: "i0n1", Reason: "case 1"}); err != nil {
			t.Fatal(err)
		}
		k.sandbox("blue", "i0n5", size)
		k.sandbox("blue", "i0n6", size)
		k.want(k.look(time.Minute)) // all of them have just ended
		// Seven are too much, of which one is held: less than six take the limit.
		k.want(k.look(time.Hour))
		k.sandbox("blue", "i0n7", size)
		const why = " blue: team blue keeps 72000 bytes of records"
		gone := []string{"i0n2" + why, "i0n3" + why}
		k.want(k.look(time.Hour), gone...)
		k.want(k.look(time.Hour), gone...)
		if n, err := k.index.Bytes(t.Context(), "blue"); err != nil || n < 5*size || n > 6*(size+2000) {
			t.Errorf("%d bytes are left, %v", n, err)
		}
	})
}

// What cannot be erased yet is no failure, and what fails is one.
func TestRetentionThatFails(t *testing.T) {
	eachKeeper(t, func(t *testing.T, k *keeper) {
		k.team("blue", store.TeamLimits{AuditKeep: time.Hour})
		k.sandbox("blue", "i0ended", 100)
		living := func(context.Context) (map[berm.SandboxID]bool, error) { return nil, nil }
		log := k.log
		for _, kind := range []berm.Kind{berm.Conflict, berm.Denied, berm.NotFound, berm.Unavailable, berm.Internal} {
			k.log = failing{log, kind}
			err := k.retain(t.Context(), living, time.Now().Add(2*time.Hour))
			if wrong := kind == berm.Unavailable || kind == berm.Internal; (err != nil) != wrong {
				t.Errorf("%v: %v", kind, err)
			}
			if _, err := k.db.Sandbox(t.Context(), "i0ended"); err != nil {
				t.Errorf("%v: the database has forgotten it: %v", kind, err)
			}
		}
		k.log = log
		unknown := func(context.Context) (map[berm.SandboxID]bool, error) { return nil, errors.New("no engine") }
		if err := k.retain(t.Context(), unknown, time.Now().Add(2*time.Hour)); err == nil {
			t.Error("it is not known what lives")
		}
		k.want(k.look(2*time.Hour), "i0ended blue: team blue keeps records for 1h0m0s")
	})
}

// failing is a log that erases nothing.
type failing struct {
	auditLog
	kind berm.Kind
}

func (f failing) EraseAll(all []trail.Erasure) ([]trail.Erasure, error) {
	return all, berm.Errorf(f.kind, "no")
}
