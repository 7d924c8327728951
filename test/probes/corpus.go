// Package probes tries to break out of a sandbox, and lets a judge outside of it
// decide whether that worked.
//
// A probe is a file of corpus: a header and a script that runs inside and prints
// what it saw. It never judges itself. The header tells the judge what must and
// what must not be printed; whatever it says, a token of the host in the output, a
// call at a listener of the host or a changed host is an escape.
package probes

import (
	"embed"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

//go:embed corpus
var corpus embed.FS

// Probe is one file of the corpus.
type Probe struct {
	ID, Title string
	Kind      string // "sh" or "py"
	Expect    string // D denied, V virtual, L limited, with the words that follow
	Timeout   time.Duration
	Users     []string         // users inside that run it; in local mode, those who run berm
	Where     []string         // "server" and "local"
	Limit     string           // what must be limited for it: "memory", or nothing
	Escaped   []*regexp.Regexp // any match is an escape
	Safe      []*regexp.Regexp // each must match, else the outcome is unknown
	Abuse     bool             // uses up what it can until it is killed
	Next      string           // command that must print CLEAN in the next sandbox
	HostValue []string         // host files whose content must not be printed
	Needs     []string         // "internet", "inspection" of requests, "credential"
	Denied    []Denial         // must be recorded
	Passed    []string         // "HOST/PATH" that the internet must have seen, so that a probe whose network is broken is none
	Script    string
}

// Denial is one that must be in the record of a sandbox.
type Denial struct{ Target, Reason string }

// Load reads the corpus, sorted by id.
func Load() ([]Probe, error) {
	entries, err := corpus.ReadDir("corpus")
	if err != nil {
		return nil, err
	}
	prelude, err := corpus.ReadFile("corpus/prelude.py")
	if err != nil {
		return nil, err
	}
	internet, err := corpus.ReadFile("corpus/internet.py")
	if err != nil {
		return nil, err
	}
	var probes []Probe
	for _, entry := range entries {
		if entry.Name() == "prelude.py" || entry.Name() == "internet.py" {
			continue
		}
		text, err := corpus.ReadFile("corpus/" + entry.Name())
		if err != nil {
			return nil, err
		}
		probe, err := parse(entry.Name(), string(text))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", entry.Name(), err)
		}
		if probe.Kind == "py" && len(probe.Needs) > 0 {
			probe.Script = string(internet) + "\n" + probe.Script
		} else if probe.Kind == "py" {
			probe.Script = string(prelude) + "\n" + probe.Script
		}
		probes = append(probes, probe)
	}
	return probes, nil
}

// parse reads one file: "# name: value" lines, then the script.
func parse(name, text string) (Probe, error) {
	probe := Probe{Kind: strings.TrimPrefix(path.Ext(name), "."), Users: []string{"user", "root"}, Where: []string{"server", "local"}}
	_, probe.Script, _ = strings.Cut(text, "\n\n")
	for line := range strings.Lines(text) {
		field, ok := strings.CutPrefix(line, "# ")
		if !ok {
			break
		}
		key, value, ok := strings.Cut(strings.TrimSuffix(field, "\n"), ": ")
		if !ok {
			return probe, fmt.Errorf("header line %q has no value", line)
		}
		switch key {
		case "id":
			probe.ID = value
		case "title":
			probe.Title = value
		case "expect":
			probe.Expect = value
		case "timeout":
			seconds, err := strconv.Atoi(value)
			if err != nil {
				return probe, err
			}
			probe.Timeout = time.Duration(seconds) * time.Second
		case "users":
			probe.Users = strings.Fields(value)
		case "where":
			probe.Where = strings.Fields(value)
		case "limit":
			probe.Limit = value
		case "escaped", "safe":
			re, err := regexp.Compile("(?m)" + value)
			if err != nil {
				return probe, err
			}
			if key == "safe" {
				probe.Safe = append(probe.Safe, re)
			} else {
				probe.Escaped = append(probe.Escaped, re)
			}
		case "abuse":
			probe.Abuse = value == "yes"
		case "next":
			probe.Next = value
		case "needs":
			probe.Needs = strings.Fields(value)
		case "denied":
			target, reason, _ := strings.Cut(value, " ")
			probe.Denied = append(probe.Denied, Denial{target, reason})
		case "passed":
			probe.Passed = append(probe.Passed, strings.Fields(value)...)
		case "host-value":
			probe.HostValue = strings.Fields(value)
		default:
			return probe, fmt.Errorf("unknown header %q", key)
		}
	}
	switch {
	case probe.ID != strings.TrimSuffix(name, path.Ext(name)):
		return probe, fmt.Errorf("id %q is not the file's name", probe.ID)
	case probe.Kind != "sh" && probe.Kind != "py":
		return probe, fmt.Errorf("unknown kind %q", probe.Kind)
	case probe.Title == "" || probe.Timeout == 0 || !slices.Contains([]string{"D", "V", "L"}, probe.Expect[:min(1, len(probe.Expect))]):
		return probe, fmt.Errorf("title, timeout or expect is missing")
	case len(probe.Safe) == 0 && !probe.Abuse:
		return probe, fmt.Errorf("nothing tells that it ran to its end")
	}
	return probe, nil
}
