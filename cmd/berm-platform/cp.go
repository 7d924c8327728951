package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
	"github.com/berm-sandbox/berm/internal/terminal"
)

func newCopyCommand() *cobra.Command {
	var user string
	cmd := serverCommand(&cobra.Command{
		Use:   "cp SOURCE DESTINATION",
		Short: "Copy files and directories into a sandbox or out of it",
		Long: `Copy a file or a directory into a sandbox or out of it. One side is SANDBOX:PATH; a
PATH that is not absolute begins at the home of the user inside. A destination that
is a directory gets the copy inside it, otherwise the copy gets that name; of a
source directory that ends in "/." the contents are copied.

Directories need tar in the sandbox. Out of a sandbox, links that lead outside of
the copied directory, devices and set-uid bits are left out, with a notice.`,
		Example: `  berm cp notes.txt i0abcdefghijklmnopqrs:
  berm cp ./project i0abcdefghijklmnopqrs:/home/user
  berm cp i0abcdefghijklmnopqrs:/home/user/project/. results
  berm cp --user root secrets.env i0abcdefghijklmnopqrs:/root/.env`,
		Args:              cli.UsageArgs(cobra.ExactArgs(2)),
		ValidArgsFunction: completePaths,
	})
	cmd.Flags().StringVarP(&user, "user", "u", "", "user inside, who will own the copy (default: the template's)")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		fromID, from := splitPath(args[0])
		toID, to := splitPath(args[1])
		if (fromID == "") == (toID == "") {
			return cli.UsageError{Err: errors.New("one of the two must be SANDBOX:PATH, and the other a path here (write a local name with a colon as ./NAME)")}
		}
		c, id, err := serverAndSandbox(cmd, fromID+toID)
		if err != nil {
			return err
		}
		agent, err := runningAgent(cmd.Context(), c, id, user)
		if err != nil {
			return err
		}
		copier := &copier{cmd: cmd}
		copier.Copier = client.Copier{Agent: agent, Note: copier.note, Progress: copier}
		defer copier.clear()
		if fromID == "" {
			return copier.upload(cmd.Context(), from, to)
		}
		return copier.download(cmd.Context(), from, to)
	}
	return cmd
}

func completePaths(cmd *cobra.Command, args []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 1 || strings.ContainsAny(typed, "/.:") {
		return nil, cobra.ShellCompDirectiveDefault
	}
	return sandboxCompletions(cmd, nil, nil, ":"), cobra.ShellCompDirectiveNoSpace
}

// splitPath takes SANDBOX:PATH apart; the id is "" for a local path.
func splitPath(arg string) (id, name string) {
	id, name, ok := strings.Cut(arg, ":")
	if !ok {
		return "", arg
	}
	if _, err := berm.ParseSandboxID(id); err != nil {
		return "", arg
	}
	if name == "" {
		name = "."
	}
	return id, name
}

// copier copies between here and one sandbox, and shows how far it is.
type copier struct {
	client.Copier
	cmd *cobra.Command

	mu          sync.Mutex // guards the progress, which is shown on a terminal
	done, total int64      // bytes; total 0 is not known
	began, last time.Time
}

func (c *copier) upload(ctx context.Context, from, to string) error {
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	target, targetErr := c.Agent.Stat(ctx, to)
	if targetErr != nil && berm.KindOf(targetErr) != berm.NotFound {
		return targetErr
	}
	if targetErr == nil && target.Dir || strings.HasSuffix(to, "/") || to == "." {
		if contents := info.IsDir() && endsInDot(from); !contents {
			name, err := filepath.Abs(from) // "." and ".." have names too
			if err != nil {
				return err
			}
			to = path.Join(to, filepath.Base(name))
		}
	}
	if info.Mode().IsRegular() {
		c.total = info.Size()
	}
	return c.Put(ctx, from, to)
}

func endsInDot(name string) bool {
	return name == "." || strings.HasSuffix(name, "/.")
}

func (c *copier) download(ctx context.Context, from, to string) error {
	source, err := c.Agent.Stat(ctx, from)
	if err != nil {
		return err
	}
	if info, err := os.Stat(to); err == nil && info.IsDir() || strings.HasSuffix(to, "/") {
		if contents := source.Dir && endsInDot(from); !contents {
			// The name comes from the command line, not from the sandbox.
			name := path.Base(path.Clean(from))
			if name == "/" || name == "." || name == ".." {
				return cli.UsageError{Err: fmt.Errorf("give the copy of %q a name: %s/NAME", from, strings.TrimSuffix(to, "/"))}
			}
			to = filepath.Join(to, name)
		}
	}
	if !source.Dir {
		c.total = source.Size
	}
	return c.Get(ctx, source, to)
}

// Write counts copied bytes and shows the progress.
func (c *copier) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.done += int64(len(p))
	now := time.Now()
	if c.began.IsZero() {
		c.began, c.last = now, now // nothing is shown of a short copy
	}
	if stderr := c.cmd.ErrOrStderr(); now.Sub(c.last) >= 200*time.Millisecond && terminal.Is(stderr) {
		c.last = now
		of := ""
		if c.total > 0 {
			of = fmt.Sprintf(" of %s (%d%%)", cli.Size(c.total), min(100, c.done*100/c.total))
		}
		rate := float64(c.done) / now.Sub(c.began).Seconds()
		_, _ = fmt.Fprintf(stderr, "\r%s%s, %s/s\x1b[K", cli.Size(c.done), of, cli.Size(int64(rate)))
	}
	return len(p), nil
}

func (c *copier) note(text string) {
	c.clear()
	cli.Notice(c.cmd, "%s", text)
}

// clear takes the progress off the terminal.
func (c *copier) clear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if stderr := c.cmd.ErrOrStderr(); c.last != c.began && terminal.Is(stderr) {
		_, _ = fmt.Fprint(stderr, "\r\x1b[K")
	}
}
