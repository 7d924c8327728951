package main

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net/http/httptest"
	"strings"
	"testing"
)

// Every script can be played to its end in the words of both agents.
func TestScripts(t *testing.T) {
	files, err := scripts.ReadDir("scripts")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		steps, err := load(strings.TrimSuffix(file.Name(), ".json"))
		if err != nil {
			t.Fatal(err)
		}
		for i, step := range steps {
			last := i == len(steps)-1
			_, claude := step.claude()
			_, codex := step.codex()
			if claude == last || codex == last || last == (step.Say == "") {
				t.Errorf("%s, step %d: %+v: only the last step says something", file.Name(), i, step)
			}
		}
	}
}

// The number of tool results in a request says which step comes next.
func TestTurns(t *testing.T) {
	steps := []step{{Run: "make test"}, {Edit: "a.py", Old: "x", New: "y"}, {Say: "Done."}}
	handler := newModel(steps, io.Discard)
	ask := func(path, body string) string {
		t.Helper()
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest("POST", path, strings.NewReader(body)))
		if w.Code != 200 {
			t.Fatalf("%s: %d %s", path, w.Code, w.Body)
		}
		return w.Body.String()
	}
	const claudeResult = `{"role":"user","content":[{"type":"tool_result","content":"ok"}]}`
	const codexResult = `{"type":"function_call_output","output":"ok"}`
	for _, c := range []struct{ path, body, want string }{
		{"/v1/messages", `{"tools":[{}],"messages":[{"content":"fix it"}]}`, `{\"command\":\"make test\"`},
		{"/v1/messages", `{"tools":[{}],"messages":[` + claudeResult + `]}`, `\"old_string\":\"x\"`},
		{"/v1/messages", `{"tools":[{}],"messages":[` + claudeResult + "," + claudeResult + `]}`, `"text":"Done."`},
		{"/v1/messages", `{"messages":[]}`, `"text":"Nothing more to do."`},
		{"/v1/responses", `{"tools":[{}],"input":[]}`, `{\"cmd\":\"make test\"`},
		{"/v1/responses", `{"tools":[{}],"input":[` + codexResult + `]}`, `*** Update File: a.py`},
		{"/v1/responses", `{"tools":[{}],"input":[` + codexResult + "," + codexResult + `]}`, `"text":"Done."`},
	} {
		if got := ask(c.path, c.body); !strings.Contains(got, c.want) {
			t.Errorf("%s %s gave\n%s\nwithout %s", c.path, c.body, got, c.want)
		}
	}
}

// The log holds what the steps gave, so that a test can look for what must not be there.
func TestLog(t *testing.T) {
	var log strings.Builder
	w := httptest.NewRecorder()
	newModel([]step{{Read: "secret"}, {Say: "Done."}}, &log).ServeHTTP(w, httptest.NewRequest("POST", "/v1/responses",
		strings.NewReader(`{"model":"m","tools":[{}],"input":[{"type":"function_call_output","output":"key"}]}`)))
	var entries []entry
	for decoder := json.NewDecoder(strings.NewReader(log.String())); decoder.More(); {
		var e entry
		if err := decoder.Decode(&e); err != nil {
			t.Fatal(err)
		}
		entries = append(entries, e)
	}
	if len(entries) != 3 || entries[0].Request != "POST /v1/responses" || entries[1].Model != "m" ||
		entries[2].Step.Read != "secret" || string(entries[2].Result) != `"key"` {
		t.Errorf("log: %s", log.String())
	}
}

// The agent's exit status is the model's, and an agent that does not end is ended.
func TestPlay(t *testing.T) {
	status, err := play("fix", 5e9, []string{"sh", "-c", `test -n "$ANTHROPIC_BASE_URL" && test "$ANTHROPIC_BASE_URL" = "$0" && exit 7`, "{url}"})
	if status != 7 || err != nil {
		t.Errorf("status %d, error %v", status, err)
	}
	if _, err := play("fix", 1e8, []string{"sleep", "60"}); err == nil {
		t.Error("an agent that does not end was not ended")
	}
	if _, err := play("none", 1e8, []string{"true"}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("unknown script: %v", err)
	}
}
