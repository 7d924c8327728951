package network

import (
	"os"
	"os/exec"
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
	ctx, s := start(t)
	cmd := exec.CommandContext(ctx, "node", "--test", "network.test.mjs")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "E2B_API_KEY="+s.Key, "E2B_API_URL="+s.URL, "E2B_SANDBOX_URL="+s.URL)
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
}
