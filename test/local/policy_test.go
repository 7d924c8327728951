package local

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// policyFile writes a policy.
func (p *person) policyFile(document string) string {
	p.Helper()
	p.write("policy.yaml", "version: 1\n"+document)
	return p.path("policy.yaml")
}

// bash is sh with bash.
func (p *person) bash(script string, flags ...string) result {
	p.Helper()
	return p.berm(slices.Concat([]string{"run"}, flags, []string{"--", "bash", "-c", script})...)
}

// Each limit of a policy is kept, and whoever meets it is told which it is.
func TestNetworkLimits(t *testing.T) {
	online(t, func(p *person) {
		// Answers of /fill/N have N bytes.
		for name, c := range map[string]struct{ policy, script, out, told string }{
			"bytes received": {
				"rules: [{id: web, to: [www.example], limits: {down: 300KiB}}]",
				"for i in 1 2 3 4; do curl -s -m 10 -o f http://www.example/fill/100000 && echo yes || echo no; done",
				"yes\nyes\nyes\nno\n", "denied: www.example:80 (limit): www.example:80: the limit of rule web is used up (300KiB received).",
			},
			"bytes sent, of all": {
				"limits: {up: 100KiB}\nrules: [{id: web, to: [www.example]}]",
				"head -c 200000 /dev/zero > f; curl -s -m 10 -T f -o /dev/null http://www.example/ && echo yes || echo no; curl -s -m 10 -o /dev/null http://www.example/ && echo yes || echo no",
				"no\n", "the limit of the policy is used up (100KiB sent)",
			},
			"new flows": {
				"rules: [{id: web, to: [www.example], limits: {new_flows: 2}}]",
				"for i in 1 2 3; do curl -s -m 10 -o /dev/null http://www.example/ && echo yes || echo no; done",
				"yes\nyes\nno\n", "(limit): www.example:80: the limit of rule web is used up (2 new flows a second)",
			},
			"flows": {
				"rules: [{id: web, to: [www.example], limits: {flows: 1}}]",
				"exec 3<>/dev/tcp/www.example/80; curl -s -m 10 -o /dev/null http://www.example/ && echo yes || echo no; exec 3>&-",
				"no\n", "(1 flows at a time)",
			},
			"duration": {
				"rules: [{id: web, to: [www.example], limits: {duration: 300ms}}]",
				"exec 3<>/dev/tcp/www.example/80; printf 'GET / HTTP/1.1\\r\\n' >&3; timeout 10 cat <&3; echo over $?",
				"over ", "(300ms for one flow)",
			},
			"requests": {
				"rules: [{id: web, to: [www.example], http: {}, limits: {requests: 2}}]",
				"curl -s -m 10 -w '%{http_code}\\n' -o /dev/null http://www.example/ -o /dev/null http://www.example/ -o /dev/null http://www.example/",
				"200\n200\n429\n", "denied: www.example:80 (limit): www.example:80: the limit of rule web is used up (2 requests a second)",
			},
			"queries": {
				"limits: {queries: 1}\nrules: [{id: web, to: [www.example]}]",
				"export RES_OPTIONS='attempts:1 timeout:1'; for i in 1 2 3 4 5 6; do getent ahostsv4 a$i.example >/dev/null & done; wait",
				"", "denied: queries for names (limit): the limit of 1 queries a second is used up",
			},
		} {
			t.Run(name, func(t *testing.T) {
				r := p.bash("cd /tmp\n"+c.script, "--policy", p.policyFile(c.policy), "--open", opened)
				if !strings.Contains(r.stdout, c.out) || !strings.Contains(r.stderr, c.told) {
					t.Errorf("%v", r)
				}
			})
		}
	})
}

// What a rule asks is answered in another terminal, and nowhere else.
func TestAsk(t *testing.T) {
	online(t, func(p *person) {
		file := p.policyFile("rules: [{id: rest, to: [once.example, always.example, never.example, same.example, soon.example], ports: [80, 443], action: ask, reason: all else}] ")
		other := *p // not on that internet
		other.outer, other.rootOutside = nil, false
		ask := other.command("net", "ask", "--json")
		answers, err := ask.StdinPipe()
		p.must(err)
		questions, err := ask.StdoutPipe()
		p.must(err)
		ask.Stderr = os.Stderr
		p.must(ask.Start())
		p.Cleanup(func() {
			answers.Close()
			_ = ask.Wait()
		})
		var mu sync.Mutex
		asked := map[string]int{}
		go func() {
			for lines := bufio.NewScanner(questions); lines.Scan(); {
				var m struct {
					Run      struct{ Command []string }
					Question struct{ Host string }
					Reason   string
					Closed   string
				}
				if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
					p.Error(err)
				}
				if m.Closed != "" {
					continue
				}
				if m.Reason != "all else" || len(m.Run.Command) != 3 {
					p.Errorf("%s", lines.Bytes())
				}
				mu.Lock()
				asked[m.Question.Host]++
				mu.Unlock()
				reply := map[string]string{
					"once.example": `"allow":true,"for":"once"`, "same.example": `"allow":true,"for":"once"`, "always.example": `"allow":true,"for":"sandbox"`,
					"never.example": `"allow":false,"for":"sandbox"`, "soon.example": `"allow":true,"for":"until","until":"` + time.Now().Add(time.Second).Format(time.RFC3339Nano) + `"`,
				}[m.Question.Host]
				var raw struct{ Question json.RawMessage }
				_ = json.Unmarshal(lines.Bytes(), &raw)
				if m.Question.Host == "same.example" {
					time.Sleep(time.Second) // the others come meanwhile
				}
				fmt.Fprintf(answers, "{\"question\":%s,%s}\n", raw.Question, reply)
			}
		}()
		r := p.bash(`get() { curl -s -m 10 -o /dev/null http://$1.example/ && echo $1 yes || echo $1 no; }
get once; get once; get always; get always; get never; get never
for i in 1 2 3 4 5; do get same & done; wait
exec 3<>/dev/tcp/soon.example/80; timeout 10 cat <&3; echo ended $?`, "--policy", file, "--open", opened)
		mu.Lock()
		defer mu.Unlock()
		for _, want := range []string{"once yes\nonce yes\nalways yes\nalways yes\nnever no\nnever no\nsame yes\nsame yes\nsame yes\nsame yes\nsame yes\n", "ended "} {
			if !strings.Contains(r.stdout, want) {
				p.Errorf("no %q in %v", want, r)
			}
		}
		if strings.Contains(r.stdout, "ended 124") || !strings.Contains(r.stderr, "soon.example:80 (ask)") {
			p.Errorf("a flow outlives the time for which it was allowed: %v", r)
		}
		for host, n := range map[string]int{"once.example": 2, "always.example": 1, "never.example": 1, "soon.example": 1, "same.example": 1} {
			if asked[host] != n {
				p.Errorf("%s was asked about %d times", host, asked[host])
			}
		}
		if !strings.Contains(r.stderr, "`berm net ask` in another terminal") || !strings.Contains(r.stderr, "never.example:80 (ask)") {
			p.Errorf("it is not told: %v", r)
		}
	})
}

// With dns: {mode: real} names have real addresses, and a connection to one that several names
// share is for the name that the client asks for.
func TestRealNames(t *testing.T) {
	online(t, func(p *person) {
		file := p.policyFile("dns: {mode: real}\nrules: [{id: a, to: [www.example]}, {id: b, to: [b.example], ports: [443]}, {id: c, to: [c.example], ports: [81]}]")
		r := p.bash(`getent hosts www.example | cut -d' ' -f1; getent hosts evil.example || echo unknown
getent hosts www.example b.example c.example >/dev/null; getent hosts b.example > /dev/null
get() { curl -sk -m 10 -w '%{http_code}\n' "$@" || echo failed; }
get https://www.example/1; get https://b.example/2; get --resolve www.example:443:`+internetAddress+` https://www.example/3; get http://www.example/4
get --resolve evil.example:443:`+internetAddress+` https://evil.example/5; get http://`+internetAddress+`:22/6`, "--policy", file, "--open", opened)
		want := internetAddress + "\nunknown\nGET www.example /1\n200\nGET b.example /2\n200\nGET www.example /3\n200\nGET www.example /4\n200\n000\nfailed\n000\nfailed\n"
		if r.stdout != want || !strings.Contains(r.stderr, "(sni_mismatch)") || !strings.Contains(r.stderr, ":22 (port)") {
			t.Errorf("%v\nwant %q", r, want)
		}
	})
}
