package policy

import (
	"bytes"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/document"
)

// What a document may have.
const (
	maxDocument = 256 << 10 // bytes
	maxRules    = 4096
	maxList     = 1024 // entries of one list
	maxText     = 4096 // bytes of one value
)

// DecodeYAML reads a policy. It fails with Invalid, the source and the line when the
// document is not exactly in the documented form.
func DecodeYAML(source string, content []byte) (*Policy, error) {
	d := decoder{document.Source{Name: source, Max: maxDocument}}
	root, err := d.YAML(content)
	if err != nil {
		return nil, err
	}
	return d.policy(root)
}

// DecodeJSON is DecodeYAML for JSON, the same form.
func DecodeJSON(source string, content []byte) (*Policy, error) {
	d := decoder{document.Source{Name: source, Max: maxDocument}}
	root, err := d.JSON(content)
	if err != nil {
		return nil, err
	}
	p, err := d.policy(root)
	if err == nil && !bytes.Contains(bytes.TrimSpace(content), []byte("\n")) {
		for i := range p.Rules { // what programs wrote; nobody looks for its one line
			p.Rules[i].Line = 0
		}
	}
	return p, err
}

// decoder reads the nodes of one document. It walks them itself instead of decoding into
// a struct: its errors then name the line and the documented key.
type decoder struct{ document.Source }

// setters say for each key of a mapping how its value is read.
type setters map[string]func(*yaml.Node) error

func (d decoder) mapping(node *yaml.Node, what string, keys setters) error {
	if node.Kind != yaml.MappingNode {
		return d.Errorf(node, "%s must be a mapping of keys to values", what)
	}
	seen := make(map[string]bool, len(node.Content)/2)
	for i := 0; i < len(node.Content); i += 2 {
		key, value := node.Content[i], node.Content[i+1]
		set := keys[key.Value]
		switch {
		case key.Kind != yaml.ScalarNode || set == nil:
			known := make([]string, 0, len(keys))
			for k := range keys {
				known = append(known, k)
			}
			slices.Sort(known)
			return d.Errorf(key, "unknown key %q in %s", clip(key.Value), what).WithHint("known are %s", strings.Join(known, ", "))
		case seen[key.Value]:
			return d.Errorf(key, "%q stands here a second time", key.Value)
		}
		seen[key.Value] = true
		if err := set(value); err != nil {
			return err
		}
	}
	return nil
}

// text reads a single value.
func (d decoder) text(node *yaml.Node) (string, error) {
	switch {
	case node.Kind != yaml.ScalarNode:
		return "", d.Errorf(node, "this must be a single value")
	case node.ShortTag() == "!!null":
		return "", d.Errorf(node, "a value is missing here")
	case len(node.Value) > maxText:
		return "", d.Errorf(node, "this value is longer than %d bytes", maxText)
	}
	return node.Value, nil
}

// one makes a setter of a single value.
func one[T any](d decoder, to *T, parse func(string) (T, error)) func(*yaml.Node) error {
	return func(node *yaml.Node) error {
		s, err := d.text(node)
		if err != nil {
			return err
		}
		if *to, err = parse(s); err != nil {
			return d.Errorf(node, "%w", err)
		}
		return nil
	}
}

// many makes a setter of a list of single values.
func many[T any](d decoder, to *[]T, parse func(string) (T, error)) func(*yaml.Node) error {
	return func(node *yaml.Node) error {
		if node.Kind == yaml.ScalarNode && node.ShortTag() != "!!null" {
			return d.Errorf(node, "this must be a list: [%.100s]", node.Value)
		}
		if node.Kind != yaml.SequenceNode {
			return d.Errorf(node, "this must be a list")
		}
		if len(node.Content) > maxList {
			return d.Errorf(node, "more than %d entries", maxList)
		}
		*to = make([]T, len(node.Content))
		for i, item := range node.Content {
			if err := one(d, &(*to)[i], parse)(item); err != nil {
				return err
			}
		}
		return nil
	}
}

func flag(d decoder, to *bool) func(*yaml.Node) error {
	return func(node *yaml.Node) error {
		// As YAML 1.2 and JSON have it: yes and on are words.
		if node.Kind != yaml.ScalarNode || node.ShortTag() != "!!bool" || node.Value != "true" && node.Value != "false" {
			return d.Errorf(node, "this must be true or false")
		}
		*to = node.Value == "true"
		return nil
	}
}

func choice[T ~string](choices ...T) func(string) (T, error) {
	return func(s string) (T, error) {
		if i := slices.Index(choices, T(s)); i >= 0 {
			return choices[i], nil
		}
		var list []string
		for _, c := range choices {
			list = append(list, string(c))
		}
		return "", berm.Errorf(berm.Invalid, "%q: it must be one of %s", clip(s), strings.Join(list, ", "))
	}
}

func (d decoder) policy(root *yaml.Node) (*Policy, error) {
	p := &Policy{}
	version := false
	err := d.mapping(root, "the policy", setters{
		"version": func(node *yaml.Node) error {
			version = true
			if node.Kind != yaml.ScalarNode || node.Value != "1" || node.ShortTag() != "!!int" {
				return d.Errorf(node, "want version: 1")
			}
			return nil
		},
		"default": one(d, &p.Default, choice(DenyAll, AllowPublic)),
		"dns": func(node *yaml.Node) error {
			var mode string
			err := d.mapping(node, "dns", setters{
				"mode":  one(d, &mode, choice("synthetic", "real")),
				"types": many(d, &p.DNS.Types, choice(dnsTypes...)),
			})
			p.DNS.Real = mode == "real"
			return err
		},
		"limits": d.limits(&p.Limits),
		"rules": func(node *yaml.Node) error {
			if node.Kind != yaml.SequenceNode {
				return d.Errorf(node, "rules must be a list")
			}
			if len(node.Content) > maxRules {
				return d.Errorf(node, "more than %d rules", maxRules)
			}
			p.Rules = make([]Rule, len(node.Content))
			ids := make(map[string]bool, len(p.Rules))
			for i, item := range node.Content {
				r := &p.Rules[i]
				if err := d.rule(r, item); err != nil {
					return err
				}
				if r.ID == "" {
					r.ID = "rule-" + strconv.Itoa(i+1)
				}
				if ids[r.ID] {
					return d.Errorf(item, "a second rule %s", r.ID)
				}
				ids[r.ID] = true
				if err := r.check(); err != nil {
					return d.Errorf(item, "%w", err)
				}
			}
			return nil
		},
		"attach": func(node *yaml.Node) error {
			if node.Kind != yaml.SequenceNode || len(node.Content) > maxList {
				return d.Errorf(node, "attach must be a list of at most %d entries", maxList)
			}
			p.Attach = make([]Attachment, len(node.Content))
			for i, item := range node.Content {
				a := &p.Attach[i]
				if err := d.mapping(item, "attach", setters{
					"to":         many(d, &a.To, ParseTarget),
					"credential": one(d, &a.Credential, parseID),
				}); err != nil {
					return err
				}
				if a.Credential == "" || len(a.To) == 0 || slices.ContainsFunc(a.To, func(t Target) bool { return t.kind == addrRange || t.kind == namedGroup }) {
					return d.Errorf(item, "attach wants a credential and the names to which it may go")
				}
			}
			return nil
		},
	})
	if err != nil {
		return nil, err
	}
	if !version {
		return nil, d.Errorf(root, "the version is missing: want version: 1")
	}
	return p, nil
}

// dnsTypes are the record types that can be asked for.
var dnsTypes = []string{"A", "TXT", "MX", "SRV", "NS", "CAA", "CNAME"}

func (d decoder) rule(r *Rule, node *yaml.Node) error {
	r.Line = node.Line
	return d.mapping(node, "a rule", setters{
		"id":         one(d, &r.ID, parseID),
		"to":         many(d, &r.To, ParseTarget),
		"ports":      many(d, &r.Ports, ParsePorts),
		"proto":      one(d, &r.Proto, choice(TCP, UDP, AnyProto)),
		"app":        one(d, &r.Opaque, func(s string) (bool, error) { _, err := choice("tcp")(s); return true, err }),
		"tls":        one(d, &r.TLS, choice(TLSAuto, TLSPassthrough, TLSIntercept, TLSRequire, TLSForbid)),
		"ech":        one(d, &r.ECH, func(s string) (bool, error) { a, err := choice(Allow, Deny)(s); return a == Allow, err }),
		"dns_types":  many(d, &r.DNSTypes, choice(dnsTypes...)),
		"http":       d.http(&r.HTTP),
		"credential": d.credentials(&r.Attach),
		"limits":     d.limits(&r.Limits),
		"expires_at": one(d, &r.Expires, parseTime),
		"once":       flag(d, &r.Once),
		"action":     one(d, &r.Action, choice(Allow, Deny, Ask)),
		"reason":     one(d, &r.Reason, parseReason),
		"audit":      one(d, &r.Audit, choice(AuditNone, AuditMeta, AuditHeaders, AuditBody)),
	})
}

// credentials reads one id or a list of them.
func (d decoder) credentials(to *[]string) func(*yaml.Node) error {
	return func(node *yaml.Node) error {
		if node.Kind == yaml.SequenceNode {
			return many(d, to, parseID)(node)
		}
		*to = make([]string, 1)
		return one(d, &(*to)[0], parseID)(node)
	}
}

// http reads the lists allow and deny, or the conditions of a single entry of allow.
func (d decoder) http(to **HTTP) func(*yaml.Node) error {
	return func(node *yaml.Node) error {
		h := &HTTP{}
		*to = h
		var single Match
		keys := d.conditions(&single)
		isSingle := false
		for key, set := range keys {
			keys[key] = func(n *yaml.Node) error { isSingle = true; return set(n) }
		}
		lists := false
		entries := func(to *[]Match, deny bool) func(*yaml.Node) error {
			return func(node *yaml.Node) error {
				lists = true
				if node.Kind != yaml.SequenceNode || len(node.Content) > maxList {
					return d.Errorf(node, "this must be a list of at most %d entries", maxList)
				}
				*to = make([]Match, len(node.Content))
				for i, item := range node.Content {
					if err := d.mapping(item, "an entry of http", d.conditions(&(*to)[i])); err != nil {
						return err
					}
					if deny && (*to)[i].MaxBody > 0 {
						return d.Errorf(item, "max_body belongs to what is allowed")
					}
				}
				return nil
			}
		}
		keys["allow"], keys["deny"] = entries(&h.Allow, false), entries(&h.Deny, true)
		if err := d.mapping(node, "http", keys); err != nil {
			return err
		}
		if lists && isSingle {
			return d.Errorf(node, "conditions beside allow and deny").WithHint("put them into an entry of allow")
		}
		if !lists {
			h.Allow = []Match{single}
		}
		return nil
	}
}

func (d decoder) conditions(m *Match) setters {
	return setters{
		"methods":       many(d, &m.Methods, parseMethod),
		"paths":         many(d, &m.Paths, ParseGlob),
		"query":         many(d, &m.Query, parseAny),
		"require":       many(d, &m.Require, parseToken),
		"forbid":        many(d, &m.Forbid, parseToken),
		"content_types": many(d, &m.ContentTypes, parseMedia),
		"upgrade":       many(d, &m.Upgrade, parseToken),
		"max_body":      one(d, &m.MaxBody, parseBytes),
	}
}

func (d decoder) limits(l *Limits) func(*yaml.Node) error {
	return func(node *yaml.Node) error {
		return d.mapping(node, "limits", setters{
			"up":        one(d, &l.Up, parseRate),
			"down":      one(d, &l.Down, parseRate),
			"total":     one(d, &l.Total, parseRate),
			"flows":     one(d, &l.Flows, parseCount),
			"new_flows": one(d, &l.NewFlows, parseCount),
			"requests":  one(d, &l.Requests, parseCount),
			"queries":   one(d, &l.Queries, parseCount),
			"duration":  one(d, &l.Duration, parseDuration),
		})
	}
}

func parseID(s string) (string, error) {
	if s == "" || len(s) > 64 || strings.Trim(strings.ToLower(s), "abcdefghijklmnopqrstuvwxyz0123456789-_.:") != "" {
		return "", berm.Errorf(berm.Invalid, "%q is not an id: 1 to 64 letters, digits, and - _ . :", clip(s))
	}
	return s, nil
}

// parseReason takes what can be shown in a terminal and a header.
func parseReason(s string) (string, error) {
	if strings.ContainsFunc(s, func(r rune) bool { return !strconv.IsPrint(r) }) {
		return "", berm.Errorf(berm.Invalid, "a reason is one line of text")
	}
	return s, nil
}

func parseAny(s string) (string, error) { return s, nil }

func parseMethod(s string) (string, error) {
	if s == "" || s == "CONNECT" || s == "TRACE" || strings.Trim(s, "ABCDEFGHIJKLMNOPQRSTUVWXYZ-_") != "" {
		return "", berm.Errorf(berm.Invalid, "%q is not a method that can be allowed: write it in capitals", clip(s))
	}
	return s, nil
}

func parseToken(s string) (string, error) {
	if s == "" || strings.Trim(strings.ToLower(s), "abcdefghijklmnopqrstuvwxyz0123456789-_.") != "" {
		return "", berm.Errorf(berm.Invalid, "%q is not a name of letters, digits, and - _ .", clip(s))
	}
	return strings.ToLower(s), nil
}

func parseMedia(s string) (string, error) {
	major, minor, ok := strings.Cut(s, "/")
	if !ok || strings.Trim(strings.ToLower(major+minor), "abcdefghijklmnopqrstuvwxyz0123456789-_.+") != "" || major == "" || minor == "" {
		return "", berm.Errorf(berm.Invalid, "%q is not a media type such as application/json", clip(s))
	}
	return strings.ToLower(s), nil
}

func parseCount(s string) (int64, error) {
	n, err := strconv.ParseInt(s, 10, 32)
	if err != nil || n < 1 || s[0] == '+' {
		return 0, berm.Errorf(berm.Invalid, "%q is not a number from 1 on", clip(s))
	}
	return n, nil
}

func parseDuration(s string) (time.Duration, error) {
	n, err := time.ParseDuration(s)
	if err != nil || n <= 0 {
		return 0, berm.Errorf(berm.Invalid, "%q is not a time such as 90s, 15m or 1h", clip(s))
	}
	return n, nil
}

func parseTime(s string) (time.Time, error) {
	t, err := time.Parse(time.RFC3339, s)
	if err != nil {
		return t, berm.Errorf(berm.Invalid, "%q is not a time such as 2027-01-31T12:00:00Z", clip(s))
	}
	return t.UTC(), nil
}
