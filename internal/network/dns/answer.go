package dns

import (
	"context"
	"net/netip"
	"strings"

	"golang.org/x/net/dns/dnsmessage"
)

// Times to live, in seconds: of what never becomes wrong, and of what a change of policy
// makes wrong.
const (
	ttl      = 60
	negative = 5
)

// maxQuery bounds a query in bytes, and with it what a name can carry out in one go.
const maxQuery = 512

// udpSize is what is announced as taken over UDP (RFC 9715: not fragmented anywhere).
const udpSize = 1232

// leastUDP is what is taken over UDP by whoever does not say (RFC 1035).
const leastUDP = 512

// Extended DNS errors (RFC 8914): the reason beside a response code.
const (
	optionEDE     = 15
	edeProhibited = 18
)

const badVersion dnsmessage.RCode = 16 // of EDNS (RFC 6891)

// typeCAA is RFC 8659's; dnsmessage has no name for it.
const typeCAA dnsmessage.Type = 257

// Answer answers a query with the addresses that stand for names, or with what the zone looks
// up outside; nil is no answer, to what is no query. What the zone does not have does not exist
// (NXDOMAIN; REFUSED would end the search lists of resolvers), with the reason as an extended
// error. An answer of more than limit bytes is cut, and asked for again over TCP.
func Answer(ctx context.Context, names *Names, message []byte, zone Zone, limit int) []byte {
	if len(message) > maxQuery {
		return nil
	}
	var p dnsmessage.Parser
	head, err := p.Start(message)
	if err != nil || head.Response {
		return nil
	}
	r := reply{head: dnsmessage.Header{
		ID: head.ID, Response: true, OpCode: head.OpCode,
		RecursionDesired: head.RecursionDesired, RecursionAvailable: true,
	}}
	// A single question: no implementation asks more, and none could be told apart in the
	// answer (RFC 9619).
	questions, err := p.AllQuestions()
	if err != nil || len(questions) != 1 {
		return r.code(dnsmessage.RCodeFormatError)
	}
	q := questions[0]
	r.question = &q
	version := r.readEDNS(&p)
	if r.limit = limit; limit == udpSize {
		r.limit = min(limit, max(r.udp, leastUDP))
	}
	switch {
	case version != 0:
		return r.code(badVersion)
	case head.OpCode != 0:
		return r.code(dnsmessage.RCodeNotImplemented)
	case q.Class != dnsmessage.ClassINET:
		return r.code(dnsmessage.RCodeRefused)
	}
	name := strings.ToLower(strings.TrimSuffix(q.Name.String(), "."))
	if q.Type == dnsmessage.TypePTR {
		return r.pointer(names, name)
	}
	owner := name
	if serviceTypes[q.Type] {
		owner = ownerOf(name)
	}
	if !isHost(name) || !zone.Allowed(owner) {
		r.option = &dnsmessage.Option{Code: optionEDE, Data: []byte{0, edeProhibited}}
		return r.nothing(dnsmessage.RCodeNameError)
	}
	if zone.outside(q.Type, owner) {
		return r.outside(ctx, names, zone, name)
	}
	switch q.Type {
	case dnsmessage.TypeA:
		if zone.Missing != nil && zone.Missing(ctx, name) {
			return r.nothing(dnsmessage.RCodeNameError)
		}
		addr, ok := names.Addr(name)
		if !ok {
			return r.tooMany()
		}
		return r.record(&dnsmessage.AResource{A: addr.As4()})
	case dnsmessage.TypeALL: // RFC 8482: one record that says so
		return r.record(&dnsmessage.UnknownResource{Type: dnsmessage.TypeHINFO, Data: []byte("\x07RFC8482\x00")})
	case dnsmessage.TypeAAAA, dnsmessage.TypeHTTPS, dnsmessage.TypeSVCB, dnsmessage.TypeCNAME, dnsmessage.TypeMX, dnsmessage.TypeNS,
		dnsmessage.TypeSOA, dnsmessage.TypeSRV, dnsmessage.TypeTXT, typeCAA:
		// There is nothing else: IPv6 is not used inside, HTTPS records would bring keys that
		// hide names from the policy, and the rest is asked for outside by policies that say so.
		return r.nothing(dnsmessage.RCodeSuccess)
	}
	return r.code(dnsmessage.RCodeNotImplemented)
}

// isHost says whether a name can be a host's: labels of letters, digits, "-" and "_".
func isHost(name string) bool {
	for label := range strings.SplitSeq(name, ".") {
		if label == "" || len(label) > 63 || strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
			return false
		}
	}
	return len(name) <= 253
}

// reply is an answer that is being made.
type reply struct {
	head     dnsmessage.Header
	question *dnsmessage.Question
	edns     bool // the query has it, without which no answer may have it
	udp      int  // bytes that the client takes by datagram; 0: it does not say
	limit    int  // of bytes
	option   *dnsmessage.Option
}

// readEDNS looks for the query's OPT record and returns its version.
func (r *reply) readEDNS(p *dnsmessage.Parser) (version int) {
	if p.SkipAllAnswers() != nil || p.SkipAllAuthorities() != nil {
		return 0
	}
	for {
		h, err := p.AdditionalHeader()
		if err != nil {
			return 0
		}
		if h.Type == dnsmessage.TypeOPT {
			r.edns, r.udp = true, int(h.Class)
			return int(h.TTL >> 16 & 0xff)
		}
		if p.SkipAdditional() != nil {
			return 0
		}
	}
}

// pointer answers which name an address of the pool stands for.
func (r *reply) pointer(names *Names, name string) []byte {
	if digits, ok := strings.CutSuffix(name, ".in-addr.arpa"); ok {
		if found := names.Name(reversed(digits)); found != "" {
			if target, err := dnsmessage.NewName(found + "."); err == nil {
				return r.record(&dnsmessage.PTRResource{PTR: target})
			}
		}
	}
	return r.nothing(dnsmessage.RCodeNameError)
}

// reversed reads the address in a name below in-addr.arpa.
func reversed(digits string) netip.Addr {
	parts := strings.Split(digits, ".")
	if len(parts) != 4 {
		return netip.Addr{}
	}
	addr, _ := netip.ParseAddr(parts[3] + "." + parts[2] + "." + parts[1] + "." + parts[0])
	return addr
}

// code is an answer without records.
func (r *reply) code(c dnsmessage.RCode) []byte {
	r.head.RCode = c
	return r.pack(nil, nil)
}

// record is an answer with one record.
func (r *reply) record(body dnsmessage.ResourceBody) []byte {
	h := dnsmessage.ResourceHeader{Name: r.question.Name, Type: r.question.Type, Class: dnsmessage.ClassINET, TTL: ttl}
	if u, ok := body.(*dnsmessage.UnknownResource); ok {
		h.Type = u.Type
	}
	return r.pack([]dnsmessage.Resource{{Header: h, Body: body}}, nil)
}

var root = dnsmessage.MustNewName(".")

// nothing says that there is no such name or record, and for how long that may be believed
// (RFC 2308): not long, because a policy changes.
func (r *reply) nothing(c dnsmessage.RCode) []byte {
	r.head.RCode = c
	return r.pack(nil, []dnsmessage.Resource{{
		Header: dnsmessage.ResourceHeader{Name: root, Type: dnsmessage.TypeSOA, Class: dnsmessage.ClassINET, TTL: negative},
		Body:   &dnsmessage.SOAResource{NS: root, MBox: root, Serial: 1, Refresh: 3600, Retry: 600, Expire: 86400, MinTTL: negative},
	}})
}

// pack makes the message. What cannot be packed is no answer.
func (r *reply) pack(answers, authorities []dnsmessage.Resource) []byte {
	m := dnsmessage.Message{Header: r.head, Answers: answers, Authorities: authorities}
	if r.question != nil {
		m.Questions = []dnsmessage.Question{*r.question}
	}
	if r.edns {
		var h dnsmessage.ResourceHeader
		if h.SetEDNS0(udpSize, m.RCode, false) != nil {
			return nil
		}
		opt := &dnsmessage.OPTResource{}
		if r.option != nil {
			opt.Options = []dnsmessage.Option{*r.option}
		}
		m.Additionals = []dnsmessage.Resource{{Header: h, Body: opt}}
	}
	m.RCode &= 0xf // the rest is in the OPT record
	packed, err := m.Pack()
	if err == nil && len(packed) > r.limit {
		m.Truncated, m.Answers = true, nil
		packed, err = m.Pack()
	}
	if err != nil {
		return nil
	}
	return packed
}
