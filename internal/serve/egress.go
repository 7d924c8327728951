package serve

import (
	"cmp"
	"context"
	"os"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/control"
	"github.com/berm-sandbox/berm/internal/credential/vault"
	"github.com/berm-sandbox/berm/internal/kernel/feature"
	"github.com/berm-sandbox/berm/internal/network/address"
	"github.com/berm-sandbox/berm/internal/network/ask/webhook"
	"github.com/berm-sandbox/berm/internal/network/dns"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/upstream"
)

// checkEgress refuses settings of the network that are wrong.
func (c *Config) checkEgress() error {
	if c.DefaultEgress != EgressPublic && c.DefaultEgress != EgressDeny {
		return berm.Errorf(berm.Invalid, "--e2b-default-egress is %s or %s, not %q", EgressPublic, EgressDeny, c.DefaultEgress)
	}
	for i, text := range c.Open {
		p, err := address.ParseRange(text)
		if err != nil {
			return berm.Errorf(berm.Invalid, "--open: %w", err).WithHint("%s", berm.HintOf(err))
		}
		c.Open[i] = p.String()
	}
	for _, text := range c.Resolvers {
		if _, err := dns.ParseResolver(text); err != nil {
			return berm.Errorf(berm.Invalid, "--resolver: %w", err)
		}
	}
	var err error
	c.upstream, err = egress.ReadUpstream(c.UpstreamProxy, c.UpstreamCA, os.Getenv)
	if err == nil {
		_, err = upstream.New(c.upstream, nil, nil)
	}
	if err == nil && c.AskWebhook != "" && c.AskSecret == "" {
		return noSecret("--ask-webhook", "--ask-secret-file")
	}
	if err == nil && c.AskWebhook != "" {
		c.asker, err = webhook.New(c.AskWebhook, c.AskSecret)
	}
	return err
}

// egress is how sandboxes reach networks on this host, and what ends it.
func (c *Config) egress(probes []berm.Probe, secrets *vault.Vault) (control.Egress, func()) {
	e := control.Egress{Public: c.DefaultEgress == EgressPublic, Open: c.Open, Upstream: c.upstream, Asker: c.asker, Missing: "no isolation level can be had here"}
	for _, p := range probes {
		if !p.Usable {
			continue
		}
		for _, f := range p.Features {
			if f.Name != feature.Link.Name {
				continue
			}
			if !f.Found {
				e.Missing = f.Name + ": " + f.Detail
				c.Log.Warn("sandboxes have no network but loopback", "level", p.Level, "reason", e.Missing, "fix", f.Fix)
				return e, func() {}
			}
			var args []string
			for _, r := range c.Resolvers {
				args = append(args, "--"+egress.Resolver, r)
			}
			service := egress.NewService(egress.Command, c.Program, args...)
			service.Ended = func(err error) { c.Log.Error("the network service was lost", "error", err, "hint", berm.HintOf(err)) }
			if err := service.Start(); err != nil {
				e.Missing = err.Error()
				c.Log.Error("sandboxes have no network but loopback", "error", err)
				return e, func() {}
			}
			c.Log.Info("network service", "pid", service.PID(), "default", c.DefaultEgress, "links", cmp.Or(f.Detail, "TUN devices"))
			brokers := egress.NewService(egress.BrokerCommand, c.Program) // started when somebody needs it
			brokers.Ended = func(err error) {
				c.Log.Error("the service of credentials was lost", "error", err, "hint", berm.HintOf(err))
			}
			e.Service, e.Broker, e.Missing = carrier{service}, broker{brokers, secrets}, ""
			return e, func() {
				service.Close()
				brokers.Close()
			}
		}
		e.Missing = "isolation level " + string(p.Level) + " has none"
	}
	return e, func() {}
}

// carrier is the network service as control knows it.
type carrier struct{ *egress.Service }

func (c carrier) Attach(ctx context.Context, id berm.SandboxID, link, door *os.File, p egress.Policy, open []string, events func(egress.Event)) (control.Link, []string, error) {
	l, warnings, err := c.Service.Attach(ctx, id, link, door, p, open, events)
	if err != nil {
		return nil, nil, err
	}
	return l, warnings, nil
}
