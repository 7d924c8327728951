package internal_test

import (
	"slices"
	"strings"
	"testing"

	"golang.org/x/tools/go/packages"
)

const module = "github.com/berm-sandbox/berm"

// forbidden lists the edges that the layers do not have, with the reason. A
// prefix names a package and all below it.
var forbidden = []struct{ from, to, why string }{
	{"", "internal/", "the vocabulary is below everything"},
	{"internal/kernel", "internal/", "what touches the kernel knows only the vocabulary, so that every level can use it"},
	{"internal/guest", "internal/", "code inside the sandbox must not carry code of the host side"},
	{"internal/driver", "internal/api", "a driver serves any protocol"},
	{"internal/driver", "internal/control", "a driver does not know sessions"},
	{"internal/driver", "internal/store", "leases come in the spec, so that a driver works without a database"},
	{"internal/monitor", "internal/api", "the monitor is small: one runs per sandbox"},
	{"internal/monitor", "internal/control", "the monitor outlives the control plane"},
	{"internal/monitor", "internal/store", "the monitor outlives the database"},
	{"internal/control", "internal/driver", "control knows only engines"},
	{"internal/control", "internal/engine/", "control knows the Engine interface, not an engine"},
	{"internal/control", "internal/api", "protocols are above sessions"},
	{"internal/control", "internal/network/egress/server", "the network service is a process of its own"},
	{"internal/api", "internal/driver", "a protocol works over every level"},
	{"internal/api", "internal/engine/", "a protocol works over every engine"},
	{"internal/container", "internal/api", "containers come in no protocol's form"},
	{"internal/container", "internal/driver", "an interpreter works over every level"},
	{"internal/container", "internal/engine", "an interpreter works over every engine"},
	{"internal/builder", "internal/api", "orders come in no protocol's form"},
	{"internal/builder", "internal/driver", "steps run at every level"},
	{"internal/builder", "internal/engine", "steps run in sandboxes that sessions make"},
	{"internal/template", "internal/api", "images know no protocol"},
	{"internal/template", "internal/control", "images know no sessions"},
	{"internal/template", "internal/driver", "layers are shared by every level"},
	{"internal/engine", "internal/api", "an engine serves any protocol"},
	{"internal/engine", "internal/control", "an engine does not know sessions"},
	{"internal/network", "internal/api", "the network service is told what to do, and by whom it does not know"},
	{"internal/network", "internal/control", "the network service knows no sessions"},
	{"internal/network", "internal/driver", "a link looks the same at every level"},
	{"internal/network", "internal/engine", "a link looks the same at every level"},
	{"internal/network", "internal/store", "policies are kept by whoever sets them"},
	{"internal/network", "internal/local", "the network service serves servers too"},
	{"internal/network", "internal/credential", "the process that reads packets holds no secrets"},
	{"internal/network", "internal/broker", "the process that reads packets holds no secrets"},
	{"internal/local", "internal/broker", "a run starts the process that holds the secrets"},
	{"internal/broker", "internal/network/stack", "what holds secrets sees no packet"},
	{"internal/broker", "internal/network/egress/server", "what holds secrets sees no packet"},
	{"internal/credential", "internal/", "what holds secrets knows only the vocabulary"},
	{"internal/local", "internal/api", "local mode has no server"},
	{"internal/local", "internal/control", "local mode has no server"},
	{"internal/local", "internal/engine", "a run is its own monitor"},
	{"internal/local", "internal/store", "local mode has no database"},
	{"internal/local", "internal/template", "what reads images is too heavy to start for each command"},
	{"internal/local", "internal/client", "local mode has no server"},
	{"internal/cli", "internal/api", "commands know a server by its protocol alone"},
	{"internal/cli", "internal/control", "commands know a server by its protocol alone"},
	{"internal/cli", "internal/store", "commands know a server by its protocol alone"},
	{"internal/batch", "internal/api", "jobs know a server by its protocol alone"},
	{"internal/batch", "internal/control", "jobs know a server by its protocol alone"},
	{"internal/batch", "internal/store", "jobs know a server by its protocol alone"},
	{"internal/document", "internal/", "a document's form says nothing of its content"},
	{"internal/client", "internal/api", "a client knows a server by its protocol alone"},
	{"internal/client", "internal/control", "a client knows a server by its protocol alone"},
	{"internal/client", "internal/driver", "a client knows a server by its protocol alone"},
	{"internal/client", "internal/engine", "a client knows a server by its protocol alone"},
	{"internal/client", "internal/store", "a client knows a server by its protocol alone"},
	{"internal/store", "internal/control", "the store keeps what it is given"},
	{"internal/store", "internal/api", "the store keeps what it is given"},
}

// allowed are exceptions inside a prefix: a layer may use its own packages and the
// leaves that everything uses.
func allowed(from, to string) bool {
	leaf := []string{"internal/cleanup", "internal/failpoint", "internal/trust", "internal/trust/root"}
	if slices.Contains(leaf, to) {
		return true
	}
	// Own sub-packages: internal/kernel/x may use internal/kernel/y.
	top := func(p string) string {
		return strings.Join(strings.SplitN(p, "/", 3)[:min(2, strings.Count(p, "/")+1)], "/")
	}
	if strings.HasPrefix(from, "internal/") && top(from) == top(to) {
		return true
	}
	// The generated messages of the agent's protocol are shared by both sides.
	return strings.HasPrefix(to, "internal/proto/")
}

// heavy lists what the binaries that run once per sandbox must not link.
var heavy = map[string][]string{
	"cmd/berm":         {"net/http", "gvisor.dev/gvisor/pkg/tcpip/stack", "crypto/tls", "modernc.org/sqlite", "google.golang.org/protobuf/proto", "github.com/prometheus/client_golang/prometheus"},
	"cmd/berm-monitor": {"net/http", "modernc.org/sqlite", "github.com/spf13/cobra", "google.golang.org/protobuf/proto"},
	"cmd/berm-init":    {"net/http", "net", "crypto/tls", "modernc.org/sqlite", "github.com/spf13/cobra", "google.golang.org/protobuf/proto"},
	"cmd/berm-guest":   {"modernc.org/sqlite", "github.com/spf13/cobra", "github.com/prometheus/client_golang/prometheus"},
}

func TestLayers(t *testing.T) {
	for path, pkg := range load(t, module+"/...") {
		from := strings.TrimPrefix(strings.TrimPrefix(path, module), "/")
		for imported := range pkg.Imports {
			to, ours := strings.CutPrefix(imported, module)
			to = strings.TrimPrefix(to, "/")
			if !ours || allowed(from, to) {
				continue
			}
			for _, rule := range forbidden {
				if under(from, rule.from) && strings.HasPrefix(to+"/", strings.TrimSuffix(rule.to, "/")+"/") {
					t.Errorf("%s imports %s: %s", path, imported, rule.why)
				}
			}
		}
	}
}

// under says whether pkg is prefix or below it; the empty prefix is the root
// package alone.
func under(pkg, prefix string) bool {
	if prefix == "" {
		return pkg == ""
	}
	return pkg == prefix || strings.HasPrefix(pkg, prefix+"/")
}

func TestHelpersStaySmall(t *testing.T) {
	for binary, banned := range heavy {
		linked := map[string]bool{}
		var walk func(*packages.Package)
		walk = func(p *packages.Package) {
			if linked[p.PkgPath] {
				return
			}
			linked[p.PkgPath] = true
			for _, i := range p.Imports {
				walk(i)
			}
		}
		for _, p := range load(t, module+"/"+binary) {
			walk(p)
		}
		if !linked["syscall"] {
			t.Errorf("%s does not exist any more: this test no longer tests it", binary)
		}
		for _, name := range banned {
			if linked[name] {
				t.Errorf("%s links %s: what it links is paid for every sandbox", binary, name)
			}
		}
	}
}

func TestEveryPackageHasAComment(t *testing.T) {
	pkgs, err := packages.Load(&packages.Config{Mode: packages.NeedName | packages.NeedFiles | packages.NeedSyntax | packages.NeedCompiledGoFiles}, module+"/...")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pkgs {
		documented := len(p.Syntax) == 0
		for _, f := range p.Syntax {
			documented = documented || f.Doc != nil
		}
		if !documented {
			t.Errorf("%s has no package comment", p.PkgPath)
		}
	}
}

func load(t *testing.T, pattern string) map[string]*packages.Package {
	t.Helper()
	pkgs, err := packages.Load(&packages.Config{Mode: packages.NeedName | packages.NeedImports | packages.NeedDeps}, pattern)
	if err != nil {
		t.Fatal(err)
	}
	if len(pkgs) == 0 {
		t.Fatalf("no package matches %s", pattern)
	}
	found := map[string]*packages.Package{}
	for _, p := range pkgs {
		found[p.PkgPath] = p
	}
	return found
}
