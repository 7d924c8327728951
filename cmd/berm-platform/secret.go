package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/terminal"
)

func newSecretCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "secret",
		Short: "Store secrets that requests of sandboxes get",
		Long: `Store secrets on a server, for the sandboxes of the API key's team. None of them sees one: its
requests get it on the way, as credentials (berm create --cred) and rules of networks say. A value is
never shown again.`,
		Example: `  berm secret set github-token
  berm create --cred github=secret:github-token`,
		Args: cli.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newSecretSetCommand(), newSecretListCommand(), newSecretRemoveCommand(), newSecretRotateCommand())
	return cmd
}

// maxSecret is what servers take, in bytes.
const maxSecret = 64 << 10

func newSecretSetCommand() *cobra.Command {
	cmd := serverCommand(&cobra.Command{
		Use:   "set NAME",
		Short: "Store a secret, or give one another value",
		Long: `Store a secret under a name, of letters, digits, _ and -, or give the one of that name
another value, which the sandboxes that use it get at once. The value is read from standard
input, without the end of its last line; from a terminal it is asked for.`,
		Example: `  berm secret set github-token
  pass show github | berm secret set github-token`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 { // what is too much may be the secret: it is not told again
				return cli.UsageError{Err: berm.Errorf(berm.Invalid, "it takes the name of a secret alone").
					WithHint("the value is read from standard input: an argument can be seen by everybody on this machine")}
			}
			return nil
		},
	})
	asJSON := cli.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := server(cmd)
		if err != nil {
			return err
		}
		value, err := readValue(cmd)
		if err != nil {
			return err
		}
		s, err := c.SetSecret(cmd.Context(), args[0], string(value))
		if err != nil {
			return err
		}
		if *asJSON {
			return cli.PrintJSON(cmd.OutOrStdout(), s)
		}
		_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s is stored, version %d\n", terminal.Escape(s.Name), s.Version)
		return err
	}
	return cmd
}

// readValue reads a secret.
func readValue(cmd *cobra.Command) ([]byte, error) {
	in := cmd.InOrStdin()
	if file, ok := in.(*os.File); ok && term.IsTerminal(int(file.Fd())) {
		if _, err := fmt.Fprint(cmd.ErrOrStderr(), "Value (it is not shown): "); err != nil {
			return nil, err
		}
		value, err := term.ReadPassword(int(file.Fd()))
		_, _ = fmt.Fprintln(cmd.ErrOrStderr())
		if err != nil {
			return nil, berm.Errorf(berm.Internal, "read the value: %w", err)
		}
		return checkValue(value)
	}
	value, err := io.ReadAll(io.LimitReader(in, maxSecret+3))
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "read the value: %w", err)
	}
	return checkValue(bytes.TrimSuffix(bytes.TrimSuffix(value, []byte("\n")), []byte("\r")))
}

func checkValue(value []byte) ([]byte, error) {
	if len(value) == 0 || len(value) > maxSecret {
		return nil, berm.Errorf(berm.Invalid, "a secret has 1 to %d bytes", maxSecret).WithHint("write it to standard input: berm secret set NAME < FILE")
	}
	return value, nil
}

func newSecretListCommand() *cobra.Command {
	cmd := serverCommand(&cobra.Command{
		Use:     "ls",
		Short:   "List the stored secrets, without their values",
		Example: `  berm secret ls --json`,
		Args:    cli.UsageArgs(cobra.NoArgs),
	})
	asJSON := cli.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := server(cmd)
		if err != nil {
			return err
		}
		all, err := c.Secrets(cmd.Context())
		if err != nil {
			return err
		}
		if *asJSON {
			return cli.PrintJSON(cmd.OutOrStdout(), all)
		}
		table := terminal.NewTable(terminal.StyleFor(cmd.OutOrStdout()), "NAME", "VERSION", "UPDATED")
		for _, s := range all {
			table.Row(s.Name, fmt.Sprint(s.Version), s.Updated.Local().Format(time.DateTime))
		}
		return table.Write(cmd.OutOrStdout())
	}
	return cmd
}

func newSecretRemoveCommand() *cobra.Command {
	cmd := serverCommand(&cobra.Command{
		Use:     "rm NAME...",
		Short:   "Forget secrets; requests that would get one are refused",
		Example: `  berm secret rm github-token`,
		Args:    cli.UsageArgs(cobra.MinimumNArgs(1)),
	})
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := server(cmd)
		if err != nil {
			return err
		}
		for _, name := range args {
			if err := c.RemoveSecret(cmd.Context(), name); err != nil {
				return err
			}
		}
		return nil
	}
	return cmd
}

func newSecretRotateCommand() *cobra.Command {
	cmd := serverCommand(&cobra.Command{
		Use:   "rotate",
		Short: "Have all secrets encrypted with a new key",
		Long: `Have the secrets of all teams encrypted with a new key. It takes an API key of the server's own
team.`,
		Example: `  berm secret rotate`,
		Args:    cli.UsageArgs(cobra.NoArgs),
	})
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := server(cmd)
		if err != nil {
			return err
		}
		return c.RotateSecrets(cmd.Context())
	}
	return cmd
}
