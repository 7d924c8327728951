package dns

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
)

// ask packs a question and unpacks its answer.
func (z *Zone) ask(t testing.TB, names *Names, name string, kind dnsmessage.Type, limit int) dnsmessage.Message {
	t.Helper()
	m := dnsmessage.Message{Header: dnsmessage.Header{ID: 7, RecursionDesired: true}, Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName(name + "."), Type: kind, Class: dnsmessage.ClassINET}}}
	packed, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	var answer dnsmessage.Message
	if err := answer.Unpack(Answer(t.Context(), names, packed, *z, limit)); err != nil {
		t.Fatal(err)
	}
	return answer
}

func shown(m dnsmessage.Message) string {
	text := []string{m.RCode.String()[5:]}
	for _, a := range m.Answers {
		body := strings.NewReplacer("dnsmessage.", "", "&", "").Replace(a.Body.GoString())
		text = append(text, fmt.Sprintf("%s %s %d %s", a.Header.Name, strings.TrimPrefix(a.Header.Type.String(), "Type"), a.Header.TTL, body))
	}
	return strings.Join(text, "; ")
}

func TestZone(t *testing.T) {
	var mu sync.Mutex
	var seen []string
	at := resolver(t, func(q dnsmessage.Question, _ bool, m *dnsmessage.Message) {
		name := canonical(q.Name)
		mu.Lock()
		seen = append(seen, name)
		mu.Unlock()
		add := func(owner string, kind dnsmessage.Type, body dnsmessage.ResourceBody) {
			m.Answers = append(m.Answers, dnsmessage.Resource{Header: dnsmessage.ResourceHeader{Name: dnsmessage.MustNewName(owner + "."), Type: kind, Class: dnsmessage.ClassINET, TTL: 3600}, Body: body})
		}
		switch {
		case name == "good.test" && q.Type == dnsmessage.TypeTXT:
			add(name, q.Type, &dnsmessage.TXTResource{TXT: []string{"v1"}})
			add("other.test", q.Type, &dnsmessage.TXTResource{TXT: []string{"not asked for"}})
			addRecord(m, name, "192.0.2.1", 60)
		case name == "alias.test" && q.Type == dnsmessage.TypeMX:
			addRecord(m, name, "good.test", 60)
			add("good.test", q.Type, &dnsmessage.MXResource{Pref: 5, MX: dnsmessage.MustNewName("mx.test.")})
		case name == "alias.test" && q.Type == dnsmessage.TypeCNAME:
			addRecord(m, name, "good.test", 60)
		case name == "_imap._tcp.good.test" && q.Type == dnsmessage.TypeSRV:
			add(name, q.Type, &dnsmessage.SRVResource{Priority: 1, Weight: 2, Port: 993, Target: dnsmessage.MustNewName("mail.good.test.")})
		case name == "good.test" && q.Type == typeCAA:
			add(name, q.Type, &dnsmessage.UnknownResource{Type: typeCAA, Data: []byte("\x00\x05issueca.test")})
		case name == "large.test" && q.Type == dnsmessage.TypeTXT:
			for range 30 {
				add(name, q.Type, &dnsmessage.TXTResource{TXT: []string{strings.Repeat("x", 100)}})
			}
		case name == "large.test":
		case q.Type == dnsmessage.TypeA && (name == "good.test" || name == "alias.test"):
			addRecord(m, name, "198.51.100.1", 60)
			addRecord(m, name, "10.0.0.1", 60)
			addRecord(m, name, "198.18.0.1", 60)
		case name == "good.test", name == "alias.test":
		case name == "broken.test":
			m.RCode = dnsmessage.RCodeServerFailure
		default:
			m.RCode = dnsmessage.RCodeNameError
		}
	})
	real := false
	z := &Zone{
		Allowed: func(name string) bool { return strings.HasSuffix(name, ".test") && name != "evil.test" },
		Outside: func(name, recordType string) bool { return name != "plain.test" && recordType != "NS" },
		Real:    func() bool { return real },
		Told: func(found []netip.Addr) []netip.Addr {
			return slices.DeleteFunc(slices.Clone(found), func(a netip.Addr) bool { return a == netip.MustParseAddr("10.0.0.1") })
		},
		Upstream: NewUpstream([]*Resolver{{At: at}}),
	}
	names := NewNames()
	for _, c := range []struct {
		name string
		kind dnsmessage.Type
		want string
	}{
		{"good.test", dnsmessage.TypeTXT, `Success; good.test. TXT 60 TXTResource{TXT: []string{"v1"}}`},
		{"alias.test", dnsmessage.TypeMX, `Success; alias.test. MX 60 MXResource{Pref: 5, MX: MustNewName("mx.test.")}`},
		{"alias.test", dnsmessage.TypeCNAME, `Success; alias.test. CNAME 60 CNAMEResource{CNAME: MustNewName("good.test.")}`},
		{"_imap._tcp.good.test", dnsmessage.TypeSRV, `Success; _imap._tcp.good.test. SRV 60 SRVResource{Priority: 1, Weight: 2, Port: 993, Target: MustNewName("mail.good.test.")}`},
		{"_imap._tcp.good.test", dnsmessage.TypeMX, "NameError"},
		{"good.test", typeCAA, `Success; good.test. 257 60 UnknownResource{Type: 257, Data: []byte{0, 5, 105, 115, 115, 117, 101, 99, 97, 46, 116, 101, 115, 116}}`},
		{"good.test", dnsmessage.TypeMX, "Success"},
		{"missing.test", dnsmessage.TypeTXT, "NameError"},
		{"broken.test", dnsmessage.TypeTXT, "ServerFailure"},
		{"good.test", dnsmessage.TypeA, `Success; good.test. A 60 AResource{A: [4]byte{198, 18, 0, 1}}`},
	} {
		m := z.ask(t, names, c.name, c.kind, udpSize)
		if got := shown(m); got != c.want {
			t.Errorf("%s %v: %s, want %s", c.name, c.kind, got, c.want)
		}
	}
	if m := z.ask(t, names, "large.test", dnsmessage.TypeTXT, udpSize); !m.Truncated || len(m.Answers) > 0 {
		t.Errorf("a large answer: %+v", m)
	}
	if m := z.ask(t, names, "large.test", dnsmessage.TypeTXT, 1<<16-1); m.Truncated || len(m.Answers) != 30 {
		t.Errorf("a large answer over TCP: %+v", m)
	}
	// What is not to be looked up outside is not.
	count := func() int {
		mu.Lock()
		defer mu.Unlock()
		return len(seen)
	}
	before := count()
	for _, c := range []struct {
		name string
		kind dnsmessage.Type
	}{{"good.test", dnsmessage.TypeNS}, {"plain.test", dnsmessage.TypeTXT}, {"evil.test", dnsmessage.TypeTXT}, {"_x.evil.test", dnsmessage.TypeTXT}, {"good.test", dnsmessage.TypeAAAA}, {"good.test", dnsmessage.TypeHTTPS}, {"fresh.test", dnsmessage.TypeA}} {
		z.ask(t, names, c.name, c.kind, udpSize)
	}
	if n := count() - before; n != 0 {
		t.Errorf("asked outside %d times", n)
	}
	// Real addresses are told as far as they may be, and lead back to the names that have them.
	real = true
	const want = "Success; %s. A 60 AResource{A: [4]byte{198, 51, 100, 1}}"
	for _, name := range []string{"good.test", "alias.test"} {
		if got := shown(z.ask(t, names, name, dnsmessage.TypeA, udpSize)); got != fmt.Sprintf(want, name) {
			t.Error(got)
		}
	}
	if got := names.All(netip.MustParseAddr("198.51.100.1")); fmt.Sprint(got) != "[alias.test good.test]" {
		t.Errorf("%v", got)
	}
	if got := names.Name(netip.MustParseAddr("10.0.0.1")); got != "" {
		t.Errorf("an address that was not told stands for %s", got)
	}
	if got := names.All(netip.MustParseAddr("198.18.0.1")); fmt.Sprint(got) != "[good.test]" { // a synthetic one, whatever resolvers say
		t.Errorf("%v", got)
	}
	if got := shown(z.ask(t, names, "good.test", dnsmessage.TypeAAAA, udpSize)); got != "Success" {
		t.Error(got)
	}
	// Names that are looked up outside have a budget.
	refused := 0
	for i := range newNames + 100 {
		if m := z.ask(t, names, fmt.Sprintf("n%d.wild.test", i), dnsmessage.TypeTXT, udpSize); m.RCode == dnsmessage.RCodeServerFailure {
			refused++
		}
	}
	if refused < 50 {
		t.Errorf("%d new names are too many", refused)
	}
}
