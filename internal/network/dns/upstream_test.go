package dns

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/berm-sandbox/berm"
)

// zone is a resolver on the loopback: what it says to a question by datagram and by TCP.
type zone func(q dnsmessage.Question, tcp bool, m *dnsmessage.Message)

func resolver(t *testing.T, z zone) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := netip.MustParseAddrPort(l.Addr().String())
	u, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close(); u.Close() })
	answer := func(b []byte, tcp bool) []byte {
		var m dnsmessage.Message
		if err := m.Unpack(b); err != nil {
			t.Error(err)
			return nil
		}
		m.Response, m.Additionals = true, nil
		z(m.Questions[0], tcp, &m)
		packed, err := m.Pack()
		if err != nil {
			t.Error(err)
		}
		return packed
	}
	go func() {
		for b := make([]byte, 1500); ; {
			n, from, err := u.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			reply := answer(slices.Clone(b[:n]), false)
			// Forgeries come first: a wrong id, and another question.
			forged := slices.Clone(reply)
			forged[0]++
			_, _ = u.WriteToUDPAddrPort(forged, from)
			forged = slices.Clone(reply)
			forged[13] ^= 1
			_, _ = u.WriteToUDPAddrPort(forged, from)
			_, _ = u.WriteToUDPAddrPort(reply, from)
		}
	}()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			var size [2]byte
			if _, err := io.ReadFull(c, size[:]); err == nil {
				b := make([]byte, binary.BigEndian.Uint16(size[:]))
				if _, err := io.ReadFull(c, b); err == nil {
					reply := answer(b, true)
					_, _ = c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(reply))), reply...))
				}
			}
			c.Close()
		}
	}()
	return at
}

func addRecord(m *dnsmessage.Message, name, value string, ttl uint32) {
	r := dnsmessage.Resource{Header: dnsmessage.ResourceHeader{Name: dnsmessage.MustNewName(name + "."), Class: dnsmessage.ClassINET, TTL: ttl}}
	if a, err := netip.ParseAddr(value); err != nil {
		r.Header.Type, r.Body = dnsmessage.TypeCNAME, &dnsmessage.CNAMEResource{CNAME: dnsmessage.MustNewName(value + ".")}
	} else if a.Is4() {
		r.Header.Type, r.Body = dnsmessage.TypeA, &dnsmessage.AResource{A: a.As4()}
	} else {
		r.Header.Type, r.Body = dnsmessage.TypeAAAA, &dnsmessage.AAAAResource{AAAA: a.As16()}
	}
	m.Answers = append(m.Answers, r)
}

func TestLookup(t *testing.T) {
	var asked atomic.Int32
	at := resolver(t, func(q dnsmessage.Question, tcp bool, m *dnsmessage.Message) {
		asked.Add(1)
		name := canonical(q.Name)
		v4 := q.Type == dnsmessage.TypeA
		switch {
		case name == "both.test" && v4:
			addRecord(m, "BOTH.test", "192.0.2.1", 60)
			addRecord(m, "both.test", "192.0.2.2", 60)
			addRecord(m, "unrelated.test", "192.0.2.99", 60) // not what was asked
		case name == "both.test":
			addRecord(m, name, "2001:db8::1", 60)
		case name == "chain.test" && v4: // in any order
			addRecord(m, "b.test", "192.0.2.3", 60)
			addRecord(m, "chain.test", "a.test", 60)
			addRecord(m, "a.test", "b.test", 60)
		case name == "parts.test":
			addRecord(m, name, "both.test", 60)
		case name == "loop.test":
			addRecord(m, name, "loop2.test", 60)
			addRecord(m, "loop2.test", name, 60)
		case len(name) > 4 && name[:4] == "deep":
			addRecord(m, name, "deep"+name, 60)
		case name == "large.test" && v4:
			if !tcp {
				m.Truncated = true
				return
			}
			for i := range 100 {
				addRecord(m, name, fmt.Sprintf("192.0.2.%d", i), 60)
			}
		case name == "missing.test":
			m.RCode = dnsmessage.RCodeNameError
		case name == "broken.test":
			m.RCode = dnsmessage.RCodeServerFailure
		}
	})
	u := NewUpstream([]*Resolver{{At: at}})
	ctx := context.Background()
	for name, want := range map[string]string{
		"both.test":  "[2001:db8::1 192.0.2.1 192.0.2.2]",
		"chain.test": "[192.0.2.3]",
		"parts.test": "[2001:db8::1 192.0.2.1 192.0.2.2]",
	} {
		got, err := u.Lookup(ctx, name)
		if fmt.Sprint(got) != want || err != nil {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	if got, err := u.Lookup(ctx, "large.test"); len(got) != maxAddrs || err != nil {
		t.Errorf("large.test: %d addresses, %v", len(got), err)
	}
	for name, kind := range map[string]berm.Kind{
		"missing.test": berm.NotFound, "empty.test": berm.NotFound, "broken.test": berm.Unavailable, "loop.test": berm.Unavailable,
		"deep.test": berm.NotFound, "sp ace.test": berm.NotFound, "": berm.NotFound, "dot..test": berm.NotFound,
	} {
		if got, err := u.Lookup(ctx, name); berm.KindOf(err) != kind || err == nil {
			t.Errorf("%q: %v, %v", name, got, err)
		}
	}
	// What was answered is not asked again, and one question is asked once.
	before := asked.Load()
	var group sync.WaitGroup
	for range 20 {
		group.Go(func() {
			_, _ = u.Lookup(ctx, "both.test")
			_, _ = u.Lookup(ctx, "missing.test")
		})
	}
	group.Wait()
	if n := asked.Load() - before; n != 0 {
		t.Errorf("asked %d times more", n)
	}
}

func TestAnswersAreKeptForTheirTime(t *testing.T) {
	at := resolver(t, func(q dnsmessage.Question, _ bool, m *dnsmessage.Message) {
		if q.Type != dnsmessage.TypeA {
			return
		}
		switch canonical(q.Name) {
		case "short.test":
			addRecord(m, "short.test", "192.0.2.1", 0)
		case "long.test":
			addRecord(m, "long.test", "192.0.2.1", 1<<31)
		case "alias.test":
			addRecord(m, "alias.test", "real.test", 20)
			addRecord(m, "real.test", "192.0.2.1", 100)
		}
	})
	u := NewUpstream([]*Resolver{{At: at}})
	for name, want := range map[string]time.Duration{"short.test": minKeep, "long.test": maxKeep, "alias.test": 20 * time.Second, "none.test": keepMissing} {
		_, _ = u.Lookup(context.Background(), name)
		if got := time.Until(u.kept[asked{name: name}].until); got > want || got < want-2*time.Second {
			t.Errorf("%s is kept for %v, want %v", name, got, want)
		}
	}
}

func TestAnotherResolverIsAsked(t *testing.T) {
	broken := resolver(t, func(_ dnsmessage.Question, _ bool, m *dnsmessage.Message) { m.RCode = dnsmessage.RCodeRefused })
	good := resolver(t, func(q dnsmessage.Question, _ bool, m *dnsmessage.Message) {
		if q.Type == dnsmessage.TypeA {
			addRecord(m, "x.test", "192.0.2.1", 60)
		}
	})
	nobody := netip.MustParseAddrPort("127.0.0.1:1")
	u := NewUpstream([]*Resolver{{At: broken}, {At: nobody}, {At: good}})
	if got, err := u.Lookup(context.Background(), "x.test"); fmt.Sprint(got) != "[192.0.2.1]" {
		t.Errorf("%v, %v", got, err)
	}
	u = NewUpstream([]*Resolver{{At: nobody}})
	if _, err := u.Lookup(context.Background(), "x.test"); berm.KindOf(err) != berm.Unavailable {
		t.Errorf("with no resolver: %v", err)
	}
	if len(u.kept) != 0 {
		t.Error("a failure is kept")
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := u.Lookup(ctx, "x.test"); berm.KindOf(err) != berm.Unavailable {
		t.Errorf("without patience: %v", err)
	}
}

func TestHostResolvers(t *testing.T) {
	path := filepath.Join(t.TempDir(), "resolv.conf")
	text := "# nameserver 192.0.2.9\nsearch corp.test\nnameserver 192.0.2.1\nnameserver  2001:db8::1 # two\nnameserver bad\nnameserver fe80::1%eth0\nnameserver 192.0.2.4\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(hostResolvers(path)()); got != "[192.0.2.1:53 [2001:db8::1]:53 [fe80::1%eth0]:53]" {
		t.Error(got)
	}
	if got := fmt.Sprint(hostResolvers(path + ".none")()); got != "[127.0.0.1:53 [::1]:53]" {
		t.Error(got)
	}
}

func TestDialName(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	port := netip.MustParseAddrPort(l.Addr().String()).Port()
	addr := netip.MustParseAddr
	var checked []string
	var mu sync.Mutex
	d := Dialer{
		Lookup: func(context.Context, string) ([]netip.Addr, error) {
			return []netip.Addr{addr("192.0.2.1"), addr("127.0.0.2"), addr("127.0.0.1")}, nil
		},
		Vet: func(_ string, addrs []netip.Addr) ([]netip.Addr, error) { return addrs[1:], nil },
		Check: func(to netip.AddrPort) error {
			mu.Lock()
			checked = append(checked, to.Addr().String())
			mu.Unlock()
			return nil
		},
	}
	ctx := context.Background()
	// Nobody listens on the first.
	c, err := d.DialName(ctx, "tcp", "x.test", port)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if got := fmt.Sprint(checked); got != "[127.0.0.2 127.0.0.1]" {
		t.Errorf("connected to %s", got)
	}
	// The first does not answer in time.
	answered := make(chan struct{})
	d.Check = func(to netip.AddrPort) error {
		if to.Addr() == addr("127.0.0.2") {
			<-answered
		}
		return nil
	}
	begin := time.Now()
	if c, err = d.DialName(ctx, "tcp", "x.test", port); err != nil {
		t.Fatal(err)
	}
	c.Close()
	close(answered)
	if took := time.Since(begin); took < headStart {
		t.Errorf("connected after %v", took)
	}
	// What the second look refuses gets no packet.
	refused := errors.New("no")
	d.Check = func(netip.AddrPort) error { return refused }
	if _, err := d.DialName(ctx, "tcp", "x.test", port); !errors.Is(err, refused) || berm.KindOf(err) != berm.Unavailable {
		t.Errorf("%v", err)
	}
	if _, err := d.DialAddr(ctx, "tcp", netip.AddrPortFrom(addr("127.0.0.1"), port)); !errors.Is(err, refused) {
		t.Errorf("%v", err)
	}
	d.Vet = func(string, []netip.Addr) ([]netip.Addr, error) { return nil, nil }
	if _, err := d.DialName(ctx, "tcp", "x.test", port); berm.KindOf(err) != berm.Denied {
		t.Errorf("nothing is left: %v", err)
	}
	vetoed := berm.Errorf(berm.Denied, "private")
	d.Vet = func(string, []netip.Addr) ([]netip.Addr, error) { return nil, vetoed }
	if _, err := d.DialName(ctx, "tcp", "x.test", port); !errors.Is(err, vetoed) {
		t.Errorf("%v", err)
	}
}

func TestFamiliesTakeTurns(t *testing.T) {
	var addrs []netip.Addr
	for _, a := range []string{"2001:db8::1", "2001:db8::2", "192.0.2.1", "192.0.2.2", "192.0.2.3"} {
		addrs = append(addrs, netip.MustParseAddr(a))
	}
	if got := fmt.Sprint(interleaved(addrs)); got != "[2001:db8::1 192.0.2.1 2001:db8::2 192.0.2.2 192.0.2.3]" {
		t.Error(got)
	}
}

func FuzzRead(f *testing.F) {
	q := dnsmessage.Question{Name: dnsmessage.MustNewName("x.test."), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET}
	m := dnsmessage.Message{Header: dnsmessage.Header{ID: 1, Response: true}, Questions: []dnsmessage.Question{q}}
	addRecord(&m, "x.test", "y.test", 60)
	addRecord(&m, "y.test", "192.0.2.1", 60)
	packed, err := m.Pack()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(packed, uint16(q.Type))
	for kind, body := range map[dnsmessage.Type]dnsmessage.ResourceBody{
		dnsmessage.TypeTXT: &dnsmessage.TXTResource{TXT: []string{"a", ""}}, dnsmessage.TypeMX: &dnsmessage.MXResource{MX: q.Name},
		dnsmessage.TypeSRV: &dnsmessage.SRVResource{Target: q.Name}, dnsmessage.TypeNS: &dnsmessage.NSResource{NS: q.Name},
		dnsmessage.TypeCNAME: &dnsmessage.CNAMEResource{CNAME: q.Name}, typeCAA: &dnsmessage.UnknownResource{Type: typeCAA, Data: []byte{0}},
	} {
		q.Type, m.Questions[0].Type = kind, kind
		m.Answers = []dnsmessage.Resource{{Header: dnsmessage.ResourceHeader{Name: q.Name, Type: kind, Class: q.Class, TTL: 1 << 31}, Body: body}}
		if packed, err = m.Pack(); err != nil {
			f.Fatal(err)
		}
		f.Add(packed, uint16(kind))
	}
	f.Fuzz(func(t *testing.T, message []byte, kind uint16) {
		q := q
		q.Type = dnsmessage.Type(kind)
		a, _, _, ok := read(message, q, 1)
		if len(a.addrs)+len(a.records) > maxAddrs || a.ttl < 0 || a.ttl > maxKeep || (!ok && len(a.addrs)+len(a.records) > 0) {
			t.Errorf("%+v", a)
		}
		for _, r := range a.records {
			if r.Header.Type != q.Type {
				t.Errorf("a record of another type: %+v", r)
			}
		}
		// What is passed on can be packed, or is no answer.
		r := reply{question: &q, limit: 1 << 16}
		_ = r.pack(a.records, nil)
	})
}
