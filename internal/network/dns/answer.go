package dns

import (
	"strings"

	"golang.org/x/net/dns/dnsmessage"
)

// ttl is how long a client may keep an answer, in seconds; it never becomes wrong.
const ttl = 60

// maxQuery bounds a query in bytes, and with it what a name can carry out in one go.
const maxQuery = 512

// udpSize is what is announced as taken over UDP (RFC 9715: not fragmented anywhere).
const udpSize = 1232

// Extended DNS errors (RFC 8914): the reason beside NXDOMAIN.
const (
	optionEDE     = 15
	edeProhibited = 18
)

// Answer answers a query with the addresses that stand for names; nil is no answer, to what
// is no query. allowed is asked about a name in lower case without the last dot: what it
// refuses does not exist (NXDOMAIN; REFUSED would end the search lists of resolvers), with
// the reason as an extended error.
func Answer(names *Names, message []byte, allowed func(name string) bool) []byte {
	if len(message) > maxQuery {
		return nil
	}
	var p dnsmessage.Parser
	head, err := p.Start(message)
	if err != nil || head.Response {
		return nil
	}
	reply := dnsmessage.Header{ID: head.ID, Response: true, OpCode: head.OpCode, RecursionDesired: head.RecursionDesired, RecursionAvailable: true}
	questions, err := p.AllQuestions()
	if err != nil || len(questions) != 1 {
		reply.RCode = dnsmessage.RCodeFormatError
		return build(reply, nil, nil, nil, false)
	}
	q := questions[0]
	edns := hasEDNS(&p)
	if head.OpCode != 0 {
		reply.RCode = dnsmessage.RCodeNotImplemented
		return build(reply, &q, nil, nil, edns)
	}
	if q.Class != dnsmessage.ClassINET {
		reply.RCode = dnsmessage.RCodeRefused
		return build(reply, &q, nil, nil, edns)
	}
	name := strings.ToLower(strings.TrimSuffix(q.Name.String(), "."))
	if q.Type == dnsmessage.TypePTR {
		return pointer(names, reply, &q, name, edns)
	}
	if !allowed(name) {
		reply.RCode = dnsmessage.RCodeNameError
		return build(reply, &q, nil, &dnsmessage.Option{Code: optionEDE, Data: []byte{0, edeProhibited}}, edns)
	}
	if q.Type != dnsmessage.TypeA {
		// There is nothing else: IPv6 is not used inside, and HTTPS records would bring keys
		// that hide names from the policy.
		return build(reply, &q, nil, nil, edns)
	}
	addr, ok := names.Addr(name)
	if !ok {
		reply.RCode = dnsmessage.RCodeServerFailure
		return build(reply, &q, nil, nil, edns)
	}
	return build(reply, &q, &dnsmessage.Resource{
		Header: dnsmessage.ResourceHeader{Name: q.Name, Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET, TTL: ttl},
		Body:   &dnsmessage.AResource{A: addr.As4()},
	}, nil, edns)
}

// hasEDNS says whether the query has an OPT record, without which none may be answered.
func hasEDNS(p *dnsmessage.Parser) bool {
	if p.SkipAllAnswers() != nil || p.SkipAllAuthorities() != nil {
		return false
	}
	for range 16 {
		h, err := p.AdditionalHeader()
		if err != nil {
			return false
		}
		if h.Type == dnsmessage.TypeOPT {
			return true
		}
		if p.SkipAdditional() != nil {
			return false
		}
	}
	return false
}

// pointer answers which name an address of the pool stands for.
func pointer(names *Names, reply dnsmessage.Header, q *dnsmessage.Question, name string, edns bool) []byte {
	found := ""
	if digits, ok := strings.CutSuffix(name, ".in-addr.arpa"); ok {
		found = names.Name(reversed(digits))
	}
	target, err := dnsmessage.NewName(found + ".")
	if found == "" || err != nil {
		reply.RCode = dnsmessage.RCodeNameError
		return build(reply, q, nil, nil, edns)
	}
	return build(reply, q, &dnsmessage.Resource{
		Header: dnsmessage.ResourceHeader{Name: q.Name, Type: dnsmessage.TypePTR, Class: dnsmessage.ClassINET, TTL: ttl},
		Body:   &dnsmessage.PTRResource{PTR: target},
	}, nil, edns)
}

// build packs an answer. What cannot be packed is no answer.
func build(head dnsmessage.Header, q *dnsmessage.Question, record *dnsmessage.Resource, option *dnsmessage.Option, edns bool) []byte {
	m := dnsmessage.Message{Header: head}
	if q != nil {
		m.Questions = []dnsmessage.Question{*q}
	}
	if record != nil {
		m.Answers = []dnsmessage.Resource{*record}
	}
	if edns {
		var h dnsmessage.ResourceHeader
		if h.SetEDNS0(udpSize, dnsmessage.RCodeSuccess, false) != nil {
			return nil
		}
		opt := &dnsmessage.OPTResource{}
		if option != nil {
			opt.Options = []dnsmessage.Option{*option}
		}
		m.Additionals = []dnsmessage.Resource{{Header: h, Body: opt}}
	}
	packed, err := m.Pack()
	if err != nil {
		return nil
	}
	return packed
}
