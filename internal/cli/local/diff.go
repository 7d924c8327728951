package local

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/local/apply"
	"github.com/berm-sandbox/berm/internal/local/change"
	"github.com/berm-sandbox/berm/internal/terminal"
)

func newDiffCommand() *cobra.Command {
	var stat, nameStatus, binary bool
	cmd := &cobra.Command{
		Use:   "diff [flags] [PATH...]",
		Short: "Show what a session changed",
		Long: `Show what a session changed, as git diff does, files that git ignores included.

What the host, or a tool that you use on the project, would execute or obey by itself (git
hooks, editor and CI settings, instructions of agents) is marked in red.

The changes are shown against the project as it is now: what changed in it meanwhile is named,
since the diff would take it back. Piped, the output is a patch that git apply takes: with the
bytes of binary files and without what lies in .git.`,
		Example: `  berm diff
  berm diff --stat
  berm diff -s shop-1 src | less -R
  berm diff --json | jq -r .path`,
	}
	name := sessionFlag(cmd, "the session (default: the newest of this directory)")
	cmd.Flags().BoolVar(&stat, "stat", false, "show the number of changed lines of each file")
	cmd.Flags().BoolVar(&nameStatus, "name-status", false, "show names only, with A, M, T or D")
	cmd.Flags().BoolVar(&binary, "binary", false, "show the bytes of binary files too, so that git apply makes them")
	asJSON := cli.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		w, err := openWork(cmd, *name, false)
		if err != nil {
			return err
		}
		defer w.close()
		paths, err := inProject(w.session.Project, args)
		if err != nil {
			return err
		}
		changes, listErr := w.changes(cmd.Context())
		if listErr != nil && berm.KindOf(listErr) != berm.Exhausted && berm.KindOf(listErr) != berm.Denied {
			return listErr
		}
		if err := known(w, changes, paths); err != nil {
			return err
		}
		out := cmd.OutOrStdout()
		if *asJSON {
			for _, c := range changes {
				if within(c.Path, paths) {
					if err := cli.PrintJSONLine(out, c); err != nil {
						return err
					}
				}
			}
			return listErr
		}
		o := change.Options{Paths: paths, Binary: binary, Terminal: terminal.Is(out), Style: terminal.StyleFor(out)}
		if !o.Terminal {
			o.Binary = true
			o.Appliable = !slices.ContainsFunc(paths, func(path string) bool { // else it is what was asked for
				return slices.Contains(strings.Split(path, "/"), ".git")
			})
		}
		switch {
		case stat:
			o.Format = change.Stat
		case nameStatus:
			o.Format = change.Names
		}
		if err := change.Diff(out, changes, w.upper, w.project, o); err != nil {
			return err
		}
		warn(cmd.ErrOrStderr(), changes, paths)
		warnOutside(cmd, w, changes, paths)
		return listErr
	}
	return cmd
}

// maxWarned bounds how many paths a warning names.
const maxWarned = 20

// warn names what the host would obey by itself, beside the output: that may be a patch.
func warn(w io.Writer, changes []change.Change, paths []string) {
	style := terminal.StyleFor(w)
	n := 0
	for _, c := range changes {
		if c.Danger == "" || !within(c.Path, paths) {
			continue
		}
		if n++; n == 1 {
			_, _ = fmt.Fprintln(w, style.Bad("berm:"), "this machine, or a tool that you use on the project, would obey these by itself:")
		}
		if n <= maxWarned {
			danger := c.Danger
			if c.Kind == change.Deleted {
				danger = deleted + danger
			}
			_, _ = fmt.Fprintf(w, "  %s  %s\n", style.Bad(change.Quote(c.Path)), terminal.Escape(danger))
		}
	}
	if n > maxWarned {
		_, _ = fmt.Fprintf(w, "  and %d more; berm diff --json names all\n", n-maxWarned)
	}
}

// deleted begins the reason why the deletion of something is told.
const deleted = "deleted; "

// warnOutside names what the diff shows as the session's although the project changed too.
func warnOutside(cmd *cobra.Command, w *work, changes []change.Change, paths []string) {
	var chosen []change.Change
	for _, c := range changes {
		if within(c.Path, paths) {
			chosen = append(chosen, c)
		}
	}
	list, err := apply.Outside(w.request(chosen, nil), func() apply.Base { return w.base(cmd) })
	if err != nil || len(list) == 0 {
		return // an apply that was stopped tells of itself when it is settled
	}
	cli.Notice(cmd, "changed outside too since the session began, which this diff would take back; berm apply does not:")
	for i, name := range list {
		if i == maxWarned {
			_, _ = fmt.Fprintf(cmd.ErrOrStderr(), "  and %d more\n", len(list)-maxWarned)
			break
		}
		_, _ = fmt.Fprintf(cmd.ErrOrStderr(), "  %s\n", change.Quote(name))
	}
}

// known refuses paths that are neither in the project nor among the changes.
func known(w *work, changes []change.Change, paths []string) error {
	for _, path := range paths {
		if slices.ContainsFunc(changes, func(c change.Change) bool { return within(c.Path, []string{path}) }) {
			continue
		}
		if _, err := w.project.Lstat(path); errors.Is(err, fs.ErrNotExist) {
			return berm.Errorf(berm.NotFound, "%q is neither in the project nor in session %s", path, w.session.Name)
		}
	}
	return nil
}

// inProject makes paths below the project of what a person wrote, which is relative to the
// working directory, as everywhere in a shell.
func inProject(project string, args []string) ([]string, error) {
	var paths []string
	for _, arg := range args {
		path, err := filepath.Abs(arg)
		if err == nil {
			// The file may be in the session alone; the way to it need not be.
			if dir, e := filepath.EvalSymlinks(filepath.Dir(path)); e == nil {
				path = filepath.Join(dir, filepath.Base(path))
			}
			path, err = filepath.Rel(project, path)
		}
		if err != nil || !filepath.IsLocal(path) {
			return nil, cli.UsageError{Err: berm.Errorf(berm.Invalid, "%q is not in the project %s", arg, project)}
		}
		if path != "." {
			paths = append(paths, path)
		} else {
			return nil, nil // the whole
		}
	}
	return paths, nil
}

func within(path string, dirs []string) bool {
	for _, dir := range dirs {
		if path == dir || strings.HasPrefix(path, dir+string(os.PathSeparator)) {
			return true
		}
	}
	return len(dirs) == 0
}
