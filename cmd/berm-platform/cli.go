package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
)

// serverCommand gives a command the flag that chooses a server.
func serverCommand(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().String("context", "", "server to use, by its name (default: $BERM_URL, else the current context)")
	completeFlag(cmd, "context", completeContexts)
	return cmd
}

func loadContexts() (*client.Contexts, error) {
	path, err := client.ContextsPath()
	if err != nil {
		return nil, err
	}
	return client.LoadContexts(path)
}

// server connects a command to the server that it is to use.
func server(cmd *cobra.Command) (*client.Client, error) {
	contexts, err := loadContexts()
	if err != nil {
		return nil, err
	}
	name, err := cmd.Flags().GetString("context")
	if err != nil {
		return nil, err
	}
	config, err := contexts.Choose(name, os.Getenv)
	if url := cmp.Or(os.Getenv("BERM_URL"), os.Getenv("E2B_API_URL")); err != nil && name == "" && url != "" {
		// What is no address needs no key.
		if _, wrong := client.New(client.Config{URL: url, Key: "none"}); wrong != nil {
			err = wrong
		}
	}
	if err != nil {
		return nil, err
	}
	return client.New(config)
}

// serverAndSandbox is what commands on one sandbox begin with.
func serverAndSandbox(cmd *cobra.Command, arg string) (*client.Client, berm.SandboxID, error) {
	id, err := sandboxID(arg)
	if err != nil {
		return nil, "", err
	}
	c, err := server(cmd)
	return c, id, err
}

func sandboxID(arg string) (berm.SandboxID, error) {
	id, err := berm.ParseSandboxID(arg)
	if err != nil {
		return "", cli.UsageError{Err: fmt.Errorf("%q is no sandbox id", arg)}
	}
	return id, nil
}

// runningAgent is the agent of a sandbox that can run a command now.
func runningAgent(ctx context.Context, c *client.Client, id berm.SandboxID, user string) (*client.Agent, error) {
	s, err := c.Get(ctx, id)
	if err != nil {
		return nil, err
	}
	wakes := s.Lifecycle != nil && s.Lifecycle.AutoResume
	if (s.State == berm.Paused || s.State == berm.Pausing) && !wakes {
		return nil, berm.Errorf(berm.Conflict, "sandbox %s is paused", id).WithHint("berm resume %s", id)
	}
	s.ID = id
	return c.Agent(s, user), nil
}

// forEach does one thing to many sandboxes, and goes on after an error.
func forEach(args []string, do func(berm.SandboxID) error) error {
	ids := make([]berm.SandboxID, len(args))
	for i, arg := range args {
		var err error
		if ids[i], err = sandboxID(arg); err != nil {
			return err // a typing error: nothing is done
		}
	}
	var errs []error
	for _, id := range ids {
		if err := do(id); err != nil {
			if !strings.Contains(err.Error(), string(id)) {
				err = fmt.Errorf("%s: %w", id, err)
			}
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// stateCommand makes a command that does one thing to each sandbox that it is
// given and prints the id, or with --json an object of the id and what do returns.
func stateCommand(cmd *cobra.Command, do func(context.Context, *client.Client, berm.SandboxID) (map[string]any, error)) *cobra.Command {
	serverCommand(cmd)
	asJSON := cli.JSONFlag(cmd)
	cmd.Args = cli.UsageArgs(cobra.MinimumNArgs(1))
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := server(cmd)
		if err != nil {
			return err
		}
		return forEach(args, func(id berm.SandboxID) error {
			result, err := do(cmd.Context(), c, id)
			if err != nil {
				return err
			}
			if *asJSON {
				result["sandboxID"] = id
				return cli.PrintJSONLine(cmd.OutOrStdout(), result)
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), id)
			return err
		})
	}
	return cmd
}

// poll waits until it is time to ask again, and says false when the user ends the command first.
func poll(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(pollInterval):
		return true
	}
}

// quietOnInterrupt drops an error that the user caused by ending the command.
func quietOnInterrupt(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}
