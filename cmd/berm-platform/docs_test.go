package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

var update = flag.Bool("update", false, "write docs/cli.md anew")

const cliDocs = "../../docs/cli.md"

// docs/cli.md says what the commands say of themselves.
func TestDocs(t *testing.T) {
	var b strings.Builder
	b.WriteString(`# The berm command

<!-- Written by "go test ./cmd/berm-platform -run TestDocs -update" from the commands' own help. -->

`)
	root := newRootCommand()
	root.InitDefaultHelpFlag()
	var all []*cobra.Command
	var walk func(*cobra.Command)
	walk = func(cmd *cobra.Command) {
		if cmd.Runnable() && cmd.HasParent() && !cmd.Hidden {
			all = append(all, cmd)
		}
		for _, c := range cmd.Commands() {
			walk(c)
		}
	}
	walk(root)
	for _, cmd := range all {
		anchor := strings.ReplaceAll(cmd.CommandPath(), " ", "-")
		fmt.Fprintf(&b, "- [%s](#%s): %s\n", cmd.CommandPath(), anchor, cmd.Short)
	}
	b.WriteString(cliNotes)
	for _, cmd := range all {
		fmt.Fprintf(&b, "\n## %s\n\n", cmd.CommandPath())
		text := cmd.Long
		if text == "" {
			text = cmd.Short + "."
		}
		fmt.Fprintf(&b, "%s\n\n```\n%s\n```\n", text, cmd.UseLine())
		if flags := cmd.NonInheritedFlags(); flags.HasAvailableFlags() {
			fmt.Fprintf(&b, "\n```\n%s```\n", flags.FlagUsages())
		}
		if cmd.Example != "" {
			fmt.Fprintf(&b, "\nExamples:\n\n```sh\n%s\n```\n", strings.ReplaceAll("\n"+cmd.Example, "\n  ", "\n")[1:])
		}
	}
	// Defaults that depend on who asks.
	want := strings.ReplaceAll(b.String(), defaultData(), "/var/lib/berm")
	if *update {
		if err := os.WriteFile(cliDocs, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(cliDocs)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Error("docs/cli.md is out of date: go test ./cmd/berm-platform -run TestDocs -update")
	}
}

const cliNotes = `
## For scripts

**Exit codes.** 0: done. 1: failed. 2: a wrong command line; nothing was done.
` + "`berm exec` and `berm connect`" + ` end with the code of the command: 128 and the number
of the signal that ended it, 127 when there is no such command, 124 when ` + "`--timeout`" + `
was over. A berm that was interrupted itself ends with 130, a shell that was left with 129.

**JSON.** With ` + "`--json`" + ` the output is JSON, and errors are one object a line on stderr:
` + "`{\"error\":{\"kind\":…,\"message\":…,\"hint\":…}}`" + `. Fields are added, never renamed. The kinds
are internal, not found, already exists, invalid, denied, conflict, exhausted,
unavailable and unsupported. ` + "`logs`, `metrics`, `kill`, `pause`, `resume`, `replay`, `audit`, `net log`" + `,
` + "`net ask`, `sessions`, `diff`, `apply` and `undo --list`" + ` print one object a line; ` + "`run` and `shell`" + `
print theirs on stderr, beside what the command prints.

**Which server.** ` + "`--context`" + `; else ` + "`BERM_URL`, `E2B_API_URL` or `E2B_DOMAIN`" + ` with the key
in ` + "`BERM_API_KEY` or `E2B_API_KEY`" + `; else the current context; else the server on this
machine, http://127.0.0.1:7676. The local server's key is not looked for in its data
directory, where only hashes of keys are: its first start prints one, and
` + "`berm key create`" + ` makes more. ` + "`BERM_SANDBOX_URL` or `E2B_SANDBOX_URL`" + ` is one address for all
sandboxes, where it is not the API's.

**What sandboxes and other users chose** is printed escaped, so that it cannot act on the
terminal: names, metadata, logs, error messages, and the output of ` + "`exec`" + ` when it goes to
a terminal without ` + "`--tty`" + `. Files, pipes, ` + "`exec --tty` and `connect`" + ` get every byte as it is.

**Completion.** ` + "`berm completion bash`" + ` (zsh, fish, powershell) prints a script that
completes commands, flags, sandbox ids, templates and contexts.
`
