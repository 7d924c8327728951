package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
	"github.com/berm-sandbox/berm/internal/local/preset"
)

func newCreateCommand() *cobra.Command {
	var (
		o             client.CreateOptions
		timeout       cli.DurationFlag
		env, metadata []string
		memory, disk  cli.SizeFlag
		level         string
		credentials   []string
		network       policySource
		checkpoints   checkpointFlag
	)
	cmd := serverCommand(&cobra.Command{
		Use:   "create [TEMPLATE]",
		Short: "Make a sandbox and print its id",
		Long: `Make a sandbox from a template, "base" unless another is named, and print its id
when it is usable.

It reaches what --allow and --policy say, from the first moment; without both, what the server
gives to a sandbox whose creator says nothing: the public internet, or nothing (berm inspect).`,
		Example: `  berm create
  id=$(berm create --timeout 1h --env GREETING=hello --metadata user=ann)
  berm create --memory 2GiB --cpus 1.5 --level namespace
  berm create --allow pypi --allow api.example.com:8443
  berm create --policy policy.yaml --cred github=secret:my-token
  berm create my-template --auto-pause --auto-resume
  berm create --checkpoint exec,keep=20`,
		Args:              cli.UsageArgs(cobra.MaximumNArgs(1)),
		ValidArgsFunction: completeTemplates,
	})
	asJSON := cli.JSONFlag(cmd)
	flags := cmd.Flags()
	flags.Var(&timeout, "timeout", "time to live (default: the server's, 5m)")
	flags.StringArrayVarP(&env, "env", "e", nil, "variable for every command in it, KEY=VALUE; KEY alone takes the value from here")
	flags.StringArrayVarP(&metadata, "metadata", "m", nil, "KEY=VALUE to find it by")
	flags.BoolVar(&o.AutoPause, "auto-pause", false, "pause it when its time is over, instead of killing it")
	flags.BoolVar(&o.FilesOnly, "files-only", false, "with --auto-pause: keep its files then, and end its processes")
	flags.BoolVar(&o.AutoResume, "auto-resume", false, "wake it from a pause when somebody calls it")
	flags.Var(&memory, "memory", "most memory that it may use, such as 512MiB (default: the template's)")
	flags.Float64Var(&o.Limits.CPU, "cpus", 0, "most processor cores (default: the template's)")
	flags.Int64Var(&o.Limits.PIDs, "pids", 0, "most processes and threads (default: the template's)")
	flags.Var(&disk, "disk", "most bytes that it may write, such as 10GiB (default: the template's)")
	flags.StringVar(&level, "level", "", "isolation level: auto, namespace or gvisor (default: the server's)")
	flags.StringArrayVar(&credentials, "cred", nil, "let requests have a stored secret that it never sees: `NAME=SOURCE`[,KEY=VALUE...],\nsuch as github=secret:my-token; may be repeated")
	flags.Var(&checkpoints, "checkpoint", "save its files every so often, or before each command: every=5m,\nexec, keep=N, or some of these with commas (default of keep: 10)")
	network.addPolicy(cmd, "let it reach what the network policy of this `FILE` says (\"-\" is stdin)", "let it reach this `HOST[:PORT]` alone, or this group, such as github; may be\nrepeated; comes before the rules of --policy")
	completeFlag(cmd, "level", cobra.FixedCompletions([]string{string(berm.Auto), string(berm.Namespace), string(berm.GVisor)}, cobra.ShellCompDirectiveNoFileComp))
	cmd.RunE = func(cmd *cobra.Command, args []string) (err error) {
		o.Level, o.Limits.Memory, o.Limits.Disk = berm.Level(level), int64(memory), int64(disk)
		o.Template, o.Timeout = "base", time.Duration(timeout)
		if len(args) > 0 {
			o.Template = args[0]
		}
		if o.Env, err = cli.Pairs("env", env, os.LookupEnv); err != nil {
			return err
		}
		if o.Metadata, err = cli.Pairs("metadata", metadata, nil); err != nil {
			return err
		}
		if o.Credentials, err = storedCredentials(credentials); err != nil {
			return cli.UsageError{Err: err}
		}
		if checkpoints != (checkpointFlag{}) {
			o.Checkpoints = (*client.Checkpoints)(&checkpoints)
		}
		if network.given() {
			if o.Policy, err = network.document(); err != nil {
				return err
			}
		}
		c, err := server(cmd)
		if err != nil {
			return err
		}
		s, err := c.Create(cmd.Context(), o)
		if err != nil {
			return err
		}
		if *asJSON {
			return cli.PrintJSON(cmd.OutOrStdout(), s)
		}
		id, err := sandboxID(string(s.ID))
		if err != nil {
			return err
		}
		if s.Berm != nil && len(s.Berm.Degraded) > 0 {
			cli.Notice(cmd, "warning: the host cannot give all that a sandbox should have: %s", strings.Join(s.Berm.Degraded, "; "))
		}
		if s.Berm != nil {
			for _, text := range s.Berm.Warnings {
				cli.Notice(cmd, "warning: %s", text)
			}
		}
		_, err = fmt.Fprintln(cmd.OutOrStdout(), id)
		return err
	}
	return cmd
}

// storedCredentials reads what --cred of commands on servers takes.
func storedCredentials(texts []string) (all []client.Credential, err error) {
	for _, text := range texts {
		c, err := preset.ParseStored(text)
		if err != nil {
			return nil, err
		}
		all = append(all, client.Credential{
			Name: c.Name, Secret: c.Source, Service: c.Service, Hosts: c.Hosts, Header: c.Header, Prefix: c.Prefix, User: c.User, Cookie: c.Cookie, Query: c.Query,
			Methods: c.Methods, Paths: c.Paths, Env: c.Env, Swap: c.Swap, Endpoint: c.Endpoint, URL: c.URL, Repositories: c.Repositories, Push: c.Push,
		})
	}
	return all, nil
}
