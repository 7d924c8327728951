package credential

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"io"
	mathrand "math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/berm-sandbox/berm"
)

// Broker holds the bindings of all sandboxes. The zero value has no secrets. Its fields
// are set before it is used; its methods are safe for concurrent use.
type Broker struct {
	Sources Sources
	// Methods makes the methods of further kinds.
	Methods map[Kind]func(Binding) (Method, error)
	// Report records an event. When the use of a secret cannot be recorded, it is not used.
	Report func(Event) error
	// Seed is what placeholders of a sandbox are made from, so that a later process makes the
	// same; nil makes them at random.
	Seed func(berm.SandboxID) []byte

	mu     sync.Mutex
	sets   map[berm.SandboxID]*Set
	issued map[digest]issue // placeholders, also of what was revoked
}

// issue is who a placeholder was made for.
type issue struct {
	sandbox berm.SandboxID
	revoked time.Time // zero while it is valid
}

// remembered is how long a placeholder that is not valid any more is known for one.
const remembered = 24 * time.Hour

// Set is the bindings of one sandbox.
type Set struct {
	broker  *Broker
	sandbox berm.SandboxID

	mu    sync.Mutex // of changes
	state atomic.Pointer[state]
	// masks outlives the rights: what happened is told after their end too.
	masks atomic.Pointer[matcher]
}

// state is what Attach judges by. It is never changed.
type state struct {
	revision uint64
	bindings []*live
	requests *matcher // placeholders, and secrets that should not be inside
	leaks    *matcher // those secrets alone
	replies  *matcher // secrets that must not come inside
	// requestNames and replyNames find them in names of fields, whose case is not kept.
	requestNames, replyNames *matcher
}

// live is a binding in force.
type live struct {
	Binding
	method      Method
	placeholder string // empty when the sandbox gets none
	digest      digest
	uses        atomic.Int64
	ctx         context.Context // ends with the right
	end         context.CancelCauseFunc

	mu      sync.RWMutex
	secret  []byte
	needles []string // secrets that are looked for: one, or those of Value
}

var errRevoked = errors.New("the credential was revoked")

// Open begins the bindings of a sandbox. Kinds: AlreadyExists when it has some; Invalid and
// NotFound for bindings that are wrong or whose secret there is not.
func (b *Broker) Open(ctx context.Context, sandbox berm.SandboxID, revision uint64, bindings []Binding) (*Set, error) {
	s := &Set{broker: b, sandbox: sandbox}
	b.mu.Lock()
	if b.sets[sandbox] != nil {
		b.mu.Unlock()
		return nil, berm.Errorf(berm.AlreadyExists, "sandbox %s has its credentials already", sandbox)
	}
	if b.sets == nil {
		b.sets, b.issued = map[berm.SandboxID]*Set{}, map[digest]issue{}
	}
	b.sets[sandbox] = s
	b.mu.Unlock()
	s.state.Store(&state{})
	if err := s.Update(ctx, revision, bindings); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// Update replaces the bindings, as a whole or, on an error, not at all. Secrets are read
// anew. Requests under way end when their binding is gone or is another; placeholders stay
// as long as id, variable and shape do.
func (s *Set) Update(ctx context.Context, revision uint64, bindings []Binding) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.state.Load()
	if old == nil {
		return berm.Errorf(berm.NotFound, "sandbox %s has ended", s.sandbox)
	}
	before := map[string]*live{}
	for _, b := range old.bindings {
		before[b.ID] = b
	}
	next := &state{revision: revision}
	ids, variables := map[string]bool{}, map[string]bool{}
	for _, b := range bindings {
		b, err := b.normal()
		if err != nil {
			return err
		}
		if ids[b.ID] || b.Env != "" && variables[b.Env] {
			return berm.Errorf(berm.Invalid, "credential %s: another one has the same id or variable", quote(b.ID))
		}
		ids[b.ID], variables[b.Env] = true, true
		l, err := s.broker.live(ctx, s.sandbox, b, before[b.ID])
		if err != nil {
			return err
		}
		next.bindings = append(next.bindings, l)
	}
	var requests, leaks, replies []needle
	for _, b := range next.bindings {
		if b.placeholder != "" {
			requests = append(requests, needle{b.placeholder, placeholder, b.ID})
		}
		for _, text := range b.needles {
			leaks = append(leaks, needle{text, secret, b.ID})
			if b.Response != Off {
				replies = append(replies, needle{text, secret, b.ID})
			}
		}
	}
	next.requests, next.leaks, next.replies = newMatcher(slices.Concat(requests, leaks)), newMatcher(leaks), newMatcher(replies)
	next.requestNames, next.replyNames = newMatcherOf(next.requests.needles, true), newMatcherOf(replies, true)
	s.broker.issue(s.sandbox, next.bindings, old.bindings)
	s.masks.Store(next.leaks)
	s.state.Store(next)
	for _, b := range next.bindings {
		if before[b.ID] == b {
			delete(before, b.ID)
		}
	}
	for _, b := range before {
		b.revoke()
	}
	return nil
}

// live makes a binding, or returns the one before when nothing is different.
func (b *Broker) live(ctx context.Context, sandbox berm.SandboxID, binding Binding, before *live) (*live, error) {
	l := &live{Binding: binding, method: methodOf(binding)}
	if l.method == nil {
		methodFor, ok := b.Methods[binding.Kind]
		if !ok {
			return nil, berm.Errorf(berm.Invalid, "credential %s: there is no kind %s", quote(binding.ID), quote(string(binding.Kind)))
		}
		var err error
		if l.method, err = methodFor(binding); err != nil {
			return nil, err
		}
	}
	if err := l.resolve(ctx, b.Sources); err != nil {
		return nil, berm.Errorf(berm.KindOf(err), "credential %s: %w", quote(binding.ID), err)
	}
	if before != nil {
		before.mu.RLock()
		same := bytes.Equal(before.secret, l.secret)
		before.mu.RUnlock()
		if same && reflect.DeepEqual(before.Binding, binding) {
			clear(l.secret)
			return before, nil
		}
		l.uses.Store(before.uses.Load())
		if before.Env == binding.Env && before.Shape == binding.Shape {
			l.placeholder, l.digest = before.placeholder, before.digest
		}
	}
	if l.placeholder == "" && binding.Env != "" {
		l.placeholder = newPlaceholder(binding.Shape, b.random(sandbox, binding))
		l.digest = digestOf(l.placeholder)
	}
	l.ctx, l.end = context.WithCancelCause(context.Background())
	return l, nil
}

// random is where the placeholder of a binding is drawn from.
func (b *Broker) random(sandbox berm.SandboxID, binding Binding) io.Reader {
	var seed []byte
	if b.Seed != nil {
		seed = b.Seed(sandbox)
	}
	if seed == nil {
		return rand.Reader
	}
	mac := hmac.New(sha256.New, seed)
	mac.Write([]byte(binding.ID + "\x00" + binding.Env + "\x00" + binding.Shape))
	return mathrand.NewChaCha8([32]byte(mac.Sum(nil)))
}

// maxSecret bounds what a request can carry.
const maxSecret = 8 << 10

// resolve reads the secret.
func (l *live) resolve(ctx context.Context, sources Sources) error {
	if l.Revoked {
		return nil
	}
	if l.Value == "" {
		value, err := sources.Value(ctx, l.Secret)
		if err != nil {
			return err
		}
		l.secret = value
		return l.look(value)
	}
	var values []string
	for _, name := range References(l.Value) {
		value, err := sources.Value(ctx, "secret:"+name)
		if err != nil {
			return err
		}
		values = append(values, string(value))
		if err := l.look(value); err != nil {
			return err
		}
		clear(value)
	}
	l.secret = []byte(expand(l.Value, values))
	return nil
}

// look checks a secret, and has it looked for.
func (l *live) look(value []byte) error {
	switch {
	case !httpguts.ValidHeaderFieldValue(string(value)) || len(value) == 0:
		return berm.Errorf(berm.Invalid, "the secret is empty or has a control character")
	case len(value) > maxSecret:
		return berm.Errorf(berm.Invalid, "the secret is longer than 8 KiB")
	case len(value) >= shortest:
		l.needles = append(l.needles, string(value))
	case l.Response != Off:
		return berm.Errorf(berm.Invalid, "the secret is too short to be found in replies").
			WithHint("use one of at least %d bytes, or set response: off", shortest)
	}
	return nil
}

// use returns the secret; ok is false once it is revoked.
func (l *live) use() (text string, ok bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return string(l.secret), l.secret != nil
}

// revoke ends requests under way, and wipes what can be wiped: strings that a request was
// made of stay until they are collected.
func (l *live) revoke() {
	l.end(errRevoked)
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.secret)
	l.secret = nil
}

// issue knows the placeholders of bindings from now on, and those of before that are not
// among them for revoked.
func (b *Broker) issue(sandbox berm.SandboxID, bindings, before []*live) {
	now := time.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, l := range before {
		if l.placeholder != "" {
			b.issued[l.digest] = issue{sandbox, now}
		}
	}
	for _, l := range bindings {
		if l.placeholder != "" {
			b.issued[l.digest] = issue{sandbox: sandbox}
		}
	}
	for d, i := range b.issued {
		if !i.revoked.IsZero() && now.Sub(i.revoked) > remembered {
			delete(b.issued, d)
		}
	}
}

// Revision is the number that the present bindings were set with.
func (s *Set) Revision() uint64 {
	if st := s.state.Load(); st != nil {
		return st.revision
	}
	return 0
}

// Bindings are the present ones, with their defaults.
func (s *Set) Bindings() []Binding {
	st := s.state.Load()
	if st == nil {
		return nil
	}
	all := make([]Binding, len(st.bindings))
	for i, b := range st.bindings {
		all[i] = b.Binding
	}
	return all
}

// Close ends all rights of the sandbox at once. Requests under way are cut.
func (s *Set) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.state.Swap(nil)
	if st == nil {
		return
	}
	for _, b := range st.bindings {
		b.revoke()
	}
	s.broker.issue(s.sandbox, nil, st.bindings)
	s.broker.mu.Lock()
	delete(s.broker.sets, s.sandbox)
	s.broker.mu.Unlock()
}
