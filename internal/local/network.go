package local

import (
	"context"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/cleanup"
	"github.com/berm-sandbox/berm/internal/local/asking"
	"github.com/berm-sandbox/berm/internal/local/preset"
	"github.com/berm-sandbox/berm/internal/local/session"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/trust/root"
)

// Network is how a command reaches what it may, and what that is beside what its rights
// allow.
type Network struct {
	Policy egress.Policy
	Open   []string // ranges of special addresses that the policy may name
	// Upstream is the way to what the policy allows. It is no part of records.
	Upstream egress.Upstream
	// Start starts the network service, and has its end told with the reason; nil when this
	// program has none.
	Start func(ended func(error)) (*net.UnixConn, error)
	// StartBroker starts the process that holds what requests get and the command must not have;
	// nil when this program has none.
	StartBroker func(ended func(error)) (*net.UnixConn, error)
}

// maxTold bounds how many different events of one sort are kept for the user.
const maxTold = 100

// online is the network of one run.
type online struct {
	ctx     context.Context
	task    *Task
	journal *records
	cancel  context.CancelCauseFunc

	mu        sync.Mutex
	link      *egress.Link
	again     func() error // gives the link to another service; nil when that cannot be
	remade    int
	door      *asking.Door // nil: no rule asks
	denied    []egress.Event
	unreached []egress.Event
}

// doOnline is do with the task's network.
func doOnline(ctx context.Context, t *Task, r *Request, journal *records) (Result, error) {
	if !r.Network && len(r.Grant.Credentials) > 0 {
		return Result{}, unused(t, r)
	}
	if !r.Network {
		return do(ctx, t, r)
	}
	if t.Network.Start == nil {
		return Result{}, berm.Errorf(berm.Unsupported, "this program has no network service")
	}
	policy := t.Network.Policy
	policy.Entries = append(policy.Entries, r.Grant.Allow...)
	policy.Upstream = t.Network.Upstream
	if err := keepDescriptors(); err != nil {
		return Result{}, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	o := &online{ctx: ctx, task: t, journal: journal, cancel: cancel}
	conn, err := t.Network.Start(o.lost)
	if err != nil {
		cancel(nil)
		return Result{}, err
	}
	defer conn.Close()
	defer cancel(nil) // first: what ends from now on was to end
	programs, err := r.programs()
	if err != nil {
		return Result{}, err
	}
	broker, err := o.startBroker(r, policy, programs)
	if err != nil {
		return Result{}, err
	}
	var network *os.File
	if broker != nil {
		defer broker.Close()
		journal.open(o.masker(broker))
		network, policy.Attach, policy.Endpoints = broker.network, broker.Attach, broker.Endpoints
	}
	link, trust, warnings, err := egress.Prepare(ctx, conn, r.ID, policy, t.Network.Open, programs, network, o.event)
	if broker != nil {
		network.Close()
		trust = broker.Trust
	}
	if err != nil {
		return Result{}, err
	}
	for _, w := range warnings {
		// Who runs the command is the operator.
		t.Notice("policy: " + strings.Replace(w, "unless the operator opens it", "unless --open opens it too", 1))
	}
	if trust != nil {
		forget, err := r.trust(trust, programs)
		if err != nil {
			return Result{}, err
		}
		defer forget()
	}
	if link.Asks() {
		services := []*egress.Link{link}
		if broker != nil {
			services = []*egress.Link{broker.Link, link}
		}
		door, err := o.openDoor(r, services...)
		if err != nil {
			return Result{}, err
		}
		defer door.Close()
		o.mu.Lock()
		o.door = door
		o.mu.Unlock()
	}
	attached := make(chan error, 1)
	r.Link = func(f *os.File) {
		// What is sent before waits in the link: nobody reads it.
		err := link.Connect(ctx, f)
		if err != nil {
			cancel(err)
		}
		o.mu.Lock()
		o.link = link
		if err == nil && broker == nil && trust == nil && !link.Asks() {
			// What programs trust, and answers, are with the process that was.
			o.again = func() error { return o.attach(r, policy, f) }
		}
		o.mu.Unlock()
		attached <- err
	}
	result, err := do(ctx, t, r)
	o.finish()
	if broker != nil {
		journal.wrote(&result)
		journal.write()
		o.mask(o.masker(broker))
		finish(broker.Link)
	}
	select {
	case attachErr := <-attached:
		if attachErr != nil { // the command, if it ran, had no network
			return Result{}, attachErr
		}
	default:
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	result.Denied, result.Unreached = o.denied, o.unreached
	return result, err
}

// unused says why the command could use none of its credentials.
func unused(t *Task, r *Request) error {
	allow := ""
	for _, c := range r.Grant.Credentials {
		full, err := read(c, t.Environ)
		clear(full.Value)
		if err != nil && !c.Optional {
			return err
		}
		host := c.Service // a group has its name, but for one
		switch {
		case len(c.Hosts) > 0:
			host = c.Hosts[0]
		case host == "goproxy":
			host = "golang"
		}
		if to := " --allow " + host; !strings.Contains(allow+" ", to+" ") {
			allow += to
		}
	}
	if r.Grant.Network == preset.NetworkHost {
		return berm.Errorf(berm.Invalid, "the command has credentials, and --network host has no place for them").WithHint("instead of it, add%s", allow)
	}
	return berm.Errorf(berm.Invalid, "the command has credentials, and no network on which it could use them").WithHint("a credential allows no host: add%s", allow)
}

// programs is what the programs of a template trust; nil when they are this machine's.
func (r *Request) programs() (*root.Root, error) {
	if r.Template == nil {
		return nil, nil //nolint:nilnil // see above
	}
	layers, err := root.Open(r.Template.Layers)
	if err != nil {
		return nil, err
	}
	defer layers.Close()
	programs, err := root.Survey(layers)
	return &programs, err
}

// trust makes the programs inside trust an authority. The function returned takes the files
// for it away.
func (r *Request) trust(t *egress.Trust, programs *root.Root) (forget func(), err error) {
	state, err := session.StateDir()
	if err != nil {
		return nil, err
	}
	err = os.MkdirAll(state, 0o700)
	var dir string
	if err == nil {
		dir, err = os.MkdirTemp(state, "trust-")
	}
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "make a directory for certificates: %w", err)
	}
	forget = func() { os.RemoveAll(dir) }
	cu := cleanup.Make(forget)
	defer cu.Clean()
	at := map[string]string{} // where a file lies inside
	for i, f := range t.Files {
		source := filepath.Join(dir, strconv.Itoa(i)+filepath.Ext(f.Path))
		if err := os.WriteFile(source, f.Data, 0o444); err != nil {
			return nil, berm.Errorf(berm.Internal, "write certificates: %w", err)
		}
		at[f.Path] = f.Path
		if !isRegular(f.Path, programs) {
			// Nothing can be put beside what is there, which is read-only.
			at[f.Path] = "/run/berm/" + filepath.Base(source)
		}
		r.Covered = append(r.Covered, Covered{at[f.Path], source})
	}
	for name, value := range t.Env {
		if moved := at[value]; moved != "" {
			value = moved
		}
		r.Env = append(unset(r.Env, name), name+"="+value)
	}
	cu.Release()
	return forget, nil
}

// isRegular says whether there is a file inside that another one can lie over.
func isRegular(path string, programs *root.Root) bool {
	if programs != nil {
		return slices.Contains(programs.Stores, path) || slices.ContainsFunc(programs.Bundles, func(f root.File) bool { return f.Path == path })
	}
	info, err := os.Lstat(path)
	return err == nil && info.Mode().IsRegular()
}

// finish waits a moment for what the service has still to tell.
func (o *online) finish() {
	o.mu.Lock()
	link := o.link
	if link != nil {
		o.cancel(nil) // what ends from now on was to end
	}
	o.mu.Unlock()
	if link != nil {
		finish(link)
	}
}

// mostRemade bounds how many network services take the place of others in one run.
const mostRemade = 5

// lost has another network service take the place of one that ended, and tells it.
func (o *online) lost(err error) {
	o.mu.Lock()
	again := o.again
	if o.remade++; o.remade > mostRemade {
		again = nil
	}
	o.mu.Unlock()
	if o.ctx.Err() != nil {
		return
	}
	so := "the command has no network any more"
	if again != nil {
		if failed := again(); failed == nil {
			so = "another one took its place"
		} else {
			so += ": " + failed.Error()
		}
	}
	o.ended(so)(err)
}

// attach gives the link to a new network service, with the policy that the first one had.
func (o *online) attach(r *Request, policy egress.Policy, f *os.File) error {
	conn, err := o.task.Network.Start(o.lost)
	if err != nil {
		return err
	}
	link, _, err := egress.Attach(o.ctx, conn, r.ID, f, nil, policy, o.task.Network.Open, o.event)
	if err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ctx.Err() != nil {
		return link.Close()
	}
	o.link = link
	return nil
}

// masker takes out of texts what the broker alone knows as secrets.
func (o *online) masker(broker *broker) func(text []byte) ([]byte, error) {
	ctx := context.WithoutCancel(o.ctx)
	return func(text []byte) ([]byte, error) {
		ctx, stop := context.WithTimeout(ctx, maskPatience)
		defer stop()
		return broker.Mask(ctx, text)
	}
}

// mask masks what the user is told of what happened so far.
func (o *online) mask(mask func(text []byte) ([]byte, error)) {
	for _, list := range []*[]egress.Event{&o.denied, &o.unreached} {
		o.mu.Lock()
		told := *list
		*list = nil
		o.mu.Unlock()
		text, err := json.Marshal(told)
		if err == nil {
			text, err = mask(text)
		}
		var masked []egress.Event
		if err == nil {
			err = json.Unmarshal(text, &masked)
		}
		if err != nil {
			// That something was denied is told all the same, with the names of the policy.
			for i := range told {
				if told[i].Path, told[i].Detail = "", ""; told[i].Kind == "dns" {
					told[i].Name = ""
				}
			}
			masked = told
		}
		o.mu.Lock()
		*list = append(masked, *list...)
		o.mu.Unlock()
	}
}

func finish(link *egress.Link) {
	ctx, stop := context.WithTimeout(context.Background(), time.Second)
	defer stop()
	link.Finish(ctx)
}

// ended tells when a service ended by itself, and what that means for the command.
func (o *online) ended(so string) func(error) {
	return func(err error) {
		if o.ctx.Err() == nil {
			o.task.Notice(err.Error() + "; " + so)
		}
	}
}

// event records what the network service tells.
func (o *online) event(e egress.Event) { o.record(e, false) }

// brokered records what the service of credentials tells, in which it masks secrets itself.
func (o *online) brokered(e egress.Event) { o.record(e, true) }

func (o *online) record(e egress.Event, masked bool) {
	if e.Kind == egress.Asks {
		o.mu.Lock()
		door := o.door
		o.mu.Unlock()
		if door != nil {
			door.Ask(e)
		}
		return
	}
	outcome, kind := audit.OK, audit.NetFlow
	if e.Action == "deny" {
		outcome = audit.Denied
		if e.Credential == "" { // else the request is told
			o.keep(&o.denied, e)
		}
	}
	if e.Unreached {
		o.keep(&o.unreached, e)
	}
	switch {
	case e.Kind == "dns":
		kind = audit.NetDNS
	case strings.HasPrefix(e.Kind, "credential."):
		kind = audit.Type(e.Kind)
	}
	o.journal.add(o.journal.record(kind, outcome, e.Reason, e), masked)
}

// keep keeps an event for the user, and counts those that are the same.
func (o *online) keep(list *[]egress.Event, e egress.Event) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for i := range *list {
		if k := &(*list)[i]; same(*k, e) {
			k.Count = max(k.Count, 1) + max(e.Count, 1)
			return
		}
	}
	if len(*list) < maxTold {
		*list = append(*list, e)
	}
}

// same says whether two events tell the user the same.
func same(a, b egress.Event) bool {
	return a.Kind == b.Kind && a.Name == b.Name && a.Address == b.Address && a.Port == b.Port && a.Protocol == b.Protocol &&
		a.Rule == b.Rule && a.Reason == b.Reason && a.Detail == b.Detail && a.Method == b.Method && a.Path == b.Path
}
