// Package network tests what sandboxes reach: a server whose host has nothing outside but
// an internet that the test makes and watches.
package network

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/test/harness"
)

func TestMain(m *testing.M) {
	if os.Getenv(inside) != "" {
		internet()
	}
	harness.Main(m)
}

// start makes an internet, and a server beside it.
func start(t *testing.T, args ...string) (context.Context, *harness.Server) {
	t.Helper()
	harness.Slow(t)
	startInternet(t)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx, harness.Serve(t, append([]string{"--resolver", resolver + ":53"}, args...)...)
}

type object = map[string]any

func create(t *testing.T, ctx context.Context, s *harness.Server, options object) *harness.Sandbox {
	t.Helper()
	sandbox, err := s.Create(ctx, 2*time.Minute, options)
	if err != nil {
		t.Fatalf("create: %v\n%s", err, s.Log())
	}
	return sandbox
}

func network(allow, deny []string) object {
	n := object{}
	if allow != nil {
		n["allowOut"] = allow
	}
	if deny != nil {
		n["denyOut"] = deny
	}
	return n
}

var all = []string{"0.0.0.0/0"}

func run(t *testing.T, ctx context.Context, sandbox *harness.Sandbox, text string) harness.Result {
	t.Helper()
	result, err := sandbox.Run(ctx, harness.Shell("user", text))
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return result
}

// reaches says which of the URLs a sandbox gets.
func reaches(t *testing.T, ctx context.Context, sandbox *harness.Sandbox, urls ...string) []bool {
	t.Helper()
	var script strings.Builder
	for _, url := range urls {
		fmt.Fprintf(&script, "curl -fsk -m 5 -o /dev/null '%s'; echo $?\n", url)
	}
	var got []bool
	for _, code := range strings.Fields(run(t, ctx, sandbox, script.String()).Stdout) {
		got = append(got, code == "0")
	}
	if len(got) != len(urls) {
		t.Fatalf("%d answers for %d URLs", len(got), len(urls))
	}
	return got
}

// expect checks what a sandbox reaches, and what came out at the internet.
func expect(t *testing.T, ctx context.Context, sandbox *harness.Sandbox, want map[string]bool) {
	t.Helper()
	var urls []string
	for url := range want {
		urls = append(urls, url)
	}
	for i, got := range reaches(t, ctx, sandbox, urls...) {
		if got != want[urls[i]] {
			t.Errorf("%s: reached %v, want %v", urls[i], got, want[urls[i]])
		}
	}
}

// never fails the test when somebody came to an address that no sandbox may reach.
func never(t *testing.T, seen ...string) {
	t.Helper()
	w := look(t)
	for _, a := range append([]string{private, metadata, shared}, seen...) {
		if w.Seen[a] > 0 {
			t.Errorf("%d connections to %s", w.Seen[a], a)
		}
	}
}

func TestDefaults(t *testing.T) {
	ctx, s := start(t, "--open", "203.0.113.0/24")
	port := s.URL[strings.LastIndexByte(s.URL, ':')+1:]
	sandbox := create(t, ctx, s, nil)
	expect(t, ctx, sandbox, map[string]bool{
		"https://1.1.1.1/": true, "https://www.example.com/": true, "http://www.example.com/": true, "http://files.example.com:8080/": true,
		"http://" + documentation + "/": false, "http://docs.example.net/": false, // open to policies that name it
		"http://" + private + "/": false, "http://" + metadata + "/": false, "http://" + shared + "/": false,
		"http://rebind.example.net/": false, "http://metadata.example.net/": false,
		"http://" + ours + ":" + port + "/health": false, "http://127.0.0.1:" + port + "/health": false, "http://10.0.2.2:" + port + "/health": false,
		"http://" + gateway + ":8000/": false, "http://[::ffff:10.9.9.9]/": false, "http://0x0a090909/": false,
	})
	// A server that speaks first is not waited for in vain.
	if out := run(t, ctx, sandbox, `timeout 5 bash -c 'read -r line </dev/tcp/www.example.com/22; echo "$line"'`); !strings.Contains(out.Stdout, "SSH-2.0-test") {
		t.Errorf("ssh: %+v", out)
	}
	// Nothing but TCP.
	if out := run(t, ctx, sandbox, udp); !strings.Contains(out.Stdout, "nothing") {
		t.Errorf("UDP: %+v", out)
	}
	never(t, documentation)

	opened := create(t, ctx, s, object{"network": network([]string{"203.0.113.0/24"}, all)})
	expect(t, ctx, opened, map[string]bool{"http://" + documentation + "/": true, "https://1.1.1.1/": false})

	offline := create(t, ctx, s, object{"allow_internet_access": false})
	expect(t, ctx, offline, map[string]bool{"https://1.1.1.1/": false, "https://www.example.com/": false})
}

const udp = `python3 -c '
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(1.5)
try:
    s.sendto(b"x", ("1.1.1.1", 7))
    print("got", s.recv(9))
except OSError:
    print("nothing")'`

func TestRulesOfACreate(t *testing.T) {
	ctx, s := start(t)
	for _, c := range []struct {
		name        string
		allow, deny []string
		want        map[string]bool
		asked       string // that may not be resolved outside
	}{
		{"a name", []string{"www.example.com"}, all, map[string]bool{
			"https://www.example.com/": true, "http://www.example.com/": true, "https://files.example.com/": false, "https://1.1.1.1/": false,
			"https://" + site + "/": false, "http://www.example.com:8080/": false,
		}, "files.example.com"},
		{"a wildcard", []string{"*.example.com"}, all, map[string]bool{
			"https://www.example.com/": true, "https://files.example.com/": true, "https://other.example.org/": false, "http://rebind.example.com/": false,
		}, "other.example.org"},
		{"an address", []string{one}, all, map[string]bool{
			"https://1.1.1.1/": true, "http://1.1.1.1:8080/": true, "https://8.8.8.8/": false, "https://www.example.com/": false,
		}, ""},
		{"all but one", nil, []string{eight}, map[string]bool{
			"https://1.1.1.1/": true, "https://8.8.8.8/": false, "https://files.example.com/": false, "https://www.example.com/": true,
		}, ""},
		{"allowed before denied", []string{eight}, []string{"8.8.0.0/16"}, map[string]bool{"https://8.8.8.8/": true}, ""},
		{"what nobody can open", []string{"10.0.0.0/8", metadata, "0.0.0.0/0", "100.64.0.0/10"}, nil, map[string]bool{
			"http://" + private + "/": false, "http://" + metadata + "/": false, "http://" + shared + "/": false, "http://" + ours + ":22/": false,
		}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := look(t)
			sandbox := create(t, ctx, s, object{"network": network(c.allow, c.deny)})
			expect(t, ctx, sandbox, c.want)
			if c.asked != "" && look(t).Asked[c.asked] != before.Asked[c.asked] {
				t.Errorf("%s was asked of the resolver", c.asked)
			}
			never(t)
		})
	}
	// A name in the hello that is not the one that was resolved.
	sandbox := create(t, ctx, s, object{"network": network([]string{"www.example.com"}, all)})
	if out := run(t, ctx, sandbox, "a=$(getent hosts www.example.com | cut -d' ' -f1); curl -sk -m 5 --resolve files.example.com:443:$a https://files.example.com/; echo $?"); strings.HasPrefix(out.Stdout, "hello") {
		t.Errorf("another name at its address: %+v", out)
	}
	var status *harness.StatusError
	_, err := s.Create(ctx, time.Minute, object{"network": network([]string{"www.example.com"}, nil)})
	if !errors.As(err, &status) || status.Status != 400 || !strings.Contains(status.Body, "ALL_TRAFFIC") {
		t.Errorf("a name without denyOut: %v", err)
	}
}

// live is a flow that goes on until it is cut, and how it ended.
type live struct{ done chan harness.Result }

// flow opens a connection and returns once bytes went both ways.
func flow(t *testing.T, ctx context.Context, sandbox *harness.Sandbox, to string) *live {
	t.Helper()
	l := &live{make(chan harness.Result, 1)}
	begun := make(chan struct{})
	go func() {
		command := harness.Shell("user", fmt.Sprintf(`exec python3 -uc '
import socket, time
s = socket.create_connection(("%s", 7), 5)
s.settimeout(30)
n = 0
while True:
    try:
        s.sendall(b"x" * 100)
        got = s.recv(100)
    except OSError as e:
        print("cut", type(e).__name__)
        break
    if not got:
        print("cut", "end")
        break
    if n == 0: print("begun")
    n += 1
    time.sleep(.02)'`, to))
		command.First = func() { close(begun) }
		result, err := sandbox.Run(ctx, command)
		if err != nil {
			result.Stderr += err.Error()
		}
		l.done <- result
	}()
	select {
	case <-begun:
	case r := <-l.done:
		t.Fatalf("no flow to %s: %+v", to, r)
	case <-ctx.Done():
		t.Fatal(ctx.Err())
	}
	return l
}

// cut waits for the end of the flow.
func (l *live) cut(t *testing.T, since time.Time, limit time.Duration) {
	t.Helper()
	select {
	case r := <-l.done:
		if took := time.Since(since); took > limit {
			t.Errorf("the flow was cut after %s: %+v", took, r)
		} else {
			t.Logf("cut within %s: %s", took.Round(time.Millisecond), r.Stdout)
		}
	case <-time.After(limit + 5*time.Second):
		t.Error("the flow goes on")
	}
}

func (l *live) goesOn(t *testing.T) {
	t.Helper()
	select {
	case r := <-l.done:
		t.Errorf("a flow that is allowed was cut: %+v", r)
	case <-time.After(200 * time.Millisecond):
	}
}

func TestChanges(t *testing.T) {
	ctx, s := start(t)
	sandbox := create(t, ctx, s, nil)
	put := func(n object) {
		t.Helper()
		if err := s.Call(ctx, "PUT", "/sandboxes/"+sandbox.ID+"/network", n, nil); err != nil {
			t.Fatal(err)
		}
	}
	kept, ended, named := flow(t, ctx, sandbox, one), flow(t, ctx, sandbox, eight), flow(t, ctx, sandbox, "files.example.com")
	since := time.Now()
	put(network(nil, []string{eight}))
	ended.cut(t, since, 10*time.Second)
	named.cut(t, since, 10*time.Second) // its name is an address that is denied now
	kept.goesOn(t)
	since = time.Now()
	put(network(nil, all))
	kept.cut(t, since, 10*time.Second)
	expect(t, ctx, sandbox, map[string]bool{"https://1.1.1.1/": false})
	put(object{})
	expect(t, ctx, sandbox, map[string]bool{"https://1.1.1.1/": true, "https://8.8.8.8/": true})

	// What is refused changes nothing.
	var status *harness.StatusError
	for body, want := range map[string]int{
		`{"denyOut":["www.example.com"]}`: 400, `{"allowOut":["www.example.com"]}`: 400, `{"rules":{"www.example.com":[{"transform":{"headers":{"A\\n":"b"}}}]}}`: 400,
		`{"egressProxy":{"address":"192.0.2.1:1080"}}`: 400, `{"egressProxy":{"address":"rebind.example.net:1080"}}`: 400, `{"egressProxy":{"address":"none.example.net:1080"}}`: 400,
		`{"egressProxy":{"address":"127.0.0.1:1080"}}`: 400, `{"egressProxy":{"address":"[::ffff:169.254.169.254]:80"}}`: 400,
	} {
		err := s.Call(ctx, "PUT", "/sandboxes/"+sandbox.ID+"/network", rawJSON(body), nil)
		if !errors.As(err, &status) || status.Status != want {
			t.Errorf("%s: %v, want %d", body, err, want)
		}
	}
	expect(t, ctx, sandbox, map[string]bool{"https://1.1.1.1/": true})

	// Rules outlive a pause.
	put(network([]string{one}, all))
	if err := s.Call(ctx, "POST", "/sandboxes/"+sandbox.ID+"/pause", object{}, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Call(ctx, "POST", "/v2/sandboxes/"+sandbox.ID+"/connect", object{"timeout": 60}, nil); err != nil {
		t.Fatal(err)
	}
	expect(t, ctx, sandbox, map[string]bool{"https://1.1.1.1/": true, "https://8.8.8.8/": false})

	// A whole policy, and its log.
	var answer struct{ Revision int }
	policy := `{"version":1,"rules":[{"id":"echo","to":["1.1.1.1"],"ports":[7],"proto":"any"}]}`
	if err := s.Call(ctx, "PUT", "/berm/v1/sandboxes/"+sandbox.ID+"/network", rawJSON(policy), &answer); err != nil || answer.Revision < 5 {
		t.Fatalf("revision %d, %v", answer.Revision, err)
	}
	expect(t, ctx, sandbox, map[string]bool{"https://1.1.1.1/": false})
	if out := run(t, ctx, sandbox, udp); !strings.Contains(out.Stdout, "got") {
		t.Errorf("UDP: %+v", out)
	}
	var log struct {
		Events []struct{ Action, Reason, Address, Revision string }
	}
	found := false
	for end := time.Now().Add(30 * time.Second); !found && time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if err := s.Call(ctx, "GET", "/berm/v1/sandboxes/"+sandbox.ID+"/network/log", nil, &log); err != nil {
			t.Fatal(err)
		}
		for _, e := range log.Events {
			found = found || e.Action == "deny" && e.Reason == "port" && e.Address == one && e.Revision == strconv.Itoa(answer.Revision)
		}
	}
	if !found {
		t.Errorf("the denial of a port is not in %+v", log)
	}

	// The end of a rule is the end of its flows.
	policy = fmt.Sprintf(`{"version":1,"rules":[{"to":["1.1.1.1"],"ports":[7],"expires_at":%q}]}`, time.Now().Add(2*time.Second).UTC().Format(time.RFC3339Nano))
	since = time.Now()
	if err := s.Call(ctx, "PUT", "/berm/v1/sandboxes/"+sandbox.ID+"/network", rawJSON(policy), nil); err != nil {
		t.Fatal(err)
	}
	flow(t, ctx, sandbox, one).cut(t, since, 20*time.Second)

	// The end of a sandbox is the end of its flows.
	put(object{})
	flow(t, ctx, sandbox, one)
	if err := sandbox.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	closed(t, 20*time.Second, one)
}

// closed waits until no connection to an address is open.
func closed(t *testing.T, limit time.Duration, address string) {
	t.Helper()
	for end := time.Now().Add(limit); ; time.Sleep(20 * time.Millisecond) {
		open := look(t).Open[address]
		if open == 0 {
			return
		}
		if time.Now().After(end) {
			t.Errorf("%d connections to %s are open after %s", open, address, limit)
			return
		}
	}
}

type rawJSON string

func (r rawJSON) MarshalJSON() ([]byte, error) { return []byte(r), nil }

// service is the network service's process.
func service(t *testing.T) int {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if pids := harness.Processes("berm\x00egressd"); len(pids) == 1 {
			return pids[0]
		}
	}
	t.Fatal("there is not one network service")
	return 0
}

// Whatever dies, nothing passes that was not allowed, and what is allowed passes again.
func TestDeaths(t *testing.T) {
	ctx, s := start(t)
	sandbox := create(t, ctx, s, object{"network": network([]string{one, "www.example.com"}, all)})
	other := create(t, ctx, s, object{"network": network([]string{eight}, all)})
	recovered := func(since time.Time) {
		t.Helper()
		for end := time.Now().Add(10 * time.Second); ; {
			if a, b := reaches(t, ctx, sandbox, "https://www.example.com/", "https://1.1.1.1/"), reaches(t, ctx, other, "https://8.8.8.8/"); a[0] && a[1] && b[0] {
				t.Logf("recovered after %s", time.Since(since).Round(time.Millisecond))
				return
			}
			if time.Now().After(end) {
				t.Fatalf("no network any more\n%s", s.Log())
			}
		}
	}
	// Both try all the time to reach what they may not, and what they may.
	const storm = `timeout %d python3 -c '
import socket, threading
def go(to):
    while True:
        try:
            s = socket.create_connection((to, 80), 2)
            s.sendall(b"GET / HTTP/1.0\r\nHost: x\r\n\r\n")
            s.recv(100)
            s.close()
        except OSError: pass
for a in ["%s"] * 10 + ["%s"] * 10 + ["10.9.9.9", "169.254.169.254", "100.64.9.9"]:
    threading.Thread(target=go, args=(a,)).start()'`
	before := look(t)
	done := make(chan error, 2)
	for sb, allowed := range map[*harness.Sandbox]string{sandbox: one, other: eight} {
		go func() {
			_, err := sb.Run(ctx, harness.Shell("user", fmt.Sprintf(storm, 6, allowed, documentation)))
			done <- err
		}()
	}
	for range 4 {
		time.Sleep(time.Duration(200+rand.IntN(600)) * time.Millisecond)
		if err := syscall.Kill(service(t), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	since := time.Now()
	recovered(since)

	// The server dies, and its service with it; the next one gives the same back.
	time.Sleep(300 * time.Millisecond)
	pid := service(t)
	s.Crash()
	for end := time.Now().Add(30 * time.Second); syscall.Kill(pid, 0) == nil; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Error("the service outlives its server")
			break
		}
	}
	if err := s.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	recovered(time.Now())
	for range 2 {
		<-done // cut by the server's death
	}
	after := look(t)
	if after.Seen[one] == before.Seen[one] || after.Seen[eight] == before.Seen[eight] {
		t.Error("the storm reached nothing")
	}
	never(t, documentation)
	expect(t, ctx, sandbox, map[string]bool{"https://8.8.8.8/": false, "http://" + site + "/": false})
	expect(t, ctx, other, map[string]bool{"https://1.1.1.1/": false})

	// The service's death cuts flows; a program sees it.
	l := flow(t, ctx, sandbox, one)
	since = time.Now()
	if err := syscall.Kill(service(t), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	l.cut(t, since, 20*time.Second)
}

// A service that hangs is ended, and what it did begins anew.
func TestHang(t *testing.T) {
	ctx, s := start(t)
	sandbox := create(t, ctx, s, object{"network": network([]string{one}, all)})
	l := flow(t, ctx, sandbox, one)
	pid, since := service(t), time.Now()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	l.cut(t, since, 30*time.Second)
	t.Logf("cut after %s", time.Since(since).Round(time.Millisecond))
	if again := service(t); again == pid {
		t.Fatal("it still hangs")
	}
	expect(t, ctx, sandbox, map[string]bool{"https://1.1.1.1/": true, "https://8.8.8.8/": false})
	if !strings.Contains(s.Log(), "did not answer") {
		t.Errorf("the server does not tell it\n%s", s.Log())
	}
}

// Sandboxes leave nothing behind in the service, and cost it little while they idle.
func TestServiceKeepsNothing(t *testing.T) {
	ctx, s := start(t)
	pid := service(t)
	cycle := func(n int) (took time.Duration) {
		var made []*harness.Sandbox
		rss, fds := harness.RSS(pid), harness.Descriptors(pid)
		for range n {
			sandbox := create(t, ctx, s, nil)
			made = append(made, sandbox)
			for _, step := range sandbox.Steps {
				if step.Name == "network" {
					took += step.Took
				}
			}
		}
		t.Logf("%d KiB and %.1f descriptors each", (harness.RSS(pid)-rss)>>10/int64(n), float64(harness.Descriptors(pid)-fds)/float64(n))
		for _, sandbox := range made {
			expect(t, ctx, sandbox, map[string]bool{"https://1.1.1.1/": true})
			if err := sandbox.Kill(ctx); err != nil {
				t.Fatal(err)
			}
		}
		return took / time.Duration(n)
	}
	cycle(3)
	before := harness.Descriptors(pid)
	t.Logf("attaching took %s", cycle(10))
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		after := harness.Descriptors(pid)
		if after <= before {
			return
		}
		if time.Now().After(end) {
			t.Errorf("%d descriptors before, %d after", before, after)
			return
		}
	}
}

// On a host without TUN devices sandboxes have the same network.
func TestHostWithoutTUN(t *testing.T) {
	harness.Slow(t)
	// Of the tests' own mount namespace.
	if err := unix.Mount("tmpfs", "/dev/net", "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount("/dev/net", unix.MNT_DETACH) })
	t.Run("link", func(t *testing.T) {
		ctx, s := start(t)
		sandbox := create(t, ctx, s, nil)
		if out := run(t, ctx, sandbox, "grep -c gateway: /proc/net/dev"); out.Stdout != "1\n" {
			t.Errorf("the devices are not a pair: %+v", out)
		}
	})
	t.Run("defaults", TestDefaults)
	t.Run("rules", TestRulesOfACreate)
	t.Run("changes", TestChanges)
	t.Run("deaths", TestDeaths)
}

// The metrics tell of each sandbox's traffic.
func TestMetrics(t *testing.T) {
	ctx, s := start(t, "--e2b-default-egress", "deny")
	sandbox := create(t, ctx, s, object{"network": network([]string{one}, nil)})
	expect(t, ctx, sandbox, map[string]bool{"https://1.1.1.1/": true, "https://8.8.8.8/": false})
	want := []string{
		fmt.Sprintf(`berm_sandbox_network_flows_total{action="allow",sandbox="%s"} 1`, sandbox.ID),
		fmt.Sprintf(`berm_sandbox_network_flows_total{action="deny",sandbox="%s"} 1`, sandbox.ID),
		fmt.Sprintf(`berm_sandbox_network_bytes_total{direction="down",sandbox="%s"} `, sandbox.ID),
	}
	var text string
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		text = scrape(t, ctx, s)
		missing := false
		for _, line := range want {
			missing = missing || !strings.Contains(text, line)
		}
		if !missing {
			return
		}
	}
	t.Errorf("not all of %q in\n%s", want, text)
}

func scrape(t *testing.T, ctx context.Context, s *harness.Server) string {
	t.Helper()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("X-API-Key", s.Key)
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(body)
}
