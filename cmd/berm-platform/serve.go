package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/driver/gvisor"
	"github.com/berm-sandbox/berm/internal/driver/namespace"
	"github.com/berm-sandbox/berm/internal/engine/local"
	"github.com/berm-sandbox/berm/internal/kernel/claim"
	"github.com/berm-sandbox/berm/internal/serve"
	"github.com/berm-sandbox/berm/internal/template"
)

func newServeCommand() *cobra.Command {
	c := serve.Config{IDs: local.DefaultIDs}
	var templates, devDomain, logFormat, config, level string
	var spares uint8
	var second gvisor.Config
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the server",
		Long: `Run the server: the E2B API, the way into sandboxes, and everything behind them, on
one port. Without --listen that port is on the loopback interface only.

Every flag can be given as an environment variable (--max-sandboxes is
BERM_MAX_SANDBOXES) and in the configuration file, under "serve:"; a flag wins over the
environment, the environment over the file. The first start makes an API key and prints
it once; BERM_BOOTSTRAP_KEY makes a key of your own valid instead.

Stopping the server leaves its sandboxes alive; the next start finds them again.`,
		Example: `  berm serve
  berm serve --listen 127.0.0.1:7676 --data ./data
  berm serve --dev-domain berm.test --listen 127.0.0.1:8443
  BERM_BOOTSTRAP_KEY=e2b_0123456789abcdef0123456789abcdef01234567 berm serve`,
		Args: cli.UsageArgs(cobra.NoArgs),
	}
	flags := cmd.Flags()
	flags.StringVar(&c.Listen, "listen", "127.0.0.1:7676", "address to serve on, HOST:PORT")
	flags.StringVar(&c.Data, "data", defaultData(), "data directory")
	flags.StringVar(&templates, "templates", "", "directory of the templates (default: /var/cache/berm/templates\nas root, else ~/.cache/berm/templates)")
	flags.IntVar(&c.MaxSandboxes, "max-sandboxes", 500, "sandboxes that may exist at once, paused ones included; 0 is any\nnumber")
	flags.DurationVar(&c.MaxTimeout, "max-timeout", 24*time.Hour, "longest time to live that may be asked for")
	flags.BoolVar(&c.RequireLimits, "require-limits", os.Geteuid() == 0, "refuse a sandbox when this host cannot enforce a limit that its\ntemplate has by default; otherwise it is made without that limit,\nand says so (default: true as root, false as another user)")
	flags.Lookup("require-limits").DefValue = "" // it depends on who asks
	flags.StringVar(&level, "level", string(berm.Auto), "isolation level of sandboxes that ask for none: auto, namespace or\ngvisor")
	flags.StringVar(&second.Runsc, "runsc", "", "gVisor's executable, for the level gvisor, as make runsc builds it\n(default: runsc beside berm, or in PATH)")
	flags.StringVar(&second.Platform, "gvisor-platform", "", "how gVisor gets hold of system calls: systrap, ptrace or kvm\n(default: the first of systrap and ptrace that works)")
	flags.StringVar(&c.DefaultEgress, "e2b-default-egress", serve.EgressPublic, "what a sandbox may reach when its creator says nothing: public,\nthe public internet as with E2B, or deny")
	flags.StringArrayVar(&c.Open, "open", nil, "range of special addresses that network policies may name, such as\n10.1.0.0/16; may be repeated")
	flags.StringArrayVar(&c.Resolvers, "resolver", nil, "resolver that names are asked of, ADDRESS:PORT,\ntls://ADDRESS#NAME or https://ADDRESS/dns-query#NAME; may be\nrepeated (default: those of /etc/resolv.conf)")
	flags.StringVar(&c.UpstreamProxy, "upstream-proxy", "", "proxy that sandboxes' networks are reached through: the URL of an\nHTTP, HTTPS or SOCKS5 proxy, or the word env for that of\nHTTPS_PROXY")
	flags.StringVar(&c.UpstreamCA, "upstream-ca", "", "file of authorities, PEM, by which servers and proxies are trusted\nbeside the system's")
	flags.StringVar(&c.AskWebhook, "ask-webhook", "", "URL that is asked about what rules of network policies with\naction: ask leave to somebody; without one they deny")
	flags.StringVar(&c.AskSecret, "ask-secret-file", "", "file with the secret by which those questions are signed")
	flags.StringVar(&c.Domain, "domain", "", "domain under which sandboxes have host names, PORT-ID.DOMAIN")
	flags.StringVar(&c.TLSCert, "tls-cert", "", "certificate for --domain and *.DOMAIN, PEM; TLS is then served\non the same port")
	flags.StringVar(&c.TLSKey, "tls-key", "", "key of the certificate, PEM")
	flags.StringVar(&devDomain, "dev-domain", "", "as --domain, with a certificate made for it by an authority of\nits own")
	flags.Uint32Var(&c.IDs.Base, "id-base", local.DefaultIDs.Base, "first host user id that sandboxes may be given, as root")
	flags.Uint32Var(&c.IDs.Count, "id-count", local.DefaultIDs.Count, "number of host user ids that sandboxes may be given, as root")
	flags.Uint8Var(&spares, "spares", 2, "monitors that wait in advance, each with an empty disk, for\nsandboxes of a size that was asked for twice; 0 starts them when\nthey are needed")
	flags.Var((*poolFlag)(&c.Pools), "pool", "sandboxes of a template that are made in advance, TEMPLATE=N or\nTEMPLATE@LEVEL=N; may be repeated")
	flags.StringVar(&c.ContainerTemplate, "container-template", "code-interpreter-v1", "template that containers are made of, which has an interpreter")
	flags.Var((*cli.SizeFlag)(&c.Depot), "depot", "`SIZE` of a file system in a sparse file, for disks that snapshots\nshare their bytes with where the data directory's cannot clone\n(default: none)")
	c.CheckpointBytes = 10 << 30
	flags.Var((*cli.SizeFlag)(&c.CheckpointBytes), "checkpoint-limit", "most bytes of the checkpoints of one sandbox together; the oldest go")
	flags.StringArrayVar(&c.AuditAnchors, "audit-anchor", nil, "append checkpoints of the audit log to this `FILE`, which should be\nout of this machine's reach; may be repeated")
	flags.StringArrayVar(&c.AuditWitnesses, "audit-witness", nil, "send them to berm audit witness of another machine at this `URL`;\nmay be repeated")
	flags.DurationVar(&c.AuditKeep, "audit-keep", 0, "how long records are kept at least, such as 720h; older ones are\nremoved in time (default: for ever)")
	flags.Var((*cli.SizeFlag)(&c.AuditLimit), "audit-limit", "how much records and their content may take, such as 20GiB; the\noldest are removed in time (default: any amount)")
	flags.StringSliceVar(&c.Record, "record", []string{serve.RecordOutput, serve.RecordProcesses, serve.RecordChanges}, "what goes into the audit log beside actions: output of commands,\nprocesses inside, changes on disk; \"\" is nothing of it")
	flags.StringSliceVar(&c.RecordCalls, "record-calls", nil, "`NAMES` of system calls that are recorded with processes, such as\nptrace,mount; as root")
	flags.StringArrayVar(&c.Webhooks, "webhook", nil, "`URL` that gets events of sandboxes by POST, as CloudEvents; may be\nrepeated")
	flags.StringVar(&c.WebhookSecret, "webhook-secret-file", "", "file with the secret by which those are signed")
	flags.StringVar(&c.OTLP, "otlp", "", "`URL` of an OpenTelemetry endpoint (OTLP over HTTP) that gets audit\nrecords as logs")
	flags.StringArrayVar(&c.OTLPHeaders, "otlp-header", nil, "header of those requests, `NAME=VALUE`; may be repeated")
	flags.StringSliceVar(&c.OTLPEvents, "otlp-events", []string{"*"}, "types of audit records that are sent there")
	flags.StringSliceVar(&c.WebhookEvents, "webhook-events", []string{"sandbox.*", "audit.erase"}, "types of audit records that are sent")
	flags.StringVar(&logFormat, "log-format", "text", "format of the log on stderr: text or json")
	flags.StringVar(&config, "config", "", "configuration file (default: berm/config.yaml in $XDG_CONFIG_HOME\nor ~/.config)")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := configure(cmd, config, os.LookupEnv); err != nil {
			return err
		}
		var err error
		if c.Registries, err = registries(config, os.LookupEnv); err != nil {
			return err
		}
		options := &slog.HandlerOptions{Level: slog.LevelInfo}
		switch logFormat {
		case "text":
			c.Log = slog.New(slog.NewTextHandler(os.Stderr, options))
		case "json":
			c.Log = slog.New(slog.NewJSONHandler(os.Stderr, options))
		default:
			return cli.UsageError{Err: berm.Errorf(berm.Invalid, "--log-format is text or json")}
		}
		if (c.TLSCert == "") != (c.TLSKey == "") {
			return cli.UsageError{Err: berm.Errorf(berm.Invalid, "--tls-cert and --tls-key go together")}
		}
		if devDomain != "" {
			if c.TLSCert != "" || c.Domain != "" {
				return cli.UsageError{Err: berm.Errorf(berm.Invalid, "--dev-domain stands for --domain and --tls-cert")}
			}
			c.Domain, c.DevTLS = devDomain, true
		}
		if c.MaxSandboxes < 0 {
			return cli.UsageError{Err: berm.Errorf(berm.Invalid, "--max-sandboxes %d: it must be a number from 1, or 0 for any number", c.MaxSandboxes)}
		}
		if second.Platform != "" && !slices.Contains(gvisor.Platforms, second.Platform) {
			return cli.UsageError{Err: berm.Errorf(berm.Invalid, "--gvisor-platform %q: the platforms are %s", second.Platform, strings.Join(gvisor.Platforms, ", "))}
		}
		if c.Level = berm.Level(level); c.Level != berm.Auto {
			c.Needed = append(c.Needed, c.Level)
		}
		if second.Runsc != "" || second.Platform != "" {
			c.Needed = append(c.Needed, berm.GVisor)
		}
		claims := ""
		if os.Geteuid() == 0 {
			file, err := claim.Open(claim.Path)
			if err != nil {
				return err
			}
			defer func() { _ = file.Close() }()
			c.Claims, claims = file, claim.Path
		} else {
			c.IDs = berm.IDRange{} // an ordinary user's driver maps its own
		}
		c.BootstrapKey = os.Getenv("BERM_BOOTSTRAP_KEY")
		c.MaxLimits = hostLimits()
		c.Out = cmd.OutOrStdout()
		c.Program = ownProgram

		data, err := filepath.Abs(c.Data)
		if err != nil {
			return err
		}
		c.Data = data
		images, err := template.Open(templates)
		if err != nil {
			return err
		}
		c.Templates = newTemplates(cmd.Context(), images, c.Log)
		if err := images.Arrive(cmd.Context()); err != nil { // it is tried again with the next sandbox
			c.Log.Error("an image does not go on arriving", "error", err, "hint", berm.HintOf(err))
		}
		if os.Geteuid() == 0 || images.Shifted() { // with one id no image can be made into what sandboxes need
			c.Images = images
		}
		c.Drivers = func(watch serve.Watch, images string) ([]berm.Driver, error) {
			second.Watch = watch.GVisor
			return drivers(namespace.Config{Data: data, Images: images, Claims: claims, Spares: int(spares), Watch: watch.Host}, second)
		}
		c.Ready = images.Serve
		c.Hold = func(ctx context.Context, spec berm.Spec) error {
			return images.Lease(ctx, spec.ID, filepath.Join(data, "sandboxes", string(spec.ID)), berm.Template{ID: spec.Guest.TemplateID, Layers: spec.Layers})
		}
		c.HoldLayers = func(ctx context.Context, name, alive string, t berm.Template) error {
			return images.Lease(ctx, berm.SandboxID(name), alive, t)
		}
		err = serve.Run(cmd.Context(), c)
		if setting := (serve.SettingError{}); errors.As(err, &setting) {
			return cli.UsageError{Err: setting.Err}
		}
		return err
	}
	return cmd
}

// defaultData is /var/lib/berm for root, else below $XDG_DATA_HOME.
func defaultData() string {
	if os.Geteuid() == 0 {
		return "/var/lib/berm"
	}
	if dir := os.Getenv("XDG_DATA_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "berm")
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "berm-data"
	}
	return filepath.Join(home, ".local", "share", "berm")
}

// hostLimits is what one sandbox may ask for: as much as the machine has.
func hostLimits() berm.Limits {
	limits := berm.Limits{CPU: float64(runtime.NumCPU()), PIDs: 1 << 15, Disk: 1 << 40}
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		limits.Memory = int64(info.Totalram) * int64(info.Unit)
	}
	if os.Geteuid() != 0 {
		limits.Disk = limits.Memory // where an ordinary user's limited disks lie
	}
	return limits
}
