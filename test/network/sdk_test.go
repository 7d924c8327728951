package network

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
)

// E2B's JavaScript SDK, as test/e2e/run installed it.
func TestSDK(t *testing.T) {
	harness.Slow(t)
	dir := os.Getenv("BERM_TEST_SDK")
	if dir == "" {
		t.Skip("missing: E2B's SDK, which test/e2e/run installs before it runs this")
	}
	ctx, s := startTrusting(t)
	cmd := exec.CommandContext(ctx, "node", "--test", "network.test.mjs")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "E2B_API_KEY="+s.Key, "E2B_API_URL="+s.URL, "E2B_SANDBOX_URL="+s.URL)
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
}

// E2B's Python SDK, as test/e2e/run installed it.
func TestPythonSDK(t *testing.T) {
	harness.Slow(t)
	python := os.Getenv("BERM_TEST_SDK_PYTHON")
	if python == "" {
		t.Skip("missing: E2B's Python SDK, which test/e2e/run installs before it runs this")
	}
	ctx, s := startTrusting(t)
	cmd := exec.CommandContext(ctx, python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "../e2e/python/network.py")
	cmd.Env = append(os.Environ(), "E2B_API_KEY="+s.Key, "E2B_API_URL="+s.URL, "E2B_SANDBOX_URL="+s.URL)
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
}

// E2B's own tests of networks, in a directory that holds its JavaScript SDK's repository with
// what it depends on.
func TestSuite(t *testing.T) {
	harness.Slow(t)
	dir := os.Getenv("BERM_TEST_SUITE")
	if dir == "" {
		t.Skip("missing: E2B's test suite, for which BERM_TEST_SUITE names packages/js-sdk of its repository")
	}
	ctx, s := serveDomain(t)
	cmd := exec.CommandContext(ctx, "npx", "vitest", "run", "--project", "unit", "--reporter", "verbose", "tests/sandbox/network.test.ts", "tests/sandbox/internetAccess.test.ts")
	cmd.Dir = dir
	hook, err := filepath.Abs("../e2e/js/dns-hook.cjs") // names of sandboxes are this machine
	if err != nil {
		t.Fatal(err)
	}
	cmd.Env = append(os.Environ(), "E2B_API_KEY="+s.Key, "E2B_DOMAIN="+domain,
		"NODE_EXTRA_CA_CERTS="+filepath.Join(s.Data, "tls", "ca.pem"), "NODE_OPTIONS=--require "+hook)
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
}

// What a template starts serves when the sandbox is handed out, also after a start from its files
// alone; and one sandbox reaches another by its public name, with the fields that its rules set.
func TestStartCommand(t *testing.T) {
	ctx, s := serveDomain(t)
	server, err := s.Create(ctx, time.Minute, map[string]any{"templateID": "httpbin"})
	if err != nil {
		t.Fatal(err)
	}
	name := "8080-" + server.ID + "." + domain
	client, err := s.Create(ctx, time.Minute, map[string]any{"network": object{
		"rules": object{name: []object{{"transform": object{"headers": object{"X-Test-Token": "value-123"}}}}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	ask := func() {
		t.Helper()
		r, err := client.Run(ctx, harness.Shell("", "curl -sS --max-time 10 https://"+name+"/headers"))
		var told struct{ Headers map[string][]string }
		if err != nil || json.Unmarshal([]byte(r.Stdout), &told) != nil || !slices.Equal(told.Headers["X-Test-Token"], []string{"value-123"}) {
			t.Errorf("%+v, %v", r, err)
		}
	}
	ask()
	if err := s.Call(ctx, "POST", "/sandboxes/"+server.ID+"/pause", object{"memory": false}, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Call(ctx, "POST", "/sandboxes/"+server.ID+"/connect", object{"timeout": 60}, nil); err != nil {
		t.Fatal(err)
	}
	ask()
	// Both commands run as those of the API do.
	r, err := server.Run(ctx, harness.Shell("", "ps -C python3 -o user=,args="))
	if err != nil || !slices.Equal(strings.Fields(r.Stdout), []string{"user", "python3", "-", "8080"}) {
		t.Errorf("%+v, %v", r, err)
	}
}

// serveDomain starts a server whose sandboxes have names below domain, for programs here and for
// those inside, with the templates base and httpbin.
func serveDomain(t *testing.T) (context.Context, *harness.Server) {
	t.Helper()
	harness.Slow(t)
	startInternet(t)
	trustInternet(t)
	templates := trusting(t)
	binary, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(binary, "template", "build", "httpbin", "--templates", templates).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx, harness.ServeAt(t, "0.0.0.0:443", "--resolver", resolver+":53", "--templates", templates, "--dev-domain", domain)
}

// trusting is a copy of the templates in which base trusts the internet of this test.
func trusting(t *testing.T) string {
	t.Helper()
	answer, err := http.Get("http://" + gateway + ":8000/certificate")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	certificate, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "templates")
	copied := exec.Command("/bin/sh", "-ec", `mkdir -m 700 "$1" && cd /var/cache/berm/templates && cp -a *.json "$1"
		cp -al layers "$1" 2>/dev/null || cp -a layers "$1"`, "copy", dir) // links where there can be: half a gigabyte
	if out, err := copied.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	bundles, err := filepath.Glob(filepath.Join(dir, "layers/*/etc/ssl/certs/ca-certificates.crt"))
	if err != nil || len(bundles) == 0 {
		bundles, _ = filepath.Glob(filepath.Join(dir, "layers/*/*/etc/ssl/certs/ca-certificates.crt"))
	}
	if len(bundles) == 0 {
		t.Fatal("base has no certificates")
	}
	for _, bundle := range bundles {
		known, err := os.ReadFile(bundle)
		if err == nil {
			err = os.Remove(bundle) // the original stays
		}
		if err == nil {
			err = os.WriteFile(bundle, append(known, certificate...), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}
