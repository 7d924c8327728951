package main

import (
	"context"
	"io"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm/internal/client/clienttest"
	"github.com/berm-sandbox/berm/internal/embedded"
)

// asked has arguments of commands that need others than their usage tells, or that would begin
// something: these are refused once their flags were read.
var asked = map[string][]string{
	"berm run":             {"--preset", "none", "true"},
	"berm shell":           {"--preset", "none"},
	"berm serve":           {"--log-format", "none"},
	"berm cp":              {"here", "i0abcdefghijklmnopqrs:/there"},
	"berm audit export":    {"--all", "-o", "-"},
	"berm audit witness":   {"--key", "none", "--keep", "none", "--listen", "none"},
	"berm net set":         {"i0abcdefghijklmnopqrs", "--allow", "a.test"},
	"berm context add":     {"name", "http://127.0.0.1:1", "--no-key"},
	"berm rollback":        {"i0abcdefghijklmnopqrs", "none"},
	"berm template import": {"..//..:"},
}

// value is an argument for a word of a command's usage.
func value(word string) string {
	switch word {
	case "SANDBOX":
		return "i0abcdefghijklmnopqrs"
	case "--reason":
		return word
	case "URL|HOST[:PORT]":
		return "a.test"
	}
	return "none"
}

// No command asks for a flag that it does not have: each is called with the least that it takes.
func TestEveryCommandHasItsFlags(t *testing.T) {
	s := clienttest.Start(t)
	t.Setenv("BERM_URL", s.URL)
	t.Setenv("BERM_API_KEY", clienttest.Key)
	for _, name := range []string{"HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"} {
		t.Setenv(name, t.TempDir())
	}
	t.Setenv("BERM_DATA", t.TempDir())
	t.Chdir(t.TempDir())
	skip := map[string]bool{
		"berm": true, "berm doctor": true, // starts sandboxes to see whether that works
		"berm egressd": true, "berm brokerd": true, "berm auditd": true, // talk to the server that started them
	}
	walk(newRootCommand(), func(cmd *cobra.Command) {
		path := cmd.CommandPath()
		if !cmd.Runnable() || skip[path] {
			return
		}
		t.Run(path, func(t *testing.T) {
			args, ok := asked[path]
			if !ok {
				for _, word := range strings.Fields(cmd.Use)[1:] {
					if word == "|" {
						break
					}
					if !strings.HasPrefix(word, "[") && word != "--" {
						args = append(args, value(strings.TrimSuffix(word, "...")))
					}
				}
			}
			if cmd.Flag("data") != nil {
				args = append(args, "--data", filepath.Join(t.TempDir(), "none"))
			}
			if cmd.Flag("templates") != nil {
				args = append(args, "--templates", filepath.Join(t.TempDir(), "none"))
			}
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			root := newRootCommand()
			root.SetArgs(append(strings.Fields(path)[1:], args...))
			root.SetIn(strings.NewReader(""))
			root.SetOut(io.Discard)
			root.SetErr(io.Discard)
			err := root.ExecuteContext(ctx)
			if err != nil && (strings.Contains(err.Error(), "not defined") || strings.Contains(err.Error(), "unknown flag")) {
				t.Errorf("%q: %v", args, err)
			}
			if testing.Verbose() {
				t.Logf("%q: %v", args, err)
			}
		})
	})
}

func walk(cmd *cobra.Command, do func(*cobra.Command)) {
	do(cmd)
	for _, c := range cmd.Commands() {
		walk(c, do)
	}
}

// What asks for the snapshots of a sandbox says when there is no such sandbox.
func TestSnapshotsOfNoSandbox(t *testing.T) {
	s := newSetup(t)
	for _, args := range [][]string{{"timeline", "i0nosuch"}, {"snapshots", "i0nosuch"}, {"snapshots", "-q", "i0nosuch"}} {
		if r := s.run(args...); r.code != 1 || r.stdout != "" || !strings.Contains(r.stderr, "i0nosuch") {
			t.Errorf("berm %q: %+v", args, r)
		}
	}
	id := strings.TrimSpace(s.ok("create"))
	if got := s.ok("snapshots", id); !strings.HasPrefix(got, "SNAPSHOT") {
		t.Errorf("of a sandbox without any: %q", got)
	}
}

// What a server is told wrongly ends it before it serves, with what would be right.
func TestServeRefusesWrongSettings(t *testing.T) {
	s := newSetup(t)
	s.env = append(s.env, "BERM_LISTEN=127.0.0.1:1") // not even so
	for want, args := range map[string][]string{
		"the platforms are systrap, ptrace, kvm":      {"--gvisor-platform", "foo"},
		"0 for any number":                            {"--max-sandboxes", "-1"},
		`isolation level "foo" is not known here`:     {"--level", "foo"},
		`isolation level "microvm" is not known here`: {"--level", "microvm"},
	} {
		if _, err := embedded.Binary(embedded.Monitor); err != nil && args[0] == "--level" {
			continue // levels are asked of drivers, which have nothing to start here
		}
		r := s.run(append([]string{"serve", "--data", t.TempDir(), "--templates", filepath.Join(t.TempDir(), "templates")}, args...)...)
		if r.code != 2 || !strings.Contains(r.stderr, want) {
			t.Errorf("%q: %+v", args, r)
		}
	}
}

// A type of records that does not exist is an error with those that do; nothing found is said.
func TestAuditOfNothing(t *testing.T) {
	s := newSetup(t)
	log := t.TempDir()
	for _, kind := range []string{"nonsense", "ex", "exec."} {
		if r := s.run("audit", "--log", log, "--type", kind); r.code != 2 || !strings.Contains(r.stderr, "exec.start, exec.exit") {
			t.Errorf("%s: %+v", kind, r)
		}
	}
	if r := s.run("audit", "--log", log, "--type", "exec,net.flow", "--sandbox", "i0nosuch"); r.code != 0 || r.stdout != "" || !strings.Contains(r.stderr, "no records") {
		t.Errorf("%+v", r)
	}
}
