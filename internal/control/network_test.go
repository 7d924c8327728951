package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/control/enginetest"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/policy"
	"github.com/berm-sandbox/berm/internal/store"
)

// carrier is a network service in memory as Service.
type carrier struct{ *enginetest.Network }

func (c carrier) Attach(ctx context.Context, id berm.SandboxID, link, door *os.File, p egress.Policy, open []string, events func(egress.Event)) (Link, []string, error) {
	l, warnings, err := c.Network.Attach(ctx, id, link, door, p, open, events)
	if err != nil {
		return nil, nil, err
	}
	return l, warnings, nil
}

// broker is a service of credentials in memory as Broker.
type broker struct {
	*enginetest.Network
	enginetest.Vault
	teams *sync.Map // whose secrets a sandbox gets
}

func (b broker) Open(ctx context.Context, id berm.SandboxID, o Brokering, events func(egress.Event)) (Link, egress.Brokered, error) {
	l, _, err := b.Attach(ctx, id, o.Door, nil, o.Policy, o.Open, events)
	if err != nil {
		return nil, egress.Brokered{}, err
	}
	got, err := b.Bind(ctx, id, o.Team, l, o.Policy, o.Grants)
	if err == nil && o.Kept == nil {
		got.Keep, err = os.Open(os.DevNull)
	}
	return l, got, err
}

func (b broker) Bind(ctx context.Context, id berm.SandboxID, team berm.Team, l Link, p egress.Policy, g Grants) (egress.Brokered, error) {
	b.teams.Store(id, team)
	_, err := l.Set(ctx, p)
	return egress.Brokered{Authority: "authority of " + string(id)}, err
}

func (b broker) CheckFields(fields Fields) ([]string, error) { return b.Secrets(fields), nil }

func (b broker) SetFields(_ context.Context, id berm.SandboxID, fields Fields) error {
	b.Keep(id, fields)
	return nil
}

func (b broker) Fields(_ context.Context, id berm.SandboxID) (Fields, error) { return b.Kept(id), nil }

func newOnlineWorld(t *testing.T, public bool) (*world, *enginetest.Network) {
	n := &enginetest.Network{}
	w := newWorld(t, func(c *Config) {
		c.Egress = Egress{Service: carrier{n}, Broker: broker{&enginetest.Network{}, enginetest.NewVault(), &sync.Map{}}, Public: public}
	})
	return w, n
}

// document is the policy in the hands of the service.
func document(t *testing.T, n *enginetest.Network, id berm.SandboxID) *policy.Policy {
	t.Helper()
	l := n.Link(id)
	if l == nil {
		t.Fatal("the service has no link")
	}
	p, err := policy.DecodeJSON("test", l.Policy().JSON)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestNetworkOfACreate(t *testing.T) {
	no, yes := false, true
	for name, c := range map[string]struct {
		public   bool
		request  func(*CreateRequest)
		reach    string
		fallback policy.Default
		rules    int
	}{
		"public by default":     {true, func(*CreateRequest) {}, ReachPublic, policy.AllowPublic, 0},
		"nothing by default":    {false, func(*CreateRequest) {}, ReachNothing, policy.DenyAll, 0},
		"no internet":           {true, func(r *CreateRequest) { r.Internet = &no }, ReachNothing, policy.DenyAll, 0},
		"internet":              {false, func(r *CreateRequest) { r.Internet = &yes }, ReachPublic, policy.AllowPublic, 0},
		"a name and no more":    {true, func(r *CreateRequest) { r.Network.AllowOut = []string{"example.com"}; r.Internet = &no }, ReachRules, policy.DenyAll, 1},
		"a range is denied":     {true, func(r *CreateRequest) { r.Network.DenyOut = []string{"192.0.2.0/24"} }, ReachRules, policy.AllowPublic, 1},
		"all traffic is denied": {true, func(r *CreateRequest) { r.Network.DenyOut = []string{"0.0.0.0/0"} }, ReachNothing, policy.DenyAll, 0},
	} {
		t.Run(name, func(t *testing.T) {
			w, n := newOnlineWorld(t, c.public)
			s := w.create(t, c.request)
			if s.Reach() != c.reach || s.Policy.Revision != 1 {
				t.Errorf("reaches %s, revision %d", s.Reach(), s.Policy.Revision)
			}
			p := document(t, n, s.ID)
			if p.Default != c.fallback || len(p.Rules) != c.rules {
				t.Errorf("policy %s", p.YAML())
			}
			if !strings.Contains(w.audit.types(s.ID), "policy.set:ok policy.set:ok sandbox.start:ok") {
				t.Errorf("records: %s", w.audit.types(s.ID))
			}
			if w.audit.together != 2 { // each exchange with the log's writer is waited for
				t.Errorf("%d records came with others", w.audit.together)
			}
		})
	}
}

func TestNetworkThatCannotBeHad(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t, func(c *Config) { c.Egress = Egress{Missing: "no TUN devices", Public: true} })
	s := w.create(t)
	if s.Reach() != ReachNone || w.engine.Specs[0].Link {
		t.Errorf("reaches %s, spec %+v", s.Reach(), w.engine.Specs[0])
	}
	ask := func(n Network) error {
		_, err := w.Create(ctx, CreateRequest{Template: "base", Timeout: time.Minute, Secure: true, Network: n})
		return err
	}
	err := ask(Network{AllowOut: []string{"192.0.2.1"}})
	if wantKind(t, err, berm.Unsupported); err == nil || !strings.Contains(err.Error(), "no TUN devices") {
		t.Errorf("%v does not tell the reason", err)
	}
	wantKind(t, ask(Network{AllowOut: []string{"not a name"}, DenyOut: []string{"0.0.0.0/0"}}), berm.Invalid)
	wantKind(t, w.SetNetwork(ctx, s.ID, Network{AllowOut: []string{"192.0.2.1"}}, nil, tester), berm.Unsupported)
	if err := w.SetNetwork(ctx, s.ID, Network{DenyOut: []string{"192.0.2.1"}}, nil, tester); err != nil {
		t.Error(err)
	}
	_, _, err = w.SetPolicy(ctx, s.ID, &policy.Policy{}, 0, tester)
	wantKind(t, err, berm.Unsupported)
}

// A sandbox whose link is not taken is not kept.
func TestCreateWithoutTheService(t *testing.T) {
	w, n := newOnlineWorld(t, true)
	n.Fail(berm.Errorf(berm.Unavailable, "no service"))
	_, err := w.Create(t.Context(), CreateRequest{Template: "base", Timeout: time.Minute})
	wantKind(t, err, berm.Unavailable)
	if left, _ := w.engine.List(t.Context()); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	// Nor does the broker go on to know it, or to keep what is for it.
	_, err = w.Create(t.Context(), CreateRequest{Template: "base", Timeout: time.Minute, Network: Network{
		Transforms: map[string][]policy.E2BTransform{"a.example": {{Headers: map[string]string{"X-Key": "value"}}}},
	}})
	wantKind(t, err, berm.Unavailable)
	b := w.Egress.Broker.(broker)
	if l := b.Link(w.engine.Specs[len(w.engine.Specs)-1].ID); l == nil {
		t.Error("the broker was not asked")
	} else {
		select {
		case <-l.Done():
		default:
			t.Error("the broker knows a sandbox that was not made")
		}
	}
	if kept, _ := b.Keeps(t.Context()); len(kept) > 0 {
		t.Errorf("kept of %v", kept)
	}
}

func TestSetPolicy(t *testing.T) {
	ctx := t.Context()
	w, n := newOnlineWorld(t, true)
	s := w.create(t, func(r *CreateRequest) { r.Network.DenyOut = []string{"192.0.2.0/24"} })
	if len(s.Warnings) != 1 {
		t.Errorf("a create tells the warnings %q", s.Warnings)
	}
	if err := w.SetNetwork(ctx, s.ID, Network{}, nil, tester); err != nil {
		t.Fatal(err)
	}
	if p := document(t, n, s.ID); p.Default != policy.AllowPublic || len(p.Rules) != 0 || n.Link(s.ID).Policy().Revision != "2" {
		t.Errorf("an empty update left %s", p.YAML())
	}
	next := &policy.Policy{}
	revision, warnings, err := w.SetPolicy(ctx, s.ID, next, 2, tester)
	if err != nil || revision != 3 || len(warnings) != 1 {
		t.Fatalf("revision %d, warnings %v, %v", revision, warnings, err)
	}
	if _, _, err := w.SetPolicy(ctx, s.ID, next, 2, tester); !errors.Is(err, ErrPolicyChanged) {
		t.Errorf("over a newer one: %v", err)
	}
	info, _ := w.Get(ctx, s.ID)
	if info.Network.DenyOut != nil || info.Reach() != ReachNothing || info.Policy.Revision != 3 {
		t.Errorf("told of it: %+v", info)
	}
	wantKind(t, w.SetNetwork(ctx, s.ID, Network{DenyOut: []string{"a.name"}}, nil, tester), berm.Invalid)
	wantKind(t, w.SetNetwork(ctx, berm.NewSandboxID(), Network{}, nil, tester), berm.NotFound)

	// What the service or the log refuses leaves the old one.
	n.Fail(berm.Errorf(berm.Invalid, "no such policy"))
	wantKind(t, w.SetNetwork(ctx, s.ID, Network{}, nil, tester), berm.Invalid)
	n.Fail(nil)
	w.audit.setFail(berm.Errorf(berm.Unavailable, "the disk is full"))
	wantKind(t, w.SetNetwork(ctx, s.ID, Network{}, nil, tester), berm.Unavailable)
	w.audit.setFail(nil)
	if info, _ = w.Get(ctx, s.ID); info.Policy.Revision != 3 || n.Link(s.ID).Policy().Revision != "3" {
		t.Errorf("a change that failed left revision %d", info.Policy.Revision)
	}
}

// The link is given to the service again when that died, and by the next server, with the
// policy that was set last.
func TestNetworkComesBack(t *testing.T) {
	ctx := t.Context()
	w, n := newOnlineWorld(t, true)
	s := w.create(t)
	n.Fail(berm.Errorf(berm.Unavailable, "starting"))
	n.Die()
	if _, _, err := w.SetPolicy(ctx, s.ID, &policy.Policy{}, 1, tester); err != nil {
		t.Fatal(err) // nothing passes, and the new one will be in force
	}
	n.Fail(nil)
	eventually(t, "attached again", func() bool { return n.Link(s.ID) != nil })
	if p := n.Link(s.ID).Policy(); p.Revision != "2" {
		t.Errorf("revision %s", p.Revision)
	}
	w.Close()
	if n.Link(s.ID).Done(); n.Attached() != 2 {
		t.Errorf("attached %d times", n.Attached())
	}
	w.start(t, func(c *Config) { c.Egress = Egress{Service: carrier{n}, Public: true} })
	eventually(t, "attached by the next server", func() bool { return n.Attached() == 3 })
	if p := document(t, n, s.ID); p.Default == policy.AllowPublic {
		t.Errorf("policy %s", p.YAML())
	}
	if err := w.SetNetwork(ctx, s.ID, Network{}, nil, tester); err != nil {
		t.Error(err)
	}
	if err := w.Kill(ctx, s.ID, tester); err != nil {
		t.Fatal(err)
	}
	select {
	case <-n.Link(s.ID).Done():
	default:
		t.Error("a killed sandbox keeps its link")
	}
	time.Sleep(100 * time.Millisecond)
	if n.Attached() != 3 {
		t.Error("the link of a dead sandbox was attached")
	}
}

func TestNetworkRecords(t *testing.T) {
	w, n := newOnlineWorld(t, true)
	s := w.create(t)
	tell := n.Link(s.ID).Tell
	tell(egress.Event{Kind: "flow", Name: "a.example", Port: 443, Action: "allow", Up: 10, Down: 20})
	tell(egress.Event{Kind: "dns", Name: "b.example", Action: "deny", Reason: "not_listed", Count: 3})
	tell(egress.Event{Kind: "http", Method: "GET", Path: strings.Repeat("/a", 10_000), Action: "allow", Up: 5, Down: 5})
	if log, _ := w.NetworkLog(s.ID, 2); len(log) != 1 || len(log[0].Path) > maxEventText+len("…") {
		t.Errorf("a long path: %d events", len(log))
	}
	var wg sync.WaitGroup
	const denials = denialsAtOnce + 500
	for i := range denials {
		wg.Go(func() {
			tell(egress.Event{Kind: "flow", Address: fmt.Sprintf("192.0.2.%d", i%250), Action: "deny", Reason: "not_listed"})
		})
	}
	wg.Wait()
	traffic := w.Traffic()[s.ID]
	if traffic != (Traffic{Up: 10, Down: 20, Allowed: 1, Denied: denials, DeniedQueries: 3}) {
		t.Errorf("%+v", traffic)
	}
	log, err := w.NetworkLog(s.ID, 0)
	if err != nil || len(log) != maxFlows || log[len(log)-1].Seq != denials+3 || log[0].Seq != 4 {
		t.Fatalf("%d events from %d, %v", len(log), log[0].Seq, err)
	}
	if later, _ := w.NetworkLog(s.ID, denials); len(later) != 3 || later[0].Seq != denials+1 {
		t.Errorf("after %d: %v", denials, later)
	}
	if none, _ := w.NetworkLog(s.ID, denials+3); len(none) != 0 {
		t.Errorf("after the last: %v", none)
	}
	w.audit.mu.Lock()
	defer w.audit.mu.Unlock()
	flows, gap := 0, 0
	for _, r := range w.audit.all {
		switch r.Type {
		case audit.NetFlow, audit.NetDNS:
			flows++
			if r.Trust != audit.TrustHost || r.Sandbox != s.ID {
				t.Errorf("record %+v", r)
			}
		case audit.Gap:
			gap += r.Data.(map[string]any)["count"].(int)
		}
	}
	if flows < denialsAtOnce || flows > denialsAtOnce+100 || flows+gap > denials+3 {
		t.Errorf("%d records, %d in gaps", flows, gap)
	}
}

// A sandbox of an older server has no policy, and no network.
func TestAdoptWithoutAPolicy(t *testing.T) {
	w := newWorld(t)
	s := w.create(t)
	w.Close()
	n := &enginetest.Network{}
	w.start(t, func(c *Config) { c.Egress = Egress{Service: carrier{n}, Public: true} })
	info, err := w.Get(t.Context(), s.ID)
	if err != nil || info.Reach() != ReachNone || n.Attached() != 0 {
		t.Errorf("%+v, %v", info, err)
	}
	var stored map[string]json.RawMessage
	row, err := w.db.Sandbox(t.Context(), s.ID)
	if err == nil {
		err = json.Unmarshal(row.Record, &stored)
	}
	if _, has := stored["policy"]; err != nil || has {
		t.Errorf("%s, %v", row.Record, err)
	}
}

// Rules that look into requests make the sandbox known to the broker, whose key outlives it.
func TestInspection(t *testing.T) {
	w, n := newOnlineWorld(t, true)
	b := w.Egress.Broker.(broker)
	s := w.create(t)
	if b.Attached() != 0 || len(w.engine.Told(s.ID)) != 0 {
		t.Error("a broker without need")
	}
	set := func(text string) {
		t.Helper()
		p, err := policy.DecodeJSON("test", []byte(text))
		if err == nil {
			_, _, err = w.SetPolicy(t.Context(), s.ID, p, 0, tester)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	looks := `{"version":1,"rules":[{"to":["example.com"],"http":{"methods":["GET"]}}]}`
	set(looks)
	told := w.engine.Told(s.ID)
	if b.Attached() != 1 || len(told) != 1 || !strings.HasPrefix(told[0].Authority, "authority of ") {
		t.Fatalf("%d times known, told %+v", b.Attached(), told)
	}
	set(looks)
	set(`{"version":1}`)
	if b.Attached() != 1 || len(w.engine.Told(s.ID)) != 1 || string(b.Link(s.ID).Policy().JSON) == looks {
		t.Errorf("%d times known, told %+v", b.Attached(), w.engine.Told(s.ID))
	}
	set(looks)
	// Either comes back without the other.
	for range 2 {
		before, links := b.Attached(), n.Attached()
		b.Die()
		eventually(t, "the broker knows it again", func() bool { return b.Attached() == before+1 })
		if n.Attached() != links {
			t.Error("the link was attached again")
		}
		n.Die()
		eventually(t, "the link is attached again", func() bool { return n.Attached() == links+1 })
		if b.Attached() != before+1 {
			t.Error("the broker met it again")
		}
	}
	// A paused sandbox is told when it goes on.
	other := w.create(t)
	if err := w.Pause(t.Context(), other.ID, tester); err != nil {
		t.Fatal(err)
	}
	s = other
	set(looks)
	if len(w.engine.Told(s.ID)) != 0 {
		t.Error("a paused sandbox was told")
	}
	if _, err := w.Resume(t.Context(), s.ID, time.Minute, tester); err != nil {
		t.Fatal(err)
	}
	if len(w.engine.Told(s.ID)) != 1 {
		t.Error("the sandbox was not told when it went on")
	}
	// The end of a sandbox is the end of its rights.
	l := b.Link(s.ID)
	if err := w.Kill(t.Context(), s.ID, tester); err != nil {
		t.Fatal(err)
	}
	select {
	case <-l.Done():
	case <-time.After(10 * time.Second):
		t.Error("the broker knows a dead sandbox")
	}
}

// What requests get is stored without values, and ends with its secret and its sandbox.
func TestGrants(t *testing.T) {
	ctx := t.Context()
	w, _ := newOnlineWorld(t, true)
	b := w.Egress.Broker.(broker)
	rules := func(value string) map[string][]policy.E2BTransform {
		return map[string][]policy.E2BTransform{"A.example": {{Headers: map[string]string{"X-Key": value}}}}
	}
	good := []Credential{{Name: "api", Secret: "secret:sKey", Hosts: []string{"api.example"}}}
	s := w.create(t, func(r *CreateRequest) { r.Network.Transforms, r.Credentials = rules("inline-value"), good })
	row, err := w.db.Sandbox(ctx, s.ID)
	if err != nil || strings.Contains(string(row.Record), "inline-value") || !strings.Contains(string(row.Record), "X-Key") {
		t.Errorf("stored: %s, %v", row.Record, err)
	}
	if got := b.Kept(s.ID); got["a.example"]["X-Key"] != "inline-value" || b.Attached() != 1 {
		t.Errorf("kept %v", got)
	}
	if all, _, err := w.Credentials(s.ID); err != nil || len(all) != 1 || all[0].Name != "api" {
		t.Errorf("%v, %v", all, err)
	}
	// What is refused leaves what was.
	for name, c := range map[string]Credential{
		"no name": {Secret: "secret:s"}, "odd name": {Name: "A", Secret: "secret:s"}, "reserved": {Name: "e2b-1", Secret: "secret:s"},
		"no secret": {Name: "a"}, "another source": {Name: "a", Secret: "env:HOME"}, "unknown secret": {Name: "a", Secret: "secret:none"},
	} {
		err := w.SetCredentials(ctx, s.ID, []Credential{c}, tester)
		if wantKind(t, err, berm.Invalid); err == nil {
			t.Error(name)
		}
	}
	b.Fail(berm.Errorf(berm.Invalid, "no such header"))
	wantKind(t, w.SetNetwork(ctx, s.ID, Network{Transforms: rules("other")}, nil, tester), berm.Invalid)
	wantKind(t, w.SetCredentials(ctx, s.ID, []Credential{}, tester), berm.Invalid)
	b.Fail(nil)
	info, _ := w.Get(ctx, s.ID)
	if got := b.Kept(s.ID); got["a.example"]["X-Key"] != "inline-value" || len(info.Grants.Credentials) != 1 || info.Policy.Revision != 1 {
		t.Errorf("a change that failed left %v, %+v", got, info.Grants)
	}
	// An update replaces fields and leaves credentials.
	if err := w.SetNetwork(ctx, s.ID, Network{Transforms: rules("${e2b.secrets.s2}")}, nil, tester); err != nil {
		t.Fatal(err)
	}
	info, _ = w.Get(ctx, s.ID)
	if !slices.Equal(info.Grants.FieldSecrets, []string{"s2"}) || len(info.Grants.Credentials) != 1 {
		t.Errorf("%+v", info.Grants)
	}
	sets := b.Link(s.ID).Sets()
	w.SecretChanged(ctx, "", "unused")
	w.SecretChanged(ctx, "blue", "S2")
	w.SecretChanged(ctx, "", "S2")
	eventually(t, "the broker reads the secret anew", func() bool { return b.Link(s.ID).Sets() == sets+1 })
	if err := w.SetNetwork(ctx, s.ID, Network{}, nil, tester); err != nil || b.Kept(s.ID) != nil {
		t.Errorf("an empty update left %v, %v", b.Kept(s.ID), err)
	}
	if err := w.SetNetwork(ctx, s.ID, Network{Transforms: rules("last")}, nil, tester); err != nil {
		t.Fatal(err)
	}
	if err := w.Kill(ctx, s.ID, tester); err != nil || b.Kept(s.ID) != nil {
		t.Errorf("the end of the sandbox left %v, %v", b.Kept(s.ID), err)
	}
	// What an earlier server left is forgotten.
	b.Keep("i0gone", map[string]map[string]string{"a": {"b": "c"}})
	w.Close()
	w.start(t, func(c *Config) { c.Egress = w.Egress })
	if ids, _ := b.Keeps(ctx); len(ids) != 0 {
		t.Errorf("%v are kept", ids)
	}
	w.audit.mu.Lock()
	defer w.audit.mu.Unlock()
	for _, r := range w.audit.all {
		if text, _ := json.Marshal(r); strings.Contains(string(text), "inline-value") {
			t.Errorf("a value in a record: %s", text)
		}
	}
}

// A secret that changes after a sandbox that is being made has got it, and before others know of the
// sandbox, reaches it too.
func TestSecretChangesDuringCreate(t *testing.T) {
	w, _ := newOnlineWorld(t, true)
	b := w.Egress.Broker.(broker)
	before := 0
	w.audit.before = func(r audit.Record) {
		if r.Type == audit.SandboxStart {
			before = b.Link(r.Sandbox).Sets()
			w.SecretChanged(t.Context(), "", "skey")
		}
	}
	s := w.create(t, func(r *CreateRequest) {
		r.Credentials = []Credential{{Name: "api", Secret: "secret:skey", Hosts: []string{"api.example"}}}
	})
	eventually(t, "the broker reads the secret anew", func() bool { return b.Link(s.ID).Sets() > before })
	w.audit.before = nil
	quiet := w.create(t, func(r *CreateRequest) { r.Credentials = s.Grants.Credentials })
	time.Sleep(20 * time.Millisecond)
	if sets := b.Link(quiet.ID).Sets(); sets != before {
		t.Errorf("the broker reads %d times what did not change", sets)
	}
}

// A sandbox gets secrets of its own team, after a restart and as a fork too, and hears of no others.
func TestGrantsOfATeam(t *testing.T) {
	ctx := t.Context()
	b := broker{&enginetest.Network{}, enginetest.NewVault(), &sync.Map{}}
	online := func(c *Config) { c.Egress = Egress{Service: carrier{&enginetest.Network{}}, Broker: b, Public: true} }
	_, keeping := saves(t)
	w := newWorld(t, online, keeping)
	if _, err := w.db.CreateTeam(ctx, "root", "blue", store.TeamLimits{}); err != nil {
		t.Fatal(err)
	}
	good := []Credential{{Name: "api", Secret: "secret:sblue", Hosts: []string{"api.example"}}}
	others := []Credential{{Name: "api", Secret: "secret:sred", Hosts: []string{"api.example"}}}
	_, err := w.Create(ctx, CreateRequest{Template: "base", Timeout: time.Minute, Team: "blue", Credentials: others, Actor: tester})
	wantKind(t, err, berm.Invalid)
	s := w.create(t, func(r *CreateRequest) { r.Team, r.Credentials = "blue", good })
	wantKind(t, w.SetCredentials(ctx, s.ID, others, tester), berm.Invalid)
	if err := w.SetCredentials(ctx, s.ID, good, tester); err != nil {
		t.Error(err)
	}
	forks, err := w.Fork(ctx, s.ID, 1, time.Minute, false, tester)
	if err != nil || forks[0].Err != nil {
		t.Fatal(err, forks)
	}
	sets := map[berm.SandboxID]int{}
	for _, id := range []berm.SandboxID{s.ID, forks[0].Sandbox.ID} {
		if team, _ := b.teams.Load(id); team != berm.Team("blue") {
			t.Errorf("%s gets the secrets of team %v", id, team)
		}
		sets[id] = b.Link(id).Sets()
	}
	w.SecretChanged(ctx, "", "sblue")
	w.SecretChanged(ctx, "red", "sblue")
	w.SecretChanged(ctx, "blue", "sblue")
	for id, before := range sets {
		eventually(t, "the broker reads the secret anew", func() bool { return b.Link(id).Sets() > before })
		time.Sleep(20 * time.Millisecond)
		if more := b.Link(id).Sets() - before; more != 1 {
			t.Errorf("%d changes of secrets reach a sandbox, and one is of its team", more)
		}
	}
	b.teams.Clear()
	w.Close()
	w.start(t, online, keeping)
	eventually(t, "the broker gets the sandbox again", func() bool { team, ok := b.teams.Load(s.ID); return ok && team == berm.Team("blue") })
}

// asker answers as a test wants it.
type asker func(ctx context.Context, id berm.SandboxID, metadata map[string]string, e egress.Event) (egress.Reply, error)

func (a asker) Ask(ctx context.Context, id berm.SandboxID, metadata map[string]string, e egress.Event) (egress.Reply, error) {
	return a(ctx, id, metadata, e)
}

// What the service asks is answered at the service, and recorded; no answer is no yes.
func TestQuestions(t *testing.T) {
	n := &enginetest.Network{}
	stuck := make(chan struct{}, 1)
	w := newWorld(t, func(c *Config) {
		c.Egress = Egress{Service: carrier{n}, Asker: asker(func(ctx context.Context, _ berm.SandboxID, metadata map[string]string, e egress.Event) (egress.Reply, error) {
			switch e.Name {
			case "yes.example.com":
				return egress.Reply{Question: e.Question(), Allow: metadata["user"] == "ann", Scope: egress.ScopeSandbox}, nil
			case "stuck.example.com":
				<-ctx.Done()
				stuck <- struct{}{}
			}
			return egress.Reply{Allow: true}, errors.New("nobody there")
		})}
	})
	s := w.create(t, func(r *CreateRequest) { r.Metadata = map[string]string{"user": "ann"} })
	tell := func(name string) {
		n.Link(s.ID).Tell(egress.Event{Kind: egress.Asks, Name: name, Port: 443, Protocol: "tcp", Rule: "rest", Duration: 60})
	}
	replies := func(count int) []egress.Reply {
		t.Helper()
		var got []egress.Reply
		eventually(t, "an answer", func() bool { got = n.Link(s.ID).Replies(); return len(got) == count })
		return got
	}
	tell("yes.example.com")
	if r := replies(1)[0]; !r.Allow || r.Scope != egress.ScopeSandbox || r.Question.Host != "yes.example.com" {
		t.Errorf("%+v", r)
	}
	tell("error.example.com")
	if r := replies(2)[1]; r.Allow || r.Scope != egress.ScopeNone || r.Question.Host != "error.example.com" {
		t.Errorf("%+v", r)
	}
	if events, err := w.NetworkLog(s.ID, 0); err != nil || len(events) != 0 {
		t.Errorf("questions are flows: %v %v", events, err)
	}
	tell("stuck.example.com")
	if err := w.Kill(t.Context(), s.ID, system); err != nil {
		t.Fatal(err)
	}
	<-stuck // the end of the sandbox is the end of its questions
}

// The password of a sandbox's own proxy is the broker's to keep, in no record and no answer,
// and goes with the sandbox.
func TestEgressProxy(t *testing.T) {
	w, n := newOnlineWorld(t, true)
	ctx := context.Background()
	b := w.Egress.Broker.(broker)
	password := func(id berm.SandboxID) string { p, _ := b.ProxyPassword(ctx, id); return p }
	proxy := func(p string) *EgressProxy {
		return &EgressProxy{Address: "proxy.example:1080", Username: "user", Password: p}
	}
	s := w.create(t, func(r *CreateRequest) { r.Network.EgressProxy = proxy("hidden-one") })
	if got := n.Link(s.ID).Policy().Upstream; got.Own != "socks5://user:hidden-one@proxy.example:1080" || !got.Verify {
		t.Errorf("%+v", got)
	}
	if s.Network.EgressProxy == nil || s.Network.EgressProxy.Password != "" || password(s.ID) != "hidden-one" {
		t.Errorf("%+v, %q", s.Network.EgressProxy, password(s.ID))
	}
	// What is refused leaves what was.
	n.Fail(berm.Errorf(berm.Invalid, "it does not resolve"))
	wantKind(t, w.SetNetwork(ctx, s.ID, Network{EgressProxy: proxy("hidden-two")}, nil, tester), berm.Invalid)
	n.Fail(nil)
	if password(s.ID) != "hidden-one" {
		t.Error("an update that failed changed the password")
	}
	if err := w.SetNetwork(ctx, s.ID, Network{EgressProxy: proxy("hidden-two")}, nil, tester); err != nil || password(s.ID) != "hidden-two" {
		t.Errorf("%v, %q", err, password(s.ID))
	}
	if err := w.SetNetwork(ctx, s.ID, Network{}, nil, tester); err != nil || password(s.ID) != "" || n.Link(s.ID).Policy().Upstream.Own != "" {
		t.Errorf("%v, %q", err, password(s.ID))
	}
	if err := w.SetNetwork(ctx, s.ID, Network{EgressProxy: proxy("hidden-last")}, nil, tester); err != nil {
		t.Fatal(err)
	}
	if err := w.Kill(ctx, s.ID, tester); err != nil || password(s.ID) != "" {
		t.Errorf("the end of the sandbox left a password: %v", err)
	}
	w.audit.mu.Lock()
	defer w.audit.mu.Unlock()
	for _, r := range w.audit.all {
		if text, _ := json.Marshal(r); strings.Contains(string(text), "hidden-") {
			t.Errorf("a password in a record: %s", text)
		}
	}
}
