package policy

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"
)

func compileSchema(t *testing.T) *jsonschema.Schema {
	t.Helper()
	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(Schema()))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("policy.json", document); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("policy.json")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestSchema: an editor finds no fault with a policy that is right, and finds those that a
// schema can.
func TestSchema(t *testing.T) {
	s := compileSchema(t)
	valid := func(content []byte) error {
		document, err := jsonschema.UnmarshalJSON(bytes.NewReader(content))
		if err != nil {
			t.Fatal(err)
		}
		return s.Validate(document)
	}
	r := rand.New(rand.NewPCG(17, 18))
	for range 200 {
		content, err := json.Marshal(randomPolicy(r))
		if err != nil {
			t.Fatal(err)
		}
		if err := valid(content); err != nil {
			t.Fatalf("%v\n%s", err, content)
		}
	}
	for _, text := range []string{
		"version: 1\n" + example,
		"version: 1\nattach: [{to: [a.b], credential: c}]\nlimits: {up: 1, down: 2KiB/s, flows: 1, requests: 1, duration: 1s}",
		"version: 1\nrules: [{to: [a.b], credential: [a, b], ech: deny, tls: auto, audit: body, reason: x, once: true, ports: [1, any, 1-2], http: {query: [a], require: [b], forbid: [c], upgrade: [websocket], content_types: [a/b], max_body: 5}}]",
	} {
		var document any
		if err := yaml.Unmarshal([]byte(text), &document); err != nil {
			t.Fatal(err)
		}
		content, err := json.Marshal(document)
		if err != nil {
			t.Fatal(err)
		}
		if err := valid(content); err != nil {
			t.Errorf("%s: %v", text, err)
		}
		if _, err := DecodeYAML("p", []byte(text)); err != nil {
			t.Error(err)
		}
	}
	for _, content := range []string{
		`{}`, `[]`, `{"version": 2}`, `{"version": 1, "x": 1}`, `{"version": 1, "rules": [{}]}`, `{"version": 1, "rules": [{"to": []}]}`, `{"version": 1, "rules": [{"to": ["a.b"], "x": 1}]}`,
		`{"version": 1, "rules": [{"to": ["a.b"], "ports": [0]}]}`, `{"version": 1, "rules": [{"to": ["a.b"], "http": {"allow": []}}]}`, `{"version": 1, "rules": [{"to": ["a.b"], "http": {"allow": [{}], "methods": ["GET"]}}]}`,
		`{"version": 1, "rules": [{"to": ["a.b"], "http": {"methods": ["get"]}}]}`, `{"version": 1, "rules": [{"to": ["a.b"], "http": {"deny": [{}]}}]}`, `{"version": 1, "default": "allow"}`, `{"version": 1, "attach": [{"to": ["a.b"]}]}`,
	} {
		if valid([]byte(content)) == nil {
			t.Errorf("the schema takes %s", content)
		}
		if _, err := DecodeJSON("p", []byte(content)); err == nil {
			t.Errorf("the decoder takes %s", content)
		}
	}
}
