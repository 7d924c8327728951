package e2b

import (
	"context"
	"encoding/json"
	"io"
	"net/http"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit/index"
	"github.com/berm-sandbox/berm/internal/audit/trail"
)

// Trail finds the records of the audit log, and what is kept beside them.
type Trail interface {
	// Query returns the records that a query finds, in order.
	Query(ctx context.Context, q index.Query) ([]index.Found, error)
	// Names says whether a record of the sandbox names content by its hash.
	Names(ctx context.Context, id berm.SandboxID, sha256 string) (bool, error)
	// Team says whose a sandbox was, by its records. NotFound when there are none.
	Team(ctx context.Context, id berm.SandboxID) (berm.Team, error)
	// Blob opens content by its hash. Kind NotFound.
	Blob(sha256 string) (io.ReadCloser, error)
}

// Eraser takes what is kept of sandboxes that have ended away.
type Eraser interface {
	// Erase erases records and content of a sandbox, and what else is kept of it beside the log;
	// with dry it only says what that would be. Kinds as of trail.Log.Erase.
	Erase(ctx context.Context, e trail.Erasure, dry bool) (trail.Erasure, error)
}

// maxRecords is how many records an answer has at most.
const maxRecords = 1000

// auditLog returns records of all sandboxes of the key's team, and those of no sandbox that are the team's: of the
// server's own, those of the server.
func (a *API) auditLog(w http.ResponseWriter, r *http.Request) error {
	return a.records(w, r, "")
}

// auditOf returns the records of a sandbox, and what the log lost of all, also long after its
// end.
func (a *API) auditOf(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	return a.records(w, r, id)
}

func (a *API) records(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	q, err := index.Parse(r.URL.Query())
	if err != nil {
		return err
	}
	team := keyOf(r).Team
	q.Team = &team
	if id != "" {
		q.Sandbox, q.Gaps = id, true
	}
	if q.Limit == 0 || q.Limit > maxRecords {
		q.Limit = maxRecords
	}
	found, err := a.Trail.Query(r.Context(), q)
	if err != nil {
		return err
	}
	next := q.After
	for _, f := range found {
		next = f.Seq
	}
	return answer(w, http.StatusOK, map[string]any{
		"records": mapped(found, func(f index.Found) json.RawMessage { return f.Line }), "next": next,
	})
}

// auditBlob returns content that a record of the sandbox names: output of a command, a file.
func (a *API) auditBlob(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	hash := r.PathValue("sha256")
	known, err := a.Trail.Names(r.Context(), id, hash)
	if err != nil {
		return err
	}
	if !known {
		return berm.Errorf(berm.NotFound, "no record of sandbox %s names this content", id)
	}
	content, err := a.Trail.Blob(hash)
	if err != nil {
		return err
	}
	defer func() { _ = content.Close() }()
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Disposition", "attachment") // a browser must not show what a sandbox wrote
	h.Set("Content-Security-Policy", "sandbox")
	_, _ = io.Copy(w, content)
	return nil
}

// changes records what a sandbox has written until now, and returns it.
func (a *API) changes(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	record, err := a.Sessions.Changes(r.Context(), id, actor(r))
	if err != nil {
		return err
	}
	return answer(w, http.StatusOK, map[string]any{
		"traceID": record.TraceID, "outcome": record.Outcome, "reason": record.Reason, "data": record.Data,
	})
}

// maxReason bounds the reason of an erasure in bytes.
const maxReason = 1024

// erase takes what the log has of a sandbox out of it.
func (a *API) erase(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	var in struct {
		Reason string `json:"reason"`
		DryRun bool   `json:"dryRun"`
	}
	body, err := readBody(w, r)
	if err != nil {
		return err
	}
	if err := parse(body, &in); err != nil {
		return err
	}
	if len(body) > 0 {
		if err := checkKeys(body, "", in); err != nil { // a dry run that is misspelt is none
			return err
		}
	}
	if !keyOf(r).Erase {
		return berm.Errorf(berm.Denied, "this API key may not erase records").WithHint("`berm key create --erase` makes one that may")
	}
	if in.Reason == "" && !in.DryRun || len(in.Reason) > maxReason {
		return invalid("reason is required, of at most %d bytes", maxReason)
	}
	if _, err := a.Sessions.Get(r.Context(), id); err == nil {
		return berm.Errorf(berm.Conflict, "sandbox %s has not ended", id).WithHint("kill it first")
	} else if berm.KindOf(err) != berm.NotFound {
		return err
	}
	// What is begun is finished, whether the client waits or not.
	done, err := a.Eraser.Erase(context.WithoutCancel(r.Context()), trail.Erasure{Sandbox: id, Actor: actor(r), Reason: in.Reason}, in.DryRun)
	if err != nil {
		return err
	}
	return answer(w, http.StatusOK, done)
}
