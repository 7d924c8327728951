package internet

import (
	"net"
	"net/netip"
	"strings"
	"sync"

	"golang.org/x/net/dns/dnsmessage"
)

// Names is what the internet's resolver answers.
type Names struct {
	mu    sync.Mutex
	known map[string]func() []string
	asked []string
}

// Set lets a name, or *.name for all below it, have these addresses, or be an alias when the
// first is a name.
func (n *Names) Set(name string, to ...string) { n.Change(name, func() []string { return to }) }

// Change lets a name have what a function says at each query.
func (n *Names) Change(name string, to func() []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.known == nil {
		n.known = map[string]func() []string{}
	}
	n.known[name] = to
}

// Asked returns the names that were asked for since the last call.
func (n *Names) Asked() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	asked := n.asked
	n.asked = nil
	return asked
}

func (n *Names) of(name string) []string {
	if to := n.known[name]; to != nil {
		return to()
	}
	for at := name; ; {
		_, parent, ok := strings.Cut(at, ".")
		if !ok {
			return nil
		}
		if to := n.known["*."+parent]; to != nil {
			return to()
		}
		at = parent
	}
}

// answer fills in what a query is answered.
func (n *Names) answer(m *dnsmessage.Message) {
	q := m.Questions[0]
	n.mu.Lock()
	defer n.mu.Unlock()
	name := strings.ToLower(strings.TrimSuffix(q.Name.String(), "."))
	n.asked = append(n.asked, name)
	owner := q.Name
	for range 4 {
		to := n.of(name)
		if len(to) == 0 {
			m.RCode = dnsmessage.RCodeNameError
			return
		}
		head := dnsmessage.ResourceHeader{Name: owner, Class: q.Class}
		if _, err := netip.ParseAddr(to[0]); err != nil {
			alias := dnsmessage.MustNewName(to[0] + ".")
			head.Type = dnsmessage.TypeCNAME
			m.Answers = append(m.Answers, dnsmessage.Resource{Header: head, Body: &dnsmessage.CNAMEResource{CNAME: alias}})
			owner, name = alias, to[0]
			continue
		}
		for _, text := range to {
			addr := netip.MustParseAddr(text)
			switch {
			case addr.Is4() && q.Type == dnsmessage.TypeA:
				head.Type = dnsmessage.TypeA
				m.Answers = append(m.Answers, dnsmessage.Resource{Header: head, Body: &dnsmessage.AResource{A: addr.As4()}})
			case addr.Is6() && q.Type == dnsmessage.TypeAAAA:
				head.Type = dnsmessage.TypeAAAA
				m.Answers = append(m.Answers, dnsmessage.Resource{Header: head, Body: &dnsmessage.AAAAResource{AAAA: addr.As16()}})
			}
		}
		return
	}
}

// resolve answers the queries that come, to whatever address. Called in the namespace.
func (i *Internet) resolve() error {
	// From the address that was asked, or it would not be taken for an answer.
	conn, err := net.ListenPacket("udp4", Resolver+":53")
	if err != nil {
		return err
	}
	go func() {
		b := make([]byte, 2048)
		for {
			size, from, err := conn.ReadFrom(b)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if m.Unpack(b[:size]) != nil || len(m.Questions) != 1 {
				continue
			}
			m.Response, m.RecursionAvailable, m.Additionals = true, true, nil
			i.Names.answer(&m)
			if answer, err := m.Pack(); err == nil {
				_, _ = conn.WriteTo(answer, from)
			}
		}
	}()
	return nil
}
