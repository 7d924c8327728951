package main

import (
	"context"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
	"github.com/berm-sandbox/berm/internal/terminal"
)

// completionTime is how long a press of the tab key waits for a server.
const completionTime = time.Second

// maxCompletions bounds the list that a shell is given.
const maxCompletions = 200

// completeSandboxes completes the ids of sandboxes in the given states, or in all.
func completeSandboxes(states ...berm.State) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		return sandboxCompletions(cmd, states, args, ""), cobra.ShellCompDirectiveNoFileComp
	}
}

// completeFirstSandbox completes one id; what follows it belongs to the sandbox.
func completeFirstSandbox() cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return sandboxCompletions(cmd, nil, nil, ""), cobra.ShellCompDirectiveNoFileComp
	}
}

func sandboxCompletions(cmd *cobra.Command, states []berm.State, except []string, suffix string) []cobra.Completion {
	c, err := server(cmd)
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), completionTime)
	defer cancel()
	var found []cobra.Completion
	err = c.List(ctx, client.Filter{States: states}, func(s client.Sandbox) bool {
		// The shell gets ids of the right form only, and descriptions of one line.
		id, err := berm.ParseSandboxID(string(s.ID))
		if err == nil && !slices.Contains(except, string(id)) {
			about := s.Template() + " " + string(s.State) + " " + sortedPairs(own(s.Metadata))
			found = append(found, cobra.CompletionWithDesc(string(id)+suffix, terminal.Clip(terminal.Escape(about), 60)))
		}
		return len(found) < maxCompletions
	})
	if err != nil {
		return nil
	}
	return found
}

// completeRollback completes a sandbox, and then one of its snapshots.
func completeRollback(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	switch len(args) {
	case 0:
		return sandboxCompletions(cmd, nil, nil, ""), cobra.ShellCompDirectiveNoFileComp
	case 1:
		if id, err := berm.ParseSandboxID(args[0]); err == nil {
			return snapshotCompletions(cmd, id, nil), cobra.ShellCompDirectiveNoFileComp
		}
	}
	return nil, cobra.ShellCompDirectiveNoFileComp
}

// snapshotCompletions are the snapshots of a sandbox, or with "" of all.
func snapshotCompletions(cmd *cobra.Command, of berm.SandboxID, except []string) (found []cobra.Completion) {
	c, err := server(cmd)
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), completionTime)
	defer cancel()
	all, err := c.Snapshots(ctx, of)
	if err != nil {
		return nil
	}
	for _, s := range all[:min(len(all), maxCompletions)] {
		if !slices.Contains(except, s.ID) {
			about := "of " + string(s.Berm.SandboxID) + ", " + cli.Span(time.Since(s.Berm.CreatedAt)) + " ago"
			found = append(found, cobra.CompletionWithDesc(terminal.Escape(s.ID), terminal.Clip(terminal.Escape(about), 60)))
		}
	}
	return found
}

func completeTemplates(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	c, err := server(cmd)
	if err != nil || len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), completionTime)
	defer cancel()
	list, err := c.Templates(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var names []string
	for _, t := range list {
		if len(t.Names) == 0 {
			t.Names = []string{string(t.ID)}
		}
		for _, name := range t.Names {
			names = append(names, terminal.Escape(name))
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// completeFlag completes the values of a flag of cmd.
func completeFlag(cmd *cobra.Command, flag string, f cobra.CompletionFunc) {
	if err := cmd.RegisterFlagCompletionFunc(flag, f); err != nil {
		panic(err) // there is no such flag, or it has one already
	}
}

func completeContexts(*cobra.Command, []string, string) ([]cobra.Completion, cobra.ShellCompDirective) {
	contexts, err := loadContexts()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var names []cobra.Completion
	for _, c := range contexts.Contexts {
		names = append(names, cobra.CompletionWithDesc(c.Name, terminal.Escape(c.URL)))
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}
