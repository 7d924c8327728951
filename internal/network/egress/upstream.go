package egress

import (
	"io"
	"net/url"
	"os"
	"strings"

	"github.com/berm-sandbox/berm"
)

// Upstream is the way to what a policy allows. It may hold passwords.
type Upstream struct {
	Proxy string `json:"proxy,omitempty"` // the operator's, as inspect.NewChain takes it
	Own   string `json:"own,omitempty"`   // the sandbox's, reached through that one
	Roots []byte `json:"roots,omitempty"` // authorities beside the system's that verify upstreams, in PEM
	// OwnName and OwnRoots verify the sandbox's proxy, instead of its host and the others.
	OwnName  string `json:"ownName,omitempty"`
	OwnRoots []byte `json:"ownRoots,omitempty"`
	// Verify has a policy refused when the sandbox's proxy is not where sandboxes may go.
	Verify bool `json:"verify,omitempty"`
}

// ProxyOfEnv means the environment's, in the place of a proxy's URL.
const ProxyOfEnv = "env"

// proxyVariables are what programs look for it in, the first that is set.
var proxyVariables = []string{"HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"}

// maxRoots bounds a file of authorities in bytes.
const maxRoots = 2 << 20

// ReadUpstream makes the way of a proxy's URL, or ProxyOfEnv, and the file of further
// authorities; both may be empty. Kinds: Invalid, NotFound.
func ReadUpstream(proxy, roots string, getenv func(name string) string) (u Upstream, err error) {
	u.Proxy = proxy
	if proxy == ProxyOfEnv {
		u.Proxy = ""
		for _, name := range proxyVariables {
			if u.Proxy = getenv(name); u.Proxy != "" {
				break
			}
		}
		if u.Proxy == "" {
			return u, berm.Errorf(berm.NotFound, "the environment has no proxy").WithHint("set one of %s, or write the proxy's URL", strings.Join(proxyVariables, ", "))
		}
		if !strings.Contains(u.Proxy, "://") {
			u.Proxy = "http://" + u.Proxy // as curl has it
		}
	}
	if roots == "" {
		return u, nil
	}
	file, err := os.Open(roots)
	if err != nil {
		return u, berm.Errorf(berm.NotFound, "the authorities for upstreams: %w", err)
	}
	defer file.Close()
	u.Roots, err = io.ReadAll(io.LimitReader(file, maxRoots+1))
	if err != nil || len(u.Roots) > maxRoots {
		return u, berm.Errorf(berm.Invalid, "the authorities for upstreams: %s cannot be read, or is longer than 2 MiB", roots)
	}
	return u, nil
}

// String says what the way is, without passwords.
func (u Upstream) String() string {
	var parts []string
	for _, p := range []struct{ what, proxy string }{{"through ", u.Proxy}, {"then ", u.Own}} {
		if p.proxy == "" {
			continue
		}
		shown := "a proxy"
		if at, err := url.Parse(p.proxy); err == nil {
			shown = at.Redacted()
		}
		parts = append(parts, p.what+shown)
	}
	if len(u.Roots) > 0 {
		parts = append(parts, "authorities of its own beside the system's")
	}
	return strings.Join(parts, ", ")
}
