// Package index finds records of a log, by a cache in SQLite that may be lost at any time.
package index

import (
	"encoding/json"
	"iter"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/trail"
)

// Query says which records. What it leaves empty matches all.
type Query struct {
	Sandbox berm.SandboxID
	// Gaps adds what the log lost of all sandboxes to the records of one.
	Gaps bool
	// Team is whose records; nil is anybody's. Those about the server as a whole are its own team's. Not of
	// URLs: there the key says it.
	Team    *berm.Team
	Actor   string   // its id, or its type
	Types   []string // of records, or their first parts: "net.flow", "net"
	Since   time.Time
	Until   time.Time
	Path    string // of a file or a program, or a directory that it lies in
	Host    string // a name or address, or a domain that it lies in
	Verdict audit.Outcome
	After   uint64 // records with greater numbers
	Limit   int    // how many at most, the first ones; 0 is all
}

// The parameters of a query in a URL, with the flags of the command of the same names.
const (
	paramSandbox = "sandbox"
	paramActor   = "actor"
	paramType    = "type"
	paramSince   = "since"
	paramUntil   = "until"
	paramPath    = "path"
	paramHost    = "host"
	paramVerdict = "verdict"
	paramAfter   = "after"
	paramLimit   = "limit"
)

// Parse reads a query of a URL. Kind Invalid.
func Parse(values url.Values) (q Query, err error) {
	if s := values.Get(paramSandbox); s != "" {
		if q.Sandbox, err = berm.ParseSandboxID(s); err != nil {
			return q, err
		}
	}
	q.Actor, q.Path, q.Host = values.Get(paramActor), values.Get(paramPath), values.Get(paramHost)
	for _, list := range values[paramType] {
		for t := range strings.SplitSeq(list, ",") {
			if t = strings.TrimSuffix(t, ".*"); t != "" {
				q.Types = append(q.Types, t)
			}
		}
	}
	if q.Since, err = parseTime(paramSince, values.Get(paramSince)); err != nil {
		return q, err
	}
	if q.Until, err = parseTime(paramUntil, values.Get(paramUntil)); err != nil {
		return q, err
	}
	if q.Verdict, err = ParseVerdict(values.Get(paramVerdict)); err != nil {
		return q, err
	}
	if q.Path != "" && !path.IsAbs(q.Path) {
		return q, berm.Errorf(berm.Invalid, "path must be absolute, inside the sandbox, and %q is not", q.Path)
	}
	if s := values.Get(paramAfter); s != "" {
		if q.After, err = strconv.ParseUint(s, 10, 63); err != nil {
			return q, berm.Errorf(berm.Invalid, "after must be the number of a record, and %q is not", s)
		}
	}
	if s := values.Get(paramLimit); s != "" {
		if q.Limit, err = strconv.Atoi(s); err != nil || q.Limit < 0 {
			return q, berm.Errorf(berm.Invalid, "limit must be a number, and %q is not", s)
		}
	}
	return q, nil
}

func parseTime(name, s string) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	t, err := time.Parse(time.RFC3339Nano, s)
	if err != nil {
		return t, berm.Errorf(berm.Invalid, "%s must be a time such as 2026-01-31T12:00:00Z, and %q is not", name, s)
	}
	return t, nil
}

// ParseVerdict reads an outcome, also in the words of network policies. Kind Invalid.
func ParseVerdict(s string) (audit.Outcome, error) {
	switch s {
	case "":
		return "", nil
	case string(audit.OK), "allow":
		return audit.OK, nil
	case string(audit.Denied), "deny":
		return audit.Denied, nil
	case string(audit.Failed):
		return audit.Failed, nil
	}
	return "", berm.Errorf(berm.Invalid, "verdict must be ok (or allow), denied (or deny) or failed, and %q is not", s)
}

// Values writes a query as Parse reads it.
func (q Query) Values() url.Values {
	values := url.Values{}
	set := func(name, value string) {
		if value != "" {
			values.Set(name, value)
		}
	}
	set(paramSandbox, string(q.Sandbox))
	set(paramActor, q.Actor)
	set(paramType, strings.Join(q.Types, ","))
	if !q.Since.IsZero() {
		set(paramSince, q.Since.UTC().Format(time.RFC3339Nano))
	}
	if !q.Until.IsZero() {
		set(paramUntil, q.Until.UTC().Format(time.RFC3339Nano))
	}
	set(paramPath, q.Path)
	set(paramHost, q.Host)
	set(paramVerdict, string(q.Verdict))
	if q.After > 0 {
		set(paramAfter, strconv.FormatUint(q.After, 10))
	}
	if q.Limit > 0 {
		set(paramLimit, strconv.Itoa(q.Limit))
	}
	return values
}

// Scan finds records without an index, by reading all of them. Lines that are no records come
// as errors. A record that was made before its sandbox was a team's, as of those that wait in a pool, is not
// known to be that team's, as it is by an index.
func Scan(source trail.Source, q Query) iter.Seq2[trail.Line, error] {
	return func(yield func(trail.Line, error) bool) {
		n := 0
		for line, err := range source.Records(q.After + 1) {
			if err == nil && !q.match(line, source) {
				continue
			}
			if !yield(line, err) {
				return
			}
			if err == nil {
				if n++; n == q.Limit {
					return
				}
			}
		}
	}
}

// match says whether a query finds a record.
func (q Query) match(line trail.Line, source trail.Source) bool {
	gap := q.Gaps && line.Type == audit.Gap && line.Sandbox == ""
	switch {
	case line.Seq <= q.After,
		q.Sandbox != "" && line.Sandbox != q.Sandbox && !gap,
		q.Team != nil && line.Team != *q.Team && (!gap || q.Sandbox == ""),
		q.Actor != "" && line.Actor.ID != q.Actor && line.Actor.Type != q.Actor,
		!q.Since.IsZero() && line.Time.Before(q.Since),
		!q.Until.IsZero() && line.Time.After(q.Until),
		q.Verdict != "" && line.Outcome != q.Verdict,
		len(q.Types) > 0 && !slices.ContainsFunc(q.Types, func(t string) bool {
			return string(line.Type) == t || strings.HasPrefix(string(line.Type), t+".")
		}):
		return false
	case q.Path == "" && q.Host == "":
		return true
	}
	names := namesOf(line, source)
	return (q.Path == "" || slices.ContainsFunc(names.paths, func(p string) bool { return inside(p, pathKey(q.Path), "/") })) &&
		(q.Host == "" || slices.ContainsFunc(names.hosts, func(h string) bool { return inside(h, hostKey(q.Host), ".") }))
}

// inside says whether a key is another, or begins with it and a separator.
func inside(key, of, separator string) bool {
	return key == of || strings.HasPrefix(key, of+separator)
}

// pathKey is a path as it is looked for: "/" is "".
func pathKey(p string) string { return strings.TrimSuffix(path.Clean(p), "/") }

// hostKey is a name with its labels from the last to the first, so that those of a domain lie
// side by side.
func hostKey(h string) string {
	h = strings.ToLower(strings.TrimSuffix(h, "."))
	if strings.ContainsAny(h, ":") || strings.Trim(h, "0123456789.") == "" { // an address
		return h
	}
	labels := strings.Split(h, ".")
	slices.Reverse(labels)
	return strings.Join(labels, ".")
}

// names are what of a record is looked for beside its envelope.
type names struct{ paths, hosts []string }

// namesOf takes them from a record, and from the list of changes that it may have beside it.
func namesOf(line trail.Line, source trail.Source) (n names) {
	// What was read with the record is not read again but for changes, which are lists.
	data, _ := line.Data.(map[string]any)
	text := func(key string) string {
		s, _ := data[key].(string)
		return s
	}
	switch family, _, _ := strings.Cut(string(line.Type), "."); family {
	case "proc":
		n.paths = append(n.paths, text("exe")) // audit.Process, audit.ProcessSum
	case "fs":
		if line.Type == audit.FileAPI {
			// audit.FileAccess
			n.paths = append(n.paths, text("path"), text("to"))
			break
		}
		var raw struct{ Data json.RawMessage }
		_ = json.Unmarshal(line.Raw, &raw) // it was read as a record before
		c := audit.Changes{}
		if json.Unmarshal(raw.Data, &c) != nil {
			break
		}
		for _, change := range append(c.Changes, allChanges(line, c, source)...) {
			n.paths = append(n.paths, path.Join("/", change.Path))
		}
	case "net", "credential":
		if line.Type == audit.NetAsk {
			data, _ = data["question"].(map[string]any) // egress.Reply
			n.hosts = append(n.hosts, text("host"))
			break
		}
		n.hosts = append(n.hosts, text("name"), text("address")) // egress.Event
	}
	n.paths, n.hosts = tidy(n.paths, pathKey), tidy(n.hosts, hostKey)
	return n
}

// tidy makes keys of what is not empty, each once.
func tidy(list []string, key func(string) string) []string {
	var keys []string
	for _, s := range list {
		if s != "" {
			keys = append(keys, key(s))
		}
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}

// allChanges reads the changes that had no place in the record.
func allChanges(line trail.Line, c audit.Changes, source trail.Source) (all []audit.Change) {
	if c.More == 0 {
		return nil
	}
	for _, b := range line.Blobs {
		if b.Kind != audit.KindChanges || b.Size > audit.MaxBlob {
			continue
		}
		r, err := source.Blob(b.SHA256)
		if err != nil {
			continue
		}
		_ = json.NewDecoder(r).Decode(&all) // the record alone is found then
		_ = r.Close()
	}
	return all
}
