package network

import (
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

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
	startInternet(t)
	ctx := t.Context()
	s := harness.Serve(t, "--resolver", resolver+":53", "--templates", trusting(t), "--dev-domain", "berm.test")
	cmd := exec.CommandContext(ctx, "npx", "vitest", "run", "--reporter", "verbose",
		"-t", "^(?!.*injected header is reflected)", // changes requests on their way, which is refused yet
		"tests/sandbox/network.test.ts", "tests/sandbox/internetAccess.test.ts")
	cmd.Dir = dir
	hook, err := filepath.Abs("../e2e/js/dns-hook.cjs") // names of sandboxes are this machine
	if err != nil {
		t.Fatal(err)
	}
	cmd.Env = append(os.Environ(), "E2B_API_KEY="+s.Key, "E2B_DOMAIN=berm.test:"+s.URL[strings.LastIndexByte(s.URL, ':')+1:],
		"NODE_EXTRA_CA_CERTS="+filepath.Join(s.Data, "tls", "ca.pem"), "NODE_OPTIONS=--require "+hook)
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
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
	if out, err := exec.Command("cp", "-a", "/var/cache/berm/templates", dir).CombinedOutput(); err != nil {
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
		f, err := os.OpenFile(bundle, os.O_APPEND|os.O_WRONLY, 0)
		if err == nil {
			_, err = f.Write(certificate)
			f.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}
