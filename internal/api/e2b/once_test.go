package e2b

import (
	"reflect"
	"strings"
	"sync"
	"testing"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/store"
)

func TestIdempotentCreate(t *testing.T) {
	w := newWorld(t)
	const body = `{"templateID":"base","metadata":{"a":"b"}}`
	create := func(status int, path, body, key string, header ...string) (s sandbox, code string) {
		t.Helper()
		r := w.want(status, "POST", path, body, append(header, "Idempotency-Key", key)...)
		if status >= 400 {
			var e errorBody
			r.into(t, &e)
			return s, e.Name
		}
		r.into(t, &s)
		return s, ""
	}

	first, _ := create(201, "/v2/sandboxes", body, "k-1")
	again, _ := create(201, "/v2/sandboxes", body, "k-1")
	if !reflect.DeepEqual(first, again) {
		t.Errorf("%+v then %+v", first, again)
	}
	if other, _ := create(201, "/v2/sandboxes", body, "k-2"); other.SandboxID == first.SandboxID {
		t.Error("two keys, one sandbox")
	}
	if old, _ := create(201, "/sandboxes", body, "k-old"); old.AccessToken != "" {
		t.Error("a first-generation create was secured")
	}
	for _, differs := range []struct{ path, body, key string }{
		{"/v2/sandboxes", `{"templateID":"base","metadata":{"a":"c"}}`, "k-1"},
		{"/v2/sandboxes", body, "k-old"},
	} {
		if _, code := create(422, differs.path, differs.body, differs.key); code != "idempotency_request_mismatch" {
			t.Errorf("%+v: %q", differs, code)
		}
	}
	// A request that failed may be made again.
	w.engine.Fail(func(_ berm.SandboxID, method string) error {
		if method == "Create" {
			return berm.Errorf(berm.Unavailable, "busy")
		}
		return nil
	})
	create(503, "/v2/sandboxes", body, "k-3")
	w.engine.Fail(nil)
	create(201, "/v2/sandboxes", body, "k-3")
	// One that made a sandbox may not, also when it is dead.
	w.want(204, "DELETE", "/sandboxes/"+string(first.SandboxID), "")
	if again, _ := create(201, "/v2/sandboxes", body, "k-1"); !reflect.DeepEqual(again, first) {
		t.Errorf("after its end: %+v", again)
	}
	for _, bad := range []string{strings.Repeat("k", 256), "a b", "k\u00e9"} {
		create(400, "/v2/sandboxes", body, bad)
	}
}

func TestIdempotencyKeysOfTwoClients(t *testing.T) {
	w := newWorld(t)
	_, second, err := w.db.CreateKey(t.Context(), store.Key{Name: "second"})
	if err != nil {
		t.Fatal(err)
	}
	var a, b sandbox
	w.want(201, "POST", "/v2/sandboxes", `{"templateID":"base"}`, "Idempotency-Key", "k").into(t, &a)
	w.want(201, "POST", "/v2/sandboxes", `{"templateID":"base"}`, "Idempotency-Key", "k", "X-API-Key", second).into(t, &b)
	if a.SandboxID == b.SandboxID {
		t.Error("two clients share a key")
	}
}

func TestConcurrentIdempotentCreates(t *testing.T) {
	w := newWorld(t)
	var group sync.WaitGroup
	var mu sync.Mutex
	made := map[berm.SandboxID]bool{}
	for range 20 {
		group.Go(func() {
			var s sandbox
			w.call("POST", "/v2/sandboxes", `{"templateID":"base"}`, "Idempotency-Key", "k").into(t, &s)
			mu.Lock()
			made[s.SandboxID] = true
			mu.Unlock()
		})
	}
	group.Wait()
	if ids, _ := w.engine.List(t.Context()); len(made) != 1 || len(ids) != 1 {
		t.Errorf("%d answers, %d sandboxes", len(made), len(ids))
	}
}
