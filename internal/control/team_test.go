package control

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/store"
)

// team makes a team, or gives it other limits.
func (w *world) team(t testing.TB, name berm.Team, limits store.TeamLimits) {
	t.Helper()
	if _, err := w.db.CreateTeam(t.Context(), "tester", name, limits); err == nil || berm.KindOf(err) != berm.AlreadyExists {
		if err != nil {
			t.Fatal(err)
		}
		return
	}
	if _, err := w.db.LimitTeam(t.Context(), "tester", name, func(l *store.TeamLimits) { *l = limits }); err != nil {
		t.Fatal(err)
	}
}

func TestTeamLimitsHoldUnderConcurrency(t *testing.T) {
	for what, limits := range map[string]store.TeamLimits{
		"sandboxes": {Sandboxes: 3}, "memory": {Memory: 3<<30 + 1<<29}, "cpu": {CPU: 3}, "disk": {Disk: 3 << 30},
	} {
		t.Run(what, func(t *testing.T) {
			w := newWorld(t)
			w.team(t, "blue", limits)
			w.team(t, "red", store.TeamLimits{})
			var made [2]atomic.Int32
			var wg sync.WaitGroup
			for i := range 40 {
				team := []berm.Team{"blue", "red"}[i%2]
				wg.Go(func() {
					_, err := w.Create(t.Context(), CreateRequest{
						Template: "base", Timeout: time.Minute, Actor: tester, Team: team, Limits: berm.Limits{CPU: 1, Memory: 1 << 30, Disk: 1 << 30},
					})
					switch {
					case err == nil:
						made[i%2].Add(1)
					case berm.KindOf(err) != berm.Exhausted:
						t.Error(err)
					}
				})
			}
			wg.Wait()
			if blue, red := made[0].Load(), made[1].Load(); blue != 3 || red != 20 {
				t.Errorf("team blue has %d, team red %d", blue, red)
			}
			blue := berm.Team("blue")
			if err := w.Kill(t.Context(), w.List(Filter{Team: &blue})[0].ID, tester); err != nil {
				t.Fatal(err)
			}
			w.create(t, func(r *CreateRequest) { r.Team, r.Limits = "blue", berm.Limits{CPU: 1, Memory: 1 << 30, Disk: 1 << 30} })
		})
	}
}

func TestTeamLimitNeedsLimitedSandboxes(t *testing.T) {
	w := newWorld(t)
	w.engine.Unlimited = map[string]string{"memory": "no control group"}
	w.team(t, "blue", store.TeamLimits{Memory: 1 << 30})
	_, err := w.Create(t.Context(), CreateRequest{Template: "base", Timeout: time.Minute, Team: "blue"})
	wantKind(t, err, berm.Unsupported)
	_, err = w.Create(t.Context(), CreateRequest{Template: "base", Timeout: time.Minute, Team: "red"})
	wantKind(t, err, berm.NotFound)
	if len(w.List(Filter{})) != 0 || len(w.creating) != 0 {
		t.Error("something was made, or counts")
	}
}

// What is kept on disk leaves room for others, and needs room to go on.
func TestTeamLimitOfPausedSandboxes(t *testing.T) {
	ctx := t.Context()
	_, configure := saves(t)
	w := newWorld(t, configure)
	w.team(t, "blue", store.TeamLimits{Sandboxes: 1, Memory: 1 << 30, Disk: 2 << 30})
	mine := func(r *CreateRequest) { r.Team, r.Limits = "blue", berm.Limits{Memory: 1 << 30, Disk: 1 << 30} }
	first := w.create(t, mine)
	if err := w.PauseToFiles(ctx, first.ID, tester); err != nil {
		t.Fatal(err)
	}
	second := w.create(t, mine)
	_, _, err := w.Connect(ctx, first.ID, time.Minute, tester)
	wantKind(t, err, berm.Exhausted)
	if got, err := w.Get(ctx, first.ID); err != nil || got.State != berm.Paused {
		t.Errorf("%+v, %v", got.State, err)
	}
	if err := w.PauseToFiles(ctx, second.ID, tester); err != nil {
		t.Fatal(err)
	}
	_, err = w.Create(ctx, CreateRequest{Template: "base", Timeout: time.Minute, Team: "blue", Limits: berm.Limits{Memory: 1 << 30, Disk: 1 << 30}})
	wantKind(t, err, berm.Exhausted) // two disks are there
	if _, _, err := w.Connect(ctx, first.ID, time.Minute, tester); err != nil {
		t.Error(err)
	}
	if len(w.creating) != 0 {
		t.Errorf("%v still count", w.creating)
	}
}

// Who has no room takes nothing that waits for others.
func TestTeamWithoutRoomTakesNothingOfAPool(t *testing.T) {
	w := newWorld(t, pooling(1))
	w.team(t, "blue", store.TeamLimits{Sandboxes: 1})
	w.waiting(t, 1)
	w.create(t, func(r *CreateRequest) { r.Team = "blue" })
	w.waiting(t, 1)
	made := len(w.engine.Specs)
	for range 5 {
		_, err := w.Create(t.Context(), CreateRequest{Template: "base", Timeout: time.Minute, Secure: true, Team: "blue", Actor: tester})
		wantKind(t, err, berm.Exhausted)
	}
	w.asks(t, 1, 0)
	if s := w.create(t); !s.Warm || s.ID != w.engine.Specs[made-1].ID {
		t.Errorf("%+v", s)
	}
}

// A sandbox that goes on from disk counts once at each moment: it counts when its processes may begin, and does until it rests again.
func TestWakingSandboxCountsOnce(t *testing.T) {
	ctx := t.Context()
	_, configure := saves(t)
	w := newWorld(t, configure)
	w.team(t, "blue", store.TeamLimits{})
	s := w.create(t, func(r *CreateRequest) { r.Team = "blue" })
	for range 200 {
		if err := w.PauseToFiles(ctx, s.ID, tester); err != nil {
			t.Fatal(err)
		}
		resumed := make(chan error, 1)
		go func() {
			_, _, err := w.Connect(ctx, s.ID, time.Minute, tester)
			resumed <- err
		}()
		for begun, done := false, false; !done; {
			w.mu.Lock()
			team, server := w.takenBy("blue").Sandboxes, w.held()
			w.mu.Unlock()
			if team != server || team > 1 || team == 0 && begun {
				t.Fatalf("a sandbox that goes on is %d of its team's, and %d of the server's", team, server)
			}
			begun = team == 1
			select {
			case err := <-resumed:
				if done = true; err != nil {
					t.Fatal(err)
				}
			default:
			}
		}
	}
}

func TestTeamsShareNothing(t *testing.T) {
	ctx := t.Context()
	_, configure := saves(t)
	var told sync.Map
	telling := func(c *Config) { c.Owned = func(id berm.SandboxID, team berm.Team) { told.Store(id, team) } }
	owned := func(id berm.SandboxID) berm.Team {
		team, _ := told.Load(id)
		name, _ := team.(berm.Team)
		return name
	}
	w := newWorld(t, configure, telling)
	made := map[berm.Team]Sandbox{}
	for _, team := range []berm.Team{"blue", "red"} {
		w.team(t, team, store.TeamLimits{})
		made[team] = w.create(t, func(r *CreateRequest) { r.Team = team })
		if got, err := w.TeamOf(ctx, made[team].ID); err != nil || got != team || owned(made[team].ID) != team {
			t.Errorf("%q and %q, %v", got, owned(made[team].ID), err)
		}
		if _, err := w.Snapshot(ctx, made[team].ID, SnapshotRequest{Name: "mine", Actor: tester}); err != nil {
			t.Fatal(err)
		}
	}
	for team, s := range made {
		all := w.Snapshots(SnapshotFilter{Team: &team, Ref: "mine"})
		if len(all) != 1 || all[0].Sandbox != s.ID || all[0].Team != team {
			t.Errorf("snapshots of team %s: %+v", team, all)
		}
		from := w.create(t, func(r *CreateRequest) { r.Team, r.Template = team, "mine" })
		if from.From != all[0].Build || from.Team != team {
			t.Errorf("a sandbox of team %s began with %s of team %s", team, from.From, from.Team)
		}
		forks, err := w.Fork(ctx, s.ID, 1, time.Minute, false, tester)
		if err != nil || forks[0].Err != nil || forks[0].Sandbox.Team != team || owned(forks[0].Sandbox.ID) != team {
			t.Errorf("%+v, %v", forks, err)
		}
		if got := w.List(Filter{Team: &team}); len(got) != 3 {
			t.Errorf("team %s has %d sandboxes", team, len(got))
		}
	}
	blue, red := made["blue"], w.Snapshots(SnapshotFilter{Ref: "mine", Sandbox: made["red"].ID})[0]
	for _, ref := range []string{red.ID(), string(red.TemplateID), string(red.TemplateID) + ":" + red.Tag} {
		if ref == "mine:default" {
			continue // which is blue's, too
		}
		_, err := w.Rollback(ctx, blue.ID, ref, tester)
		wantKind(t, err, berm.NotFound)
		_, err = w.Create(ctx, CreateRequest{Template: ref, Timeout: time.Minute, Team: "blue", Actor: tester})
		wantKind(t, err, berm.NotFound)
		wantKind(t, w.DeleteSnapshot(ctx, "blue", ref, tester), berm.NotFound)
	}
	if _, err := w.Snapshot(ctx, blue.ID, SnapshotRequest{Name: string(red.TemplateID), Actor: tester}); err != nil {
		t.Errorf("that it is the id of another team's snapshot is told: %v", err)
	} else if err := w.DeleteSnapshot(ctx, "blue", string(red.TemplateID), tester); err != nil {
		t.Fatal(err)
	}
	if err := w.DeleteSnapshot(ctx, "blue", "mine", tester); err != nil {
		t.Fatal(err)
	}
	for _, r := range w.audit.all {
		if r.Type == audit.SnapshotRemove && r.Team != "blue" {
			t.Errorf("%+v", r)
		}
	}
	if all := w.Snapshots(SnapshotFilter{}); len(all) != 1 || all[0].Team != "red" {
		t.Errorf("left: %+v", all)
	}

	told.Clear()
	w.Close()
	w.start(t, configure, telling)
	if got, err := w.TeamOf(ctx, blue.ID); err != nil || got != "blue" || owned(blue.ID) != "blue" {
		t.Errorf("after a restart: %q and %q, %v", got, owned(blue.ID), err)
	}
	if err := w.Kill(ctx, blue.ID, tester); err != nil {
		t.Fatal(err)
	}
	if got, err := w.TeamOf(ctx, blue.ID); err != nil || got != "blue" {
		t.Errorf("after its end: %q, %v", got, err)
	}
}
