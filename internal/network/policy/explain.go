package policy

import (
	"net"
	"strconv"
	"strings"
)

// Explain says in one or a few lines what was decided, why, and which line of a policy
// would allow what was denied. It is written for people and for agents, who can act on
// it, and tells nothing that the policy does not.
func (v Verdict) Explain() string {
	at := net.JoinHostPort(v.Flow.Host.String(), strconv.Itoa(int(v.Flow.Port)))
	if v.Flow.Proto == UDP {
		at += "/udp"
	}
	by := "the default of the policy"
	if v.Rule != "" {
		by = "rule " + v.Rule
	}
	switch v.Action {
	case Allow:
		return at + " is allowed by " + by + "."
	case Ask:
		return at + " needs a yes: " + by + " asks for it."
	}
	text := "Denied (" + string(v.Reason) + "): " + at
	detail := func(or string) string {
		if v.Detail != "" {
			return v.Detail
		}
		return or
	}
	switch v.Reason {
	case ReasonMetadata, ReasonMulticast, ReasonDestination:
		return text + " is " + describe(v) + ". No policy can allow it."
	case ReasonPrivate, ReasonHost, ReasonReserved:
		return text + " is " + describe(v) + ". No policy can allow it; the operator of this host can open single ranges (--open)."
	case ReasonOperator:
		return text + " is denied by the operator's rule " + v.Rule + note(v.Detail) + ". No policy can allow it."
	case ReasonDNSPrivate:
		return text + " cannot be reached: " + detail("it has no public address") + "."
	case ReasonRule:
		return text + " is denied by " + by + note(v.Detail) + ". Change or remove the rule to allow it." + v.requests()
	case ReasonNotListed:
		if !v.Flow.Host.nameable() {
			return text + " has a name of one label, which no rule can name. Ask for the full name."
		}
		return text + " is not in the policy. This rule would allow it:\n  - " + v.rule(v.Flow.Port).String()
	case ReasonPort, ReasonProto:
		what := "port"
		if v.Reason == ReasonProto {
			what = "protocol"
		}
		if v.Rule == "" {
			return text + ": the default of the policy does not have this " + what + ". This rule would allow it:\n  - " + v.rule(v.Flow.Port).String()
		}
		return text + ": rule " + v.Rule + " has the destination, but not this " + what + ". This rule would allow it:\n  - " + v.rule(v.Flow.Port).String()
	case ReasonExpired:
		return text + ": rule " + v.Rule + " has expired or was used up. A new rule would allow it:\n  - " + v.rule(v.Flow.Port).String()
	case ReasonPolicy:
		return text + ": there is no policy yet."
	case ReasonCredential:
		return text + " needs the process that holds its credentials, which has ended."
	case ReasonAsk:
		return text + " needs a yes, for which " + by + " asks" + note(v.Detail) + "."
	case ReasonNoSession:
		return text + ": the sandbox has ended."
	case ReasonLimit:
		if v.Rule == "" {
			by = "the policy"
		}
		return text + ": the limit of " + by + " is used up" + note(v.Detail) + "."
	}
	// What is wrong with a request.
	return text + " is in " + by + ", but " + detail("the "+string(v.Reason)+" is not allowed") + "." + v.requests()
}

// mostRequests bounds what is told of a rule, in bytes.
const mostRequests = 600

// requests says which requests the rule that decided allows, for whoever wrote one that it does not.
func (v Verdict) requests() string {
	if v.Match == nil || v.Match.HTTP == nil {
		return ""
	}
	told := 0
	list := func(verb string, entries []Match) string {
		var texts []string
		for i := range entries {
			text := entries[i].describe(verb == "allows")
			if told += len(text); told > mostRequests {
				texts = append(texts, "more that stands under http: in the rule")
				break
			}
			texts = append(texts, text)
		}
		if len(texts) == 0 {
			return ""
		}
		return " It " + verb + " " + strings.Join(texts, "; ") + "."
	}
	return list("allows", v.Match.HTTP.Allow) + list("denies", v.Match.HTTP.Deny)
}

// Remedy is the least rule that would allow a denied flow, as a line of a policy; "" when
// none would by itself.
func (v Verdict) Remedy() string {
	switch v.Reason {
	case ReasonNotListed, ReasonPort, ReasonProto, ReasonExpired:
		if !v.Flow.Host.nameable() {
			return ""
		}
		return v.rule(v.Flow.Port).String()
	}
	return ""
}

func describe(v Verdict) string {
	if v.Detail != "" {
		return v.Detail
	}
	switch v.Reason {
	case ReasonMetadata:
		return "a name of a cloud's metadata service"
	case ReasonHost:
		return "the host that runs the sandbox"
	case ReasonPrivate:
		return "in a private network"
	}
	return "no destination"
}

func note(detail string) string {
	if detail == "" {
		return ""
	}
	return " (" + detail + ")"
}

// rule is the least rule that would allow the verdict's flow.
func (v Verdict) rule(ports ...uint16) *Rule {
	r := &Rule{To: []Target{v.Flow.target()}}
	for _, p := range ports {
		r.Ports = append(r.Ports, PortRange{p, p})
	}
	if v.Flow.Proto == UDP {
		r.Proto = UDP
	}
	return r
}

func (f Flow) target() Target {
	if f.Host.name != "" {
		return Target{kind: exactName, name: f.Host.name}
	}
	addr := f.Host.addr.Unmap().WithZone("")
	prefix, _ := addr.Prefix(addr.BitLen())
	return rangeTarget(prefix)
}

// id makes an id of a destination.
func id(t Target) string {
	s := strings.Trim(strings.NewReplacer("*", "all", "/", "-").Replace(t.String()), ".:")
	return s[:min(len(s), 48)] // with ports it stays below what an id may have
}
