package e2b

import (
	"errors"
	"math"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/control"
	"github.com/berm-sandbox/berm/internal/network/policy"
)

// outbound is about traffic out of a sandbox.
type outbound struct {
	AllowOut    []string               `json:"allowOut,omitempty"`
	DenyOut     []string               `json:"denyOut,omitempty"`
	DNSServers  []string               `json:"dnsServers,omitempty"`
	EgressProxy *egressProxy           `json:"egressProxy,omitempty"`
	Rules       map[string][]transform `json:"rules,omitempty"`
}

// network is how traffic reaches a new sandbox and leaves it.
type network struct {
	outbound
	Public     *bool    `json:"allowPublicTraffic,omitempty"`
	MaskHost   string   `json:"maskRequestHost,omitempty"`
	HTTPSPorts []uint16 `json:"httpsPorts,omitempty"`
}

// networkUpdate replaces outbound; what is about traffic to the sandbox stays.
type networkUpdate struct {
	outbound
	Internet *bool `json:"allow_internet_access,omitempty"`
}

// egressProxy is a SOCKS5 proxy of the client's. The password and the authorities are never in
// an answer.
type egressProxy struct {
	Address  string    `json:"address"`
	Username string    `json:"username,omitempty"`
	Password string    `json:"password,omitempty"`
	TLS      *proxyTLS `json:"tls,omitempty"`
}

type proxyTLS struct {
	Enabled    bool   `json:"enabled"`
	ServerName string `json:"serverName,omitempty"`
	CACert     string `json:"caCert,omitempty"`
}

func (p *egressProxy) form() (*control.EgressProxy, error) {
	if p == nil {
		return nil, nil //nolint:nilnil // there is none
	}
	form := &control.EgressProxy{Address: p.Address, Username: p.Username, Password: p.Password}
	switch t := p.TLS; {
	case t == nil:
	case t.Enabled:
		form.TLS = &control.ProxyTLS{ServerName: t.ServerName, CACert: t.CACert}
	case t.ServerName != "" || t.CACert != "":
		return nil, berm.Errorf(berm.Invalid, "network.egressProxy: tls is not enabled, and has serverName or caCert")
	}
	return form, nil
}

func toEgressProxy(p *control.EgressProxy) *egressProxy {
	if p == nil {
		return nil
	}
	told := &egressProxy{Address: p.Address, Username: p.Username}
	if p.TLS != nil {
		told.TLS = &proxyTLS{Enabled: true, ServerName: p.TLS.ServerName}
	}
	return told
}

type transform struct {
	Transform struct {
		Headers map[string]string `json:"headers"`
	} `json:"transform"`
}

// fields makes control's form, which is judged there.
func (n *network) fields() (control.Network, error) {
	fields, err := n.outbound.fields()
	fields.Private, fields.MaskHost, fields.HTTPSPorts = n.Public != nil && !*n.Public, n.MaskHost, n.HTTPSPorts
	return fields, err
}

// fields refuses what no version has.
func (n *outbound) fields() (control.Network, error) {
	if len(n.DNSServers) > 0 {
		return control.Network{}, berm.Errorf(berm.Unsupported, "This version of Berm does not have network.dnsServers: names are resolved by the server's own resolvers")
	}
	fields := control.Network{AllowOut: n.AllowOut, DenyOut: n.DenyOut}
	var err error
	if fields.EgressProxy, err = n.EgressProxy.form(); err != nil {
		return control.Network{}, err
	}
	if n.Rules != nil {
		fields.Transforms = map[string][]policy.E2BTransform{}
	}
	for domain, list := range n.Rules {
		transforms := make([]policy.E2BTransform, len(list))
		for i, t := range list {
			transforms[i].Headers = t.Transform.Headers
		}
		fields.Transforms[domain] = transforms
	}
	return fields, nil
}

// toNetwork is what a sandbox's creator, or the last update, said of its network; nil for
// nothing.
func toNetwork(n control.Network) *network {
	if !n.Private && n.MaskHost == "" && n.HTTPSPorts == nil && n.AllowOut == nil && n.DenyOut == nil && n.EgressProxy == nil {
		return nil
	}
	public := !n.Private
	return &network{
		outbound: outbound{AllowOut: n.AllowOut, DenyOut: n.DenyOut, EgressProxy: toEgressProxy(n.EgressProxy)},
		Public:   &public, MaskHost: n.MaskHost, HTTPSPorts: n.HTTPSPorts,
	}
}

// setNetwork replaces the rules for traffic out of a sandbox: what the update does not say
// is as in a create that does not say it.
func (a *API) setNetwork(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	body, err := readBody(w, r)
	if err != nil {
		return err
	}
	var in networkUpdate
	if err := parse(body, &in); err != nil {
		return err
	}
	if err := checkKeys(body, "", in); err != nil {
		return err
	}
	fields, err := in.fields()
	if err != nil {
		return err
	}
	if err := a.Sessions.SetNetwork(r.Context(), id, fields, in.Internet, actor(r)); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// networkPolicy returns the network policy in force as the document that setNetworkPolicy
// takes, with its revision as the entity tag.
func (a *API) networkPolicy(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	s, err := a.Sessions.Inspect(r.Context(), id)
	if err != nil {
		return err
	}
	if s.Policy == nil {
		return berm.Errorf(berm.NotFound, "sandbox %s has no network policy: it has no network but loopback", id)
	}
	document, kind := []byte(s.Policy.Document), "application/json"
	if strings.Contains(r.Header.Get("Accept"), "yaml") {
		p, err := policy.DecodeJSON("policy", document)
		if err != nil {
			return berm.Errorf(berm.Internal, "stored policy of sandbox %s: %w", id, err)
		}
		document, kind = p.YAML(), "application/yaml"
	}
	w.Header().Set("Content-Type", kind)
	w.Header().Set("ETag", entityTag(s.Policy.Revision))
	_, _ = w.Write(document)
	return nil
}

func entityTag(revision int) string { return `"` + strconv.Itoa(revision) + `"` }

// setNetworkPolicy replaces the network policy by a document in JSON or YAML. With If-Match
// it does so only if nobody else did since the document was read.
func (a *API) setNetworkPolicy(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	body, err := readBody(w, r)
	if err != nil {
		return err
	}
	decode := policy.DecodeJSON
	kind, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if strings.HasSuffix(kind, "yaml") {
		decode = policy.DecodeYAML
	}
	p, err := decode("policy", body)
	if err != nil && !strings.HasSuffix(kind, "yaml") {
		var mismatch *berm.Error
		if _, yaml := policy.DecodeYAML("policy", body); errors.As(err, &mismatch) && yaml == nil {
			err = mismatch.WithHint("it is read as JSON; of YAML say so: Content-Type: application/yaml")
		}
	}
	if err != nil {
		return err
	}
	revision := 0
	if match := r.Header.Get("If-Match"); match != "" && match != "*" {
		if revision, err = strconv.Atoi(strings.Trim(match, `"`)); err != nil || match != entityTag(revision) || revision < 1 {
			return &httpError{http.StatusPreconditionFailed, "", "If-Match is no entity tag of this policy"}
		}
	}
	revision, warnings, err := a.Sessions.SetPolicy(r.Context(), id, p, revision, actor(r))
	if errors.Is(err, control.ErrPolicyChanged) {
		return &httpError{http.StatusPreconditionFailed, "", err.Error()}
	}
	if err != nil {
		return err
	}
	if warnings == nil {
		warnings = []string{}
	}
	w.Header().Set("ETag", entityTag(revision))
	return answer(w, http.StatusOK, map[string]any{"revision": revision, "warnings": warnings})
}

// explainNetwork says in plain words what the network policy in force allows.
func (a *API) explainNetwork(w http.ResponseWriter, _ *http.Request, id berm.SandboxID) error {
	d, revision, err := a.Sessions.ExplainNetwork(id)
	if err != nil {
		return err
	}
	w.Header().Set("ETag", strconv.Quote(revision))
	return answer(w, http.StatusOK, d)
}

// checkNetwork says what the network policy in force says of a URL or destination.
func (a *API) checkNetwork(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	query := r.URL.Query()
	q, err := policy.ParseQuestion(query.Get("to"), query.Get("method"), time.Now())
	if err != nil {
		return err
	}
	v, err := a.Sessions.CheckNetwork(id, q)
	if err != nil {
		return err
	}
	return answer(w, http.StatusOK, v.Answer())
}

// networkLog returns flows, denials and denied queries of a sandbox after the number given.
func (a *API) networkLog(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	after, err := queryInt(r, "after", 0, 0, math.MaxInt64-1)
	if err != nil {
		return err
	}
	events, err := a.Sessions.NetworkLog(id, uint64(after))
	if err != nil {
		return err
	}
	return answer(w, http.StatusOK, map[string]any{"events": events})
}
