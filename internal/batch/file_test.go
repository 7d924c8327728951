package batch

import (
	"bytes"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/document"
)

const whole = `version: 1
defaults:
  template: python
  timeout: 2m
  env: {LANG: C, A: defaults}
  put:
    - {from: harness.py, to: /opt/}
  checks:
    - stdout: {contains: ok}
jobs:
  - id: first
    command: python3 solve.py
    env: {A: job}
    put:
      - {content: "print(1)\n", to: solve.py}
    checks:
      - file: {path: out.txt, matches: "^[0-9]+$"}
      - command: [python3, /tests/judge.py]
        put: [{from: judge, to: /tests}]
        timeout: 30
    get: [out.txt, logs]
  - id: HumanEval/7
    template: base
    level: gvisor
    limits: {memory: 512MiB, cpus: 1.5, pids: 64}
    allow: [pypi]
    command: [sh, -c, exit 3]
    timeout: 90s
    checks:
      - exit: 3
`

func TestParse(t *testing.T) {
	jobs, err := Parse("f.yaml", []byte(whole))
	if err != nil {
		t.Fatal(err)
	}
	a, b := jobs[0], jobs[1]
	if a.Template != "python" || a.Env["A"] != "job" || a.Env["LANG"] != "C" || time.Duration(a.Timeout) != 2*time.Minute || a.At != "f.yaml:11" ||
		!slices.Equal(a.Command, Command{"/bin/sh", "-c", "python3 solve.py"}) || len(a.Put) != 2 || a.Put[0].target() != "/opt/harness.py" {
		t.Errorf("the first job: %+v", a)
	}
	names := func(j Job) (names []string) {
		for _, c := range j.Checks {
			names = append(names, c.name())
		}
		return names
	}
	if got := names(a); !slices.Equal(got, []string{"exit", "stdout", "file out.txt", "command python3 /tests/judge.py"}) {
		t.Errorf("its checks: %q", got)
	}
	if got := names(b); !slices.Equal(got, []string{"stdout", "exit"}) || b.Checks[1].Exit.Code != 3 || b.Env["A"] != "defaults" {
		t.Errorf("the second job: %+v", b)
	}
	if b.Limits.Memory != 512<<20 || b.Limits.CPU != 1.5 || b.Level != berm.GVisor {
		t.Errorf("its sandbox: %+v", b)
	}
	// The same in JSON lines.
	lines := `{"version":1,"defaults":{"template":"python","timeout":"2m","env":{"LANG":"C","A":"defaults"},"put":[{"from":"harness.py","to":"/opt/"}],"checks":[{"stdout":{"contains":"ok"}}]}}

{"id":"HumanEval/7","template":"base","level":"gvisor","limits":{"memory":"512MiB","cpus":1.5,"pids":64},"allow":["pypi"],"command":["sh","-c","exit 3"],"timeout":"90s","checks":[{"exit":3}]}
{"id":"\ud83d\ude00","command":"true"}`
	again, err := Parse("f.jsonl", []byte(lines))
	if err != nil {
		t.Fatal(err)
	}
	if again[0].At != "f.jsonl:3" || again[1].ID != "😀" {
		t.Errorf("JSON lines: %+v", again)
	}
	b.At, again[0].At = "", ""
	if !reflect.DeepEqual(b, again[0]) {
		t.Errorf("%+v\nin JSON lines %+v", b, again[0])
	}
}

// What docs/batch.md shows can be read.
func TestDocs(t *testing.T) {
	text, err := os.ReadFile("../../docs/batch.md")
	if err != nil {
		t.Fatal(err)
	}
	_, example, ok := strings.Cut(string(text), "```yaml\n")
	example, _, closed := strings.Cut(example, "```\n")
	if jobs, err := Parse("docs/batch.md", []byte(example)); !ok || !closed || err != nil || len(jobs) != 2 {
		t.Errorf("%d jobs, %v", len(jobs), err)
	}
}

func TestParseErrors(t *testing.T) {
	for text, want := range map[string]string{
		"version: 2\njobs: [{id: a, command: x}]":                                                         "f:1: want version: 1",
		"jobs: [{id: a, command: x}]":                                                                     "want version: 1",
		"version: 1":                                                                                      "f has no jobs",
		"version: 1\njobs:\n- {id: a, comand: x}":                                                         `f:3: unknown key "comand" in a job`,
		"version: 1\njobs:\n- {id: a, command: x}\n- {id: a, command: x}":                                 "f:4: a second job a, the first is at f:3",
		"version: 1\njobs:\n- {command: x}":                                                               "f:3: the job has no id",
		"version: 1\njobs:\n- {id: a b, command: x}":                                                      "no blanks",
		"version: 1\njobs:\n- {id: .a, command: x}":                                                       "no dot",
		"version: 1\njobs:\n- {id: a}":                                                                    "f:3: job a has no command",
		"version: 1\njobs:\n- {id: a, command: []}":                                                       "f:3: command: it must be",
		"version: 1\njobs:\n- {id: a, command: x, timeout: soon}":                                         "f:3: timeout: it must be a time",
		"version: 1\njobs:\n- {id: a, command: x, limits: {memory: much}}":                                "f:3: memory: it must be a size",
		"version: 1\njobs:\n- {id: a, command: x, put: [{to: x}]}":                                        "one of from and content",
		"version: 1\njobs:\n- {id: a, command: x, put: [{content: x, to: d/}]}":                           "the name of a file in to",
		"version: 1\njobs:\n- {id: a, command: x, get: [a/f, b/f]}":                                       "two paths that end in f",
		"version: 1\njobs:\n- {id: a, command: x, get: [..]}":                                             "no name for the copy",
		"version: 1\njobs:\n- {id: a, command: x, checks: [{}]}":                                          "check 1: it has one of",
		"version: 1\njobs:\n- {id: a, command: x, checks: [{exit: 0, stdout: {equals: x}}]}":              "it has one of",
		"version: 1\njobs:\n- {id: a, command: x, checks: [{exit: 256}]}":                                 "exit code from 0 to 255",
		"version: 1\njobs:\n- {id: a, command: x, checks: [{stdout: {}}]}":                                "neither contains",
		"version: 1\njobs:\n- {id: a, command: x, checks: [{stdout: {matches: '('}}]}":                    "missing closing )",
		"version: 1\njobs:\n- {id: a, command: x, checks: [{file: {}}]}":                                  "file has no path",
		"version: 1\njobs:\n- {id: a, command: x, checks: [{file: {path: f, exists: false, equals: x}}]}": "must not exist has no content",
		"version: 1\njobs:\n- {id: a, command: x, checks: [{exit: 0, timeout: 5}]}":                       "belong to a command",
		"{\"id\":\"a\",\"command\":\"x\"}\n{\"id\":\"b\",\"command\":\"x\",\"x\":1}":                      `f:2: unknown key "x" in a job`,
		"{\"id\":\"a\",\"command\":\"x\"}\n{\"version\":1}":                                               `f:2: unknown key "version"`,
		"{\"id\":\"a\",\"command\":\"x\"}\n{":                                                             "f:2: the document ends too early",
		"":                                                                                                "empty",
	} {
		jobs, err := Parse("f", []byte(text))
		if berm.KindOf(err) != berm.Invalid || !strings.Contains(err.Error(), want) {
			t.Errorf("%s\n%v %v, want %s", text, jobs, err, want)
		}
	}
	_, err := Parse("f", []byte("version: 1\njobs:\n- {id: a, command: x, checks: [{out: x}]}"))
	if hint := berm.HintOf(err); hint != "known are command, cwd, env, exit, file, put, stderr, stdout, timeout, user" {
		t.Errorf("hint %q", hint)
	}
}

// The schema knows the keys that Parse knows, and takes what it takes.
func TestSchema(t *testing.T) {
	text, err := jsonschema.UnmarshalJSON(bytes.NewReader(Schema()))
	if err != nil {
		t.Fatal(err)
	}
	compiler := jsonschema.NewCompiler()
	if err := compiler.AddResource("batch.schema.json", text); err != nil {
		t.Fatal(err)
	}
	schema, err := compiler.Compile("batch.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	job := schema.Properties["jobs"].Items2020.Ref.Ref
	put := job.Properties["put"].Ref.Items2020
	check := job.Properties["checks"].Items2020.Ref
	for _, of := range []struct {
		what   string
		schema *jsonschema.Schema
		keys   any
	}{
		{"job", job, Job{}}, {"defaults", schema.Properties["defaults"].Ref, Job{}}, {"limits", job.Properties["limits"], Limits{}}, {"put", put, Put{}},
		{"check", check, Check{}}, {"text", check.Properties["stdout"].Ref, Text{}}, {"file", check.Properties["file"], File{}},
	} {
		var has []string
		for key := range of.schema.Properties {
			has = append(has, key)
		}
		want := slices.DeleteFunc(document.Keys(of.keys), func(k string) bool { return k == "" })
		slices.Sort(has)
		slices.Sort(want)
		if !slices.Equal(has, want) {
			t.Errorf("%s: the schema has %q, Parse knows %q", of.what, has, want)
		}
	}
	valid := func(text string) error {
		var v any
		if err := yaml.Unmarshal([]byte(text), &v); err != nil {
			t.Fatal(err)
		}
		return schema.Validate(v)
	}
	if err := valid(whole); err != nil {
		t.Error(err)
	}
	for _, text := range []string{
		"version: 2\njobs: [{id: a}]", "version: 1\njobs: [{id: a, comand: x}]", "version: 1\njobs: [{id: a, checks: [{}]}]",
		"version: 1\njobs: [{id: a, checks: [{exit: 0, timeout: 5}]}]", "version: 1\njobs: [{id: a, put: [{content: x}]}]",
	} {
		if valid(text) == nil {
			t.Errorf("the schema takes %s", text)
		}
	}
}

// What a job names can be read to an end.
func TestResolve(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mkfifo(filepath.Join(dir, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	for job, want := range map[string]string{
		"put: [{from: .}]":    "",
		"put: [{from: fifo}]": "fifo is no regular file",
		"policy: fifo":        "fifo is no regular file",
		"policy: .":           "is no regular file",
		"put: [{from: none}]": "no such file",
		"checks: [{command: x, put: [{from: fifo}]}]": "fifo is no regular file",
	} {
		jobs, err := Parse("f", []byte("version: 1\njobs:\n- {id: a, command: x, "+job+"}"))
		if err != nil {
			t.Fatal(err)
		}
		err = jobs[0].Resolve(dir)
		if want == "" && err != nil || want != "" && (berm.KindOf(err) != berm.Invalid || !strings.HasPrefix(err.Error(), "f:3: job a: ") || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", job, err, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(whole))
	f.Add([]byte(`{"version":1}` + "\n" + `{"id":"a","command":["x"],"checks":[{"exit":"any"}]}`))
	f.Fuzz(func(t *testing.T, content []byte) {
		jobs, err := Parse("f", content)
		if err != nil {
			if berm.KindOf(err) != berm.Invalid {
				t.Fatal(err)
			}
			return
		}
		for _, j := range jobs {
			if j.ID == "" || len(j.Command) == 0 || len(j.Checks) == 0 {
				t.Fatalf("%+v", j)
			}
		}
	})
}
