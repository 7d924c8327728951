// Package serve puts the parts of `berm serve` together: store, audit log, engine,
// sessions, API and router behind one listener.
package serve

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/api/e2b"
	"github.com/berm-sandbox/berm/internal/api/router"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/capture"
	"github.com/berm-sandbox/berm/internal/audit/forward"
	"github.com/berm-sandbox/berm/internal/audit/index"
	"github.com/berm-sandbox/berm/internal/audit/process"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/audit/writer"
	"github.com/berm-sandbox/berm/internal/builder"
	"github.com/berm-sandbox/berm/internal/cleanup"
	"github.com/berm-sandbox/berm/internal/container"
	"github.com/berm-sandbox/berm/internal/control"
	"github.com/berm-sandbox/berm/internal/credential/vault"
	"github.com/berm-sandbox/berm/internal/depot"
	"github.com/berm-sandbox/berm/internal/engine/local"
	"github.com/berm-sandbox/berm/internal/kernel/claim"
	"github.com/berm-sandbox/berm/internal/kernel/feature"
	"github.com/berm-sandbox/berm/internal/kernel/seccomp"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/store"
	"github.com/berm-sandbox/berm/internal/template"
)

// Config is how a server is run.
type Config struct {
	Listen string // HOST:PORT
	Data   string // data directory
	// Domain is the domain under which sandboxes have host names; "" for none.
	Domain string
	// TLSCert and TLSKey are files in PEM; without them the server speaks TLS only when
	// DevTLS is set. Plain HTTP is served on the same port in any case.
	TLSCert, TLSKey string
	// DevTLS makes an authority and a certificate for Domain below Data.
	DevTLS       bool
	BootstrapKey string // made valid instead of a random first key
	MaxSandboxes int
	MaxTimeout   time.Duration
	MaxLimits    berm.Limits
	// Pools are sandboxes that are made in advance.
	Pools []control.Pool
	// Depot is how many bytes the file system in a file has, on which disks are cloned; 0 is none.
	Depot int64
	// CheckpointBytes bounds the checkpoints of one sandbox together; 0 does not.
	CheckpointBytes int64
	// RequireLimits refuses a sandbox of a template whose limits the host cannot enforce.
	RequireLimits bool
	Level         berm.Level
	// Needed are levels that somebody asked for by name: the server does not start where one
	// cannot be had.
	Needed []berm.Level
	// DefaultEgress is what a sandbox may reach when its creator says nothing: EgressPublic
	// or EgressDeny.
	DefaultEgress string
	Open          []string // ranges of special addresses that network policies may name
	Resolvers     []string // ADDRESS:PORT that names are asked of; none: those of the host
	// UpstreamProxy and UpstreamCA are how networks are reached; see egress.ReadUpstream.
	UpstreamProxy, UpstreamCA string

	upstream egress.Upstream
	// AskWebhook is who answers what rules of network policies ask, "" for nobody; AskSecret the
	// file of the secret that signs the questions.
	AskWebhook, AskSecret string

	asker control.Asker
	// Program opens the program that has the network service.
	Program func() (*os.File, error)
	IDs     berm.IDRange
	// Claims keeps IDs apart from those of other servers of this machine; nil does not.
	Claims *claim.File

	// AuditAnchors are files, and AuditWitnesses URLs, that get the checkpoints of the audit log.
	AuditAnchors, AuditWitnesses []string
	AuditKeep                    time.Duration // 0 keeps records for ever
	AuditLimit                   int64         // bytes that records and their content may take; 0 is any number
	// Record is what is recorded beside actions: some of RecordOutput, RecordProcesses and
	// RecordChanges.
	Record []string
	// RecordCalls are system calls that are recorded with processes, by name.
	RecordCalls []string
	// Webhooks are URLs that get records of the types WebhookEvents, signed with the secret in
	// the file WebhookSecret.
	Webhooks, WebhookEvents []string
	WebhookSecret           string
	// OTLP is an endpoint of OpenTelemetry that gets records of the types OTLPEvents, "" for
	// none, with OTLPHeaders, NAME=VALUE.
	OTLP                    string
	OTLPHeaders, OTLPEvents []string

	Templates control.Templates
	// ContainerTemplate is what containers are made of.
	ContainerTemplate string
	// Images is where templates are built; nil builds none.
	Images *template.Store
	// Registries are those that images are fetched from in a way of their own.
	Registries *template.Registries
	// Drivers makes the drivers of this machine, once the data directory is held. Empty disks lie
	// in the directory images; "" is in the data directory.
	Drivers func(watch Watch, images string) ([]berm.Driver, error)
	// Ready has the layers of a sandbox that is to be made be there; nil when they are.
	Ready func(ctx context.Context, layers []berm.Layer) error
	// Hold keeps the layers of a sandbox's template from being removed; nil does not.
	Hold func(ctx context.Context, spec berm.Spec) error
	// HoldLayers does so for a snapshot; see control.Config.
	HoldLayers func(ctx context.Context, name, alive string, t berm.Template) error
	Log        *slog.Logger
	Out        io.Writer // for what a person must read, once
}

// What is recorded beside actions.
const (
	RecordOutput    = "output"    // what commands of the API write
	RecordProcesses = "processes" // what runs inside
	RecordChanges   = "changes"   // what sandboxes write to their disks
)

// checkRecord refuses words that mean nothing.
func (c *Config) checkRecord() error {
	for _, what := range c.Record {
		if what != RecordOutput && what != RecordProcesses && what != RecordChanges {
			return berm.Errorf(berm.Invalid, "%q is nothing that can be recorded", what).
				WithHint("--record takes %s, %s and %s.", RecordOutput, RecordProcesses, RecordChanges)
		}
	}
	if len(c.RecordCalls) > 0 && !slices.Contains(c.Record, RecordProcesses) {
		return berm.Errorf(berm.Invalid, "--record-calls needs --record %s", RecordProcesses)
	}
	if len(c.RecordCalls) > maxCalls {
		return berm.Errorf(berm.Invalid, "--record-calls takes %d system calls", maxCalls)
	}
	for _, name := range c.RecordCalls {
		if _, ok := seccomp.Number(name); !ok {
			return berm.Errorf(berm.Invalid, "--record-calls: there is no system call %q on this machine", name)
		}
	}
	return nil
}

// maxCalls bounds the system calls that are recorded: each that is made is compared with all of them.
const maxCalls = 64

// minAuditLimit leaves room for records of some minutes.
const minAuditLimit = 64 << 20

// auditWait is how long the writer of a server that died may go on.
const auditWait = 30 * time.Second

// auditLog is the log of records as its server needs it.
type auditLog interface {
	audit.Emitter
	audit.Blobs
	Origin() string
	Seq() uint64
	Erase(e trail.Erasure, dry bool) (trail.Erasure, error)
	EraseAll(all []trail.Erasure) ([]trail.Erasure, error)
	Close() error
}

// audit opens the log of records. A server of root has a process of its own, with no rights of
// root's, write it.
func (c *Config) audit(ctx context.Context, db *store.DB) (auditLog, error) {
	if c.AuditLimit != 0 && c.AuditLimit < minAuditLimit {
		return nil, berm.Errorf(berm.Invalid, "--audit-limit must be %d MiB at least", minAuditLimit>>20)
	}
	holds := func() ([]berm.SandboxID, error) {
		holds, err := db.Holds(ctx)
		ids := make([]berm.SandboxID, len(holds))
		for i, h := range holds {
			ids[i] = h.Sandbox
		}
		return ids, err
	}
	for _, witness := range c.AuditWitnesses {
		u, err := url.Parse(witness)
		if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
			return nil, berm.Errorf(berm.Invalid, "--audit-witness %q is not an http or https URL", witness)
		}
	}
	dir := filepath.Join(c.Data, "audit")
	if os.Geteuid() == 0 && c.Program != nil {
		log, err := writer.Open(writer.Config{
			Dir: dir, Program: c.Program, Keep: c.AuditKeep, Limit: c.AuditLimit, Holds: holds, Log: c.Log,
			Anchors: c.AuditAnchors, Witnesses: c.AuditWitnesses, Wait: auditWait,
		})
		if err != nil {
			return nil, err
		}
		c.Log.Info("writer of the audit log", "pid", log.PID())
		return log, nil
	}
	options := trail.Options{Log: c.Log, Keep: c.AuditKeep, Limit: c.AuditLimit, Holds: holds}
	for _, path := range c.AuditAnchors {
		options.Anchors = append(options.Anchors, trail.FileAnchor(path))
	}
	for _, witness := range c.AuditWitnesses {
		options.Anchors = append(options.Anchors, trail.WitnessAnchor(witness))
	}
	return trail.Open(dir, options)
}

// checkForward refuses settings that say wrongly which records go where.
func (c *Config) checkForward() error {
	if len(c.Webhooks) > 0 && c.WebhookSecret == "" {
		return noSecret("--webhook", "--webhook-secret-file")
	}
	if err := forward.ParseTypes(c.WebhookEvents); err != nil {
		return berm.Errorf(berm.Invalid, "--webhook-events: %w", err).WithHint("%s", berm.HintOf(err))
	}
	if err := forward.ParseTypes(c.OTLPEvents); err != nil {
		return berm.Errorf(berm.Invalid, "--otlp-events: %w", err).WithHint("%s", berm.HintOf(err))
	}
	return nil
}

// noSecret is about a flag that needs another one.
func noSecret(flag, secret string) error {
	return berm.Errorf(berm.Invalid, "%s needs a secret, by which its requests are signed: %s", flag, secret).
		WithHint("(umask 077; openssl rand -hex 32 > FILE), then %s FILE", secret)
}

// forward sends records on. It returns what stops it.
func (c *Config) forward(records auditLog) (stop func(), err error) {
	var all []*forward.Forwarder
	add := func(kind, address string, types []string, target forward.Target) {
		all = append(all, &forward.Forwarder{
			Dir: filepath.Join(c.Data, "audit"), Places: filepath.Join(c.Data, "forward"), Name: forward.TargetName(kind, address), Types: types, Target: target, Log: c.Log,
		})
	}
	for _, address := range c.Webhooks {
		target, err := forward.NewWebhook(address, c.WebhookSecret, records.Origin())
		if err != nil {
			return nil, err
		}
		add("webhook", address, c.WebhookEvents, target)
	}
	if c.OTLP != "" {
		target, err := forward.NewOTLP(c.OTLP, c.OTLPHeaders, records.Origin())
		if err != nil {
			return nil, err
		}
		add("otlp", c.OTLP, c.OTLPEvents, target)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	for _, f := range all {
		running.Go(func() { f.Run(ctx, records.Seq()) })
	}
	return func() { cancel(); running.Wait() }, nil
}

// What a sandbox may reach when its creator says nothing.
const (
	EgressPublic = "public" // the public internet, as with E2B
	EgressDeny   = "deny"
)

const (
	headerTime = 10 * time.Second // to send a request's header, or a TLS handshake
	maxHeader  = 64 << 10         // bytes of a request's header
	keepIdle   = 2 * time.Minute  // an idle connection
	// grace is how long requests under way may take at shutdown.
	grace = 5 * time.Second
)

// Watch says of which sandboxes monitors have to hear what runs inside, because this process cannot
// see it.
type Watch struct {
	Host   bool // those on this host's kernel
	GVisor bool
}

// SettingError is about a setting that this machine cannot give.
type SettingError struct{ Err error }

func (e SettingError) Error() string { return e.Err.Error() }

// Unwrap returns what cannot be given.
func (e SettingError) Unwrap() error { return e.Err }

// Run serves until ctx ends. Sandboxes live on. A level that is needed and cannot be had is a
// SettingError.
func Run(ctx context.Context, c Config) error {
	if err := errors.Join(c.checkEgress(), c.checkForward(), c.checkRecord()); err != nil {
		return err
	}
	cu := cleanup.Make()
	defer cu.Clean()

	db, err := store.Open(c.Data)
	if err != nil {
		return err
	}
	cu.Add(func() { c.closed("database", db.Close()) })
	written, err := c.audit(ctx, db)
	if err != nil {
		return err
	}
	cu.Add(func() { c.closed("audit log", written.Close()) })
	owners := newOwners()
	records := ownedLog{written, owners}
	if c.BootstrapKey != "" {
		if _, err := db.AddKey(ctx, "bootstrap", c.BootstrapKey); err != nil {
			return err
		}
	}
	if err := db.DrainOutbox(ctx, records); err != nil {
		return err
	}
	seed, err := db.Secret(ctx, "tokens")
	if err != nil {
		return err
	}
	secrets, err := vault.Open(ctx, filepath.Join(c.Data, "secrets"))
	if err != nil {
		return err
	}
	cu.Add(func() { c.closed("secrets", secrets.Close()) })
	var processes control.Processes
	var watch Watch
	if slices.Contains(c.Record, RecordProcesses) {
		host, listen, err := c.onHost(records)
		if err != nil {
			return err
		}
		inside := byLevel{process.NewStreams(records, c.Log), host}
		cu.Add(inside.Close)
		processes, watch = inside, Watch{Host: listen, GVisor: true}
	}
	images, saved := "", ""
	disks, err := depot.Open(ctx, c.Data, c.Depot)
	if err != nil {
		return err
	}
	var dismiss []func()
	if disks != nil {
		cu.Add(func() {
			for _, dismiss := range dismiss { // what waits for a sandbox has a disk in it
				dismiss()
			}
			c.closed("depot", disks.Close())
		})
	}
	if c.Depot != 0 {
		images, saved = disks.Images(), disks.Snapshots()
	} else if err := feature.Reflink(c.Data).Check(ctx); err != nil && os.Geteuid() == 0 {
		c.Log.Info("snapshots copy what sandboxes wrote", "reason", err, "hint", "with --depot SIZE they share it")
	}
	drivers, err := c.Drivers(watch, images)
	if err != nil {
		return err
	}
	for _, d := range drivers {
		if d, ok := d.(interface{ Dismiss() }); ok {
			dismiss = append(dismiss, d.Dismiss)
		}
	}
	engine, err := local.New(ctx, local.Config{Drivers: drivers, Leases: db, IDs: c.IDs, Claims: c.Claims, Ready: c.Ready, Hold: c.Hold})
	if err != nil {
		return err
	}
	for _, level := range c.Needed {
		if err := engine.Check(level); err != nil {
			return SettingError{err}
		}
	}
	for _, p := range engine.Probe(ctx) {
		c.Log.Info("isolation level", "level", p.Level, "usable", p.Usable)
		if p.Usable {
			c.warn(p)
		}
	}

	var certificates *tls.Config
	if c.TLSCert != "" || c.DevTLS {
		if certificates, err = c.certificates(); err != nil {
			return err
		}
	}
	listener, err := net.Listen("tcp", c.Listen)
	if err != nil {
		err := berm.Errorf(berm.Unavailable, "listen: %w", err)
		if errors.Is(err, syscall.EADDRINUSE) {
			err = err.WithHint("Another program has that port. Choose one with --listen HOST:PORT.")
		} else {
			err = err.WithHint("--listen HOST:PORT names an address of this machine and a port.")
		}
		return err
	}
	cu.Add(func() { _ = listener.Close() }) // the HTTP server has closed it already

	egress, stopEgress := c.egress(engine.Probe(ctx), secrets)
	cu.Add(stopEgress)
	var changes audit.Blobs
	if slices.Contains(c.Record, RecordChanges) {
		changes = records
	}
	sessions := control.New(control.Config{
		Engine: engine, Templates: c.Templates, Store: db, Audit: records, Owned: owners.own, Blobs: changes, Log: c.Log, Seed: seed,
		Level: c.Level, MaxSandboxes: c.MaxSandboxes, MaxTimeout: c.MaxTimeout, MaxLimits: c.MaxLimits, RequireLimits: c.RequireLimits,
		Egress: egress, SampleEvery: 5 * time.Second, SnapshotDir: filepath.Join(c.Data, "snapshots"), Depot: saved, HoldLayers: c.HoldLayers,
		CheckpointBytes: c.CheckpointBytes, Pools: c.Pools, Boot: boot(),
	})
	sessions.Processes = processes
	if err := sessions.Start(ctx); err != nil {
		return err
	}
	recorder := capture.New(records, records, slices.Contains(c.Record, RecordOutput), c.Log)
	cu.Add(recorder.Close)
	cu.Add(sessions.Close) // before: it cuts the streams that are recorded
	if err := records.Emit(event(audit.ServerStart)); err != nil {
		return err
	}
	stopWebhooks, err := c.forward(records)
	if err != nil {
		return err
	}
	cu.Add(stopWebhooks)

	found, err := index.Open(filepath.Join(c.Data, "audit-index.db"), trail.Dir(filepath.Join(c.Data, "audit")))
	if err != nil {
		return err
	}
	cu.Add(func() { c.closed("index of the audit log", found.Close()) })

	port := listener.Addr().(*net.TCPAddr).Port
	var builds *builder.Builder
	if c.Images != nil {
		if builds, err = builder.New(builder.Config{Sessions: sessions, Store: c.Images, Audit: records, Dir: filepath.Join(c.Data, "uploads"), Open: c.Open, Registries: c.Registries, Log: c.Log}); err != nil {
			return err
		}
		cu.Add(builds.Close)
	}
	containers := container.New(container.Config{
		Sessions: sessions, Inside: router.Inside{Sessions: sessions, Capture: recorder}, Template: c.ContainerTemplate, Audit: records, Capture: recorder,
	})
	forgetting := &eraser{records, found, db}
	api := e2b.New(e2b.Config{Sessions: sessions, Containers: containers, Templates: c.Templates, Builder: builds, UploadKey: seed, Keys: db, Secrets: secrets, Domain: withPort(c.Domain, port), Audit: records, Trail: found, Eraser: forgetting, Log: c.Log})
	server := newHTTPServer(router.New(router.Config{Sessions: sessions, Control: api, Domain: c.Domain, Capture: recorder, Log: c.Log}), certificates)

	// Only now: the key is shown once, and a start that fails shows nothing.
	first, err := firstKey(ctx, db)
	if err != nil {
		return err
	}
	served := make(chan error, 2)
	if certificates == nil {
		go func() { served <- server.Serve(listener) }()
	} else {
		plain, secure := split(listener, headerTime)
		go func() { served <- server.Serve(plain) }()
		go func() { served <- server.ServeTLS(secure, "", "") }()
	}
	c.greet(first, port)
	if certificates == nil && leaves(listener.Addr()) {
		c.Log.Warn("API keys, and all that goes into sandboxes and out of them, pass the network in the clear", "listen", c.Listen,
			"hint", "--tls-cert and --tls-key have it encrypted; or let a proxy on this machine do so, and listen on 127.0.0.1")
	}

	background, stop := context.WithCancel(context.Background())
	var loops sync.WaitGroup
	loops.Go(func() { drainLoop(background, db, records, c.Log) })
	living := livingSandboxes(db, engine)
	loops.Go(func() { owners.forgetLoop(background, living, c.Log) })
	loops.Go(func() { forgetting.retainLoop(background, living, c.Log) })
	cu.Add(func() { stop(); loops.Wait() })

	select {
	case err := <-served:
		return berm.Errorf(berm.Internal, "serve: %w", err)
	case <-ctx.Done():
	}
	c.Log.Info("stopping; sandboxes live on")
	final, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	if err := server.Shutdown(final); errors.Is(err, context.DeadlineExceeded) {
		_ = server.Close() // long streams do not end by themselves
	}
	if err := records.Emit(event(audit.ServerStop)); err != nil {
		c.Log.Error("audit record lost", "error", err)
	}
	return nil
}

// boot is the kernel's name of its run; see random(4).
func boot() string {
	id, err := os.ReadFile(trail.BootID)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(id))
}

// processes records what runs inside sandboxes.
type processes interface {
	control.Processes
	Close()
}

// byLevel records what runs inside sandboxes on kernels of their own, and of the others by host,
// nil where nothing can.
type byLevel struct {
	*process.Streams
	host processes
}

func (r byLevel) Follow(id berm.SandboxID, first *berm.First, late bool) error {
	if r.host == nil || first != nil && first.Stream {
		return r.Streams.Follow(id, first, late)
	}
	return r.host.Follow(id, first, late)
}

func (r byLevel) Forget(id berm.SandboxID) {
	r.Streams.Forget(id)
	if r.host != nil {
		r.host.Forget(id)
	}
}

func (r byLevel) Close() {
	r.Streams.Close()
	if r.host != nil {
		r.host.Close()
	}
}

// onHost begins to record what runs inside sandboxes on this host's kernel, where that lets it.
// watch says that monitors have to listen for it. Kind Unsupported says why system calls that are to
// be recorded cannot be.
func (c *Config) onHost(records audit.Emitter) (_ processes, watch bool, err error) {
	collector, because := process.New(records, c.Log, c.RecordCalls...)
	if because == nil {
		return collector, false, nil
	}
	if len(c.RecordCalls) > 0 {
		return nil, false, berm.Errorf(berm.Unsupported, "--record-calls: %w", because).WithHint("start without it, or as root on a kernel with BTF")
	}
	listeners, err := process.NewListeners(records, c.Log)
	if err != nil {
		c.Log.Warn("processes inside sandboxes are not recorded, but for the commands of the API", "reason", errors.Join(because, err))
		return nil, false, nil
	}
	c.Log.Info("processes inside sandboxes are recorded as they ask for executions", "reason", because)
	return listeners, true, nil
}

// warn tells what the host cannot give to sandboxes of a level.
func (c *Config) warn(p berm.Probe) {
	// Templates have defaults of these; other limits are refused to those who ask.
	for _, name := range []string{"memory", "cpu", "pids", "disk"} {
		if why, missing := p.Unlimited[name]; missing {
			then := "templates that have it go without"
			if c.RequireLimits {
				then = "templates that have it are refused"
			}
			c.Log.Warn("limit cannot be enforced", "level", p.Level, "limit", name, "reason", why, "then", then)
		}
	}
	for _, what := range p.Degraded {
		c.Log.Warn("sandboxes are not what they are on other hosts", "level", p.Level, "what", what)
	}
}

// closed reports what could not be closed in order.
func (c *Config) closed(what string, err error) {
	if err != nil {
		c.Log.Error("closing failed", "what", what, "error", err)
	}
}

func event(what audit.Type) audit.Record {
	return audit.Record{Actor: audit.Actor{Type: "system"}, Type: what, Src: "server", Trust: audit.TrustHost, Outcome: audit.OK}
}

func newHTTPServer(handler http.Handler, certificates *tls.Config) *http.Server {
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler: handler, TLSConfig: certificates, Protocols: &protocols,
		// No limit on a whole request or answer: streams last as long as sandboxes.
		ReadHeaderTimeout: headerTime, IdleTimeout: keepIdle, MaxHeaderBytes: maxHeader,
		HTTP2: &http.HTTP2Config{
			// A client keeps all its commands and watches on one connection.
			MaxConcurrentStreams: 1000,
			// Frames of a slow or lost client are not waited for without end.
			SendPingTimeout: 30 * time.Second, PingTimeout: 30 * time.Second,
			MaxReceiveBufferPerConnection: 8 << 20, MaxReceiveBufferPerStream: 1 << 20,
		},
		ErrorLog: log.New(io.Discard, "", 0), // what strangers send is no news
	}
}

// firstKey makes sure that there is a key. It returns a new one that nobody knows
// yet, or "".
func firstKey(ctx context.Context, db *store.DB) (string, error) {
	keys, err := db.Keys(ctx)
	if err != nil || len(keys) > 0 {
		return "", err
	}
	_, secret, err := db.CreateKey(ctx, store.Key{Name: "first"})
	return secret, err
}

// drainLoop moves audit records that commands left into the log.
func drainLoop(ctx context.Context, db *store.DB, records audit.Emitter, log *slog.Logger) {
	for tick := time.NewTicker(time.Second); ; {
		select {
		case <-ctx.Done():
			tick.Stop()
			return
		case <-tick.C:
			if err := db.DrainOutbox(ctx, records); err != nil && ctx.Err() == nil {
				log.Error("audit records of keys and holds are waiting", "error", err)
			}
		}
	}
}

// withPort is the domain as clients write it into URLs, which are https.
func withPort(domain string, port int) string {
	if domain == "" || port == 443 {
		return domain
	}
	return fmt.Sprintf("%s:%d", domain, port)
}

// leaves says whether what is served on an address comes from other machines, too.
func leaves(addr net.Addr) bool {
	tcp, ok := addr.(*net.TCPAddr)
	return ok && !tcp.IP.IsLoopback()
}

// greet tells a person how to reach the server.
func (c *Config) greet(first string, port int) {
	host, _, _ := net.SplitHostPort(c.Listen)
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	address := "http://" + net.JoinHostPort(host, fmt.Sprint(port))
	var text strings.Builder
	fmt.Fprintf(&text, "Berm serves at %s\n", address)
	if first != "" {
		fmt.Fprintf(&text, "\nA first API key was made. It is shown this once:\n\n  export E2B_API_KEY=%s\n", first)
	}
	fmt.Fprintf(&text, "\nFor E2B SDKs and the berm command:\n\n  export E2B_API_URL=%s\n  export E2B_SANDBOX_URL=%[1]s\n", address)
	if c.DevTLS {
		ca := filepath.Join(c.Data, "tls", "ca.pem")
		fmt.Fprintf(&text, `
Or, with a host name for every port of every sandbox (https://PORT-ID.%[1]s), instead
of the two above:

  export E2B_DOMAIN=%[1]s
  export NODE_EXTRA_CA_CERTS=%[2]s   # Node
  export SSL_CERT_FILE=%[2]s         # Python, Go, curl

Names under %[3]s must resolve to this machine.
`, withPort(c.Domain, port), ca, c.Domain)
	}
	if _, err := io.WriteString(c.Out, text.String()); err != nil {
		c.Log.Error("the greeting could not be printed", "error", err, "hint", "berm key create makes another API key")
	}
}
