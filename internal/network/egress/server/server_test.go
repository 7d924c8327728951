package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/dns"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/link"
	"github.com/berm-sandbox/berm/internal/network/link/linktest"
	"github.com/berm-sandbox/berm/internal/service"
)

func TestMain(m *testing.M) { linktest.Main(m) }

// The internet of these tests: one machine, which is this one, at two addresses.
const (
	one   = "198.51.100.7"
	other = "198.51.100.8"
)

// internet puts the addresses there, with an echo at port 7 by TCP and UDP, a web server at 80,
// and a resolver that knows one.example. It returns the service.
func internet(t *testing.T) *Server {
	t.Helper()
	for _, a := range []string{one, other} {
		out, err := exec.Command("ip", "addr", "replace", a+"/32", "dev", "lo").CombinedOutput()
		if errors.Is(err, exec.ErrNotFound) {
			t.Skip("missing: ip(8)")
		} else if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		listen(t, a+":7", func(c net.Conn) { _, _ = io.Copy(c, c) })
		u, err := net.ListenPacket("udp", a+":7")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { u.Close() })
		go func() {
			for b := make([]byte, 1500); ; {
				n, from, err := u.ReadFrom(b)
				if err != nil {
					return
				}
				_, _ = u.WriteTo(b[:n], from)
			}
		}()
	}
	l, err := net.Listen("tcp", one+":80")
	if err != nil {
		t.Fatal(err)
	}
	web := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.Host) })}
	go func() { _ = web.Serve(l) }()
	t.Cleanup(func() { web.Close() })
	s, err := New(Config{Resolvers: []*dns.Resolver{{At: resolver(t)}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.hosts.Close() })
	return s
}

func listen(t *testing.T, address string, serve func(net.Conn)) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				serve(c)
			}()
		}
	}()
}

// asked are the names that resolvers were asked for.
var asked sync.Map

func resolver(t *testing.T) netip.AddrPort {
	u, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { u.Close() })
	go func() {
		for b := make([]byte, 1500); ; {
			n, from, err := u.ReadFrom(b)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if m.Unpack(b[:n]) != nil {
				continue
			}
			m.Response, m.Additionals = true, nil
			asked.Store(m.Questions[0].Name.String(), true)
			if q := m.Questions[0]; q.Name.String() == "one.example." && q.Type == dnsmessage.TypeA {
				m.Answers = []dnsmessage.Resource{{
					Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class, TTL: 60},
					Body:   &dnsmessage.AResource{A: netip.MustParseAddr(one).As4()},
				}}
			}
			packed, _ := m.Pack()
			_, _ = u.WriteTo(packed, from)
		}
	}()
	return netip.MustParseAddrPort(u.LocalAddr().String())
}

// owner is the owner of a sandbox, and the sandbox.
type owner struct {
	*testing.T
	*linktest.Box
	conn    *net.UnixConn
	wire    *service.Wire
	answers chan egress.Answer
	ended   chan struct{} // closed when the service has ended the connection
	left    chan struct{} // closed when Attend has returned

	mu     sync.Mutex
	events []egress.Event
}

// connect makes an owner that has sent nothing yet.
func connect(t *testing.T, s *Server) *owner {
	t.Helper()
	ours, theirs, err := service.Pair()
	if err != nil {
		t.Fatal(err)
	}
	conns := [2]*net.UnixConn{}
	for i, f := range []*os.File{ours, theirs} {
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		conns[i] = c.(*net.UnixConn)
	}
	o := &owner{
		T: t, Box: linktest.New(t), conn: conns[0], wire: service.NewWire(conns[0]),
		answers: make(chan egress.Answer, 10), ended: make(chan struct{}), left: make(chan struct{}),
	}
	go func() {
		defer close(o.left)
		s.Attend(conns[1])
	}()
	go func() {
		defer close(o.ended)
		for {
			var a egress.Answer
			if o.wire.Receive(&a) != nil {
				return
			}
			if a.Event == nil {
				o.answers <- a
				continue
			}
			o.mu.Lock()
			o.events = append(o.events, *a.Event)
			o.mu.Unlock()
		}
	}()
	t.Cleanup(func() {
		o.conn.Close()
		<-o.left
	})
	return o
}

// attach is connect with a link and a policy.
func attach(t *testing.T, s *Server, policy string) *owner {
	t.Helper()
	o := connect(t, s)
	fd := o.Link(t)
	frames := link.Frames(fd)
	file := os.NewFile(uintptr(fd), "link")
	defer file.Close()
	if a := o.order(egress.Order{Protocol: egress.Protocol, Sandbox: "i0test", Policy: document(policy), Open: []string{one + "/32", other + "/32"}, Frames: frames}, file); !a.Done {
		t.Fatalf("attach: %+v", a.Error)
	}
	return o
}

func document(policy string) egress.Policy {
	return egress.Policy{JSON: json.RawMessage(policy), Source: "p", Revision: "7"}
}

// order sends an order and waits for the answer.
func (o *owner) order(order egress.Order, file *os.File) egress.Answer {
	o.Helper()
	if err := o.wire.Send(order, file); err != nil {
		o.Fatal(err)
	}
	select {
	case a := <-o.answers:
		return a
	case <-time.After(10 * time.Second):
		o.Fatal("no answer")
	}
	return egress.Answer{}
}

// told waits for an event that fits.
func (o *owner) told(what string, fits func(egress.Event) bool) egress.Event {
	o.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		o.mu.Lock()
		for _, e := range o.events {
			if fits(e) {
				o.mu.Unlock()
				return e
			}
		}
		if time.Now().After(end) {
			o.Fatalf("%s is not told: %+v", what, o.events)
		}
		o.mu.Unlock()
	}
}

// echo sends something over a connection and has it come back.
func (o *owner) echo(c net.Conn) error {
	if _, err := c.Write([]byte("hello")); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 5))
	return err
}

const echoRule = `{"version":1,"rules":[{"id":"echo","to":["` + one + `"],"ports":[7]},{"id":"udp","to":["` + one + `"],"ports":[7],"proto":"udp"}]}`

func TestFlowsAreJudgedAndTold(t *testing.T) {
	o := attach(t, internet(t), echoRule)
	for _, network := range []string{"tcp", "udp"} {
		c := o.MustConnect(t, network, one+":7")
		if err := o.echo(c); err != nil {
			t.Fatalf("%s: %v", network, err)
		}
		c.Close()
	}
	e := o.told("the flow", func(e egress.Event) bool { return e.Protocol == "tcp" && e.Action == "allow" })
	if e.Kind != "flow" || e.Address != one || e.Port != 7 || e.Rule != "echo" || e.Revision != "7" || e.Up != 5 || e.Down != 5 {
		t.Errorf("%+v", e)
	}
	for _, to := range []string{other + ":7", one + ":8", "169.254.169.254:80", "127.0.0.1:7"} {
		if c, err := o.Connect("tcp", to); err == nil && o.echo(c) == nil {
			t.Errorf("%s is reached", to)
		}
	}
	if e := o.told("the denial", func(e egress.Event) bool { return e.Action == "deny" && e.Address == other }); e.Reason != "not_listed" || e.Detail == "" {
		t.Errorf("%+v", e)
	}
	o.told("the denial of metadata", func(e egress.Event) bool { return e.Address == "169.254.169.254" && e.Reason == "metadata" })
}

// What cannot be connected outside is refused inside, and told apart from denials.
func TestUnreached(t *testing.T) {
	o := attach(t, internet(t), `{"version":1,"rules":[{"id":"closed","to":["`+one+`"],"ports":[9]}]}`)
	if _, err := o.Connect("tcp", one+":9"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("%v", err)
	}
	if e := o.told("it", func(e egress.Event) bool { return e.Unreached }); e.Action != "allow" || e.Detail == "" {
		t.Errorf("%+v", e)
	}
}

// A name gets an address that stands for it; what is said to it must be about it.
func TestNames(t *testing.T) {
	o := attach(t, internet(t), `{"version":1,"rules":[{"id":"web","to":["one.example","gone.example","*.wild.example"]}]}`)
	resolve := func(name string) (dnsmessage.RCode, netip.Addr) {
		n := dnsmessage.MustNewName(name + ".")
		query, _ := (&dnsmessage.Message{Header: dnsmessage.Header{ID: 1}, Questions: []dnsmessage.Question{{Name: n, Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET}}}).Pack()
		c := o.MustConnect(t, "udp", "10.0.2.2:53")
		_, _ = c.Write(query)
		b := make([]byte, 512)
		length, err := c.Read(b)
		var m dnsmessage.Message
		if err != nil || m.Unpack(b[:length]) != nil {
			t.Fatal(err)
		}
		for _, a := range m.Answers {
			if r, ok := a.Body.(*dnsmessage.AResource); ok {
				return m.RCode, netip.AddrFrom4(r.A)
			}
		}
		return m.RCode, netip.Addr{}
	}
	code, addr := resolve("one.example")
	if code != dnsmessage.RCodeSuccess || !netip.MustParsePrefix("198.18.0.0/15").Contains(addr) {
		t.Fatalf("%v %v", code, addr)
	}
	if code, _ := resolve("two.example"); code != dnsmessage.RCodeNameError {
		t.Errorf("a name that is not allowed: %v", code)
	}
	// What a rule names exactly is asked for, no name that the sandbox can choose.
	if code, _ := resolve("gone.example"); code != dnsmessage.RCodeNameError {
		t.Errorf("a name that is allowed and does not exist: %v", code)
	}
	if code, _ := resolve("secret.wild.example"); code != dnsmessage.RCodeSuccess {
		t.Errorf("a name below a wildcard: %v", code)
	}
	for _, name := range []string{"two.example.", "secret.wild.example."} {
		if _, ok := asked.Load(name); ok {
			t.Errorf("%s was asked for", name)
		}
	}
	o.told("the name", func(e egress.Event) bool { return e.Kind == "dns" && e.Name == "two.example" && e.Action == "deny" })
	ask := func(host string) string {
		c := o.MustConnect(t, "tcp", addr.String()+":80")
		fmt.Fprintf(c, "GET / HTTP/1.0\r\nHost: %s\r\n\r\n", host)
		answer, _ := io.ReadAll(c)
		return string(answer)
	}
	if got := ask("one.example"); !strings.HasPrefix(got, "HTTP/1.0 200") && !strings.HasPrefix(got, "HTTP/1.1 200") {
		t.Errorf("%q", got)
	}
	if got := ask("two.example"); strings.Contains(got, " 200 ") {
		t.Errorf("for another name: %q", got)
	}
	if e := o.told("the flow", func(e egress.Event) bool { return e.Kind == "flow" && e.Name == "one.example" && e.Action == "allow" }); e.Address != one {
		t.Errorf("%+v", e)
	}
}

// cut waits for the end of a flow, which begins with an echo, and returns how long it took.
func (o *owner) cut(c net.Conn, since time.Time) time.Duration {
	o.Helper()
	if err := c.SetReadDeadline(time.Now().Add(30 * time.Second)); err != nil {
		o.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		o.Fatalf("the flow ends by %v", err)
	}
	return time.Since(since)
}

func TestChangeOfPolicy(t *testing.T) {
	o := attach(t, internet(t), echoRule)
	c := o.MustConnect(t, "tcp", one+":7")
	if err := o.echo(c); err != nil {
		t.Fatal(err)
	}
	// One that is wrong changes nothing.
	if a := o.order(egress.Order{Policy: document(`{"version":1,"rules":[{"to":[]}]}`)}, nil); a.Error == nil || a.Error.Kind != berm.Invalid {
		t.Errorf("%+v", a)
	}
	if err := o.echo(c); err != nil {
		t.Fatalf("after a wrong policy: %v", err)
	}
	since := time.Now()
	if a := o.order(egress.Order{Policy: document(`{"version":1}`)}, nil); !a.Done {
		t.Fatalf("%+v", a.Error)
	}
	o.cut(c, since)
	o.told("the end", func(e egress.Event) bool { return e.Action == "deny" && e.Address == one && e.Up > 0 })
	if _, err := o.Connect("tcp", one+":7"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("a new flow: %v", err)
	}
}

// A rule that ends cuts its flows, when nothing else happens.
func TestExpiry(t *testing.T) {
	end := time.Now().Add(1500 * time.Millisecond)
	o := attach(t, internet(t), fmt.Sprintf(`{"version":1,"rules":[
		{"id":"short","to":[%q],"ports":[7],"expires_at":%q},
		{"id":"long","to":[%q],"ports":[7],"expires_at":%q}]}`, one, end.UTC().Format(time.RFC3339Nano), other, end.Add(time.Hour).UTC().Format(time.RFC3339Nano)))
	short, long := o.MustConnect(t, "tcp", one+":7"), o.MustConnect(t, "tcp", other+":7")
	for _, c := range []net.Conn{short, long} {
		if err := o.echo(c); err != nil {
			t.Fatal(err)
		}
	}
	if late := o.cut(short, end); late < 0 {
		t.Errorf("cut %s after the end", late)
	}
	if err := o.echo(long); err != nil {
		t.Errorf("the other rule's flow: %v", err)
	}
}

// A rule for one flow is used up by one, also when the same policy comes again, and not by one of
// the policy before.
func TestOnce(t *testing.T) {
	const rules = `{"version":1,"rules":[{"id":"once","to":["` + one + `"],"ports":[7],"once":true}]}`
	o := attach(t, internet(t), rules)
	c := o.MustConnect(t, "tcp", one+":7")
	if err := o.echo(c); err != nil {
		t.Fatal(err)
	}
	if _, err := o.Connect("tcp", one+":7"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("the second: %v", err)
	}
	if err := o.echo(c); err != nil {
		t.Errorf("the first afterwards: %v", err)
	}
	again := document(rules)
	again.Attach = []egress.Attachment{} // as credentials are given
	if a := o.order(egress.Order{Policy: again}, nil); !a.Done {
		t.Fatalf("the same again: %+v", a.Error)
	}
	if _, err := o.Connect("tcp", one+":7"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("after the same policy: %v", err)
	}
	if err := o.echo(c); err != nil {
		t.Errorf("the first after the same policy: %v", err)
	}
	again.Revision = "8"
	if a := o.order(egress.Order{Policy: again}, nil); !a.Done {
		t.Fatalf("a new one: %+v", a.Error)
	}
	if err := o.echo(o.MustConnect(t, "tcp", one+":7")); err != nil {
		t.Errorf("by a new policy: %v", err)
	}
}

// The end of the connection is the end of the link, and the other way round; what happened is
// told before.
func TestEnds(t *testing.T) {
	s := internet(t)
	o := attach(t, s, echoRule)
	c := o.MustConnect(t, "tcp", one+":7")
	if err := o.echo(c); err != nil {
		t.Fatal(err)
	}
	s.Pass()
	_ = o.conn.CloseWrite()
	<-o.left
	<-o.ended
	o.told("the flow", func(e egress.Event) bool { return e.Up == 5 })
	o.cut(c, time.Now())
	s.mu.Lock()
	if len(s.sandboxes) != 0 {
		t.Error("the sandbox is not forgotten")
	}
	s.mu.Unlock()

	o = connect(t, s)
	var pair [2]int
	pair, _ = unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	file := os.NewFile(uintptr(pair[0]), "link")
	a := o.order(egress.Order{Protocol: egress.Protocol, Policy: document(echoRule)}, file)
	file.Close()
	if !a.Done {
		t.Fatalf("%+v", a)
	}
	unix.Close(pair[1])
	select {
	case <-o.left:
	case <-time.After(10 * time.Second):
		t.Error("a link that is gone does not end the connection")
	}
}

// Who asks whether the service works gets no answer while a sandbox of it is stuck.
func TestPass(t *testing.T) {
	s := internet(t)
	attach(t, s, echoRule)
	var x *sandbox
	for x == nil { // it may be answered a moment before it is counted
		s.Pass()
		s.mu.Lock()
		for x = range s.sandboxes {
		}
		s.mu.Unlock()
	}
	x.mu.Lock()
	passed := make(chan struct{})
	go func() {
		defer close(passed)
		s.Pass()
	}()
	select {
	case <-passed:
		t.Error("it does not see that a lock is held")
	case <-time.After(100 * time.Millisecond):
	}
	x.mu.Unlock()
	<-passed
}

func TestRefusals(t *testing.T) {
	s := internet(t)
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for name, test := range map[string]struct {
		order egress.Order
		file  *os.File
		kind  berm.Kind
	}{
		"protocol": {egress.Order{Protocol: egress.Protocol + 1, Policy: document(echoRule)}, null, berm.Unsupported},
		"no link":  {egress.Order{Protocol: egress.Protocol, Policy: document(echoRule)}, nil, berm.Invalid},
		"range":    {egress.Order{Protocol: egress.Protocol, Policy: document(echoRule), Open: []string{"here"}}, null, berm.Invalid},
		"policy":   {egress.Order{Protocol: egress.Protocol, Policy: document(`{}`)}, null, berm.Invalid},
	} {
		t.Run(name, func(t *testing.T) {
			o := connect(t, s)
			if a := o.order(test.order, test.file); a.Error == nil || a.Error.Kind != test.kind {
				t.Errorf("%+v", a.Error)
			}
			<-o.left
		})
	}
}
