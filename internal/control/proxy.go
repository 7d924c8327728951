package control

import (
	"context"
	"crypto/x509"
	"net"
	"net/url"
	"strconv"
	"strings"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/address"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

// EgressProxy is a SOCKS5 proxy of whoever made a sandbox, through which all that leaves it
// goes, after its policy.
type EgressProxy struct {
	Address  string `json:"address"` // HOST:PORT
	Username string `json:"username,omitempty"`
	// Password is what a request brings; the Broker keeps it.
	Password string    `json:"-"`
	TLS      *ProxyTLS `json:"tls,omitempty"` // nil: without
}

// ProxyTLS is how the proxy proves whose it is.
type ProxyTLS struct {
	ServerName string `json:"serverName,omitempty"` // instead of the host of the address
	CACert     string `json:"caCert,omitempty"`     // authorities instead of the system's, in PEM
}

// Bounds of E2B's API, in bytes.
const (
	maxProxyWord = 255
	maxProxyName = 253
	maxProxyCA   = 8192
)

// checkProxy refuses an egressProxy that is wrong whatever the network is like; where it is, is
// the network service's to judge.
func (m *Manager) checkProxy(p *EgressProxy) error {
	if p == nil {
		return nil
	}
	invalid := func(format string, args ...any) error {
		return berm.Errorf(berm.Invalid, "network.egressProxy: "+format, args...)
	}
	host, port, err := net.SplitHostPort(p.Address)
	_, plain, literal := address.Literal(host)
	n, portErr := strconv.ParseUint(port, 10, 16)
	switch {
	case err != nil || portErr != nil || n == 0 || host == "" || strings.ContainsAny(p.Address, "/@%?# \t\r\n\x00"):
		return invalid(`the address must be of the form "host:port"`)
	case literal && !plain:
		return invalid("%q is an address in disguise: write it as 192.0.2.1", host)
	case len(p.Username) > maxProxyWord:
		return invalid("the username is longer than %d bytes", maxProxyWord)
	case len(p.Password) > maxProxyWord:
		return invalid("the password is longer than %d bytes", maxProxyWord)
	case p.Password != "" && p.Username == "":
		return invalid("a password needs a username")
	}
	if t := p.TLS; t != nil {
		if len(t.ServerName) > maxProxyName {
			return invalid("tls.serverName is longer than %d bytes", maxProxyName)
		}
		if len(t.CACert) > maxProxyCA || t.CACert != "" && !x509.NewCertPool().AppendCertsFromPEM([]byte(t.CACert)) {
			return invalid("tls.caCert is no certificate in PEM of at most %d bytes", maxProxyCA)
		}
	}
	if m.Egress.Service == nil || m.Egress.Broker == nil {
		return m.noNetwork("network.egressProxy")
	}
	return nil
}

// way adds the proxy to a way.
func (p *EgressProxy) way(to *egress.Upstream, password string) {
	u := url.URL{Scheme: "socks5", Host: p.Address}
	if p.Username != "" {
		u.User = url.UserPassword(p.Username, password)
	}
	if p.TLS != nil {
		u.Scheme = "socks5s"
		to.OwnName, to.OwnRoots = p.TLS.ServerName, []byte(p.TLS.CACert)
	}
	to.Own = u.String()
}

// keepProxy has the Broker keep the password of a proxy, and returns what goes back to that of
// before.
func (s *session) keepProxy(ctx context.Context, p *EgressProxy) (back func(), err error) {
	broker := s.m.Egress.Broker
	if broker == nil {
		return func() {}, nil
	}
	before, err := broker.ProxyPassword(ctx, s.info.ID)
	if err != nil {
		return nil, err
	}
	password := ""
	if p != nil {
		password = p.Password
	}
	if err := broker.SetProxyPassword(ctx, s.info.ID, password); err != nil {
		return nil, err
	}
	return func() {
		if err := broker.SetProxyPassword(ctx, s.info.ID, before); err != nil {
			s.m.Log.Error("putting the password of a proxy back failed", "sandbox", s.info.ID, "error", err)
		}
	}, nil
}

// plain is the network without passwords.
func (n Network) plain() Network {
	n.EgressProxy = n.EgressProxy.plain()
	return n
}

// plain is the proxy as it is stored, told and recorded: without the password.
func (p *EgressProxy) plain() *EgressProxy {
	if p == nil {
		return nil
	}
	other := *p
	other.Password = ""
	return &other
}
