package policy

import (
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
)

// Question is a flow, or a request in one, of which somebody wants to know what a policy says.
type Question struct {
	Flow    Flow
	TLS     bool     // the flow begins with TLS for the name
	Request *Request // nil: nothing is known of the requests in the flow
}

// ParseQuestion reads a URL of HTTP or of WebSocket, or HOST[:PORT][/udp]; without a port it is
// 443. method is a request's, for URLs only; "" is GET. Kind: Invalid.
func ParseQuestion(text, method string, now time.Time) (Question, error) {
	scheme, _, isURL := strings.Cut(text, "://")
	if !isURL {
		if method != "" {
			return Question{}, berm.Errorf(berm.Invalid, "a method is one of a request to a URL").WithHint("write https://%s/PATH", clip(text))
		}
		q := Question{Flow: Flow{Proto: TCP, Time: now}}
		to, isUDP := strings.CutSuffix(text, "/udp")
		if isUDP {
			q.Flow.Proto = UDP
		}
		var err error
		q.Flow.Host, q.Flow.Port, err = parseDestination(to, 443)
		return q, err
	}
	u, err := url.Parse(text)
	if err != nil {
		return Question{}, berm.Errorf(berm.Invalid, "%q is not a URL", clip(text))
	}
	q := Question{Flow: Flow{Proto: TCP, Time: now}, Request: &Request{Method: method, Target: u.RequestURI()}}
	port := uint16(443)
	switch strings.ToLower(scheme) {
	case "https", "wss":
		q.TLS = true
	case "http", "ws":
		port = 80
	default:
		return Question{}, berm.Errorf(berm.Invalid, "%q is not a URL of http, https, ws or wss", clip(text)).
			WithHint("of other protocols write HOST:PORT")
	}
	if u.User != nil || u.Fragment != "" {
		return Question{}, berm.Errorf(berm.Invalid, "%q has a user or a fragment, which are not a part of requests", clip(text))
	}
	if method == "" {
		q.Request.Method = "GET"
	}
	if strings.HasPrefix(strings.ToLower(scheme), "ws") {
		q.Request.Header = map[string][]string{"Upgrade": {"websocket"}}
	}
	q.Flow.Host, q.Flow.Port, err = parseDestination(u.Host, port)
	if err != nil {
		return Question{}, err
	}
	q.Request.Authority = netip.AddrPortFrom(q.Flow.Host.addr, q.Flow.Port).String()
	if q.Flow.Host.name != "" {
		q.Request.Authority = q.Flow.Host.name
	}
	return q, nil
}

// Answer is a verdict for programs.
type Answer struct {
	To          string   `json:"to"` // HOST:PORT
	Protocol    Proto    `json:"protocol"`
	Action      Action   `json:"action"`
	Rule        string   `json:"rule,omitempty"` // that decided, or came nearest
	Revision    string   `json:"revision,omitempty"`
	Reason      Reason   `json:"reason,omitempty"` // of a denial
	Explanation string   `json:"explanation"`
	Remedy      string   `json:"remedy,omitempty"` // the least rule that would allow it
	Inspected   bool     `json:"inspected"`        // requests are looked into
	Credentials []string `json:"credentials,omitempty"`
}

// Answer is the verdict for programs.
func (v Verdict) Answer() Answer {
	a := Answer{
		To: net.JoinHostPort(v.Flow.Host.String(), strconv.Itoa(int(v.Flow.Port))), Protocol: v.Flow.Proto, Action: v.Action,
		Rule: v.Rule, Revision: v.Revision, Reason: v.Reason, Explanation: v.Explain(), Remedy: v.Remedy(),
	}
	if v.Action != Deny {
		a.Inspected, a.Credentials = v.Inspect || v.Sniff, v.Credentials
	}
	return a
}

// parseDestination reads HOST[:PORT], with brackets around an IPv6 address that has a port.
func parseDestination(text string, port uint16) (Host, uint16, error) {
	name, isBracketed := text, strings.HasPrefix(text, "[")
	if i := strings.LastIndexByte(text, ':'); i >= 0 && (isBracketed || strings.IndexByte(text, ':') == i) && !strings.HasSuffix(text, "]") {
		var err error
		if port, err = parsePort(text[i+1:]); err != nil {
			return Host{}, 0, berm.Errorf(berm.Invalid, "%q is not HOST, HOST:PORT or a URL", clip(text))
		}
		name = text[:i]
	}
	if isBracketed {
		name = strings.TrimSuffix(strings.TrimPrefix(name, "["), "]")
	}
	host, err := ParseHost(name)
	return host, port, err
}

// Answer judges a question as a flow and a request like that would be. What the addresses of
// a name are is not known here: Vet judges them when it is dialed.
func (e *Evaluator) Answer(q Question) Verdict {
	v := e.Decide(q.Flow)
	if v.Action == Deny || q.Request == nil {
		return v
	}
	action := v.Action
	v.Action = Allow // a yes is not the last word
	hello := &Hello{ServerName: q.Flow.Host.name}
	if !q.TLS {
		hello = nil
	}
	after := v.DecideTLS(hello)
	if after.Action == Allow && (v.Inspect || !q.TLS && v.Flow.Host.name != "" && (v.Match == nil || !v.Match.Opaque)) {
		after = after.DecideHTTP(*q.Request)
	}
	if after.Action == Allow {
		after.Action = action
	}
	return after
}
