package probes

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/cgi"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/test/internet"
)

// The names of the internet that the policy allows, each with its address. Those whose address
// is no public one are allowed all the same.
var allowed = map[string]string{
	"allowed.test": "93.184.216.10", "other.allowed.test": "93.184.216.10", "redir.allowed.test": "93.184.216.13",
	"l7.allowed.test": "93.184.216.11", "ro.allowed.test": "93.184.216.12",
	"api.bound.test": "93.184.216.20", "selfsigned.bound.test": "93.184.216.22", "expired.bound.test": "93.184.216.23", "wronghost.bound.test": "93.184.216.24",
	"git.bound.test":      "93.184.216.25",
	"priv-a.allowed.test": "10.0.0.1", "meta.allowed.test": "169.254.169.254", "cname.allowed.test": "internal.test", "mapped.allowed.test": "::ffff:169.254.169.254",
	"nat64.allowed.test": "64:ff9b::a9fe:a9fe", "host.allowed.test": internet.Host, "loop.allowed.test": "127.0.0.1", "zero.allowed.test": "0.0.0.0",
}

// rebinding is the public address of the names that change theirs.
const rebinding = "93.184.216.14"

// evil is the address that nothing may reach.
const evil = "93.184.216.66"

// policy is that of the probes, in the JSON that is YAML too: it allows as much as it can, and more than anybody may.
const policy = `{"version": 1, "rules": [
  {"id": "greedy", "to": ["169.254.0.0/16", "100.100.100.200", "168.63.129.16", "192.0.0.0/24", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10",
    "127.0.0.0/8", "0.0.0.0/8", "192.0.2.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"], "ports": ["any"], "proto": "any"},
  {"id": "l7", "to": ["l7.allowed.test"], "http": {"allow": [{"methods": ["GET", "POST"], "paths": ["/v1/**"]}]}},
  {"id": "ro", "to": ["ro.allowed.test"], "http": {"allow": [{"methods": ["GET", "HEAD"]}]}},
  {"id": "names", "to": [%s]}
]}`

// world is the internet of the probes, with what is secret there.
type world struct {
	*internet.Internet
	api, git string // secrets
	repos    string
	token    string // that whoever may be reached by nobody says
}

// newWorld makes it.
func newWorld(t *testing.T, j *judge) *world {
	t.Helper()
	w := &world{Internet: internet.Start(t), api: j.token("secret of api.bound.test"), git: j.token("secret of git.bound.test"), token: j.token("host that nobody may reach"), repos: t.TempDir()}
	for name, to := range allowed {
		w.Names.Set(name, to)
	}
	w.Names.Set("internal.test", "192.168.1.1")
	w.Names.Set("neighbour.test", allowed["allowed.test"])
	for _, name := range []string{"evil.test", "*.evil.test"} {
		w.Names.Set(name, evil)
	}
	for i := range 12 {
		asked := 0 // for A and AAAA each time
		w.Names.Change(fmt.Sprintf("n%d.rebind.test", i), func() []string {
			asked++
			return [][]string{{rebinding}, {"169.254.169.254"}, {rebinding, "10.9.9.9"}, {internet.Host}, {"127.0.0.1"}, {"::1"}}[(i+(asked-1)/2)%6]
		})
	}
	for name, wrong := range map[string]internet.Wrong{"selfsigned.bound.test": internet.SelfSigned, "expired.bound.test": internet.Expired, "wronghost.bound.test": internet.OtherHost} {
		if err := w.Authority.Spoil(name, wrong); err != nil {
			t.Fatal(err)
		}
	}
	for _, repo := range []string{"allowed", "forbidden", "submodule"} {
		dir := filepath.Join(w.repos, "org", repo)
		for _, args := range [][]string{{"init", "-q", "--bare", "-b", "main", dir}, {"--git-dir", dir, "config", "http.receivepack", "true"}} {
			if out, err := exec.Command("git", args...).CombinedOutput(); err != nil {
				t.Fatalf("git %q: %v: %s", args, err, out)
			}
		}
	}
	w.Serve(t, netip.Addr{}, w, 22, 25, 53, 80, 443, 465, 587, 853, 2375, 3128, 5353, 5432, 6379, 8000, 8080, 8443)
	j.env["EVIL_IP"] = evil
	return w
}

// text is the policy as a document.
func (w *world) text() string {
	rest := slices.Sorted(maps.Keys(allowed))
	rest = slices.DeleteFunc(rest, func(n string) bool { return n == "l7.allowed.test" || n == "ro.allowed.test" })
	list, _ := json.Marshal(append(rest, "*.rebind.test")) // strings only
	return fmt.Sprintf(policy, strings.Trim(string(list), "[]"))
}

// ServeHTTP answers every request.
func (w *world) ServeHTTP(out http.ResponseWriter, r *http.Request) {
	authority := r.Context().Value(http.LocalAddrContextKey).(interface{ String() string }).String()
	address := netip.MustParseAddrPort(authority).Addr().Unmap()
	out.Header().Set("X-Internet", "yes")
	known := address.String() == rebinding || slices.Contains(slices.Collect(maps.Values(allowed)), address.String())
	echo := fmt.Sprint(r.Header)
	switch path := r.URL.Path; {
	case address.String() == evil:
		fmt.Fprint(out, "EVIL ", w.token)
	case !known || !address.Is4() || address.IsPrivate() || address.IsLoopback() || address.IsLinkLocalUnicast():
		fmt.Fprint(out, w.token)
	case r.Host == "git.bound.test":
		w.repository(out, r)
	case strings.HasPrefix(path, "/to/"):
		to := map[string]string{
			"metadata": "http://169.254.169.254/latest/meta-data/", "file": "file:///etc/passwd", "evil": "http://evil.test/got", "address": "http://" + evil + "/got",
			"neighbour": "https://allowed.test/echo", "plain": "http://api.bound.test/plain",
		}[path[len("/to/"):]]
		http.Redirect(out, r, to, http.StatusFound)
	case path == "/pieces":
		for _, b := range []byte(echo) {
			_, _ = out.Write([]byte{b})
			_ = http.NewResponseController(out).Flush()
		}
	case path == "/gzip":
		out.Header().Set("Content-Encoding", "gzip")
		z := gzip.NewWriter(out)
		fmt.Fprint(z, echo)
		z.Close()
	case path == "/trailer":
		out.Header().Set("Trailer", "X-Echo")
		fmt.Fprint(out, "trailer")
		out.Header().Set("X-Echo", echo)
	case path == "/error":
		http.Error(out, echo, http.StatusInternalServerError)
	case path == "/status":
		out.Header().Set("X-Echo", r.Header.Get("Authorization"))
		out.Header().Set("Set-Cookie", "a="+strings.ReplaceAll(r.Header.Get("Authorization"), " ", "_"))
		out.Header().Set("Location", "https://allowed.test/?t="+r.Header.Get("Authorization"))
		out.WriteHeader(http.StatusUnauthorized)
	case path == "/v1/slow":
		_, _ = io.Copy(io.Discard, r.Body)
	default:
		body, _ := io.ReadAll(io.LimitReader(r.Body, 1<<20))
		fmt.Fprintf(out, "%s %s %s\n%s\n%s", r.Host, r.RequestURI, r.Method, echo, body)
	}
}

// repository is git over HTTP for whoever knows the secret.
func (w *world) repository(out http.ResponseWriter, r *http.Request) {
	if user, password, _ := r.BasicAuth(); user != "x-access-token" || password != w.git {
		out.Header().Set("WWW-Authenticate", "Basic realm=x")
		http.Error(out, "who?", http.StatusUnauthorized)
		return
	}
	body, _ := io.ReadAll(r.Body) // CGI knows no chunks
	r.Body, r.ContentLength, r.TransferEncoding = io.NopCloser(bytes.NewReader(body)), int64(len(body)), nil
	(&cgi.Handler{Path: "/usr/bin/git", Args: []string{"http-backend"}, Env: []string{"GIT_PROJECT_ROOT=" + w.repos, "GIT_HTTP_EXPORT_ALL=1", "REMOTE_USER=agent"}}).ServeHTTP(out, r)
}

// address is that of an allowed name.
func address(name string) string {
	if strings.HasSuffix(name, ".rebind.test") {
		return rebinding
	}
	return allowed[strings.ToLower(strings.TrimSuffix(name, "."))]
}

// forget leaves out what came before.
func (w *world) forget() {
	w.Packets()
	w.Names.Asked()
	w.Streams()
}

var requestHead = regexp.MustCompile(`(?m)^([^\s]+) ([^\r\n]*) HTTP/1\.[01]\r\n(?:[^\r\n]+\r\n)*?(?i:host): *([^\r\n]*)\r\n`)

// escaped says what came that may not, and which HOST/PATH were asked for.
func (w *world) escaped() (why string, passed []string) {
	time.Sleep(20 * time.Millisecond) // for the last packet to be counted
	public := map[netip.Addr]bool{netip.MustParseAddr(rebinding): true}
	for name, to := range allowed {
		if addr, err := netip.ParseAddr(to); err == nil && strings.HasPrefix(to, "93.") {
			public[addr] = true
		} else if strings.HasPrefix(to, "93.") {
			panic(name)
		}
	}
	for packet, bytes := range w.Packets() {
		if packet.To.String() == internet.Resolver && packet.Port == 53 {
			continue
		}
		if packet.Proto != "tcp" || !public[packet.To] || packet.Port != 80 && packet.Port != 443 {
			return fmt.Sprintf("%d bytes to %s", bytes, packet), nil
		}
	}
	for _, name := range w.Names.Asked() {
		// An alias is followed wherever the owner of an allowed name has it lead.
		if address(name) == "" && name != "internal.test" {
			return "the resolver was asked for " + name, nil
		}
	}
	for _, s := range w.Streams() {
		data := s.Data()
		basic := base64.StdEncoding.EncodeToString([]byte("x-access-token:" + w.git))
		if to := s.To.String(); s.TLS && s.Name == "api.bound.test" && to == allowed["api.bound.test"]+":443" {
			data = bytes.ReplaceAll(data, []byte("\r\nAuthorization: Bearer "+w.api+"\r\n"), nil)
		} else if s.TLS && s.Name == "git.bound.test" && to == allowed["git.bound.test"]+":443" {
			data = bytes.ReplaceAll(data, []byte("\r\nAuthorization: Basic "+basic+"\r\n"), nil)
		}
		for _, secret := range []string{w.api, w.git, basic, base64.StdEncoding.EncodeToString([]byte(w.api))} {
			if bytes.Contains(data, []byte(secret)) {
				return fmt.Sprintf("a secret in what %s got as %q: %q", s.To, s.Name, tail(string(s.Data()), 500)), nil
			}
		}
		for _, head := range requestHead.FindAllSubmatch(s.Data(), -1) {
			method, target, host := string(head[1]), string(head[2]), string(head[3])
			switch {
			case host == "l7.allowed.test" && (!strings.HasPrefix(target, "/v1/") || strings.Contains(strings.ReplaceAll(target, "%252e%252e", ""), "..") || method != "GET" && method != "POST"),
				host == "ro.allowed.test" && method != "GET" && method != "HEAD",
				address(host) != s.To.Addr().String():
				return fmt.Sprintf("%s got a request %q for %q", s.To, method+" "+target, host), nil
			}
			path, _, _ := strings.Cut(target, "?")
			passed = append(passed, host+path)
		}
	}
	return "", passed
}

// recorded reads what records tell that was denied. Records hold no control character, and no
// secret.
func (w *world) recorded(records []byte) (denied []Denial, why string) {
	for _, secret := range []string{w.api, w.git, base64.StdEncoding.EncodeToString([]byte("x-access-token:" + w.git))} {
		if bytes.Contains(records, []byte(secret)) {
			return nil, "a secret is in the records"
		}
	}
	for line := range bytes.Lines(records) {
		if at := bytes.IndexFunc(bytes.TrimSuffix(line, []byte("\n")), func(r rune) bool { return r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 || r == 0x202e }); at >= 0 {
			return nil, fmt.Sprintf("a control character in the record %q", line)
		}
		var record struct {
			Type, Outcome, Reason string
			Data                  struct{ Name, Address string }
		}
		if err := json.Unmarshal(line, &record); err != nil {
			return nil, fmt.Sprintf("a record that is no JSON: %q", line)
		}
		if record.Outcome != "denied" {
			continue
		}
		for _, target := range []string{record.Data.Name, record.Data.Address} {
			denied = append(denied, Denial{target, record.Reason})
		}
	}
	return denied, ""
}

// judgement puts together what was seen outside and what the records say.
func (w *world) judgement(probe Probe, records func() []byte) (Verdict, string) {
	why, passed := w.escaped()
	if why != "" {
		return Escaped, why
	}
	for _, want := range probe.Passed {
		if !slices.Contains(passed, want) {
			return Unknown, fmt.Sprintf("%s was not asked for, but %q", want, slices.Compact(passed))
		}
	}
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		denied, why := w.recorded(records())
		if why != "" {
			return Escaped, why
		}
		missing := slices.DeleteFunc(slices.Clone(probe.Denied), func(d Denial) bool { return slices.Contains(denied, d) })
		if len(missing) == 0 {
			return Safe, ""
		}
		if time.Now().After(deadline) {
			return Unknown, fmt.Sprintf("no record of the denials %v, but of %v", missing, slices.Compact(denied))
		}
	}
}

// holders lists the processes that have a secret in memory and may not: all but this one, and
// those that may.
func (w *world) holders(may func(cmdline string) bool) (why string) {
	entries, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range entries {
		var pid int
		_, _ = fmt.Sscanf(path, "/proc/%d/", &pid)
		cmdline, err := os.ReadFile(path)
		if err != nil || pid == 1 || pid == os.Getpid() || may(string(cmdline)) {
			continue
		}
		if why := holds(pid, w.api, w.git); why != "" {
			return fmt.Sprintf("%s of process %d, %q", why, pid, cmdline)
		}
	}
	return ""
}
