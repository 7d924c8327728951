package preset

import (
	"os"
	"slices"
	"strings"
	"testing"
)

func TestDocumentation(t *testing.T) {
	content, err := os.ReadFile("../../../docs/presets.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := strings.Split(string(content), "```")
	var examples int
	var variables []string
	for i := 1; i < len(blocks); i += 2 {
		switch block := blocks[i]; {
		case strings.HasPrefix(block, "yaml\n# config.yaml\n"):
			config, err := parseConfig("config.yaml", []byte(strings.TrimPrefix(block, "yaml")))
			if err != nil {
				t.Fatal(err)
			}
			for name := range config.Presets {
				if _, err := chain(config, name); err != nil {
					t.Error(err)
				}
			}
			examples++
		case strings.HasPrefix(block, "yaml\n# berm.yaml\n"):
			if _, err := parseProject(ProjectFile, []byte(strings.TrimPrefix(block, "yaml"))); err != nil {
				t.Error(err)
			}
			examples++
		case strings.HasPrefix(block, "\nTERM "):
			variables = strings.Fields(block)
		}
	}
	if examples != 3 {
		t.Errorf("%d examples, want 3", examples)
	}
	if !slices.Equal(variables, base.Env) {
		t.Errorf("documented are %q, passed %q", variables, base.Env)
	}
	ours, err := builtins()
	if err != nil {
		t.Fatal(err)
	}
	for name := range ours {
		if !strings.Contains(string(content), "| `"+name+"` |") {
			t.Errorf("preset %s is not documented", name)
		}
	}
}
