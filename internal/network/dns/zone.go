package dns

import (
	"context"
	"net/netip"
	"strings"

	"golang.org/x/net/dns/dnsmessage"
)

// Zone is what a sandbox finds under names. Names are in lower case without the last dot.
type Zone struct {
	// Allowed says whether there is a name.
	Allowed func(name string) bool
	// Missing says whether a name that is allowed is known not to exist; nil is never. It may ask
	// outside, if the question tells nobody what the sandbox chose.
	Missing func(ctx context.Context, name string) bool
	// Outside says whether a record type beside A, such as TXT, is looked up outside for a
	// name; nil is never.
	Outside func(name, recordType string) bool
	// Real says whether names have their real addresses; nil is never. Told are those of a
	// name that may be told to the sandbox.
	Real func() bool
	Told func(found []netip.Addr) []netip.Addr
	// Upstream is asked; it is needed with Outside and Real alone.
	Upstream *Upstream
}

// outsideTypes are the types that Outside is asked about, by their names.
var outsideTypes = map[dnsmessage.Type]string{
	dnsmessage.TypeTXT: "TXT", dnsmessage.TypeMX: "MX", dnsmessage.TypeSRV: "SRV", dnsmessage.TypeNS: "NS", dnsmessage.TypeCNAME: "CNAME", typeCAA: "CAA",
}

// serviceTypes are those whose names may begin with labels of services, such as
// _sip._tcp.example.com (RFC 8552), which belong to the name behind them.
var serviceTypes = map[dnsmessage.Type]bool{dnsmessage.TypeTXT: true, dnsmessage.TypeSRV: true, dnsmessage.TypeCNAME: true}

// ownerOf is a name without the labels of services before it.
func ownerOf(name string) string {
	for strings.HasPrefix(name, "_") {
		_, rest, ok := strings.Cut(name, ".")
		if !ok {
			break
		}
		name = rest
	}
	return name
}

// outside says whether a question for a name that is there goes outside.
func (z *Zone) outside(t dnsmessage.Type, owner string) bool {
	if t == dnsmessage.TypeA {
		return z.Real != nil && z.Real()
	}
	text, ok := outsideTypes[t]
	return ok && z.Outside != nil && z.Outside(owner, text)
}

// outside answers with what resolvers know.
func (r *reply) outside(ctx context.Context, names *Names, zone Zone, name string) []byte {
	if !names.ask(name) { // a name carries bytes to its servers
		return r.tooMany()
	}
	var records []dnsmessage.Resource
	var err error
	if r.question.Type == dnsmessage.TypeA {
		var found []netip.Addr
		if found, err = zone.Upstream.Lookup(ctx, name); err == nil {
			for _, addr := range names.learn(name, zone.Told(found)) {
				records = append(records, dnsmessage.Resource{Header: dnsmessage.ResourceHeader{TTL: ttl}, Body: &dnsmessage.AResource{A: addr.As4()}})
			}
		}
	} else {
		records, err = zone.Upstream.Records(ctx, name, r.question.Type)
	}
	switch {
	case isMissing(err):
		return r.nothing(dnsmessage.RCodeNameError)
	case err != nil:
		return r.code(dnsmessage.RCodeServerFailure)
	case len(records) == 0:
		return r.nothing(dnsmessage.RCodeSuccess)
	}
	for i := range records {
		h := &records[i].Header
		h.Name, h.Type, h.Class, h.TTL = r.question.Name, r.question.Type, dnsmessage.ClassINET, min(h.TTL, ttl)
	}
	return r.pack(records, nil)
}

// tooMany refuses a new name.
func (r *reply) tooMany() []byte {
	r.option = &dnsmessage.Option{Code: optionEDE, Data: append([]byte{0, edeProhibited}, "too many new names"...)}
	return r.code(dnsmessage.RCodeServerFailure)
}
