package template

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
)

// The server of the code interpreter, over kernels that do what they are told.
func TestInterpreterServer(t *testing.T) {
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	python := filepath.Join(cache, "berm", "interpreter", "bin", "python")
	if _, err := os.Stat(python); err != nil {
		t.Skip("needs Jupyter's client: `make setup` installs it")
	}
	out, err := exec.CommandContext(t.Context(), python, "-B", "-W", "ignore", "interpreter/test/test_server.py").CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// What the template of the code interpreter is made of names one version of each package, and
// its files have a layer of their own that is the same for the same files.
func TestInterpreterRecipe(t *testing.T) {
	m := interpreter()
	if len(m.recipe.Python) < 10 {
		t.Errorf("Python packages %q", m.recipe.Python)
	}
	for _, p := range m.recipe.Python {
		if ok, _ := filepath.Match("[A-Za-z]*==[0-9]*", p); !ok {
			t.Errorf("package %q has no version", p)
		}
	}
	if len(m.over) < 6 || m.over[interpreterDir+"/server.py"] == "" {
		t.Errorf("files %d", len(m.over))
	}
	for range 5 {
		if !slices.Equal(pack(m.over), pack(interpreter().over)) {
			t.Fatal("the archive of the same files is another")
		}
	}
	changed := interpreter()
	changed.over[interpreterDir+"/server.py"] += "#"
	if changed.key() == m.key() || changed.recipe.key() != m.recipe.key() {
		t.Error("a change of the server is no change, or one of the packages")
	}
}
