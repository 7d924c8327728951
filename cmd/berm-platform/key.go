package main

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/store"
	"github.com/berm-sandbox/berm/internal/terminal"
)

func newKeyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "key",
		Short: "Make, list and revoke API keys",
		Long: `Make, list and revoke the API keys of the server with the data directory given. It may
be running: what changes counts at once.`,
		Args: cli.UsageArgs(cobra.NoArgs),
		Example: `  berm key ls
  berm key create --data ~/.local/share/berm --name laptop`,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	data := cmd.PersistentFlags().String("data", defaultData(), "data directory of the server")
	with := storeOf(data)
	cmd.AddCommand(newKeyCreateCommand(with, data), newKeyListCommand(with), newKeyRevokeCommand(with))
	return cmd
}

// withStore runs do on the store of the data directory.
type withStore func(cmd *cobra.Command, do func(*store.DB) error) error

// storeOf opens the store of a data directory that --data names, also beside its server.
func storeOf(data *string) withStore {
	return func(cmd *cobra.Command, do func(*store.DB) error) error {
		if err := configureData(cmd, os.LookupEnv); err != nil {
			return err
		}
		if err := checkData(*data); err != nil {
			return err
		}
		db, err := store.OpenShared(*data)
		if err != nil {
			return err
		}
		return errors.Join(do(db), db.Close())
	}
}

// checkData refuses a data directory that is not there: what is changed in a new one would change
// no server.
func checkData(dir string) error {
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
		return berm.Errorf(berm.NotFound, "there is no data directory %s", dir).
			WithHint("Give that of your server with --data. `berm serve` makes it at its first start.")
	}
	return nil
}

func newKeyCreateCommand(with withStore, data *string) *cobra.Command {
	var key store.Key
	var team string
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Make an API key and print it, once",
		Example: `  export E2B_API_KEY=$(berm key create --name laptop)
  berm key create --team blue --name ci
  berm key create --erase --name "data protection"`,
		Args: cli.UsageArgs(cobra.NoArgs),
	}
	asJSON := cli.JSONFlag(cmd)
	cmd.Flags().StringVar(&key.Name, "name", "", "what the key is for")
	cmd.Flags().StringVar(&team, "team", berm.Team("").String(), "the team that it is of")
	cmd.Flags().BoolVar(&key.Erase, "erase", false, "one that may also erase what the audit log has of a sandbox")
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		if key.Team, err = berm.ParseTeam(team); err != nil {
			return cli.UsageError{Err: err}
		}
		return with(cmd, func(db *store.DB) error {
			key, secret, err := db.CreateKey(cmd.Context(), key)
			if err != nil {
				return err
			}
			if *asJSON {
				return cli.PrintJSON(cmd.OutOrStdout(), struct {
					store.Key
					Secret string `json:"key"`
				}{key, secret})
			}
			if !cmd.Flags().Changed("data") { // the server that other commands use may be another
				cli.Notice(cmd, "a key for the server with the data directory %s; --data names another", *data)
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), secret)
			return err
		})
	}
	return cmd
}

func newKeyListCommand(with withStore) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "ls",
		Short:   "List the API keys",
		Example: `  berm key ls --json`,
		Args:    cli.UsageArgs(cobra.NoArgs),
	}
	asJSON := cli.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return with(cmd, func(db *store.DB) error {
			keys, err := db.Keys(cmd.Context())
			if err != nil {
				return err
			}
			if *asJSON {
				return cli.PrintJSON(cmd.OutOrStdout(), keys)
			}
			table := terminal.NewTable(terminal.StyleFor(cmd.OutOrStdout()), "ID", "KEY", "TEAM", "NAME", "MAY ERASE", "CREATED", "REVOKED")
			for _, k := range keys {
				revoked := "-"
				if !k.Revoked.IsZero() {
					revoked = k.Revoked.Local().Format(time.DateTime)
				}
				mayErase := "no"
				if k.Erase {
					mayErase = "yes"
				}
				table.Row(k.ID, k.Prefix+"…", k.Team.String(), k.Name, mayErase, k.Created.Local().Format(time.DateTime), revoked)
			}
			return table.Write(cmd.OutOrStdout())
		})
	}
	return cmd
}

func newKeyRevokeCommand(with withStore) *cobra.Command {
	return &cobra.Command{
		Use:     "revoke ID",
		Short:   "Make an API key invalid at once",
		Example: `  berm key revoke 3f1c5d2e7a9b0c4d`,
		Args:    cli.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return with(cmd, func(db *store.DB) error {
				key, err := db.RevokeKey(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s… is revoked\n", key.Prefix)
				return err
			})
		},
	}
}
