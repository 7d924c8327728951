package control

import (
	"context"
	"os"
	"reflect"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/service"
)

// Broker is the service of credentials, which looks into requests.
type Broker interface {
	// Open makes a sandbox known, until the link ends.
	Open(ctx context.Context, id berm.SandboxID, b Brokering, events func(egress.Event)) (Link, egress.Brokered, error)
	// Bind replaces policy and grants at the broker. Secrets are those of the team, as with Open.
	Bind(ctx context.Context, id berm.SandboxID, team berm.Team, link Link, p egress.Policy, g Grants) (egress.Brokered, error)
	// CheckSecret fails with NotFound when the team has no stored secret of that name.
	CheckSecret(ctx context.Context, team berm.Team, name string) error
	// CheckFields returns the secrets that the values of fields refer to. Kinds: Invalid,
	// Unsupported.
	CheckFields(fields Fields) (secrets []string, err error)
	// SetFields keeps fields of a sandbox with their values; of none it keeps nothing.
	SetFields(ctx context.Context, id berm.SandboxID, fields Fields) error
	// Fields returns them.
	Fields(ctx context.Context, id berm.SandboxID) (Fields, error)
	// SetProxyPassword keeps that of a sandbox's own proxy; "" is none.
	SetProxyPassword(ctx context.Context, id berm.SandboxID, password string) error
	// ProxyPassword returns it.
	ProxyPassword(ctx context.Context, id berm.SandboxID) (string, error)
	// Keeps are the sandboxes of which it keeps some.
	Keeps(ctx context.Context) ([]berm.SandboxID, error)
}

// Brokering is what a Broker is told of a sandbox.
type Brokering struct {
	Team   berm.Team // whose secrets the grants name
	Policy egress.Policy
	Open   []string // ranges that the operator opens
	Grants Grants
	Door   *os.File // an end of a connection whose other end the Service gets
	Kept   *os.File // what it had kept for the sandbox; nil for nothing
}

// credentialKind begins the kinds of events about credentials.
const credentialKind = "credential."

// inspected says whether requests of the sandbox are looked into.
func (s *Sandbox) inspected() bool {
	return s.Policy != nil && (s.Policy.Inspects || !s.Grants.empty())
}

// links are those that live.
func (o *online) links() (link, broker Link) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.link, o.broker
}

// lose forgets those of two links that have ended.
func (o *online) lose(link, broker Link) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, l := range []struct {
		had Link
		now *Link
	}{{link, &o.link}, {broker, &o.broker}} {
		select {
		case <-done(l.had):
			if *l.now == l.had {
				*l.now = nil
			}
		default:
		}
	}
}

// done is closed when a link has ended; never when there is none.
func done(l Link) <-chan struct{} {
	if l == nil {
		return nil
	}
	return l.Done()
}

// order is a sandbox's policy for the Service.
func (s *session) order(ctx context.Context, info *Sandbox) (egress.Policy, error) {
	order, err := s.brokerOrder(ctx, info)
	s.online.mu.Lock()
	defer s.online.mu.Unlock()
	order.Attach, order.Endpoints = s.online.attach, s.online.endpoints
	return order, err
}

// brokerOrder is a sandbox's policy for the Broker.
func (s *session) brokerOrder(ctx context.Context, info *Sandbox) (egress.Policy, error) {
	order := info.Policy.order()
	order.Upstream = s.m.Egress.Upstream
	if p := info.Network.EgressProxy; p != nil {
		password, err := s.m.Egress.Broker.ProxyPassword(ctx, info.ID)
		if err != nil {
			return order, err
		}
		p.way(&order.Upstream, password)
	}
	return order, nil
}

// openDoor makes the connection between the service and the broker, which it makes the
// sandbox known to, and returns the service's end; nil when no requests are looked into. The
// caller holds setting.
func (s *session) openDoor(ctx context.Context, info *Sandbox) (door *os.File, err error) {
	o := s.online
	_, broker := o.links()
	if broker == nil && !info.inspected() {
		return nil, nil //nolint:nilnil // see above
	}
	if s.m.Egress.Broker == nil {
		return nil, berm.Errorf(berm.Unsupported, "this server cannot look into requests")
	}
	door, theirs, err := service.Pair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	if broker != nil {
		var order egress.Policy
		if order, err = s.brokerOrder(ctx, info); err == nil {
			_, err = broker.Door(ctx, order, theirs)
		}
		if berm.KindOf(err) == berm.Unavailable && err != nil {
			o.lose(nil, broker)
		}
	} else {
		err = s.meetBroker(ctx, info, theirs)
	}
	if err != nil {
		door.Close()
		return nil, err
	}
	return door, nil
}

// meetBroker makes the sandbox known to the broker.
func (s *session) meetBroker(ctx context.Context, info *Sandbox, door *os.File) error {
	handle := s.current()
	kept, err := handle.Kept(ctx)
	if err != nil {
		return err
	}
	if kept != nil {
		defer kept.Close()
	}
	order, err := s.brokerOrder(ctx, info)
	if err != nil {
		return err
	}
	broker, got, err := s.m.Egress.Broker.Open(ctx, info.ID, Brokering{
		Team: info.Team, Policy: order, Open: s.m.Egress.Open, Grants: info.Grants, Door: door, Kept: kept,
	}, s.flow)
	if err != nil {
		return err
	}
	// What nobody keeps would be made anew by the next broker, and not be trusted inside.
	if got.Keep != nil {
		err = handle.Keep(ctx, got.Keep)
		got.Keep.Close()
	}
	if err == nil {
		if err = s.inform(ctx, got); err != nil && kept != nil {
			s.m.Log.Error("the guest agent was not told again what it knows", "sandbox", info.ID, "error", err)
			err = nil
		}
	}
	if err != nil {
		finish(broker)
		return err
	}
	s.useBroker(broker, got)
	return nil
}

func (s *session) useBroker(broker Link, got egress.Brokered) {
	o := s.online
	o.mu.Lock()
	defer o.mu.Unlock()
	o.broker, o.attach, o.endpoints = broker, got.Attach, got.Endpoints
	select {
	case <-o.over:
		o.broker = nil
		go finish(broker)
	default:
	}
}

// rebroker makes the sandbox known to the broker again, and tells the service of it.
func (s *session) rebroker(ctx context.Context) error {
	o := s.online
	o.setting.Lock()
	defer o.setting.Unlock()
	info := s.snapshot()
	link, broker := o.links()
	if link == nil || broker != nil {
		return nil // somebody else did
	}
	ctx, cancel := context.WithTimeout(ctx, attachTime)
	defer cancel()
	door, err := s.openDoor(ctx, &info)
	if err != nil {
		return err
	}
	defer door.Close()
	order, err := s.order(ctx, &info)
	if err != nil {
		return err
	}
	_, err = link.Door(ctx, order, door)
	if berm.KindOf(err) == berm.Unavailable && err != nil {
		return nil // the link has ended: it is attached with another door
	}
	return err
}

// bind gives the broker the present policy and grants.
func (s *session) bind(ctx context.Context, broker Link, info *Sandbox) error {
	order, err := s.brokerOrder(ctx, info)
	if err != nil {
		return err
	}
	got, err := s.m.Egress.Broker.Bind(ctx, info.ID, info.Team, broker, order, info.Grants)
	if err != nil {
		return err
	}
	s.online.mu.Lock()
	s.online.attach, s.online.endpoints = got.Attach, got.Endpoints
	s.online.mu.Unlock()
	return s.inform(ctx, got)
}

// inform tells the guest agent what programs inside have to trust, and what stands for
// credentials. A paused sandbox is told when it goes on.
func (s *session) inform(ctx context.Context, got egress.Brokered) error {
	told := berm.GuestConfig{Authority: got.Authority, Placeholders: got.Env}
	if told.Placeholders == nil {
		told.Placeholders = map[string]string{}
	}
	s.online.mu.Lock()
	before := s.online.toldAgent
	s.online.mu.Unlock()
	if reflect.DeepEqual(before, told) {
		return nil
	}
	err := s.tellAgent(ctx, told)
	s.online.mu.Lock()
	defer s.online.mu.Unlock()
	if err == nil {
		s.online.toldAgent = told
	}
	if berm.KindOf(err) == berm.Conflict && err != nil {
		s.online.untoldAgent = &told
		return nil
	}
	s.online.untoldAgent = nil
	return err
}

// informResumed tells the agent what could not be told while the sandbox was paused.
func (s *session) informResumed(ctx context.Context) {
	if s.online == nil {
		return
	}
	s.online.mu.Lock()
	told := s.online.untoldAgent
	s.online.untoldAgent = nil
	s.online.mu.Unlock()
	if told == nil {
		return
	}
	if err := s.tellAgent(ctx, *told); err != nil {
		s.m.Log.Error("programs of a sandbox do not trust what looks into their requests", "sandbox", s.info.ID, "error", err)
	}
}

// tellAgent changes the configuration of the guest agent of a sandbox that somebody has.
func (s *session) tellAgent(ctx context.Context, told berm.GuestConfig) error {
	token := ""
	if info := s.snapshot(); info.Secure {
		token = s.m.token("access", info.ID)
	}
	return s.initAgent(ctx, token, told)
}
