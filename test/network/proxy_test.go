package network

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
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

// What leaves a sandbox goes through the proxy of whoever made it, after the policy, also when
// the operator has one, and after the death of every process; never past it.
func TestEgressProxy(t *testing.T) {
	for name, flags := range map[string][]string{"alone": nil, "behind the operator's": {"--upstream-proxy", "http://user:" + proxyPassword + "@" + gateway + ":3128"}} {
		t.Run(name, func(t *testing.T) {
			ctx, s := start(t, flags...)
			proxied := func(password string, allow ...string) object {
				n := network(allow, nil)
				if allow != nil {
					n["denyOut"] = all
				}
				n["egressProxy"] = object{"address": one + ":3128", "username": "user", "password": password}
				return n
			}
			sandbox := create(t, ctx, s, object{"network": proxied(proxyPassword, "www.example.com")})
			via := func(url string) string {
				return strings.TrimSpace(run(t, ctx, sandbox, "curl -fsk -m 5 -w ' %{exitcode}' "+url+"/via").Stdout)
			}
			check := func(when string) {
				t.Helper()
				if got := via("https://www.example.com"); got != "+www.example.com:443 0" {
					t.Errorf("%s: %q", when, got)
				}
				if got := via("http://files.example.com"); got != "6" {
					t.Errorf("%s, what is not allowed: %q", when, got)
				}
			}
			check("at first")
			put := func(n object) {
				t.Helper()
				if err := s.Call(ctx, "PUT", "/sandboxes/"+sandbox.ID+"/network", n, nil); err != nil {
					t.Fatal(err)
				}
			}
			s.Crash()
			if err := s.Restart(ctx); err != nil {
				t.Fatal(err)
			}
			for end := time.Now().Add(10 * time.Second); !strings.HasSuffix(via("https://www.example.com"), " 0") && time.Now().Before(end); {
				time.Sleep(50 * time.Millisecond)
			}
			check("after a restart")
			put(proxied("wrong", "www.example.com"))
			if got := via("https://www.example.com"); strings.HasSuffix(got, " 0") {
				t.Errorf("past a proxy that refuses: %q", got)
			}
			put(proxied(proxyPassword))
			if got := via("https://1.1.1.1"); got != "+1.1.1.1:443 0" {
				t.Errorf("an address: %q", got)
			}
			if got := via("http://" + metadata); strings.HasSuffix(got, " 0") {
				t.Errorf("metadata: %q", got)
			}
			put(network([]string{"www.example.com"}, all))
			if got := via("https://www.example.com"); strings.Contains(got, "+www") || !strings.HasSuffix(got, " 0") {
				t.Errorf("without a proxy again: %q", got)
			}
			put(proxied(proxyPassword, "www.example.com"))
			never(t)
			var detail any
			if err := s.Call(ctx, "GET", "/sandboxes/"+sandbox.ID, nil, &detail); err != nil || strings.Contains(fmt.Sprint(detail), proxyPassword) || !strings.Contains(fmt.Sprint(detail), "address:"+one) {
				t.Errorf("%v, %v", detail, err)
			}
			if strings.Contains(s.Log(), proxyPassword) {
				t.Error("the log tells the password")
			}
			_ = filepath.WalkDir(s.Data, func(path string, d os.DirEntry, err error) error {
				if err == nil && d.Type().IsRegular() && !isImage(path) {
					if content, err := os.ReadFile(path); err == nil && bytes.Contains(content, []byte(proxyPassword)) {
						t.Errorf("the password is in %s", path)
					}
				}
				return nil
			})
		})
	}
}
