package dns

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/berm-sandbox/berm"
)

// How long to wait for one resolver, how often all are asked, and the bound of it all.
const (
	patience    = 2 * time.Second
	tlsPatience = 4 * time.Second // with the handshakes of one that is encrypted
	rounds      = 2
	maxPatience = 15 * time.Second
)

// maxDatagram is more than a resolver may send, which was told udpSize.
const maxDatagram = 4096

// canonical is a name in lower case without the last dot.
func canonical(n dnsmessage.Name) string { return strings.ToLower(strings.TrimSuffix(n.String(), ".")) }

// exchange asks the resolvers one after another, until one answers.
func (u *Upstream) exchange(ctx context.Context, name string, t dnsmessage.Type) (answer, error) {
	full, err := dnsmessage.NewName(name + ".")
	if err != nil || !isHost(name) {
		return answer{}, berm.Errorf(berm.NotFound, "there is no name %q", name)
	}
	q := dnsmessage.Question{Name: full, Type: t, Class: dnsmessage.ClassINET}
	failed := errors.New("no resolver is configured")
	for range rounds {
		for _, server := range u.servers() {
			a, code, err := u.one(ctx, server, q)
			switch {
			case ctx.Err() != nil:
				return answer{}, berm.Errorf(berm.Unavailable, "resolve %s: %w", name, ctx.Err())
			case err != nil:
				failed = err
			case code == dnsmessage.RCodeSuccess:
				return a, nil
			case code == dnsmessage.RCodeNameError:
				return answer{}, berm.Errorf(berm.NotFound, "there is no name %s", name)
			default: // another may know better
				failed = errors.New("the resolver " + server.String() + " says " + code.String())
			}
		}
	}
	return answer{}, berm.Errorf(berm.Unavailable, "resolve %s: %w", name, failed)
}

// one asks one resolver: by datagram, and by TCP if the answer does not fit into one.
func (u *Upstream) one(ctx context.Context, server *Resolver, q dnsmessage.Question) (answer, dnsmessage.RCode, error) {
	wait := patience
	if server.TLS != "" {
		wait = tlsPatience
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	id := uint16(rand.Uint32()) // together with a random port; the source seeds from the kernel
	if server.Path != "" {
		id = 0 // RFC 8484 section 4.1; the connection tells answers apart
	}
	var h dnsmessage.ResourceHeader
	if err := h.SetEDNS0(udpSize, dnsmessage.RCodeSuccess, false); err != nil {
		return answer{}, 0, err
	}
	message, err := (&dnsmessage.Message{
		Header:      dnsmessage.Header{ID: id, RecursionDesired: true},
		Questions:   []dnsmessage.Question{q},
		Additionals: []dnsmessage.Resource{{Header: h, Body: &dnsmessage.OPTResource{}}},
	}).Pack()
	if err != nil {
		return answer{}, 0, err
	}
	if server.TLS != "" {
		reply, err := server.transact(ctx, message)
		if err != nil {
			return answer{}, 0, fmt.Errorf("the resolver %s: %w", server, err)
		}
		a, code, truncated, ok := read(reply, q, id)
		if !ok || truncated {
			return answer{}, 0, fmt.Errorf("the resolver %s sends no answer to the question", server)
		}
		return a, code, nil
	}
	for _, network := range [...]string{"udp", "tcp"} {
		a, code, truncated, err := transact(ctx, network, server.At, message, q, id)
		if err != nil {
			return answer{}, 0, err
		}
		if !truncated {
			return a, code, nil
		}
	}
	return answer{}, 0, errors.New("the resolver " + server.String() + " cuts its answers short")
}

func transact(ctx context.Context, network string, server netip.AddrPort, message []byte, q dnsmessage.Question, id uint16) (a answer, code dnsmessage.RCode, truncated bool, err error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, server.String())
	if err != nil {
		return a, 0, false, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if network == "tcp" {
		reply, err := streamed(conn, message)
		if err != nil {
			return a, 0, false, err
		}
		a, code, truncated, ok := read(reply, q, id)
		if !ok {
			err = errors.New("the resolver " + server.String() + " sends no answer to the question")
		}
		return a, code, truncated, err
	}
	if _, err := conn.Write(message); err != nil {
		return a, 0, false, err
	}
	reply := make([]byte, maxDatagram)
	for {
		n, err := conn.Read(reply)
		if err != nil {
			return a, 0, false, err
		}
		// What is no answer to the question may be forged: the real one may still come.
		if a, code, truncated, ok := read(reply[:n], q, id); ok {
			return a, code, truncated, nil
		}
	}
}

// recheck is how often the resolvers of the host are looked up again.
const recheck = 5 * time.Second

// hostResolvers reads a resolv.conf(5) whenever it is older than recheck.
func hostResolvers(path string) func() []*Resolver {
	var mu sync.Mutex
	var servers []*Resolver
	var readAt time.Time
	return func() []*Resolver {
		mu.Lock()
		defer mu.Unlock()
		if time.Since(readAt) > recheck {
			readAt = time.Now()
			text, _ := os.ReadFile(path) // none is as good as an empty one
			servers = nil
			for _, at := range parseResolvers(text) {
				servers = append(servers, &Resolver{At: at})
			}
		}
		return servers
	}
}

// parseResolvers returns the name servers of a resolv.conf(5), the first three, as the C
// library takes them; that of this host when it has none.
func parseResolvers(text []byte) []netip.AddrPort {
	var servers []netip.AddrPort
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan() && len(servers) < 3; {
		fields := strings.Fields(lines.Text())
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		if addr, err := netip.ParseAddr(fields[1]); err == nil {
			servers = append(servers, netip.AddrPortFrom(addr, 53))
		}
	}
	if len(servers) == 0 {
		servers = []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:53"), netip.MustParseAddrPort("[::1]:53")}
	}
	return servers
}
