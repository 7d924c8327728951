package local

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// What is allowed is reached through the proxy of a corporate network, by its name if a rule
// names it; nothing else is, and the password is told nowhere.
func TestUpstreamProxy(t *testing.T) {
	online(t, func(p *person) {
		p.env = append(p.env, "REAL_TOKEN="+secret, "HTTPS_PROXY=http://user:"+proxyPassword+"@proxy.example:3128")
		script := `exec 2>&1
echo named $(curl -sSk https://www.example/via)
echo plain $(curl -sS http://www.example/via)
echo secret $(curl -sS https://api.example/hash)
echo looked $(curl -sS https://api.example/via)
echo other $(curl -sSk -m5 https://other.example/via)
echo address $(curl -sS http://` + internetAddress + `/via)
true`
		for _, proxy := range []string{
			"http://user:" + proxyPassword + "@" + internetAddress + ":3128",
			"https://user:" + proxyPassword + "@proxy.example:3129",
			"socks5://user:" + proxyPassword + "@proxy.example:3128",
			"env", "config",
		} {
			flags := []string{"--allow", "www.example", "--allow", "api.example", "--allow", internetAddress, "--open", opened, "--cred", bound}
			if proxy == "config" {
				p.mkdir(".config")
				p.mkdir(".config/berm")
				p.write(".config/berm/config.yaml", "version: 1\nupstream-proxy: env\n")
			} else {
				flags = append(flags, "--upstream-proxy", proxy)
			}
			r := p.sh(script, flags...)
			for _, want := range []string{
				"named <www.example:443>\n", "plain <www.example:80>\n", "secret " + authorised("Bearer "+secret) + "\n", "looked <api.example:443>\n",
				"address <" + internetAddress + ":80>\n", "Could not resolve host: other.example",
			} {
				if !strings.Contains(r.stdout, want) {
					t.Errorf("%s: no %q in %v", proxy, want, r)
				}
			}
			if record := p.read(".local/state/berm/audit/log.jsonl"); strings.Contains(r.stdout+r.stderr+record, proxyPassword) {
				t.Errorf("the password is told: %v", r)
			}
		}
		p.must(os.Remove(p.path(".config/berm/config.yaml")))
		// Of the environment only who asks for it.
		p.sh(`test "$(curl -sSk https://www.example/via)" = "<>"`, "--allow", "www.example", "--open", opened).exits(0)
		r := p.sh("curl -sSk -m5 https://www.example/via", "--allow", "www.example", "--open", opened, "--upstream-proxy", "http://user:wrong@proxy.example:3128")
		if r.code == 0 || !strings.Contains(r.stderr, "not reached: www.example:443") || !strings.Contains(r.stderr, "407") || strings.Contains(r.stderr, "wrong") {
			t.Error(r)
		}
		r = p.berm("run", "--print-policy", "--upstream-proxy", "env", "--allow", "www.example", "--", "true")
		if !strings.Contains(r.stdout, "through http://user:xxxxx@proxy.example:3128") || strings.Contains(r.stdout, proxyPassword) {
			t.Error(r)
		}
		for _, wrong := range []string{"ftp://proxy.example", "proxy.example", "http://user:" + proxyPassword + "@proxy.example:x"} {
			r := p.sh("true", "--allow", "www.example", "--upstream-proxy", wrong)
			if r.code != 125 || !strings.Contains(r.stderr, "upstream proxy") || strings.Contains(r.stderr, proxyPassword) {
				t.Errorf("%s: %v", wrong, r)
			}
		}
	})
}

// Names that are allowed only for being public are resolved here: for the proxy, they could be
// of its own network.
func TestUpstreamProxyOfPublicNames(t *testing.T) {
	online(t, func(p *person) {
		r := p.sh("curl -sSk -m5 https://www.example/via; curl -sSk https://named.example/via", "--allow", "named.example", "--allow", "public", "--open", opened,
			"--upstream-proxy", "socks5://user:"+proxyPassword+"@proxy.example:3128")
		if r.stdout != "<named.example:443>" || !strings.Contains(r.stderr, "denied: www.example:443") {
			t.Error(r)
		}
	})
}

// An authority of the network's own is trusted when it is named.
func TestUpstreamAuthority(t *testing.T) {
	online(t, func(p *person) {
		p.env = append(p.env, "REAL_TOKEN="+secret)
		dir := p.outer[slices.Index(p.outer, "internet")+1]
		p.outer = append(p.outer, "env", "-u", "SSL_CERT_FILE")
		flags := []string{"--allow", "api.example", "--open", opened, "--cred", bound}
		p.sh(`curl -sS https://api.example/hash | grep -q upstream_certificate`, flags...).exits(0)
		for _, more := range [][]string{nil, {"--upstream-proxy", "https://user:" + proxyPassword + "@proxy.example:3129"}} {
			p.sh(`test "$(curl -sS https://api.example/hash)" = `+authorised("Bearer "+secret), append(append(flags, "--upstream-ca", dir+"/ca.pem"), more...)...).exits(0)
		}
		for wrong, says := range map[string]string{"/nonexistent": "no such file", "/etc/hostname": "no certificate"} {
			r := p.sh("true", append(flags, "--upstream-ca", wrong)...)
			if r.code != 125 || !strings.Contains(r.stderr, says) {
				t.Error(r)
			}
		}
	})
}
