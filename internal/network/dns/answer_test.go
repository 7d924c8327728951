package dns_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/berm-sandbox/berm/internal/network/dns"
)

// query packs a question. edns is the version of its OPT record, or -1 for none.
func query(t testing.TB, name string, kind dnsmessage.Type, edns int) []byte {
	t.Helper()
	m := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: 4711, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName(name), Type: kind, Class: dnsmessage.ClassINET}},
	}
	if edns >= 0 {
		var h dnsmessage.ResourceHeader
		_ = h.SetEDNS0(1232, 0, false)
		h.TTL |= uint32(edns) << 16
		m.Additionals = []dnsmessage.Resource{{Header: h, Body: &dnsmessage.OPTResource{}}}
	}
	packed, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	return packed
}

func unpack(t testing.TB, answer []byte) dnsmessage.Message {
	t.Helper()
	var m dnsmessage.Message
	if err := m.Unpack(answer); err != nil {
		t.Fatalf("% x: %v", answer, err)
	}
	return m
}

// show is an answer in short: code, answers, whether it has an SOA and an extended error.
func show(m dnsmessage.Message) string {
	s := strings.TrimPrefix(m.RCode.String(), "RCode")
	for _, a := range m.Answers {
		switch b := a.Body.(type) {
		case *dnsmessage.AResource:
			s += " A " + netip.AddrFrom4(b.A).String()
		case *dnsmessage.PTRResource:
			s += " PTR " + b.PTR.String()
		case *dnsmessage.UnknownResource:
			s += fmt.Sprintf(" %d %q", b.Type, b.Data)
		}
	}
	if len(m.Authorities) > 0 {
		s += fmt.Sprint(" SOA ", m.Authorities[0].Header.TTL)
	}
	for _, a := range m.Additionals {
		if opt, ok := a.Body.(*dnsmessage.OPTResource); ok {
			s += " OPT"
			if code := a.Header.ExtendedRCode(m.RCode); code != m.RCode {
				s += fmt.Sprint(" code ", int(code))
			}
			for _, o := range opt.Options {
				s += fmt.Sprintf(" EDE %d", binary.BigEndian.Uint16(o.Data))
			}
		}
	}
	return s
}

func allow(names ...string) func(string) bool {
	return func(name string) bool {
		for _, n := range names {
			if name == n {
				return true
			}
		}
		return false
	}
}

// answer is that of a zone of names alone, by datagram.
func answer(t testing.TB, names *dns.Names, message []byte, allowed func(name string) bool) []byte {
	return dns.Answer(t.Context(), names, message, dns.Zone{Allowed: allowed}, 1232)
}

func TestAnswer(t *testing.T) {
	names := dns.NewNames()
	allowed := allow("good.test", "other.test")
	for _, c := range []struct {
		name string
		kind dnsmessage.Type
		edns int
		want string
	}{
		{"good.test.", dnsmessage.TypeA, -1, "Success A 198.18.0.1"},
		{"GOOD.Test.", dnsmessage.TypeA, 0, "Success A 198.18.0.1 OPT"},
		{"other.test.", dnsmessage.TypeA, -1, "Success A 198.18.0.2"},
		{"good.test.", dnsmessage.TypeAAAA, -1, "Success SOA 5"},
		{"good.test.", 65, 0, "Success SOA 5 OPT"},
		{"good.test.", 64, -1, "Success SOA 5"},
		{"good.test.", dnsmessage.TypeTXT, -1, "Success SOA 5"},
		{"good.test.", dnsmessage.TypeALL, -1, `Success 13 "\aRFC8482\x00"`},
		{"good.test.", 252, -1, "NotImplemented"},
		{"good.test.", dnsmessage.TypeA, 1, "Success OPT code 16"},
		{"evil.test.", dnsmessage.TypeA, -1, "NameError SOA 5"},
		{"evil.test.", dnsmessage.TypeA, 0, "NameError SOA 5 OPT EDE 18"},
		{"evil.test.", dnsmessage.TypeTXT, 0, "NameError SOA 5 OPT EDE 18"},
		{"evil.good.test.", dnsmessage.TypeA, -1, "NameError SOA 5"},
		{".", dnsmessage.TypeNS, -1, "NameError SOA 5"},
		{"1.0.18.198.in-addr.arpa.", dnsmessage.TypePTR, -1, "Success PTR good.test."},
		{"9.0.18.198.in-addr.arpa.", dnsmessage.TypePTR, -1, "NameError SOA 5"},
		{"1.0.0.127.in-addr.arpa.", dnsmessage.TypePTR, -1, "NameError SOA 5"},
	} {
		m := unpack(t, answer(t, names, query(t, c.name, c.kind, c.edns), allowed))
		if got := show(m); got != c.want {
			t.Errorf("%s %v: %s, want %s", c.name, c.kind, got, c.want)
		}
		if m.ID != 4711 || !m.Response || len(m.Questions) != 1 || m.Questions[0].Name.String() != c.name {
			t.Errorf("%s: not the answer to the question: %+v", c.name, m.Header)
		}
	}
	if names.Name(netip.MustParseAddr("198.18.0.3")) != "" {
		t.Error("a query for something else than an address gave an address away")
	}
}

func TestWhatIsNoQueryGetsNoAnswer(t *testing.T) {
	good := query(t, "good.test.", dnsmessage.TypeA, 0)
	response := bytes.Clone(good)
	response[2] |= 0x80
	long := append(bytes.Clone(good), make([]byte, 600)...)
	for name, message := range map[string][]byte{"nothing": nil, "a short one": good[:11], "a response": response, "a long one": long} {
		if got := answer(t, dns.NewNames(), message, allow("good.test")); got != nil {
			t.Errorf("%s is answered by % x", name, got)
		}
	}
	status := bytes.Clone(good)
	status[2] |= 2 << 3 // opcode STATUS
	two := bytes.Clone(good)
	two[5] = 2
	chaos := bytes.Clone(good)
	chaos[12+11+2+1] = 3
	for want, message := range map[string][]byte{"NotImplemented OPT": status, "FormatError": two, "Refused OPT": chaos} {
		if got := show(unpack(t, answer(t, dns.NewNames(), message, allow("good.test")))); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

func TestNamesKeepTheirAddress(t *testing.T) {
	names := dns.NewNames()
	var group sync.WaitGroup
	var mu sync.Mutex
	seen := map[netip.Addr]string{}
	for range 4 {
		group.Go(func() {
			for i := range 2000 {
				name := fmt.Sprintf("host.d%d.test", i)
				addr, ok := names.Addr(name)
				if !ok || !dns.InPool(addr) || names.Name(addr) != name {
					t.Errorf("%s: %v, %v, %s", name, addr, ok, names.Name(addr))
					return
				}
				mu.Lock()
				if other, taken := seen[addr]; taken && other != name {
					t.Errorf("%v stands for %s and for %s", addr, name, other)
				}
				seen[addr] = name
				mu.Unlock()
			}
		})
	}
	group.Wait()
	if len(seen) != 2000 {
		t.Errorf("%d addresses", len(seen))
	}
	for _, addr := range []string{"198.18.0.0", "198.19.255.255", "198.20.0.0", "198.17.255.255", "::1"} {
		if names.Name(netip.MustParseAddr(addr)) != "" {
			t.Errorf("%s stands for a name", addr)
		}
	}
}

func TestNewNamesOfOneDomainAreLimited(t *testing.T) {
	names := dns.NewNames()
	n := 0
	for i := range 1000 {
		// At any depth: each part of a name can carry something.
		if _, ok := names.Addr(fmt.Sprintf("x%d.y%d.evil.example.com", i, i)); ok {
			n++
		}
	}
	if n < 500 || n > 502 {
		t.Errorf("%d new names below one domain", n)
	}
	if _, ok := names.Addr("x1.y1.evil.example.com"); !ok {
		t.Error("a name that is known already is refused")
	}
	if _, ok := names.Addr("other.example.org"); !ok {
		t.Error("another domain is refused too")
	}
	m := unpack(t, answer(t, names, query(t, "new.example.com.", dnsmessage.TypeA, 0), func(string) bool { return true }))
	if got := show(m); got != "ServerFailure OPT EDE 18" {
		t.Error(got)
	}
}

func TestResponder(t *testing.T) {
	r := dns.NewResponder(dns.NewNames(), dns.Zone{Allowed: allow("good.test")}, func() bool { return true })
	message := query(t, "good.test.", dnsmessage.TypeA, -1)
	ours, theirs := net.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- r.Serve(t.Context(), ours) }()
	_ = theirs.SetDeadline(time.Now().Add(10 * time.Second))
	for range 3 {
		if _, err := theirs.Write(append([]byte{0, byte(len(message))}, message...)); err != nil {
			t.Fatal(err)
		}
		var size [2]byte
		if _, err := io.ReadFull(theirs, size[:]); err != nil {
			t.Fatal(err)
		}
		answer := make([]byte, binary.BigEndian.Uint16(size[:]))
		if _, err := io.ReadFull(theirs, answer); err != nil {
			t.Fatal(err)
		}
		if got := show(unpack(t, answer)); got != "Success A 198.18.0.1" {
			t.Error(got)
		}
	}
	theirs.Close()
	if err := <-ended; err != nil {
		t.Errorf("the end of a connection: %v", err)
	}
	// Datagrams above the rate are lost.
	answered := 0
	for range 1000 {
		if r.Answer(t.Context(), message) != nil {
			answered++
		}
	}
	if answered < 150 || answered > 500 {
		t.Errorf("%d of 1000 queries at once are answered", answered)
	}
}

func FuzzAnswer(f *testing.F) {
	for _, name := range []string{"good.test.", "evil.test.", "1.0.18.198.in-addr.arpa."} {
		for _, kind := range []dnsmessage.Type{dnsmessage.TypeA, dnsmessage.TypePTR, dnsmessage.TypeALL, 65} {
			f.Add(query(f, name, kind, 0))
			f.Add(query(f, name, kind, -1))
		}
	}
	f.Add([]byte("\x00\x01\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\xc0\x0c\x00\x01\x00\x01")) // a pointer to itself
	f.Fuzz(func(t *testing.T, message []byte) {
		names := dns.NewNames()
		answer := answer(t, names, message, func(name string) bool {
			if name == "" || strings.ToLower(name) != name || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' }) {
				t.Errorf("asked about %q", name)
			}
			return name == "good.test"
		})
		if answer == nil {
			return
		}
		m := unpack(t, answer)
		if len(answer) > 1232 || !m.Response || m.ID != binary.BigEndian.Uint16(message) {
			t.Errorf("% x to % x", answer, message)
		}
		for _, a := range m.Answers {
			if a.Header.Type == dnsmessage.TypeA && !strings.EqualFold(a.Header.Name.String(), "good.test.") {
				t.Errorf("an address of %v", a.Header.Name)
			}
		}
		if names.Name(netip.MustParseAddr("198.18.0.2")) != "" {
			t.Error("a name that is not allowed has an address")
		}
	})
}
