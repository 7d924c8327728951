package dns

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sync/singleflight"

	"github.com/berm-sandbox/berm"
)

// How long an answer is used again, whatever its own time to live, and of how many names.
const (
	minKeep     = 5 * time.Second
	maxKeep     = 5 * time.Minute
	keepMissing = 5 * time.Second
	maxKept     = 4096
)

// maxChain is how many aliases one name may lead through.
const maxChain = 8

// Upstream asks resolvers for the real addresses of names. It looks into no hosts file and
// no search list. Its methods are safe for concurrent use.
type Upstream struct {
	servers func() []*Resolver
	group   singleflight.Group

	mu   sync.Mutex
	kept map[asked]kept
}

// asked is a question: of type 0 for the addresses of both kinds.
type asked struct {
	name string
	t    dnsmessage.Type
}

type kept struct {
	addrs   []netip.Addr
	records []dnsmessage.Resource
	err     error
	until   time.Time
}

// NewUpstream uses the resolvers given, or those of /etc/resolv.conf, as it is at the time,
// when there are none.
func NewUpstream(resolvers []*Resolver) *Upstream {
	u := &Upstream{kept: map[asked]kept{}, servers: func() []*Resolver { return resolvers }}
	if len(resolvers) == 0 {
		u.servers = hostResolvers("/etc/resolv.conf")
	}
	return u
}

// Lookup returns the addresses of a name, none of them judged. Kinds: NotFound (no such
// name, or one without an address), Unavailable.
func (u *Upstream) Lookup(ctx context.Context, name string) ([]netip.Addr, error) {
	k := u.once(ctx, asked{name: name}, func(ctx context.Context) kept { return u.ask(ctx, name) })
	return k.addrs, k.err
}

// Records returns the records of a type, not one of addresses, that a name has, or that the
// name has which it is an alias of. Who owns them is not said. Kinds: as of Lookup; a name
// without such a record is no error.
func (u *Upstream) Records(ctx context.Context, name string, t dnsmessage.Type) ([]dnsmessage.Resource, error) {
	k := u.once(ctx, asked{name, t}, func(ctx context.Context) kept {
		a, err := u.follow(ctx, name, t)
		keep := min(max(a.ttl, minKeep), maxKeep)
		if len(a.records) == 0 {
			keep = keepMissing
		}
		return kept{records: a.records, err: err, until: time.Now().Add(keep)}
	})
	return slices.Clone(k.records), k.err // the caller changes the headers
}

// once asks, unless the answer is kept or somebody else is asking.
func (u *Upstream) once(ctx context.Context, q asked, ask func(context.Context) kept) kept {
	u.mu.Lock()
	k, ok := u.kept[q]
	u.mu.Unlock()
	if ok && time.Now().Before(k.until) {
		return k
	}
	// Who asked first may lose patience before those who joined: the question goes on.
	result := u.group.DoChan(q.name+" "+q.t.String(), func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), maxPatience)
		defer cancel()
		k := ask(ctx)
		if berm.KindOf(k.err) != berm.Unavailable {
			u.keep(q, k)
		}
		return k, nil
	})
	select {
	case r := <-result:
		return r.Val.(kept)
	case <-ctx.Done():
		return kept{err: berm.Errorf(berm.Unavailable, "resolve %s: %w", q.name, ctx.Err())}
	}
}

func (u *Upstream) keep(q asked, k kept) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.kept) >= maxKept {
		clear(u.kept)
	}
	u.kept[q] = k
}

// ask asks for both kinds of addresses at the same time. One of them is enough.
func (u *Upstream) ask(ctx context.Context, name string) kept {
	types := [...]dnsmessage.Type{dnsmessage.TypeAAAA, dnsmessage.TypeA}
	var answers [len(types)]answer
	var errs [len(types)]error
	var group sync.WaitGroup
	for i, t := range types {
		group.Go(func() { answers[i], errs[i] = u.follow(ctx, name, t) })
	}
	group.Wait()
	k := kept{}
	least := maxKeep
	for i, a := range answers {
		if errs[i] == nil {
			k.addrs = append(k.addrs, a.addrs...)
			if len(a.addrs) > 0 {
				least = min(least, a.ttl)
			}
		}
	}
	switch {
	case len(k.addrs) > 0:
		k.until = time.Now().Add(max(least, minKeep))
		return k
	// That there is no address may only be said when both were answered.
	case errs[0] != nil && berm.KindOf(errs[0]) != berm.NotFound:
		k.err = errs[0]
	case errs[1] != nil:
		k.err = errs[1]
	default:
		k.err = berm.Errorf(berm.NotFound, "the name %s has no address", name)
	}
	k.until = time.Now().Add(keepMissing)
	return k
}

// answer is what resolvers know about a name.
type answer struct {
	addrs   []netip.Addr
	records []dnsmessage.Resource // of another type
	ttl     time.Duration
	alias   string // where the chain ends, if it ends without an address or record
}

// follow asks for one type, and again where a chain of aliases is given in parts.
func (u *Upstream) follow(ctx context.Context, name string, t dnsmessage.Type) (answer, error) {
	asked, ttl := name, maxKeep
	for range maxChain {
		a, err := u.exchange(ctx, asked, t)
		if err != nil {
			return answer{}, err
		}
		ttl = min(ttl, a.ttl)
		if a.alias == "" || len(a.addrs)+len(a.records) > 0 {
			a.ttl = ttl
			return a, nil
		}
		asked = a.alias
	}
	return answer{}, berm.Errorf(berm.NotFound, "the name %s leads through more than %d aliases", name, maxChain)
}

// isMissing says whether there is no such name.
func isMissing(err error) bool { return err != nil && berm.KindOf(err) == berm.NotFound }

// read takes the answer to a question out of a message that a resolver sent: the addresses, or
// the records, at the end of the chain of aliases that begins at the name, whatever else is in it.
func read(message []byte, q dnsmessage.Question, id uint16) (a answer, code dnsmessage.RCode, truncated, ok bool) {
	var p dnsmessage.Parser
	head, err := p.Start(message)
	if err != nil || !head.Response || head.ID != id {
		return a, 0, false, false
	}
	questions, err := p.AllQuestions()
	if err != nil || len(questions) != 1 || !sameQuestion(questions[0], q) {
		return a, 0, false, false
	}
	if head.RCode != dnsmessage.RCodeSuccess || head.Truncated {
		return a, head.RCode, head.Truncated, true
	}
	aliases := map[string]string{}
	addrs := map[string][]netip.Addr{}
	records := map[string][]dnsmessage.Resource{}
	ttls := map[string]time.Duration{}
	for {
		h, err := p.AnswerHeader()
		if errors.Is(err, dnsmessage.ErrSectionDone) {
			break
		}
		if err != nil {
			return a, 0, false, false
		}
		owner := canonical(h.Name)
		ttl := time.Duration(h.TTL) * time.Second
		if old, ok := ttls[owner]; !ok || ttl < old {
			ttls[owner] = ttl
		}
		switch {
		case h.Class != dnsmessage.ClassINET:
			err = p.SkipAnswer()
		case h.Type == q.Type && q.Type != dnsmessage.TypeA && q.Type != dnsmessage.TypeAAAA:
			var r dnsmessage.Resource
			r, err = p.Answer()
			records[owner] = append(records[owner], r)
		case h.Type == dnsmessage.TypeCNAME:
			var r dnsmessage.CNAMEResource
			r, err = p.CNAMEResource()
			aliases[owner] = canonical(r.CNAME)
		case h.Type == dnsmessage.TypeA && q.Type == h.Type:
			var r dnsmessage.AResource
			r, err = p.AResource()
			addrs[owner] = append(addrs[owner], netip.AddrFrom4(r.A))
		case h.Type == dnsmessage.TypeAAAA && q.Type == h.Type:
			var r dnsmessage.AAAAResource
			r, err = p.AAAAResource()
			addrs[owner] = append(addrs[owner], netip.AddrFrom16(r.AAAA))
		default:
			err = p.SkipAnswer()
		}
		if err != nil {
			return a, 0, false, false
		}
	}
	name := canonical(q.Name)
	a.ttl = maxKeep
	for range maxChain + 1 {
		if ttl, ok := ttls[name]; ok {
			a.ttl = min(a.ttl, ttl)
		}
		if found := addrs[name]; len(found) > 0 {
			a.addrs, a.alias = found[:min(len(found), maxAddrs)], ""
			return a, 0, false, true
		}
		if found := records[name]; len(found) > 0 {
			a.records, a.alias = found[:min(len(found), maxAddrs)], ""
			return a, 0, false, true
		}
		next, ok := aliases[name]
		if !ok {
			return a, 0, false, true
		}
		name, a.alias = next, next
	}
	return answer{}, dnsmessage.RCodeServerFailure, false, true
}

// maxAddrs is how many addresses or records of a name are used.
const maxAddrs = 32

func sameQuestion(a, b dnsmessage.Question) bool {
	return a.Type == b.Type && a.Class == b.Class && canonical(a.Name) == canonical(b.Name)
}
