package policy

import (
	"mime"
	"net"
	"slices"
	"strconv"
	"strings"
)

// Hello is what a client shows of itself before TLS encrypts.
type Hello struct {
	ServerName string
	ECH        bool // the extension encrypted_client_hello (0xfe0d) is there
}

// DecideTLS judges the first bytes of an allowed flow over TCP: its hello, or nil when it
// does not begin with one. A hidden name matters where names decide and Berm does not end
// TLS itself.
func (v Verdict) DecideTLS(hello *Hello) Verdict {
	if v.Action != Allow {
		return v
	}
	rule := v.Match
	if rule == nil {
		rule = &Rule{}
	}
	switch {
	case rule.Opaque:
		return v
	case hello == nil:
		if rule.TLS == TLSRequire || rule.TLS == TLSIntercept {
			return v.deny(ReasonTLS, "the rule requires TLS")
		}
		return v
	case rule.TLS == TLSForbid:
		return v.deny(ReasonTLS, "the rule forbids TLS")
	case hello.ECH && !v.Inspect && !rule.ECH && (v.named && v.Flow.Host.name != "" || v.byName && !v.named):
		// Behind an allowed name's address every site of the same provider could be meant.
		return v.deny(ReasonECH, "the client hides the name of the server")
	}
	if v.Flow.Host.name == "" || hello.ServerName == "" && !v.named {
		return v // judged by its address, or one of all names
	}
	if hello.ServerName == "" {
		return v.deny(ReasonSNI, "the client does not say which server it means; app: tcp in the rule would let it pass")
	}
	host, err := ParseHost(hello.ServerName)
	if err != nil || host != v.Flow.Host {
		return v.deny(ReasonSNI, "the client asks for "+strconv.Quote(clip(hello.ServerName))+" at the address of "+v.Flow.Host.name)
	}
	return v
}

// Request is a request in a flow, as its head says.
type Request struct {
	Method    string
	Authority string // the Host header or :authority
	Target    string // the target: path and query
	Header    map[string][]string
	BodySize  int64 // in bytes, 0 without a body, negative while it is not known
}

// DecideHTTP judges a request in an allowed flow. When it allows it, Target and MaxBody
// say what to forward: where paths are judged the target is in canonical form, so that
// policy and server read the same.
func (v Verdict) DecideHTTP(r Request) Verdict {
	if v.Action == Deny {
		return v
	}
	if why := v.checkAuthority(r.Authority); why != "" {
		return v.deny(ReasonAuthority, why)
	}
	if _, err := parseMethod(r.Method); err != nil {
		return v.deny(ReasonMethod, strconv.Quote(clip(r.Method))+" is never allowed")
	}
	raw, query, hasQuery := strings.Cut(r.Target, "?")
	v.Target = r.Target
	switch {
	case !strings.HasPrefix(raw, "/") && r.Target != "*": // OPTIONS for the whole server
		return v.deny(ReasonPath, "the target "+strconv.Quote(clip(r.Target))+" is not a path")
	case len(r.Target) > maxTarget || strings.ContainsFunc(r.Target, func(c rune) bool { return c <= 0x20 || c == 0x7f || c == '#' }):
		return v.deny(ReasonPath, "the target has a character that must be encoded, or is too long")
	case v.Match == nil || v.Match.HTTP == nil:
		return v
	}
	http := v.Match.HTTP
	var p path
	if http.judgesPaths() {
		var err error
		if p, err = parsePath(raw); err != nil {
			return v.deny(ReasonPath, err.Error())
		}
		if v.Target = p.text; hasQuery {
			v.Target += "?" + query
		}
	}
	for i := range http.Deny {
		if http.Deny[i].denies(r, p, query) {
			return v.deny(ReasonRule, "the rule denies such requests")
		}
	}
	// Of the entries that do not allow it, the one that came furthest says why.
	var furthest, from int
	reason, detail := ReasonMethod, ""
	for i := range http.Allow {
		m := &http.Allow[i]
		why, text, at := m.allows(r, p, query)
		if why == "" {
			v.MaxBody = m.MaxBody
			return v
		}
		if at > furthest || i == from && furthest == 0 {
			furthest, reason, detail = at, why, text
		}
	}
	return v.deny(reason, detail)
}

// judgesPaths says whether some condition is about paths. Only then they must be what all
// servers read alike.
func (h *HTTP) judgesPaths() bool {
	about := func(m Match) bool { return len(m.Paths) > 0 }
	return slices.ContainsFunc(h.Allow, about) || slices.ContainsFunc(h.Deny, about)
}

func (v Verdict) deny(reason Reason, detail string) Verdict {
	v.Action, v.Reason, v.Detail, v.Target = Deny, reason, detail, ""
	return v
}

// checkAuthority says what is wrong with a request's authority: it must be the flow's
// destination.
func (v Verdict) checkAuthority(authority string) string {
	name := authority
	if i := strings.LastIndexByte(authority, ':'); i >= 0 && !strings.HasSuffix(authority, "]") {
		port, err := parsePort(authority[i+1:])
		if err != nil || port != v.Flow.Port {
			return strconv.Quote(clip(authority)) + " names another port than " + strconv.Itoa(int(v.Flow.Port))
		}
		name = authority[:i]
	}
	host, err := ParseHost(name)
	if err == nil && v.Flow.Host.name == "" && host.addr.Unmap() == v.Flow.Host.addr.Unmap() {
		return ""
	}
	if err != nil || host != v.Flow.Host {
		return "the request is for " + strconv.Quote(clip(authority)) + " and the connection for " +
			net.JoinHostPort(v.Flow.Host.String(), strconv.Itoa(int(v.Flow.Port)))
	}
	return ""
}

// overrides are headers by which frameworks let a request have another method.
var overrides = [...]string{"X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override"}

// allows says for an entry of Allow why it does not, "" when it does; and how many
// conditions were met before.
func (m *Match) allows(r Request, p path, query string) (why Reason, detail string, met int) {
	if len(m.Paths) > 0 {
		for _, reading := range p.readings {
			if !m.matchPath(reading) {
				return ReasonPath, p.text + " is not a path of the rule", 0
			}
		}
	}
	if len(m.Methods) > 0 {
		if !slices.Contains(m.Methods, r.Method) {
			return ReasonMethod, r.Method + " is not a method of the rule", 1
		}
		for _, name := range overrides {
			if header(r.Header, name) != nil {
				return ReasonMethod, "the header " + name + " may change the method", 1
			}
		}
	}
	if m.Query != nil {
		keys, err := queryKeys(query)
		if err != nil {
			return ReasonQuery, err.Error(), 2
		}
		for _, key := range keys {
			if !slices.Contains(m.Query, key) {
				return ReasonQuery, strconv.Quote(clip(key)) + " is not a key of the rule", 2
			}
		}
	}
	for _, name := range m.Require {
		if header(r.Header, name) == nil {
			return ReasonHeader, "the header " + name + " is missing", 3
		}
	}
	for _, name := range m.Forbid {
		if header(r.Header, name) != nil {
			return ReasonHeader, "the header " + name + " is there", 3
		}
	}
	for _, protocol := range upgrades(r.Header) {
		if !slices.Contains(m.Upgrade, protocol) {
			return ReasonUpgrade, strconv.Quote(clip(protocol)) + " is not a protocol of the rule", 4
		}
	}
	if r.BodySize != 0 && len(m.ContentTypes) > 0 && !slices.Contains(m.ContentTypes, contentType(r.Header)) {
		return ReasonBody, strconv.Quote(clip(contentType(r.Header))) + " is not a content type of the rule", 5
	}
	if m.MaxBody > 0 && r.BodySize > m.MaxBody {
		return ReasonBody, "the body has " + strconv.FormatInt(r.BodySize, 10) + " bytes, the rule allows " + formatBytes(m.MaxBody), 5
	}
	return "", "", 0
}

// denies says for an entry of Deny whether a request meets all its conditions. What
// cannot be read meets them.
func (m *Match) denies(r Request, p path, query string) bool {
	if len(m.Paths) > 0 && !slices.ContainsFunc(p.readings, m.matchPath) {
		return false
	}
	if len(m.Methods) > 0 && !slices.Contains(m.Methods, r.Method) &&
		!slices.ContainsFunc(overrides[:], func(name string) bool { return header(r.Header, name) != nil }) {
		return false
	}
	if m.Query != nil {
		keys, err := queryKeys(query)
		if err == nil && !slices.ContainsFunc(keys, func(key string) bool { return slices.Contains(m.Query, key) }) {
			return false
		}
	}
	for _, name := range m.Require {
		if header(r.Header, name) == nil {
			return false
		}
	}
	for _, name := range m.Forbid {
		if header(r.Header, name) != nil {
			return false
		}
	}
	if len(m.Upgrade) > 0 && !slices.ContainsFunc(upgrades(r.Header), func(p string) bool { return slices.Contains(m.Upgrade, p) }) {
		return false
	}
	if len(m.ContentTypes) == 0 {
		return true
	}
	media := contentType(r.Header)
	return r.BodySize != 0 && (slices.Contains(m.ContentTypes, media) || media == "" && header(r.Header, "Content-Type") != nil)
}

func (m *Match) matchPath(reading []string) bool {
	return slices.ContainsFunc(m.Paths, func(g Glob) bool { return g.match(reading) })
}

// contentType is the media type of a body in lower case, "" when it is not one.
func contentType(h map[string][]string) string {
	values := header(h, "Content-Type")
	if len(values) != 1 {
		return ""
	}
	media, _, err := mime.ParseMediaType(values[0])
	if err != nil {
		return ""
	}
	return media
}

// upgrades are the protocols to which a request wants to switch, in lower case, without
// versions. Whoever forwards requests never switches to h2c, which many clients offer.
func upgrades(h map[string][]string) (protocols []string) {
	for _, value := range header(h, "Upgrade") {
		for protocol := range strings.SplitSeq(value, ",") {
			if name, _, _ := strings.Cut(strings.ToLower(strings.TrimSpace(protocol)), "/"); name != "h2c" {
				protocols = append(protocols, name)
			}
		}
	}
	return protocols
}
