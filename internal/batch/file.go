package batch

import (
	"bytes"
	"crypto/sha256"
	_ "embed" // schema.json
	"encoding/hex"
	"encoding/json"
	"maps"
	"slices"

	"go.yaml.in/yaml/v3"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/document"
)

// What a file may have.
const (
	// MaxFile bounds a file in bytes.
	MaxFile = 64 << 20
	maxJobs = 100_000
)

//go:embed schema.json
var schema []byte

// Schema is the JSON schema of a batch file in YAML, and below $defs/job of a line of one in JSON
// lines. Parse is stricter than what a schema can say.
func Schema() []byte { return slices.Clone(schema) }

// header is what is said once for all jobs: of a file of YAML without its jobs, or the first line of
// JSON lines.
type header struct {
	Version  int `json:"version"`
	Defaults Job `json:"defaults"`
}

// Parse reads the jobs of a file: YAML, or JSON lines if its first character is "{". Kind: Invalid,
// with name and line.
func Parse(name string, content []byte) ([]Job, error) {
	source := document.Source{Name: name, Max: MaxFile}
	if !bytes.HasPrefix(bytes.TrimLeft(content, " \t\r\n"), []byte("{")) {
		return parseYAML(source, content)
	}
	var defaults Job
	var jobs []Job
	for line := range bytes.Lines(content) {
		source.Line++
		if line = bytes.TrimSpace(line); len(line) == 0 {
			continue
		}
		node, err := source.JSON(line)
		if err != nil {
			return nil, err
		}
		if len(jobs) == 0 && hasKey(node, "version") {
			h := header{}
			if err := source.Fill(node, "the first line", &h); err != nil {
				return nil, err
			}
			if defaults = h.Defaults; h.Version != 1 {
				return nil, source.Errorf(node, "want version: 1")
			}
			continue
		}
		if jobs, err = add(jobs, source, node, defaults); err != nil {
			return nil, err
		}
	}
	return finish(source, jobs)
}

func parseYAML(source document.Source, content []byte) ([]Job, error) {
	root, err := source.YAML(content)
	if err != nil {
		return nil, err
	}
	var file struct {
		Version  int         `json:"version"`
		Defaults Job         `json:"defaults"`
		Jobs     []yaml.Node `json:"jobs"`
	}
	// Jobs are read once it is known what they begin with.
	if err := source.Fill(root, "the batch", &file); err != nil {
		return nil, err
	}
	if file.Version != 1 {
		return nil, source.Errorf(root, "want version: 1")
	}
	var jobs []Job
	for i := range file.Jobs {
		if jobs, err = add(jobs, source, &file.Jobs[i], file.Defaults); err != nil {
			return nil, err
		}
	}
	return finish(source, jobs)
}

func hasKey(node *yaml.Node, key string) bool {
	for i := 0; i+1 < len(node.Content) && node.Kind == yaml.MappingNode; i += 2 {
		if node.Content[i].Value == key {
			return true
		}
	}
	return false
}

// add reads one more job.
func add(jobs []Job, source document.Source, node *yaml.Node, defaults Job) ([]Job, error) {
	job := defaults
	job.Env, job.Metadata = maps.Clone(defaults.Env), maps.Clone(defaults.Metadata)
	if err := source.Fill(node, "a job", &job); err != nil {
		return nil, err
	}
	if err := job.check(); err != nil {
		return nil, source.Errorf(node, "%w", err)
	}
	if len(jobs) == maxJobs {
		return nil, source.Errorf(node, "more than %d jobs", maxJobs)
	}
	// The content of the files that it names is not in it.
	text, err := json.Marshal(job)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(text)
	job.At, job.digest = source.At(node), hex.EncodeToString(sum[:8])
	if !slices.ContainsFunc(job.Checks, func(c Check) bool { return c.Exit != nil }) {
		job.Checks = slices.Insert(slices.Clone(job.Checks), 0, Check{Exit: &Exit{}})
	}
	return append(jobs, job), nil
}

func finish(source document.Source, jobs []Job) ([]Job, error) {
	if len(jobs) == 0 {
		return nil, berm.Errorf(berm.Invalid, "%s has no jobs", source.Name)
	}
	at := make(map[string]string, len(jobs))
	for _, j := range jobs {
		if at[j.ID] != "" {
			return nil, berm.Errorf(berm.Invalid, "%s: a second job %s, the first is at %s", j.At, j.ID, at[j.ID])
		}
		at[j.ID] = j.At
	}
	return jobs, nil
}
