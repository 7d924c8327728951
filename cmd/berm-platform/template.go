package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
	"github.com/berm-sandbox/berm/internal/template"
	"github.com/berm-sandbox/berm/internal/terminal"
)

// To build a template and to store its files for an ordinary user, this program
// runs again in a user namespace, where it must not begin as the command line.
func init() { template.RunHelper() }

func newTemplateCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "template",
		Short: "Make and list templates, from which sandboxes are made",
		Args:  cli.UsageArgs(cobra.NoArgs),
		Example: `  berm template build base
  berm template import python:3.12-slim
  berm template ls`,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.PersistentFlags().String("templates", "", "directory of the templates (default: /var/cache/berm/templates\nas root, else ~/.cache/berm/templates)")
	cmd.AddCommand(newTemplateListCommand(), newTemplateBuildCommand(), newTemplateImportCommand(), newTemplateRemoveCommand())
	return cmd
}

// templateStore opens the store that the command is to use.
func templateStore(cmd *cobra.Command) (*template.Store, error) {
	dir, err := cmd.Flags().GetString("templates")
	if err != nil {
		return nil, err
	}
	return template.Open(dir)
}

// ofServerOrHere gives a command that looks into a store its flags.
func ofServerOrHere(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().Bool("local", false, "the store of this machine, though a server is named")
	return serverCommand(cmd)
}

// serverOrStore is where a command looks for templates: on the server, if one is named, else in the store of
// this machine. The other is nil.
func serverOrStore(cmd *cobra.Command) (c *client.Client, s *template.Store, where string, err error) {
	flags := cmd.Flags()
	local, err := flags.GetBool("local")
	if err != nil {
		return nil, nil, "", err
	}
	local = local || flags.Changed("templates")
	if local && flags.Changed("context") {
		return nil, nil, "", cli.UsageError{Err: errors.New("--context names a server, and --local and --templates a store of this machine")}
	}
	named := false
	if !local {
		contexts, err := loadContexts()
		if err != nil {
			return nil, nil, "", err
		}
		named = contexts.Named(flags.Lookup("context").Value.String(), os.Getenv)
	}
	if named {
		if c, err = server(cmd); err != nil {
			return nil, nil, "", err
		}
		return c, nil, c.URL(), nil
	}
	if s, err = templateStore(cmd); err != nil {
		return nil, nil, "", err
	}
	return nil, s, "this machine, " + s.Dir(), nil
}

func newTemplateListCommand() *cobra.Command {
	cmd := ofServerOrHere(&cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List the templates of a server, or of this machine",
		Long: `List the templates of the server that --context, $BERM_URL or the current context names.
Without any of them, or with --local, list those in the store of this machine, one
line for each build. What was listed is said on stderr.`,
		Args: cli.UsageArgs(cobra.NoArgs),
		Example: `  berm template ls
  berm template ls --local
  berm template ls --json | jq -r '.[].names[0]'`,
	})
	asJSON := cli.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, store, where, err := serverOrStore(cmd)
		if err != nil {
			return err
		}
		var list any
		var table *terminal.Table
		var halted []string // why images do not arrive
		out := cmd.OutOrStdout()
		if c != nil {
			list, table, halted, err = listOfServer(cmd.Context(), c, terminal.StyleFor(out))
		} else {
			list, table, halted, err = listOfStore(cmd.Context(), store, terminal.StyleFor(out))
		}
		if err != nil {
			return err
		}
		cli.Notice(cmd, "templates of %s", where)
		if *asJSON {
			return cli.PrintJSON(out, list)
		}
		if err := table.Write(out); err != nil {
			return err
		}
		for _, why := range halted {
			cli.Notice(cmd, "%s", why)
		}
		return nil
	}
	return cmd
}

// halt tells why a template's image does not arrive, if it does not.
func halt(names []string, a *berm.Arriving) []string {
	switch {
	case a == nil:
	case a.Failed != "":
		return []string{fmt.Sprintf("%s has failed: %s", strings.Join(names, ", "), a.Failed)}
	case a.Waits != "":
		return []string{fmt.Sprintf("%s waits: %s", strings.Join(names, ", "), a.Waits)}
	}
	return nil
}

func listOfServer(ctx context.Context, c *client.Client, style terminal.Style) (_ any, _ *terminal.Table, halted []string, _ error) {
	list, err := c.Templates(ctx)
	table := terminal.NewTable(style, "NAME", "ID", "CPUS", "MEMORY", "DISK", "BUILDS", "STATE", "UPDATED")
	for _, t := range list {
		table.Row(cmp.Or(strings.Join(t.Names, ", "), "-"), string(t.ID), fmt.Sprint(t.CPUCount), byteSize(t.MemoryMB<<20), byteSize(t.DiskMB<<20), fmt.Sprint(t.Builds), state(t.Arriving),
			t.UpdatedAt.Local().Format(time.DateTime))
		halted = append(halted, halt(t.Names, t.Arriving)...)
	}
	return list, table, halted, err
}

func listOfStore(ctx context.Context, s *template.Store, style terminal.Style) (_ any, _ *terminal.Table, halted []string, _ error) {
	list, err := s.List(ctx)
	table := terminal.NewTable(style, "NAME", "ID", "SIZE", "LAYERS", "USER", "STATE", "CREATED")
	for _, t := range list {
		table.Row(cmp.Or(strings.Join(t.Names, ", "), "-"), string(t.ID), byteSize(t.Size), fmt.Sprint(len(t.Layers)), t.User, state(t.Arriving),
			t.CreatedAt.Local().Format(time.DateTime))
		halted = append(halted, halt(t.Names, t.Arriving)...)
	}
	return list, table, halted, err
}

// state tells how far a template's image is.
func state(a *berm.Arriving) string {
	switch {
	case a == nil:
		return "whole"
	case a.Failed != "":
		return "failed"
	case a.Total == 0:
		return "arriving"
	}
	return fmt.Sprintf("arriving %d %%", 100*a.Bytes/a.Total)
}

func newTemplateBuildCommand() *cobra.Command {
	var d dockerfileBuild
	cmd := serverCommand(&cobra.Command{
		Use:   "build DIR|RECIPE",
		Short: "Build a template from a Dockerfile, or from the distribution's packages",
		Long: `Build a template from the Dockerfile in a directory, on a server, or from a recipe, into
the store of this machine. A path begins with / or is ., .., ./DIR or ../DIR; anything
else is a recipe.

A directory is what COPY and ADD copy from, without what .dockerignore names. Each step
runs in a sandbox of the server, with the network that it gives sandboxes, and is taken
from an earlier build that did the same. Ctrl-C ends the build. What the Dockerfile starts
(CMD, ENTRYPOINT) is not started in sandboxes, but what --start says is.

The recipes are built in:

  base      the default template: Debian with Python, Node.js, git and the usual tools
  browser   Chromium, for Playwright and puppeteer
  desktop   Xfce and Chromium on a screen that E2B's desktop SDKs drive
  httpbin   base, which tells on port 8080 what it is asked, for tests
  code-interpreter-v1
            base with Jupyter kernels, for E2B's code interpreter

Nothing is done when the template is there and its recipe has not changed. The host's apt
sources and options are used, but do not get into the template. Packages' scripts never
run as root of the host.`,
		Args: cli.UsageArgs(cobra.ExactArgs(1)),
		Example: `  berm template build .
  berm template build . --name app:v2 --start 'exec ./server' --ready 'curl -sf localhost:8080'
  berm template build ./app -f ./app/Dockerfile.dev --build-arg VERSION=3 --target test
  berm template build base
  berm template build base --force   # newest packages`,
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return template.Recipes(), cobra.ShellCompDirectiveDefault // and files
		},
	})
	asJSON := cli.JSONFlag(cmd)
	force := cmd.Flags().Bool("force", false, "do all of it again, even if nothing has changed; --no-cache is the same")
	cmd.Flags().SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		if name == "no-cache" {
			name = "force"
		}
		return pflag.NormalizedName(name)
	})
	ofDirectory := d.flags(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if isPath(args[0]) {
			return d.run(cmd, args[0], *force, *asJSON)
		}
		for _, name := range ofDirectory {
			if cmd.Flags().Changed(name) {
				return cli.UsageError{Err: fmt.Errorf("--%s is for a Dockerfile, and %q is a recipe; a directory is ./%s", name, args[0], args[0])}
			}
		}
		store, err := templateStore(cmd)
		if err != nil {
			return err
		}
		t, err := store.Build(cmd.Context(), args[0], *force, progressTo(cmd.ErrOrStderr()))
		if err != nil {
			if info, statErr := os.Stat(args[0]); berm.KindOf(err) == berm.NotFound && statErr == nil && info.IsDir() {
				return berm.Errorf(berm.NotFound, "%w", err).WithHint("The directory is ./%s", args[0])
			}
			return err
		}
		return printTemplate(cmd.OutOrStdout(), t, *asJSON)
	}
	return cmd
}

// isPath tells a directory from the name of a recipe.
func isPath(arg string) bool {
	return arg == "." || arg == ".." || strings.HasPrefix(arg, "/") || strings.HasPrefix(arg, "./") || strings.HasPrefix(arg, "../")
}

func newTemplateImportCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "import IMAGE",
		Short: "Make a template from a container image",
		Long: `Make a template from a container image: the name of one in a registry, a directory
with an OCI image layout, or a file that "docker save" or "podman save" wrote. A
path begins with / or ./; anything else is a name. A name that was imported before
is not asked for again, unless --pull is given. Registry credentials are read from
Docker's configuration file, mirrors and authorities of registries from "registries:"
in Berm's.

Owners, modes, links and users' extended attributes are kept. File capabilities
are not, and devices and FIFOs are left out, with a note. What the image wants to
start (entrypoint, command) is not started, but what --start says is.

With --lazy the template is there at once, and the image is fetched in the background. What
a sandbox reads before it has come is fetched first, and the reader waits. That is for images
in the format eStargz, from a registry, imported by root.`,
		Args: cli.UsageArgs(cobra.ExactArgs(1)),
		Example: `  berm template import python:3.12-slim
  berm template import --lazy registry.example.com/team/large:v3
  berm template import --name tools --platform linux/arm64 registry.example.com/team/tools:v2
  docker save app:v1 -o app.tar && berm template import ./app.tar --name app
  berm template import ./layout --name mine --setuid
  berm template import ./app.tar --name app --start 'exec ./server' --ready 'curl -sf localhost:8080'`,
	}
	asJSON := cli.JSONFlag(cmd)
	var opts template.ImportOptions
	lazy := cmd.Flags().String("lazy", "", "let sandboxes start before the image has arrived; where that cannot be, refuse\n(yes, as with --lazy alone) or import it whole (auto)")
	cmd.Flags().Lookup("lazy").NoOptDefVal = string(template.Always)
	cmd.Flags().StringVar(&opts.Name, "name", "", "name of the template (default: the image's, with a tag other than latest)")
	cmd.Flags().StringVar(&opts.Platform, "platform", "", "linux/ARCH to take from an image of several (default: this machine's)")
	cmd.Flags().BoolVar(&opts.Pull, "pull", false, "ask the registry even if the image was imported before")
	cmd.Flags().BoolVar(&opts.Setuid, "setuid", false, "let set-uid programs of the image, such as sudo, gain rights inside")
	cmd.Flags().StringVar(&opts.Start, "start", "", "shell `COMMAND` that begins to run in each sandbox when it is made")
	cmd.Flags().StringVar(&opts.Ready, "ready", "", "shell `COMMAND` that is tried until it succeeds, before the sandbox is handed out")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if opts.Lazy = template.Lazy(*lazy); cmd.Flags().Changed("lazy") && opts.Lazy != template.Auto && opts.Lazy != template.Always {
			return cli.UsageError{Err: fmt.Errorf("--lazy=%s: want yes or auto", *lazy)}
		}
		store, err := templateStore(cmd)
		if err != nil {
			return err
		}
		if opts.Registries, err = registries("", os.LookupEnv); err != nil {
			return err
		}
		t, err := store.Import(cmd.Context(), args[0], opts, progressTo(cmd.ErrOrStderr()))
		if err != nil {
			return err
		}
		return printTemplate(cmd.OutOrStdout(), t, *asJSON)
	}
	return cmd
}

func newTemplateRemoveCommand() *cobra.Command {
	cmd := ofServerOrHere(&cobra.Command{
		Use:     "rm TEMPLATE...",
		Aliases: []string{"remove"},
		Short:   "Remove templates, and the layers that no other template needs",
		Long: `Remove templates, by name or id, and the layers that no other template needs: from the
server that --context, $BERM_URL or the current context names; without any of them, or
with --local, from the store of this machine. NAME:TAG removes that tag alone. A template
that a living sandbox uses is not removed.`,
		Args: cli.UsageArgs(cobra.MinimumNArgs(1)),
		Example: `  berm template rm app
  berm template rm --local python:3.12-slim
  berm template rm $(berm template ls --json | jq -r '.[].id')`,
	})
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		for _, ref := range args {
			if err := template.CheckName(ref); err != nil {
				return cli.UsageError{Err: err}
			}
		}
		c, store, where, err := serverOrStore(cmd)
		if err != nil {
			return err
		}
		for _, ref := range args {
			if c != nil {
				err = c.DeleteTemplate(cmd.Context(), ref)
			} else {
				err = store.Remove(cmd.Context(), ref)
			}
			if err != nil {
				e := berm.Errorf(berm.KindOf(err), "%s: %w", where, err)
				e.Hint = berm.HintOf(err)
				return e
			}
			cli.Notice(cmd, "%s: removed %s", where, ref)
		}
		return nil
	}
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
		c, store, _, err := serverOrStore(cmd)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		if c != nil {
			return completeTemplates(cmd, args, typed)
		}
		list, err := store.List(cmd.Context())
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		var names []string
		for _, t := range list {
			if name := cmp.Or(t.Alias(), string(t.ID)); !slices.Contains(args, name) {
				names = append(names, name)
			}
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
	return cmd
}

func printTemplate(w io.Writer, t berm.Template, asJSON bool) error {
	if asJSON {
		return cli.PrintJSON(w, t)
	}
	_, err := fmt.Fprintf(w, "%s %s %s\n", terminal.Escape(t.Alias()), t.ID, byteSize(t.Size))
	return err
}

// byteSize is a size as a person reads it.
func byteSize(n int64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
}

// progressTo shows steps with their time: on a terminal the amount that is done
// too, on a line that is written over.
func progressTo(w io.Writer) template.Progress {
	start := time.Now()
	style, live := terminal.StyleFor(w), terminal.Is(w)
	open := false // the last line is to be written over
	return func(s template.Step) {
		line := fmt.Sprintf("%s %s", style.Dim(fmt.Sprintf("%6.1fs", time.Since(start).Seconds())), terminal.Escape(s.Message))
		switch {
		case s.Done == 0:
			if open {
				_, _ = fmt.Fprint(w, "\r\x1b[K")
			}
			_, _ = fmt.Fprintln(w, line)
			open = false
		case live:
			amount := byteSize(s.Done)
			if s.Total > 0 {
				amount += " of " + byteSize(s.Total)
			}
			_, _ = fmt.Fprintf(w, "\r%s %s\x1b[K", line, amount)
			open = true
		}
	}
}
