// Package credential gives requests of a sandbox the secrets that the sandbox never holds,
// and sees to it that none comes back in a reply.
package credential

import (
	"net/netip"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/berm-sandbox/berm"
)

// Kind says where in a request a secret goes.
type Kind string

// The kinds that are built in; Broker.Methods has others.
const (
	Header Kind = "header"  // field Name, after Prefix
	Bearer Kind = "bearer"  // Authorization: Bearer
	Basic  Kind = "basic"   // Authorization: Basic, with User
	APIKey Kind = "api-key" // field Name, by default X-Api-Key
	Cookie Kind = "cookie"  // cookie Name
	Query  Kind = "query"   // key Name of the query
	JSON   Kind = "json"    // string at the JSON pointer Name (RFC 6901) of a body that has it
	Git    Kind = "git"     // git over HTTPS, as Binding.Git allows
)

// Mode says what the sandbox does for its part.
type Mode string

// The modes.
const (
	// Attach sets the secret whatever the sandbox sent in its place.
	Attach Mode = "attach"
	// Swap sets it where the sandbox sent the placeholder of this binding, and leaves a
	// request without one as it is.
	Swap Mode = "swap"
)

// Response says what happens when a reply holds a secret.
type Response string

// What happens.
const (
	Mask  Response = "mask"  // asterisks, as many as there were bytes
	Block Response = "block" // the reply is cut
	Off   Response = "off"   // nobody looks
)

// Binding is the right of a sandbox to have requests sent with a secret. A request is one
// of this binding when host, port, method and path match.
type Binding struct {
	ID   string `json:"id"` // [a-z0-9-], at most 64
	Kind Kind   `json:"kind"`
	// Name is that of the field, cookie or key.
	Name   string `json:"name,omitempty"`
	Prefix string `json:"prefix,omitempty"` // of Header, such as "token "
	User   string `json:"user,omitempty"`   // of Basic and Git
	// Secret refers to the secret: scheme:name. Empty when Value is set.
	Secret string `json:"secret,omitempty"`
	// Value is what Header sets, with references to secrets in E2B's form. See E2B.
	Value string `json:"value,omitempty"`
	// Hosts are names, *.names for all below, and either with ! before it as an exception.
	Hosts   []string `json:"hosts"`
	Ports   []uint16 `json:"ports,omitempty"`   // none: 443
	Methods []string `json:"methods,omitempty"` // none: all
	// Paths are patterns: * stands for a part of a segment, a last segment ** for any rest.
	// None: all.
	Paths    []string  `json:"paths,omitempty"`
	Mode     Mode      `json:"mode,omitempty"`     // by default attach
	Response Response  `json:"response,omitempty"` // by default mask
	MaxUses  int64     `json:"maxUses,omitempty"`  // requests; 0: no limit
	Expires  time.Time `json:"expires,omitzero"`
	// Env is the variable inside that holds the placeholder. Programs that will not start
	// without a key need one in mode Attach too.
	Env   string `json:"env,omitempty"`
	Shape string `json:"shape,omitempty"` // of the placeholder; see Shapes
	// Git is of Git, and of the service github, whose API is then held to the same.
	Git *Rules `json:"git,omitempty"`
	// Revoked says that there is no secret any more: requests of the binding are refused.
	Revoked bool `json:"revoked,omitempty"`
	// Service names an API whose host, place for the key and variables are known; see Services.
	Service string `json:"service,omitempty"`
	// Endpoint gives clients a base URL without TLS inside, which stands for the first host:
	// in the variable URL, and in those of the service.
	Endpoint bool   `json:"endpoint,omitempty"`
	URL      string `json:"url,omitempty"`
}

// normal returns the binding with its defaults, or what is wrong with it.
func (b Binding) normal() (Binding, error) {
	invalid := func(format string, args ...any) *berm.Error {
		return berm.Errorf(berm.Invalid, "credential "+quote(b.ID)+": "+format, args...)
	}
	if b.ID == "" || len(b.ID) > 64 || strings.Trim(b.ID, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" {
		return b, invalid("an id is 1 to 64 of a-z, 0-9 and -")
	}
	if service, ok := services[b.Service]; ok {
		b = service.fill(b)
	} else if b.Service != "" {
		return b, invalid("there is no service %s", quote(b.Service)).WithHint("it is one of %s; for another, name its hosts, such as ,host=api.example.com", strings.Join(Services(), ", "))
	}
	if b.Mode == "" {
		b.Mode = Attach
	}
	if b.Response == "" {
		b.Response = Mask
	}
	if len(b.Ports) == 0 {
		b.Ports = []uint16{443}
		if b.constant() {
			b.Ports = []uint16{443, 80}
		}
	}
	switch b.Kind {
	case APIKey:
		if b.Name == "" {
			b.Name = "X-Api-Key"
		}
	case Git:
		if b.User == "" {
			b.User = "x-access-token" // what GitHub and its like take with any token
		}
	}
	switch {
	case !slices.Contains([]Mode{Attach, Swap}, b.Mode):
		return b, invalid("mode is attach or swap, not %s", quote(string(b.Mode)))
	case !slices.Contains([]Response{Mask, Block, Off}, b.Response):
		return b, invalid("response is mask, block or off, not %s", quote(string(b.Response)))
	case (b.Secret == "") == (b.Value == ""):
		return b, invalid("it needs a secret")
	case b.Value != "" && (b.Kind != Header || b.Mode != Attach):
		return b, invalid("a value is for kind header in mode attach")
	case b.Git == nil && b.Kind == Git, b.Git != nil && b.Kind != Git && b.Service != github:
		return b, invalid("kind git and rules for git belong together")
	case b.Kind == Git && b.Mode != Attach:
		return b, invalid("git is never shown a placeholder: the mode is attach")
	case b.Mode == Swap && b.Env == "":
		return b, invalid("mode swap needs env, the variable that holds the placeholder")
	case strings.ContainsAny(b.User, ":\r\n\x00"):
		return b, invalid("the user has a character that it cannot have")
	case b.MaxUses < 0:
		return b, invalid("maxUses is negative")
	case b.Env != "" && !isVariable(b.Env), b.URL != "" && !isVariable(b.URL):
		return b, invalid("%s is no name of a variable", quote(b.Env+b.URL))
	case b.URL != "" && !b.Endpoint:
		return b, invalid("a variable for a URL is for an endpoint")
	case b.Endpoint && b.URL == "" && len(services[b.Service].urls) == 0:
		return b, invalid("its endpoint is in no variable")
	case b.Endpoint && (len(b.ID) > 63 || strings.Trim(b.ID, "-") != b.ID):
		return b, invalid("the id of one with an endpoint is a part of a name: at most 63 bytes, without - at an end")
	case len(b.Hosts) == 0:
		return b, invalid("it names no host")
	}
	if _, ok := shapes[b.Shape]; !ok {
		return b, invalid("there is no shape %s", quote(b.Shape)).WithHint("it is one of %s", strings.Join(Shapes(), ", "))
	}
	if err := b.checkName(); err != nil {
		return b, invalid("%w", err)
	}
	for _, host := range b.Hosts {
		if !isHost(host) {
			return b, invalid("%s is no host", quote(host)).WithHint("write a name in lower case without a last dot, as api.example.com, or *.example.com")
		}
	}
	for _, p := range b.Paths {
		if !strings.HasPrefix(p, "/") || strings.Contains(strings.TrimSuffix(p, "/**"), "**") || !wellFormed(p) {
			return b, invalid("%s is no pattern of paths", quote(p)).WithHint("it begins with /; * stands for a part of a segment, a last ** for any rest")
		}
	}
	if b.Git != nil {
		if err := b.Git.check(); err != nil {
			return b, invalid("%w", err)
		}
	}
	if b.Endpoint && (strings.HasPrefix(b.Hosts[0], "*") || strings.HasPrefix(b.Hosts[0], "!")) {
		return b, invalid("the first host is the one that the endpoint stands for, and no pattern")
	}
	return b, nil
}

// Normal returns bindings with their defaults. Invalid when one is wrong.
func Normal(bindings []Binding) ([]Binding, error) {
	normal := make([]Binding, len(bindings))
	for i, b := range bindings {
		var err error
		if normal[i], err = b.normal(); err != nil {
			return nil, err
		}
	}
	return normal, nil
}

// constant says that nothing of the binding is secret.
func (b Binding) constant() bool { return b.Value != "" && len(References(b.Value)) == 0 }

func (b Binding) checkName() error {
	switch b.Kind {
	case Header, APIKey:
		switch {
		case !httpguts.ValidHeaderFieldName(b.Name):
			return berm.Errorf(berm.Invalid, "%s is no name of a field", quote(b.Name))
		case isFraming(b.Name):
			return berm.Errorf(berm.Invalid, "the field %s is not for credentials", b.Name)
		case !b.constant() && isReflected(b.Name):
			return berm.Errorf(berm.Invalid, "servers send the field %s back or log it", b.Name)
		case !httpguts.ValidHeaderFieldValue(b.Prefix):
			return berm.Errorf(berm.Invalid, "the prefix has a control character")
		}
	case Cookie:
		if !httpguts.ValidHeaderFieldName(b.Name) {
			return berm.Errorf(berm.Invalid, "%s is no name of a cookie", quote(b.Name))
		}
	case Query:
		if b.Name == "" {
			return berm.Errorf(berm.Invalid, "it names no key of the query")
		}
	case JSON:
		if !strings.HasPrefix(b.Name, "/") {
			return berm.Errorf(berm.Invalid, "%s is no JSON pointer to a field", quote(b.Name))
		}
	}
	return nil
}

// isFraming says whether a field is about the connection, the body or the message itself.
func isFraming(name string) bool {
	name = fold(name)
	switch name {
	case "host", "connection", "date", "keep-alive", "http2-settings", "te", "trailer", "transfer-encoding", "upgrade", "expect", "cookie":
		return true
	}
	return strings.HasPrefix(name, "content-") || strings.HasPrefix(name, "proxy-") || strings.HasPrefix(name, "sec-")
}

// isReflected says whether servers are known to send a field back, or to hand it on.
func isReflected(name string) bool {
	name = strings.ToLower(name)
	switch name {
	case "user-agent", "referer", "origin", "from", "via", "forwarded", "range", "traceparent", "tracestate", "baggage", "request-id", "correlation-id":
		return true
	}
	for _, prefix := range []string{"x-forwarded-", "accept", "if-", "access-control-", "x-b3-"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return strings.HasSuffix(name, "-request-id") || strings.HasSuffix(name, "-trace-id") || strings.HasSuffix(name, "-correlation-id") || strings.HasPrefix(name, "x-request-") || strings.HasPrefix(name, "x-trace-") || strings.HasPrefix(name, "x-cloud-trace-")
}

func isVariable(name string) bool {
	return strings.Trim(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_") == "" && (name[0] < '0' || name[0] > '9')
}

// isHost says whether a pattern of hosts is in canonical form.
func isHost(host string) bool {
	host = strings.TrimPrefix(host, "!")
	rest, wild := strings.CutPrefix(host, "*.")
	if _, err := netip.ParseAddr(rest); err == nil {
		return !wild && netip.MustParseAddr(rest).String() == rest
	}
	labels := strings.Split(rest, ".")
	for _, label := range labels {
		if label == "" || len(label) > 63 || strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
			return false
		}
	}
	// *.com would be a right for everybody.
	return len(rest) <= 253 && (!wild || len(labels) > 1)
}

func matchHost(patterns []string, name string) (matched bool) {
	for _, pattern := range patterns {
		pattern, except := strings.CutPrefix(pattern, "!")
		below, wild := strings.CutPrefix(pattern, "*")
		if pattern == name || wild && strings.HasSuffix(name, below) && len(name) > len(below) {
			if except {
				return false
			}
			matched = true
		}
	}
	return matched
}

func wellFormed(pattern string) bool {
	_, err := path.Match(pattern, "")
	return err == nil && !strings.ContainsAny(pattern, `[]?\`)
}

func matchPath(patterns []string, p string) bool {
	return len(patterns) == 0 || slices.ContainsFunc(patterns, func(pattern string) bool { return matchOne(pattern, p) })
}

// matchOne matches segments one by one; a last ** matches any rest, none too.
func matchOne(pattern, p string) bool {
	if head, rest := strings.CutSuffix(pattern, "/**"); rest {
		n := strings.Count(head, "/") + 1
		segments := strings.SplitN(p, "/", n+1)
		return len(segments) >= n && matchSegments(head, strings.Join(segments[:n], "/"))
	}
	return matchSegments(pattern, p)
}

func matchSegments(pattern, p string) bool {
	ok, _ := path.Match(pattern, p) // checked by normal
	return ok
}

func quote(s string) string {
	if len(s) > 64 {
		s = s[:64] + "…"
	}
	return `"` + strings.ToValidUTF8(strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return '?'
		}
		return r
	}, s), "?") + `"`
}
