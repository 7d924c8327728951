package e2b

import (
	"encoding/base64"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/control"
)

type snapshot struct {
	SnapshotID string       `json:"snapshotID"`
	Names      []string     `json:"names"`
	Berm       snapshotMore `json:"berm"`
}

// snapshotMore is what Berm tells of a snapshot beyond E2B.
type snapshotMore struct {
	SandboxID berm.SandboxID `json:"sandboxID"`
	CreatedAt time.Time      `json:"createdAt"`
	Level     berm.Level     `json:"level"`
	Keeps     []string       `json:"keeps"` // "files", and "memory" where the level can
	Size      int64          `json:"size"`  // bytes on disk
	Shared    bool           `json:"shared"`
	StoppedMS float64        `json:"stoppedMS"` // how long the sandbox stood still
	// Checkpoint says why it was taken though nobody asked: "clock" or "exec".
	Checkpoint string `json:"checkpoint,omitempty"`
}

// checkpoints says when a sandbox is saved without anybody asking.
type checkpoints struct {
	Every int64 `json:"every,omitempty"` // seconds; 0 is not by the clock
	Exec  bool  `json:"exec,omitempty"`  // before each command that is started
	Keep  int   `json:"keep,omitempty"`  // how many stay
}

func (c *checkpoints) wanted() (control.Checkpoints, error) {
	every, err := seconds(c.Every)
	return control.Checkpoints{Every: every, Exec: c.Exec, Keep: c.Keep}, err
}

// toldCheckpoints is what a client is told of them.
type toldCheckpoints struct {
	checkpoints
	// Missed is the last one that could not be taken.
	Missed *control.MissedCheckpoint `json:"missed,omitempty"`
}

func toCheckpoints(s control.Sandbox) *toldCheckpoints {
	if s.Checkpoints == (control.Checkpoints{}) {
		return nil
	}
	return &toldCheckpoints{checkpoints{int64(s.Checkpoints.Every / time.Second), s.Checkpoints.Exec, s.Checkpoints.Keep}, s.Missed}
}

func toSnapshot(s control.Snapshot) snapshot {
	out := snapshot{SnapshotID: s.ID(), Names: []string{}, Berm: snapshotMore{
		SandboxID: s.Sandbox, CreatedAt: s.CreatedAt, Level: s.Level, Keeps: []string{"files"}, Size: s.Saved.Size, Shared: s.Saved.Shared,
		StoppedMS: float64(s.Saved.Stopped.Microseconds()) / 1000, Checkpoint: s.Checkpoint,
	}}
	if s.Name != "" {
		out.Names = append(out.Names, s.ID())
	}
	if s.Saved.Memory {
		out.Berm.Keeps = append(out.Berm.Keeps, "memory")
	}
	return out
}

func (a *API) takeSnapshot(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	var in struct {
		Name string
		Berm struct{ Memory bool }
	}
	if err := decode(w, r, &in); err != nil {
		return err
	}
	name, err := newName(r, in.Name)
	if err != nil {
		return err
	}
	s, err := a.Sessions.Snapshot(r.Context(), id, control.SnapshotRequest{Name: name, Memory: in.Berm.Memory, Actor: actor(r)})
	if err != nil {
		return err
	}
	return answer(w, http.StatusCreated, toSnapshot(s))
}

// snapshots lists snapshots, newest first. The cursor is the place of a page's last one, so that
// those that come or go in between move nothing.
func (a *API) snapshots(w http.ResponseWriter, r *http.Request) error {
	query := r.URL.Query()
	id := berm.SandboxID("")
	if text := query.Get("sandboxID"); text != "" {
		var err error
		if id, err = berm.ParseSandboxID(text); err != nil {
			return err
		}
	}
	limit, err := queryInt(r, "limit", maxPage, 1, maxPage)
	if err != nil {
		return err
	}
	all := a.Sessions.Snapshots(control.SnapshotFilter{Team: teamOf(r), Sandbox: id, Ref: keyOf(r).Team.Trim(query.Get("name"))})
	if token := query.Get("nextToken"); token != "" {
		place, err := base64.RawURLEncoding.DecodeString(token)
		at, build, ok := strings.Cut(string(place), " ")
		last, timeErr := time.Parse(time.RFC3339Nano, at)
		if err != nil || timeErr != nil || !ok {
			return invalid("nextToken is not one of this list")
		}
		i := slices.IndexFunc(all, func(s control.Snapshot) bool {
			c := s.CreatedAt.Compare(last)
			return c < 0 || c == 0 && string(s.Build) < build
		})
		if i < 0 {
			i = len(all)
		}
		all = all[i:]
	}
	if int64(len(all)) > limit {
		all = all[:limit]
		last := all[limit-1]
		w.Header().Set("X-Next-Token", base64.RawURLEncoding.EncodeToString([]byte(last.CreatedAt.Format(time.RFC3339Nano)+" "+string(last.Build))))
	}
	return answer(w, http.StatusOK, mapped(all, toSnapshot))
}

// deleteTemplate deletes a snapshot, or a template with all its builds.
func (a *API) deleteTemplate(w http.ResponseWriter, r *http.Request) error {
	ref, team := r.PathValue("templateID"), keyOf(r).Team
	err := a.Sessions.DeleteSnapshot(r.Context(), team, team.Trim(ref), actor(r))
	if berm.KindOf(err) == berm.NotFound && err != nil && a.Builder != nil {
		err = a.Builder.RemoveTemplate(r.Context(), team, ref, actor(r))
	}
	switch {
	case err == nil:
		w.WriteHeader(http.StatusNoContent)
		return nil
	case berm.KindOf(err) == berm.Conflict: // as E2B answers what is in use
		return &httpError{http.StatusBadRequest, "", err.Error()}
	case berm.KindOf(err) == berm.NotFound:
		if _, found := a.Templates.Resolve(r.Context(), team, ref); found == nil {
			return berm.Errorf(berm.Unsupported, "This server builds and removes no templates: its user has no subordinate ids").WithHint("berm template rm --local, on that host, removes one")
		}
	}
	return err
}

type fork struct {
	Sandbox *sandbox   `json:"sandbox,omitempty"`
	Error   *errorBody `json:"error,omitempty"`
}

func (a *API) fork(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	in := struct {
		Count   int64
		Timeout int64
		Berm    struct{ Memory bool }
	}{Count: 1, Timeout: 15}
	if err := decode(w, r, &in); err != nil {
		return err
	}
	if in.Count < 1 || in.Count > control.MaxForks {
		return invalid("count must be from 1 to %d", control.MaxForks)
	}
	timeout, err := seconds(in.Timeout)
	if err != nil {
		return err
	}
	children, err := a.Sessions.Fork(r.Context(), id, int(in.Count), timeout, in.Berm.Memory, actor(r))
	if err != nil {
		return err
	}
	return answer(w, http.StatusCreated, mapped(children, func(c control.Fork) fork {
		if c.Err == nil {
			s := a.sandbox(c.Sandbox)
			return fork{Sandbox: &s}
		}
		kind := berm.KindOf(c.Err)
		message := c.Err.Error()
		if kind == berm.Internal {
			a.Log.Error("a fork failed", "sandbox", id, "error", c.Err)
			message = "Internal error, see the server's log"
		}
		return fork{Error: &errorBody{Code: status[kind], Message: message}}
	}))
}

// rollback gives a sandbox the files of a snapshot.
func (a *API) rollback(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	var in struct{ Snapshot string }
	if err := decode(w, r, &in); err != nil {
		return err
	}
	if in.Snapshot == "" {
		return invalid("snapshot is required")
	}
	s, err := a.Sessions.Rollback(r.Context(), id, in.Snapshot, actor(r))
	if err != nil {
		return err
	}
	return answer(w, http.StatusOK, a.sandbox(s))
}
