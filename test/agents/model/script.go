package main

import (
	"embed"
	"encoding/json"
	"fmt"
	"path/filepath"
)

//go:embed scripts
var scripts embed.FS

// step is one turn of the model: a tool call, or with Say alone its last words. Files are
// relative to the directory in which the model was started.
type step struct {
	Say   string `json:"say,omitempty"`
	Run   string `json:"run,omitempty"`   // a shell command
	Read  string `json:"read,omitempty"`  // a file
	Edit  string `json:"edit,omitempty"`  // a file in which the line Old becomes New
	Write string `json:"write,omitempty"` // a new file that holds the line New
	Old   string `json:"old,omitempty"`
	New   string `json:"new,omitempty"`
}

// load returns the steps of a script by its name.
func load(name string) ([]step, error) {
	text, err := scripts.ReadFile("scripts/" + name + ".json")
	if err != nil {
		return nil, fmt.Errorf("no script %q: %w", name, err)
	}
	var steps []step
	if err := json.Unmarshal(text, &steps); err != nil {
		return nil, fmt.Errorf("script %q: %w", name, err)
	}
	return steps, nil
}

// call is a tool call in the words of one agent.
type call struct {
	tool  string
	input map[string]any
}

// claude is the step with the tools of claude-code, which wants absolute paths.
func (s step) claude() (call, bool) {
	switch {
	case s.Run != "":
		return call{"Bash", map[string]any{"command": s.Run, "description": "Run a command"}}, true
	case s.Read != "":
		return call{"Read", map[string]any{"file_path": absolute(s.Read)}}, true
	case s.Edit != "":
		return call{"Edit", map[string]any{"file_path": absolute(s.Edit), "old_string": s.Old, "new_string": s.New}}, true
	case s.Write != "":
		return call{"Write", map[string]any{"file_path": absolute(s.Write), "content": s.New + "\n"}}, true
	}
	return call{}, false
}

// codex is the step with the only tool that codex offers to a model it does not know. It
// takes apply_patch out of the command and applies the patch itself.
func (s step) codex() (call, bool) {
	patch := func(text string) string {
		return "apply_patch <<'PATCH'\n*** Begin Patch\n" + text + "*** End Patch\nPATCH\n"
	}
	var command string
	switch {
	case s.Run != "":
		command = s.Run
	case s.Read != "":
		command = "cat '" + s.Read + "'"
	case s.Edit != "":
		command = patch("*** Update File: " + s.Edit + "\n@@\n-" + s.Old + "\n+" + s.New + "\n")
	case s.Write != "":
		command = patch("*** Add File: " + s.Write + "\n+" + s.New + "\n")
	default:
		return call{}, false
	}
	return call{"exec_command", map[string]any{"cmd": command, "yield_time_ms": 10000}}, true
}

func absolute(path string) string {
	path, err := filepath.Abs(path)
	if err != nil {
		panic(err) // the working directory is gone
	}
	return path
}
