package egress

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/address"
	"github.com/berm-sandbox/berm/internal/network/dns"
	"github.com/berm-sandbox/berm/internal/network/policy"
	"github.com/berm-sandbox/berm/internal/network/stack"
)

// Server is the process. Its zero value is not ready: see NewServer.
type Server struct {
	hosts *address.Hosts
	up    *dns.Upstream
}

// NewServer prepares the process. Names are resolved by the host's own resolvers, which
// Config names.
func NewServer(c Config) (*Server, error) {
	hosts, err := address.WatchHosts(nil)
	if err != nil {
		return nil, err
	}
	up, err := dns.NewUpstream(c.Resolvers)
	if err != nil {
		hosts.Close()
		return nil, err
	}
	return &Server{hosts: hosts, up: up}, nil
}

// Config is what the process is started with.
type Config struct {
	Resolvers []netip.AddrPort // that names are asked of; none uses those of /etc/resolv.conf
}

// Serve serves the connections of l until it is closed.
func (s *Server) Serve(l *net.UnixListener) error {
	for {
		conn, err := l.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil { // out of descriptors: for now
			time.Sleep(50 * time.Millisecond)
			continue
		}
		go s.Attend(conn)
	}
}

// Attend serves one sandbox until its connection ends.
func (s *Server) Attend(conn *net.UnixConn) {
	defer conn.Close()
	w := newWire(conn)
	var first order
	_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	if w.receive(&first) != nil {
		return
	}
	_ = conn.SetReadDeadline(time.Time{})
	x, err := s.open(w, first)
	if err != nil {
		_ = w.send(answer{Error: failed(err)}, nil)
		return
	}
	defer x.close()
	if w.send(answer{Done: true}, nil) != nil {
		return
	}
	go func() { // a link that failed ends the connection: its owner makes another
		<-x.stack.Done()
		conn.Close()
	}()
	for {
		var next order
		if w.receive(&next) != nil {
			return
		}
		// A policy that is wrong leaves the old one in force.
		if err := x.set(next); err != nil {
			_ = w.send(answer{Error: failed(err)}, nil)
			continue
		}
		if w.send(answer{Done: true}, nil) != nil {
			return
		}
	}
}

// open begins to use a link.
func (s *Server) open(w *wire, o order) (*sandbox, error) {
	switch {
	case o.Protocol != Protocol:
		return nil, berm.Errorf(berm.Unsupported, "the network service speaks protocol %d, not %d", Protocol, o.Protocol)
	case w.link == nil:
		return nil, berm.Errorf(berm.Invalid, "no link came with the policy")
	}
	var ranges []netip.Prefix
	for _, text := range o.Open {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, berm.Errorf(berm.Invalid, "the range %q to open: %w", text, err)
		}
		ranges = append(ranges, p)
	}
	table, err := address.NewTable(address.Config{Open: ranges, Own: s.hosts.Own})
	if err != nil {
		return nil, err
	}
	x := &sandbox{id: o.Sandbox, server: s, table: table, names: dns.NewNames(), events: newEvents(w), live: map[*flow]struct{}{}}
	if err := x.set(o); err != nil {
		return nil, err
	}
	// The stack closes what it is given, and the descriptor belongs to a file.
	raw, err := w.link.SyscallConn()
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "use the link: %w", err)
	}
	fd := -1
	if controlErr := raw.Control(func(own uintptr) { fd, err = unix.FcntlInt(own, unix.F_DUPFD_CLOEXEC, 0) }); controlErr != nil {
		err = controlErr
	}
	w.link.Close()
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "use the link: %w", err)
	}
	if x.stack, err = stack.New(fd, x, stack.Limits{}); err != nil {
		return nil, err
	}
	return x, nil
}

// sandbox is one sandbox's network. It judges the flows of its stack.
type sandbox struct {
	id     berm.SandboxID
	server *Server
	table  *address.Table
	names  *dns.Names
	stack  *stack.Stack
	events *events

	mu     sync.Mutex
	policy *policy.Evaluator
	spent  map[string]bool // rules for one flow that were used
	live   map[*flow]struct{}
}

// set puts a policy in force, and resets the flows that it does not allow.
func (x *sandbox) set(o order) error {
	var raw json.RawMessage = o.Policy
	p, err := policy.DecodeJSON("policy", raw)
	if err != nil {
		return err
	}
	p.Revision = o.Revision
	e, err := policy.NewEvaluator(p, nil, x.table)
	if err != nil {
		return err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.policy, x.spent = e, map[string]bool{}
	for f := range x.live {
		if v := e.Decide(f.question); v.Action != policy.Allow {
			f.deny(v)
			f.inside.Reset()
		}
	}
	return nil
}

func (x *sandbox) evaluator() *policy.Evaluator {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.policy
}

func (x *sandbox) close() {
	x.stack.Close()
	x.events.close()
}

// Query answers one DNS message.
func (x *sandbox) Query(ctx context.Context, server netip.Addr, message []byte) []byte {
	return dns.Answer(ctx, x.names, message, func(name string) bool {
		allowed := x.evaluator().AllowsName(name, time.Now())
		if !allowed {
			x.events.add(Event{Time: time.Now(), Kind: "dns", Name: name, Action: "deny", Reason: string(policy.ReasonNotListed)})
		}
		return allowed
	})
}

// Limited tells of a flow that a limit refused.
func (x *sandbox) Limited(f *stack.Flow, limit stack.Limit) {
	x.events.add(Event{
		Time: time.Now(), Kind: "flow", Name: x.names.Name(f.Destination.Addr()), Address: f.Destination.Addr().String(), Port: f.Destination.Port(),
		Protocol: string(f.Protocol), Action: "deny", Reason: string(policy.ReasonLimit), Detail: string(limit),
	})
}
