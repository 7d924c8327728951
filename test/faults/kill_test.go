package faults

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
	"github.com/berm-sandbox/berm/test/internet"
)

// How many sandboxes have how many flows each while their services and their server die.
const (
	killedSandboxes = 4
	flowsOfEach     = 250
	flowsInAll      = killedSandboxes * flowsOfEach
)

// forbidden is where no sandbox may come, and all try to.
var forbidden = []string{"93.184.219.66", "169.254.169.254", "10.9.9.9", internet.Host}

// storm is a program that has flows to where it may as long as it lives, makes cut ones anew,
// and tries all the time to reach what it may not.
const storm = `
import asyncio, random, sys
me, mine, web, forbidden = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4].split(",")

async def dial(host, port):
    return await asyncio.wait_for(asyncio.open_connection(host, port), 5)

async def flow():
    while True:
        w = None
        try:
            r, w = await dial(mine, 7)
            while True:
                w.write(b"%s\n" % me.encode())
                if await asyncio.wait_for(r.readline(), 10) == b"": break
                await asyncio.sleep(.5)
        except (OSError, asyncio.TimeoutError): pass
        finally:
            if w: w.close()
        await asyncio.sleep(random.random())

async def denied(host, port):
    while True:
        try:
            r, w = await dial(host, port)
            w.write(b"%s-denied\n" % me.encode())
            await asyncio.wait_for(r.read(100), 1)
            w.close()
        except (OSError, asyncio.TimeoutError): pass
        await asyncio.sleep(.3)

async def ask(path):
    while True:
        try:
            r, w = await dial(web, 80)
            w.write(b"GET %s HTTP/1.1\r\nHost: %s\r\nX-Sandbox: %s\r\nConnection: close\r\n\r\n" % (path.encode(), web.encode(), me.encode()))
            await asyncio.wait_for(r.read(1000), 5)
            w.close()
        except (OSError, asyncio.TimeoutError): pass
        await asyncio.sleep(.2)

async def main():
    tasks = [flow() for _ in range(int(sys.argv[5]))] + [denied(h, p) for h in forbidden for p in (7, 80)]
    await asyncio.gather(*tasks, ask("/allowed"), ask("/denied"), ask("/denied/../allowed"))

asyncio.run(main())
`

// outsider is what the internet of TestKills saw.
type outsider struct {
	mu     sync.Mutex
	open   int
	peak   int
	heard  map[string]map[string]int // address → who spoke there
	asked  map[string]int            // sandbox and path of requests
	opened int
}

// echo answers each line and keeps who sent it.
func (o *outsider) echo(conn net.Conn) {
	defer conn.Close()
	o.mu.Lock()
	o.opened++
	o.open++
	o.peak = max(o.peak, o.open)
	o.mu.Unlock()
	defer func() {
		o.mu.Lock()
		o.open--
		o.mu.Unlock()
	}()
	host, _, _ := net.SplitHostPort(conn.LocalAddr().String())
	at := netip.MustParseAddr(host).Unmap().String()
	for lines := bufio.NewScanner(conn); lines.Scan(); {
		o.mu.Lock()
		if o.heard[at] == nil {
			o.heard[at] = map[string]int{}
		}
		o.heard[at][lines.Text()]++
		o.mu.Unlock()
		if _, err := fmt.Fprintln(conn, "yes"); err != nil {
			return
		}
	}
}

func (o *outsider) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.asked[r.Host+" of "+r.Header.Get("X-Sandbox")+" "+r.RequestURI]++
	fmt.Fprint(w, "hello")
}

// Services and server are killed at random while a thousand flows live: nothing passes that was
// not allowed, each sandbox has its own rights alone, and gets them back by itself.
func TestKills(t *testing.T) {
	harness.Slow(t)
	i, o := watched(t)
	mine := func(n int) string { return fmt.Sprintf("93.184.219.%d", 10+n) }
	web := func(n int) string { return fmt.Sprintf("web%d.test", n) }
	site := func(n int) string { return fmt.Sprintf("93.184.219.%d", 30+n) }
	for n := range killedSandboxes {
		i.Names.Set(web(n), site(n))
	}

	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	s := harness.Serve(t)
	var sandboxes []*harness.Sandbox
	for n := range killedSandboxes {
		sandbox, err := s.Create(ctx, 3*time.Minute, map[string]any{"allow_internet_access": false})
		if err != nil {
			t.Fatal(err)
		}
		document := fmt.Sprintf(`{"version":1,"rules":[{"to":[%q],"ports":[7]},{"to":[%q],"http":{"allow":[{"methods":["GET"],"paths":["/allowed"]}]}}]}`, mine(n), web(n))
		if err := s.Call(ctx, "PUT", "/berm/v1/sandboxes/"+sandbox.ID+"/network", json.RawMessage(document), nil); err != nil {
			t.Fatal(err)
		}
		if err := sandbox.Write(ctx, "user", "/tmp/storm.py", strings.NewReader(storm)); err != nil {
			t.Fatal(err)
		}
		sandboxes = append(sandboxes, sandbox)
		args := fmt.Sprintf("sandbox%d %s %s %s %d", n, mine(n), web(n), strings.Join(append(forbidden, mine((n+1)%killedSandboxes)), ","), flowsOfEach)
		if _, err := sandbox.Run(ctx, harness.Shell("user", "setsid nohup python3 /tmp/storm.py "+args+" >/tmp/storm.log 2>&1 & sleep .1")); err != nil {
			t.Fatal(err)
		}
	}
	// full waits until all flows are there.
	full := func(since time.Time) {
		t.Helper()
		for end := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
			o.mu.Lock()
			open := o.open
			o.mu.Unlock()
			if open >= flowsInAll {
				t.Logf("%d flows after %v", open, time.Since(since).Round(10*time.Millisecond))
				return
			}
			if time.Now().After(end) {
				said, _ := sandboxes[0].Run(ctx, harness.Shell("user", "tail -5 /tmp/storm.log"))
				t.Fatalf("%d flows of %d\n%s\n%s", open, flowsInAll, said.Stdout, s.Log())
			}
		}
	}
	full(time.Now())

	// At random, but each once at least; some while the last one is still being recovered from.
	kill := func(what string) {
		pids := harness.Processes("berm\x00" + what)
		if len(pids) == 1 {
			_ = syscall.Kill(pids[0], syscall.SIGKILL)
		}
	}
	deaths := []func(){
		func() { kill("egressd") }, func() { kill("brokerd") },
		func() { kill("egressd"); kill("brokerd") },
		func() {
			s.Crash()
			time.Sleep(time.Duration(rand.IntN(500)) * time.Millisecond)
			if err := s.Restart(ctx); err != nil {
				t.Fatal(err)
			}
		},
	}
	order := append(rand.Perm(len(deaths)), rand.IntN(len(deaths)), rand.IntN(len(deaths)), rand.IntN(3), rand.IntN(3))
	t.Logf("deaths: %v", order)
	for _, n := range order {
		deaths[n]()
		time.Sleep(time.Duration(rand.IntN(1500)) * time.Millisecond)
	}
	full(time.Now())

	// Requests pass again too.
	o.mu.Lock()
	clear(o.asked)
	o.mu.Unlock()
	for since, end := time.Now(), time.Now().Add(15*time.Second); ; time.Sleep(50 * time.Millisecond) {
		o.mu.Lock()
		sites := len(o.asked)
		o.mu.Unlock()
		if sites == killedSandboxes {
			t.Logf("requests after %v", time.Since(since).Round(10*time.Millisecond))
			break
		}
		if time.Now().After(end) {
			t.Fatalf("requests of %d sandboxes of %d: %v\n%s", sites, killedSandboxes, o.asked, s.Log())
		}
	}
	for _, sandbox := range sandboxes {
		if err := sandbox.Kill(ctx); err != nil {
			t.Error(err)
		}
	}

	o.mu.Lock()
	defer o.mu.Unlock()
	t.Logf("%d flows in all, %d at once", o.opened, o.peak)
	allowed := map[string]bool{}
	for n := range killedSandboxes {
		name := fmt.Sprintf("sandbox%d", n)
		allowed[mine(n)+":7"], allowed[site(n)+":80"] = true, true
		if len(o.heard[mine(n)]) != 1 || o.heard[mine(n)][name] == 0 {
			t.Errorf("%s heard %v", mine(n), o.heard[mine(n)])
		}
		delete(o.asked, web(n)+" of "+name+" /allowed")
	}
	if len(o.heard) != killedSandboxes || len(o.asked) > 0 {
		t.Errorf("also: %v, %v", o.heard, o.asked)
	}
	for packet, n := range i.Packets() {
		to := netip.AddrPortFrom(packet.To, packet.Port).String()
		if packet.Proto != "tcp" && to != internet.Resolver+":53" || packet.Proto == "tcp" && !allowed[to] {
			t.Errorf("%d bytes to %s", n, packet)
		}
	}
}

// watched makes an internet that keeps who speaks where.
func watched(t *testing.T) (*internet.Internet, *outsider) {
	t.Helper()
	i := internet.Start(t)
	o := &outsider{heard: map[string]map[string]int{}, asked: map[string]int{}}
	echo := i.Listen(t, netip.Addr{}, 7)
	go func() {
		for {
			conn, err := echo.Accept()
			if err != nil {
				return
			}
			go o.echo(conn)
		}
	}()
	i.Serve(t, netip.Addr{}, o, 80)
	return i, o
}

// When the services of a run are killed its flows end and nothing comes out of it any more; the
// command goes on without a network.
func TestKillsLocal(t *testing.T) {
	harness.Slow(t)
	i, o := watched(t)
	const mine, site = "93.184.219.10", "93.184.219.30"
	i.Names.Set("web.test", site)
	binary, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	document := fmt.Sprintf(`{"version":1,"rules":[{"to":[%q],"ports":[7]},{"to":["web.test"],"http":{"allow":[{"methods":["GET"],"paths":["/allowed"]}]}}]}`, mine)
	for name, content := range map[string]string{"storm.py": storm, "net.json": document} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	const flows = 200
	for victim, says := range map[string]string{"egressd": "the network service", "brokerd": "the service of credentials"} {
		t.Run(victim, func(t *testing.T) {
			before := harness.Look(nil)
			cmd := exec.Command(binary, "run", "--rw", ".", "--policy", "net.json", "--cred", "web=env:SECRET,host=web.test", "--", "python3", "storm.py",
				"run", mine, "web.test", strings.Join(forbidden, ","), fmt.Sprint(flows))
			cmd.Dir, cmd.Env = dir, append(os.Environ(), "SECRET=s3cr3t-of-the-test-0123456789", "HOME="+t.TempDir())
			told := &bytes.Buffer{}
			cmd.Stderr, cmd.WaitDelay = told, 5*time.Second
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			ended := make(chan error, 1)
			go func() { ended <- cmd.Wait() }()
			end := sync.OnceFunc(func() {
				_ = cmd.Process.Kill()
				<-ended
			})
			defer end()
			o.settle(t, 20*time.Second, func() bool { return o.open >= flows && len(o.asked) > 0 })
			pids := harness.Processes("berm\x00" + victim)
			if len(pids) != 1 {
				t.Fatalf("%s: %v", victim, pids)
			}
			if err := syscall.Kill(pids[0], syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			if victim == "egressd" {
				o.settle(t, 2*time.Second, func() bool { return o.open == 0 })
			}
			time.Sleep(100 * time.Millisecond)
			i.Packets()
			time.Sleep(2 * time.Second)
			o.mu.Lock()
			defer o.mu.Unlock()
			for packet, n := range i.Packets() {
				to := netip.AddrPortFrom(packet.To, packet.Port).String()
				if victim == "egressd" || to != mine+":7" {
					t.Errorf("%d bytes to %s", n, packet)
				}
			}
			delete(o.asked, "web.test of run /allowed")
			if len(o.heard) != 1 || len(o.heard[mine]) != 1 || len(o.asked) > 0 {
				t.Errorf("heard %v, asked %v", o.heard, o.asked)
			}
			select {
			case err := <-ended:
				ended <- err
				t.Errorf("the command ended with the service: %v", err)
			default:
			}
			if end(); !strings.Contains(told.String(), says) {
				t.Errorf("not told: %q", told)
			}
			// The control group of a berm that is killed is left to later runs.
			for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
				left := slices.DeleteFunc(before.Diff(harness.Look(nil)), func(what string) bool { return strings.HasPrefix(what, "+ cgroup ") })
				if len(left) == 0 {
					break
				}
				if time.Now().After(deadline) {
					t.Errorf("left behind: %q", left)
					break
				}
			}
		})
	}
}

// settle waits until something holds, which is asked under the lock.
func (o *outsider) settle(t *testing.T, limit time.Duration, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); ; time.Sleep(10 * time.Millisecond) {
		o.mu.Lock()
		ok := holds()
		o.mu.Unlock()
		if ok {
			return
		}
		if time.Now().After(end) {
			o.mu.Lock()
			defer o.mu.Unlock()
			t.Fatalf("after %v: %d open, asked %v", limit, o.open, o.asked)
		}
	}
}
