package policy

import (
	"encoding/json"
	"strconv"
	"strings"
	"time"
)

// YAML is the policy as a document that DecodeYAML reads, one rule a line. Revision and
// lines are not part of it.
func (p *Policy) YAML() []byte {
	var b strings.Builder
	b.WriteString("version: 1\n")
	for _, f := range p.fields()[1:] {
		list, isList := f.value.([]object)
		if !isList || len(list) == 0 {
			w := writer{}
			w.value(f.value)
			b.WriteString(f.key + ": " + w.String() + "\n")
			continue
		}
		b.WriteString(f.key + ":\n")
		for _, item := range list {
			w := writer{}
			w.value(item)
			b.WriteString("  - " + w.String() + "\n")
		}
	}
	return []byte(b.String())
}

// MarshalJSON is the policy as a document that DecodeJSON reads.
func (p *Policy) MarshalJSON() ([]byte, error) {
	w := writer{json: true}
	w.value(p.fields())
	return []byte(w.String()), nil
}

// String is the rule as one line of a policy.
func (r *Rule) String() string {
	w := writer{}
	w.value(r.fields())
	return w.String()
}

// field is a key with its value: string, literal, object, or a list of one of them.
type field struct {
	key   string
	value any
}

type (
	object  []field
	literal string // of numbers and truth
)

// put adds what is not empty.
func put[T ~string](o *object, key string, value T) {
	if value != "" {
		*o = append(*o, field{key, string(value)})
	}
}

func putList[T any](o *object, key string, list []T, text func(T) string) {
	if list == nil {
		return
	}
	values := make([]string, len(list))
	for i, v := range list {
		values[i] = text(v)
	}
	*o = append(*o, field{key, values})
}

func same(s string) string { return s }

func (p *Policy) fields() object {
	o := object{{"version", literal("1")}}
	put(&o, "default", p.Default)
	var dns object
	if p.DNS.Real {
		put(&dns, "mode", "real")
	}
	putList(&dns, "types", p.DNS.Types, same)
	putObject(&o, "dns", dns)
	putObject(&o, "limits", p.Limits.fields())
	if p.Rules != nil {
		list := make([]object, len(p.Rules))
		for i := range p.Rules {
			list[i] = p.Rules[i].fields()
		}
		o = append(o, field{"rules", list})
	}
	if p.Attach != nil {
		list := make([]object, len(p.Attach))
		for i, a := range p.Attach {
			putList(&list[i], "to", a.To, Target.String)
			put(&list[i], "credential", a.Credential)
		}
		o = append(o, field{"attach", list})
	}
	return o
}

func putObject(o *object, key string, value object) {
	if len(value) > 0 {
		*o = append(*o, field{key, value})
	}
}

func (r *Rule) fields() object {
	var o object
	put(&o, "id", r.ID)
	putList(&o, "to", r.To, Target.String)
	if len(r.Ports) > 0 {
		ports := make([]literal, len(r.Ports))
		for i, p := range r.Ports {
			ports[i] = literal(p.String())
		}
		o = append(o, field{"ports", ports})
	}
	put(&o, "proto", r.Proto)
	if r.Opaque {
		put(&o, "app", "tcp")
	}
	put(&o, "tls", r.TLS)
	if r.ECH {
		put(&o, "ech", "allow")
	}
	putList(&o, "dns_types", r.DNSTypes, same)
	if r.HTTP != nil {
		if len(r.HTTP.Allow) == 1 && r.HTTP.Deny == nil && r.HTTP.Allow[0].fields() == nil {
			o = append(o, field{"http", object{}}) // every request
		} else {
			var h object
			for _, list := range []struct {
				key     string
				entries []Match
			}{{"allow", r.HTTP.Allow}, {"deny", r.HTTP.Deny}} {
				if list.entries == nil {
					continue
				}
				entries := make([]object, len(list.entries))
				for i := range list.entries {
					entries[i] = list.entries[i].fields()
				}
				h = append(h, field{list.key, entries})
			}
			o = append(o, field{"http", h})
		}
	}
	putList(&o, "credential", r.Attach, same)
	putObject(&o, "limits", r.Limits.fields())
	if !r.Expires.IsZero() {
		put(&o, "expires_at", r.Expires.UTC().Format(time.RFC3339Nano))
	}
	if r.Once {
		o = append(o, field{"once", literal("true")})
	}
	put(&o, "action", r.Action)
	put(&o, "reason", r.Reason)
	put(&o, "audit", r.Audit)
	return o
}

func (m *Match) fields() object {
	var o object
	putList(&o, "methods", m.Methods, same)
	putList(&o, "paths", m.Paths, Glob.String)
	putList(&o, "query", m.Query, same)
	putList(&o, "require", m.Require, same)
	putList(&o, "forbid", m.Forbid, same)
	putList(&o, "content_types", m.ContentTypes, same)
	putList(&o, "upgrade", m.Upgrade, same)
	if m.MaxBody > 0 {
		put(&o, "max_body", formatBytes(m.MaxBody))
	}
	return o
}

func (l Limits) fields() object {
	var o object
	if l.Up.Bytes > 0 {
		put(&o, "up", l.Up.String())
	}
	if l.Down.Bytes > 0 {
		put(&o, "down", l.Down.String())
	}
	if l.Total.Bytes > 0 {
		put(&o, "total", l.Total.String())
	}
	for _, count := range []struct {
		key string
		n   int64
	}{{"flows", l.Flows}, {"new_flows", l.NewFlows}, {"requests", l.Requests}, {"queries", l.Queries}} {
		if count.n > 0 {
			o = append(o, field{count.key, literal(strconv.FormatInt(count.n, 10))})
		}
	}
	if l.Duration > 0 {
		put(&o, "duration", l.Duration.String())
	}
	return o
}

// writer writes values as JSON, or as YAML in flow style, which is JSON with quotes left
// out where nothing else can be meant.
type writer struct {
	strings.Builder
	json bool
}

func (w *writer) value(v any) {
	switch v := v.(type) {
	case string:
		w.text(v)
	case literal:
		if strings.Trim(string(v), "0123456789") != "" && v != "true" {
			w.text(string(v)) // a range of ports
		} else {
			w.WriteString(string(v))
		}
	case object:
		w.WriteByte('{')
		for i, f := range v {
			if i > 0 {
				w.WriteString(", ")
			}
			w.text(f.key)
			w.WriteString(": ")
			w.value(f.value)
		}
		w.WriteByte('}')
	case []string:
		list(w, v)
	case []literal:
		list(w, v)
	case []object:
		list(w, v)
	}
}

func list[T any](w *writer, values []T) {
	w.WriteByte('[')
	for i, v := range values {
		if i > 0 {
			w.WriteString(", ")
		}
		w.value(v)
	}
	w.WriteByte(']')
}

func (w *writer) text(s string) {
	if !w.json && bare(s) {
		w.WriteString(s)
		return
	}
	quoted, _ := json.Marshal(s) // a string: it cannot fail
	w.Write(quoted)
}

// bare says whether a string is one in YAML without quotes.
func bare(s string) bool {
	switch strings.ToLower(s) {
	case "", "y", "n", "yes", "no", "on", "off", "true", "false", "null":
		return false
	}
	return 'a' <= s[0]|0x20 && s[0]|0x20 <= 'z' &&
		strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./") == ""
}
