package policy

import (
	"encoding/json"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/berm-sandbox/berm"
)

// Forms are those that Import reads, by their names.
var Forms = []string{"sandbox-runtime", "vercel", "deno"}

// Import reads the policy of another system, in the form of that name or, without one, in the
// form that it can only be. Kinds: Invalid, Unsupported.
func Import(form string, content []byte) (*Policy, error) {
	if form == "" {
		var err error
		if form, err = formOf(content); err != nil {
			return nil, err
		}
	}
	switch form {
	case "sandbox-runtime":
		return FromSandboxRuntime(content)
	case "vercel":
		return FromVercel(content)
	case "deno":
		return FromDenoFile(content)
	}
	return nil, berm.Errorf(berm.Invalid, "%q is not a form that is read", clip(form)).WithHint("there are %s", strings.Join(Forms, ", "))
}

// formOf tells a form by the keys that only it has.
func formOf(content []byte) (string, error) {
	if json.Unmarshal(content, new(string)) == nil {
		return "vercel", nil
	}
	var keys map[string]json.RawMessage
	if err := parseJSON(content, &keys); err != nil {
		return "", err
	}
	of := map[string][]string{
		"sandbox-runtime": {"network", "deniedDomains", "filesystem"},
		"vercel":          {"networkPolicy", "mode", "allow", "subnets", "allowedCIDRs", "deniedCIDRs", "injectionRules"},
		"deno":            {"allowNet", "denyNet", "permissions"},
	}
	var found []string
	for _, form := range Forms {
		if slices.ContainsFunc(of[form], func(key string) bool { return keys[key] != nil }) {
			found = append(found, form)
		}
	}
	if len(found) != 1 {
		return "", berm.Errorf(berm.Invalid, "whose form this is cannot be told by its keys").
			WithHint("--from says it: %s", strings.Join(Forms, ", "))
	}
	return found[0], nil
}

// FromDenoFile reads the options of a Deno sandbox (allowNet), or the permissions of a
// deno.json: those of the set named default, or of the only one.
func FromDenoFile(content []byte) (*Policy, error) {
	var file struct {
		AllowNet    *[]string                  `json:"allowNet"`
		DenyNet     *[]string                  `json:"denyNet"`
		Permissions map[string]json.RawMessage `json:"permissions"`
	}
	if err := parseJSON(content, &file); err != nil {
		return nil, err
	}
	if file.Permissions == nil {
		if file.AllowNet == nil && file.DenyNet == nil {
			return nil, berm.Errorf(berm.Invalid, "there is neither allowNet nor permissions in it").
				WithHint("without allowNet Deno's sandboxes reach everything: default: allow-public says the same")
		}
		return FromDeno(file.AllowNet, file.DenyNet)
	}
	raw, ok := file.Permissions["default"]
	if !ok && len(file.Permissions) == 1 {
		for _, raw = range file.Permissions {
		}
	} else if !ok {
		return nil, berm.Errorf(berm.Invalid, "of several sets of permissions none is named default")
	}
	var set struct {
		All bool            `json:"all"`
		Net json.RawMessage `json:"net"`
	}
	if err := parseJSON(raw, &set); err != nil {
		return nil, err
	}
	var all bool
	var hosts []string
	var lists struct {
		Allow json.RawMessage `json:"allow"`
		Deny  json.RawMessage `json:"deny"`
	}
	everything := []string{}
	side := func(raw json.RawMessage) (*[]string, error) {
		var all bool
		var hosts []string
		switch {
		case raw == nil || json.Unmarshal(raw, &all) == nil && !all:
			return nil, nil
		case all:
			return &everything, nil
		}
		err := parseJSON(raw, &hosts)
		if err == nil && len(hosts) == 0 { // a list of none
			return nil, nil
		}
		return &hosts, err
	}
	switch {
	case set.Net == nil:
		if set.All {
			return FromDeno(&everything, nil)
		}
		return FromDeno(nil, nil)
	case json.Unmarshal(set.Net, &all) == nil, json.Unmarshal(set.Net, &hosts) == nil:
		lists.Allow = set.Net
	default:
		if err := parseJSON(set.Net, &lists); err != nil {
			return nil, err
		}
	}
	allow, err := side(lists.Allow)
	if err != nil {
		return nil, err
	}
	deny, err := side(lists.Deny)
	if err != nil {
		return nil, err
	}
	return FromDeno(allow, deny)
}

// FromSandboxRuntime reads the network settings of Anthropic's sandbox-runtime, a whole
// settings file or its object "network". Denied domains come first there; an entry
// without a port means every port.
func FromSandboxRuntime(content []byte) (*Policy, error) {
	type network struct {
		AllowedDomains []string `json:"allowedDomains"`
		DeniedDomains  []string `json:"deniedDomains"`
	}
	var file struct {
		network
		Network *network `json:"network"`
	}
	if err := parseJSON(content, &file); err != nil {
		return nil, err
	}
	if file.Network == nil {
		file.Network = &file.network
	}
	p := &Policy{Default: DenyAll}
	err := p.importEntries("denied", Deny, file.Network.DeniedDomains, true)
	if err == nil {
		err = p.importEntries("allowed", Allow, file.Network.AllowedDomains, false)
	}
	return p, err
}

// FromDeno reads the hosts of Deno's --allow-net and --deny-net; an empty list with the
// flag given is every host. Denied hosts come first; a host without a port means every
// port.
func FromDeno(allow, deny *[]string) (*Policy, error) {
	p := &Policy{Default: DenyAll}
	for _, side := range []struct {
		name   string
		action Action
		hosts  *[]string
	}{{"deny-net", Deny, deny}, {"allow-net", Allow, allow}} {
		switch {
		case side.hosts == nil:
		case len(*side.hosts) == 0:
			p.Rules = append(p.Rules, everything(side.name, side.action))
		default:
			if err := p.importEntries(side.name, side.action, *side.hosts, false); err != nil {
				return nil, err
			}
		}
	}
	return p, nil
}

// FromVercel reads the networkPolicy of Vercel Sandbox: "allow-all", "deny-all", or an
// object with allow and subnets, also in the form of its REST API. Names are matched by
// TLS there, on every port.
func FromVercel(content []byte) (*Policy, error) {
	var mode string
	if json.Unmarshal(content, &mode) == nil {
		return vercelMode(mode)
	}
	var policy struct {
		NetworkPolicy  json.RawMessage `json:"networkPolicy"` // as a create has it
		Mode           string          `json:"mode"`
		Allow          json.RawMessage `json:"allow"`
		Subnets        struct{ Allow, Deny []string }
		AllowedDomains []string `json:"allowedDomains"`
		AllowedCIDRs   []string `json:"allowedCIDRs"`
		DeniedCIDRs    []string `json:"deniedCIDRs"`
		InjectionRules []any    `json:"injectionRules"`
	}
	if err := parseJSON(content, &policy); err != nil {
		return nil, err
	}
	if policy.NetworkPolicy != nil {
		nested := policy.NetworkPolicy
		if parseJSON(nested, &mode) == nil {
			return vercelMode(mode)
		}
		policy.NetworkPolicy = nil
		if err := parseJSON(nested, &policy); err != nil {
			return nil, err
		}
		if policy.NetworkPolicy != nil {
			return nil, berm.Errorf(berm.Invalid, "a networkPolicy in a networkPolicy")
		}
	}
	if policy.Mode != "" && policy.Mode != "custom" {
		return vercelMode(policy.Mode)
	}
	transforms := len(policy.InjectionRules) > 0
	names := policy.AllowedDomains
	if policy.Allow != nil {
		var list []string
		var rules map[string][]any
		if json.Unmarshal(policy.Allow, &list) != nil && parseJSON(policy.Allow, &rules) != nil {
			return nil, berm.Errorf(berm.Invalid, "allow must be a list of domains, or an object of them")
		}
		for _, name := range slices.Sorted(maps.Keys(rules)) {
			list, transforms = append(list, name), transforms || len(rules[name]) > 0
		}
		names = append(names, list...)
	}
	if transforms {
		return nil, berm.Errorf(berm.Unsupported, "rules that change or forward requests are not read").
			WithHint("take them out, and bind a credential to the domain instead")
	}
	p := &Policy{Default: DenyAll}
	for _, list := range []struct {
		name   string
		action Action
		cidrs  []string
	}{{"denied", Deny, append(policy.Subnets.Deny, policy.DeniedCIDRs...)}, {"subnet", Allow, append(policy.Subnets.Allow, policy.AllowedCIDRs...)}} {
		for i, s := range list.cidrs {
			prefix, err := netip.ParsePrefix(s)
			if err != nil {
				return nil, berm.Errorf(berm.Invalid, "%q is not an address range", clip(s))
			}
			p.Rules = append(p.Rules, Rule{
				ID: list.name + "-" + strconv.Itoa(i+1), To: []Target{rangeTarget(prefix)}, Ports: anyPorts, Proto: AnyProto, Action: list.action,
			})
		}
	}
	for i, s := range names {
		t, err := importName(s)
		if err != nil {
			return nil, err
		}
		p.Rules = append(p.Rules, Rule{ID: "allow-" + strconv.Itoa(i+1), To: []Target{t}, Ports: anyPorts, TLS: TLSRequire, Action: Allow})
	}
	return p, nil
}

func vercelMode(mode string) (*Policy, error) {
	switch mode {
	case "allow-all":
		return &Policy{Default: AllowPublic}, nil
	case "deny-all":
		return &Policy{Default: DenyAll}, nil
	}
	return nil, berm.Errorf(berm.Invalid, "%q is not allow-all, deny-all or custom", clip(mode))
}

// importName reads a name, "*" for all names.
func importName(s string) (Target, error) {
	if s == "*" {
		return groupTarget(groupNames), nil
	}
	return ParseTarget(s)
}

// everything is a rule about all that is public.
func everything(id string, action Action) Rule {
	return Rule{ID: id, To: []Target{groupTarget(groupPublic)}, Ports: anyPorts, Action: action}
}

// importEntries appends a rule for each HOST[:PORT].
func (p *Policy) importEntries(id string, action Action, entries []string, star bool) error {
	for i, s := range entries {
		var r Rule
		if host, port, _ := strings.Cut(s, ":"); star && host == "*" {
			r = everything("", action)
			if port != "" {
				ports, err := ParsePorts(port)
				if err != nil {
					return err
				}
				r.Ports = []PortRange{ports}
			}
		} else {
			var err error
			if r, err = ParseEntry(s); err != nil {
				return err
			}
		}
		if r.ID, r.Action = id+"-"+strconv.Itoa(i+1), action; r.Ports == nil {
			r.Ports = anyPorts
		}
		p.Rules = append(p.Rules, r)
	}
	return nil
}

func parseJSON(content []byte, to any) error {
	if len(content) > maxDocument {
		return berm.Errorf(berm.Invalid, "the document is larger than %d KiB", maxDocument>>10)
	}
	if err := json.Unmarshal(content, to); err != nil {
		return berm.Errorf(berm.Invalid, "read the policy: %w", err)
	}
	return nil
}
