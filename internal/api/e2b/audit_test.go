package e2b

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/store"
)

const (
	first  = berm.SandboxID("i0aaaaaaaaaaaaaaaaaaa")
	second = berm.SandboxID("i0bbbbbbbbbbbbbbbbbbb")
)

type recordsPage struct {
	Records []audit.Record
	Next    uint64
}

// Records are found by what they tell, page by page, long after the sandbox is gone.
func TestAudit(t *testing.T) {
	w := newWorld(t)
	w.logged.Session(first)
	w.logged.Session(second)
	get := func(path string) (p recordsPage) {
		t.Helper()
		w.want(200, "GET", "/berm/v1"+path, "").into(t, &p)
		return p
	}
	all := get("/audit")
	if len(all.Records) < 50 || all.Next != all.Records[len(all.Records)-1].Seq {
		t.Errorf("%d records, next is %d", len(all.Records), all.Next)
	}
	denied := get("/audit?type=net&verdict=deny&host=evil.test")
	if len(denied.Records) != 4 {
		t.Errorf("%d denials", len(denied.Records))
	}
	ran := get("/audit?type=exec.start&actor=k1&sandbox=" + string(first))
	if len(ran.Records) != 4 {
		t.Errorf("%d commands", len(ran.Records))
	}
	var paged []audit.Record
	for after := uint64(0); ; {
		p := recordsPage{}
		w.want(200, "GET", "/berm/v1/sandboxes/"+string(second)+"/audit?limit=7&after="+jsonText(after), "").into(t, &p)
		if len(p.Records) == 0 {
			break
		}
		paged, after = append(paged, p.Records...), p.Next
	}
	gaps := 0
	for _, r := range paged {
		if r.Sandbox != second {
			if r.Type != audit.Gap {
				t.Errorf("a record of %q", r.Sandbox)
			}
			gaps++
		}
	}
	if len(paged) < 20 || gaps != 2 {
		t.Errorf("%d records, %d gaps", len(paged), gaps)
	}
	if p := get("/audit?after=" + jsonText(all.Next)); len(p.Records) != 0 || p.Next != all.Next {
		t.Errorf("after the last one: %+v", p)
	}
	for _, q := range []string{"since=x", "verdict=perhaps", "path=x", "after=x"} {
		w.want(400, "GET", "/berm/v1/audit?"+q, "")
	}
}

// A key sees the records of its team, and of a sandbox also what the log lost.
func TestAuditIsOfATeam(t *testing.T) {
	w := newWorld(t)
	w.logged.Session(first)
	w.logged.Add(audit.Record{Type: audit.ServerStop})
	w.logged.Team = "blue"
	w.logged.Session(second)
	w.logged.Add(audit.Record{Team: "blue", Type: audit.SecretSet})
	own := w.key
	if _, err := w.db.CreateTeam(t.Context(), "root", "blue", store.TeamLimits{}); err != nil {
		t.Fatal(err)
	}
	_, blue, err := w.db.CreateKey(t.Context(), store.Key{Name: "blue", Team: "blue"})
	if err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]struct {
		team         berm.Team
		mine, theirs berm.SandboxID
	}{own: {"", first, second}, blue: {"blue", second, first}} {
		w.key = key
		var p recordsPage
		w.want(200, "GET", "/berm/v1/audit", "").into(t, &p)
		types := map[audit.Type]bool{}
		for _, r := range p.Records {
			types[r.Type] = true
			if r.Team != want.team || r.Sandbox == want.theirs {
				t.Errorf("team %s sees %+v", want.team, r)
			}
		}
		if len(p.Records) < 20 || types[audit.ServerStop] != (want.team == "") || types[audit.SecretSet] == (want.team == "") {
			t.Errorf("team %s sees %d records, of %v", want.team, len(p.Records), types)
		}
		w.want(200, "GET", "/berm/v1/audit?sandbox="+string(want.theirs), "").into(t, &p)
		if len(p.Records) > 0 {
			t.Errorf("team %s sees %+v", want.team, p.Records)
		}
		w.want(200, "GET", "/berm/v1/sandboxes/"+string(want.mine)+"/audit?type=audit", "").into(t, &p)
		if len(p.Records) == 0 {
			t.Errorf("team %s sees no gaps", want.team)
		}
		w.want(404, "GET", "/berm/v1/sandboxes/"+string(want.theirs)+"/audit", "")
	}
}

func jsonText(v any) string {
	text, _ := json.Marshal(v)
	return string(text)
}

// Content is given to who asks for that of the sandbox whose records name it, and never as
// something that a browser would show.
func TestAuditBlob(t *testing.T) {
	w := newWorld(t)
	l := w.logged
	l.Session(first)
	kept := l.Blob(audit.KindContent, "<script>")
	hash := kept.SHA256
	l.Add(audit.Record{Sandbox: first, Type: audit.FileAPI, Data: audit.FileAccess{Path: "/s", Op: "write", SHA256: hash}})
	l.Add(audit.Record{Sandbox: second, Type: audit.FileChange, Data: audit.Changes{Changes: []audit.Change{{Path: "/s", Op: "add", Kind: "file", After: hash}}}, Blobs: []audit.Blob{kept}})
	at := "/berm/v1/sandboxes/" + string(second) + "/audit/blobs/"
	got := w.want(200, "GET", at+hash, "")
	if string(got.body) != "<script>" || got.header.Get("Content-Type") != "application/octet-stream" || got.header.Get("Content-Disposition") != "attachment" {
		t.Errorf("%q with %v", got.body, got.header)
	}
	w.want(404, "GET", "/berm/v1/sandboxes/"+string(first)+"/audit/blobs/"+hash, "")
	for _, name := range []string{strings.Repeat("0", 64), "..%2f..%2flog.jsonl", "x"} {
		w.want(404, "GET", at+name, "")
	}
}

// eraser remembers what it was asked to erase.
type eraser struct {
	asked []trail.Erasure
	dry   []bool
	err   error
}

func (e *eraser) Erase(_ context.Context, what trail.Erasure, dry bool) (trail.Erasure, error) {
	e.asked, e.dry = append(e.asked, what), append(e.dry, dry)
	what.By, what.Records = 7, 3
	return what, e.err
}

// Records are erased by a key that may, of a sandbox that has ended, for a reason; nothing is erased by a
// mistake in a request.
func TestErase(t *testing.T) {
	w := newWorld(t)
	w.logged.Session(first)
	path := "/berm/v1/sandboxes/" + string(first) + "/erase"
	if r := w.want(403, "POST", path, `{"reason":"r"}`); !strings.Contains(string(r.body), "berm key create --erase") {
		t.Errorf("%s", r.body)
	}
	key, secret, err := w.db.CreateKey(t.Context(), store.Key{Name: "data protection", Erase: true})
	if err != nil {
		t.Fatal(err)
	}
	w.key = secret
	for _, body := range []string{"", "{}", `{"reason":""}`, `{"reason":"r","dry_run":true}`, `{"reason":"r","dryrun":true}`, `{"reason":"` + strings.Repeat("x", 1025) + `"}`, `{"reason":1}`, "x"} {
		w.want(400, "POST", path, body)
	}
	var s struct{ SandboxID berm.SandboxID }
	w.want(201, "POST", "/sandboxes", `{"templateID":"base"}`).into(t, &s)
	w.want(409, "POST", "/berm/v1/sandboxes/"+string(s.SandboxID)+"/erase", `{"reason":"r"}`)
	if len(w.eraser.asked) > 0 {
		t.Fatalf("erased was %+v", w.eraser.asked)
	}
	var done trail.Erasure
	w.want(200, "POST", path, `{"dryRun":true}`).into(t, &done)
	w.want(200, "POST", path, `{"reason":"request 31"}`).into(t, &done)
	if got := w.eraser.asked; len(got) != 2 || !w.eraser.dry[0] || w.eraser.dry[1] || got[1].Sandbox != first || got[1].Reason != "request 31" || got[1].Actor != (audit.Actor{Type: "key", ID: key.ID}) {
		t.Errorf("%+v", got)
	}
	if done.By != 7 || done.Records != 3 {
		t.Errorf("%+v", done)
	}
	w.eraser.err = berm.Errorf(berm.Denied, "sandbox %s is held", first)
	w.want(403, "POST", path, `{"reason":"r"}`)
}
