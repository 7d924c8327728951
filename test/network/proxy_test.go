package network

import (
	"strings"
	"testing"
)

const proxyPassword = "pass-of-the-proxy"

// The operator's proxy is the only way out: by name to what a rule names, by an address that
// was resolved and judged here to what is allowed for being public. Its password is told
// nowhere.
func TestUpstreamProxy(t *testing.T) {
	for _, scheme := range []string{"http", "socks5"} {
		t.Run(scheme, func(t *testing.T) {
			ctx, s := start(t, "--upstream-proxy", scheme+"://user:"+proxyPassword+"@"+gateway+":3128")
			via := func(url string) string {
				return "curl -fsk -m 5 -w ' %{exitcode}' " + url + "/via"
			}
			script := strings.Join([]string{via("https://www.example.com"), via("http://www.example.com"), via("https://1.1.1.1"), via("http://rebind.example.net"), via("http://" + metadata)}, "; echo; ")
			for name, c := range map[string]struct {
				options object
				want    string
			}{
				"default":   {nil, site + ":443+ 0|" + site + ":80+ 0|1.1.1.1:443+ 0"},
				"by a name": {object{"network": network([]string{"www.example.com", one}, all)}, "www.example.com:443+ 0|www.example.com:80+ 0|1.1.1.1:443+ 0"},
			} {
				sandbox := create(t, ctx, s, c.options)
				lines := strings.Split(run(t, ctx, sandbox, script).Stdout, "\n")
				if len(lines) < 5 || strings.Join(lines[:3], "|") != c.want || strings.HasSuffix(lines[3], " 0") || strings.HasSuffix(lines[4], " 0") {
					t.Errorf("%s: %q, want %s", name, lines, c.want)
				}
			}
			never(t)
			if strings.Contains(s.Log(), proxyPassword) {
				t.Error("the log tells the password")
			}
		})
	}
}
