package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
	"github.com/berm-sandbox/berm/internal/terminal"
)

func newContextCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "context",
		Short: "Name servers and choose between them",
		Long: `Name servers, with the API key of each, and choose which one commands use.

Commands use the server of --context; else that of the variables BERM_URL (or
E2B_API_URL, or E2B_DOMAIN) and BERM_API_KEY (or E2B_API_KEY); else the current
context; else ` + client.DefaultURL + ` with the key of the variables. A stored key is
only ever sent to its own server.

The file is berm/contexts.yaml in $XDG_CONFIG_HOME or ~/.config, for its owner only.`,
		Example: `  berm context add home https://berm.example
  berm context use home
  berm context ls`,
		Args: cli.UnknownCommand,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newContextAddCommand(), newContextUseCommand(), newContextListCommand(), newContextRemoveCommand())
	return cmd
}

func newContextAddCommand() *cobra.Command {
	var c client.Context
	var noKey bool
	cmd := &cobra.Command{
		Use:   "add NAME URL",
		Short: "Store a server and its API key",
		Long: `Store a server and its API key, which is asked for, or read from stdin when that is
no terminal. A context of the same name is replaced. The first one becomes the
current one.`,
		Example: `  berm context add home http://127.0.0.1:7676
  berm context add work https://api.berm.example < keyfile
  berm context add lab --ca lab-ca.pem https://lab.example:7676`,
		Args: cli.UsageArgs(cobra.ExactArgs(2)),
	}
	cmd.Flags().StringVar(&c.SandboxURL, "sandbox-url", "", "one address for all sandboxes, if it is another than the API's")
	cmd.Flags().StringVar(&c.CA, "ca", "", "file of a certificate authority to trust, in PEM form")
	cmd.Flags().BoolVar(&noKey, "no-key", false, "store no key: take it from $BERM_API_KEY each time")
	cmd.RunE = func(cmd *cobra.Command, args []string) (err error) {
		contexts, err := loadContexts()
		if err != nil {
			return err
		}
		c.Name, c.URL = args[0], args[1]
		if c.CA != "" {
			if c.CA, err = filepath.Abs(c.CA); err != nil {
				return err
			}
		}
		check := c
		if err := contexts.Add(check); err != nil { // before somebody types a key in vain
			return err
		}
		if !noKey {
			if c.Key, err = readKey(cmd); err != nil {
				return err
			}
		}
		if err := contexts.Add(c); err != nil {
			return err
		}
		if u, err := url.Parse(c.URL); err == nil && u.Scheme == "http" && !loopback(u.Hostname()) {
			cli.Notice(cmd, "the API key will travel unencrypted to %s", u.Host)
		}
		return contexts.Save()
	}
	return cmd
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

func readKey(cmd *cobra.Command) (string, error) {
	in := cmd.InOrStdin()
	var text string
	if f, ok := in.(*os.File); ok && terminal.Is(in) {
		_, _ = fmt.Fprint(cmd.ErrOrStderr(), "API key: ")
		typed, err := term.ReadPassword(int(f.Fd()))
		_, _ = fmt.Fprintln(cmd.ErrOrStderr())
		if err != nil {
			return "", err
		}
		text = string(typed)
	} else {
		line, err := bufio.NewReader(io.LimitReader(in, 4096)).ReadString('\n')
		if err != nil && err != io.EOF {
			return "", err
		}
		text = line
	}
	if text = strings.TrimSpace(text); text == "" {
		return "", cli.UsageError{Err: fmt.Errorf("no API key was given; --no-key stores none")}
	}
	return text, nil
}

func newContextUseCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "use NAME",
		Short:             "Choose the server that commands use",
		Example:           `  berm context use home`,
		Args:              cli.UsageArgs(cobra.ExactArgs(1)),
		ValidArgsFunction: completeContexts,
		RunE: func(cmd *cobra.Command, args []string) error {
			contexts, err := loadContexts()
			if err != nil {
				return err
			}
			c, err := contexts.Get(args[0])
			if err != nil {
				return err
			}
			contexts.Current = c.Name
			return contexts.Save()
		},
	}
}

func newContextListCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List the servers that have names",
		Example: `  berm context ls
  berm context ls --json`,
		Args: cli.UsageArgs(cobra.NoArgs),
	}
	asJSON := cli.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		contexts, err := loadContexts()
		if err != nil {
			return err
		}
		type listed struct {
			client.Context
			Current bool `json:"current"`
			HasKey  bool `json:"hasKey"`
		}
		all := []listed{}
		for _, c := range contexts.Contexts {
			all = append(all, listed{c, c.Name == contexts.Current, c.Key != ""})
		}
		out := cmd.OutOrStdout()
		if *asJSON {
			return cli.PrintJSON(out, all)
		}
		table := terminal.NewTable(terminal.StyleFor(out), "CURRENT", "NAME", "URL", "KEY")
		for _, c := range all {
			current, key := "", "none"
			if c.Current {
				current = "*"
			}
			if c.HasKey {
				key = "stored"
			}
			table.Row(current, c.Name, c.URL, key)
		}
		return table.Write(out)
	}
	return cmd
}

func newContextRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "rm NAME...",
		Short:             "Forget servers and their keys",
		Example:           `  berm context rm home`,
		Args:              cli.UsageArgs(cobra.MinimumNArgs(1)),
		ValidArgsFunction: completeContexts,
		RunE: func(cmd *cobra.Command, args []string) error {
			contexts, err := loadContexts()
			if err != nil {
				return err
			}
			for _, name := range args {
				if err := contexts.Remove(name); err != nil {
					return err
				}
			}
			return contexts.Save()
		},
	}
}
