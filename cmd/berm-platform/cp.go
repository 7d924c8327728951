package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
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
		copier := &copier{cmd: cmd, agent: agent}
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

// copier copies between here and one sandbox.
type copier struct {
	cmd   *cobra.Command
	agent *client.Agent

	mu          sync.Mutex // guards the progress, which is shown on a terminal
	done, total int64      // bytes; total 0 is not known
	began, last time.Time
}

func (c *copier) upload(ctx context.Context, from, to string) error {
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	target, targetErr := c.agent.Stat(ctx, to)
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
	if info.IsDir() {
		return c.uploadTree(ctx, from, to)
	}
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer f.Close()
	size := int64(-1) // a pipe or a device
	if info.Mode().IsRegular() {
		size, c.total = info.Size(), info.Size()
	}
	if err := c.agent.Upload(ctx, to, io.TeeReader(f, c), size); err != nil {
		return err
	}
	if perm := info.Mode().Perm(); info.Mode().IsRegular() && perm&0o111 != 0 {
		// The agent makes files without x.
		made, err := c.agent.Stat(ctx, to)
		if err != nil {
			return err
		}
		if _, said, err := c.inside(ctx, client.Command{Path: "chmod", Args: []string{fmt.Sprintf("%04o", perm), made.Path}}, nil, nil); err != nil {
			cli.Notice(c.cmd, "the copy is not executable: %s", said)
		}
	}
	return nil
}

func endsInDot(name string) bool {
	return name == "." || strings.HasSuffix(name, "/.")
}

func (c *copier) uploadTree(ctx context.Context, from, to string) error {
	if err := c.agent.MakeDir(ctx, to); err != nil {
		return err
	}
	made, err := c.agent.Stat(ctx, to) // tells the absolute path
	if err != nil {
		return err
	}
	r, w := io.Pipe()
	defer r.CloseWithError(io.ErrClosedPipe) // ends the writer
	go func() {
		// A tar writer writes in small pieces, and each piece would be a call.
		pieces := bufio.NewWriterSize(w, client.InputChunk)
		err := client.WriteTree(pieces, from, c.skipped)
		if err == nil {
			err = pieces.Flush()
		}
		w.CloseWithError(err)
	}()
	return c.tar(ctx, []string{"-x", "-f", "-", "-C", made.Path}, io.TeeReader(r, c), nil)
}

func (c *copier) download(ctx context.Context, from, to string) error {
	source, err := c.agent.Stat(ctx, from)
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
	if source.Dir {
		return c.downloadTree(ctx, source.Path, to)
	}
	body, err := c.agent.Download(ctx, from)
	if err != nil {
		return err
	}
	defer body.Close()
	c.total = source.Size
	if info, err := os.Stat(to); err == nil && !info.Mode().IsRegular() { // a pipe, a device
		f, err := os.OpenFile(to, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = io.Copy(f, io.TeeReader(body, c))
		return err
	}
	// All or nothing: a copy that breaks off leaves what was there.
	temporary := filepath.Join(filepath.Dir(to), ".berm-"+rand.Text())
	f, err := os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL, source.Mode|0o600)
	if err != nil {
		return err
	}
	defer os.Remove(temporary)
	_, err = io.Copy(f, io.TeeReader(body, c))
	if closing := f.Close(); err == nil {
		err = closing
	}
	if err != nil {
		return err
	}
	return os.Rename(temporary, to)
}

func (c *copier) downloadTree(ctx context.Context, from, to string) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	r, w := io.Pipe()
	unpacked := make(chan error, 1)
	go func() {
		err := client.ReadTree(r, to, c.skipped)
		if err == nil {
			_, err = io.Copy(io.Discard, r) // padding behind the end
		}
		r.CloseWithError(err)
		unpacked <- err
	}()
	err := c.tar(ctx, []string{"-c", "-f", "-", "-C", from, "."}, nil, io.MultiWriter(w, c))
	w.CloseWithError(err)
	if unpackErr := <-unpacked; err == nil || errors.Is(err, io.ErrClosedPipe) {
		err = unpackErr
	}
	return err
}

func (c *copier) skipped(name, why string) {
	c.clear()
	cli.Notice(c.cmd, "left out %s: %s", name, why)
}

// tar runs tar in the sandbox.
func (c *copier) tar(ctx context.Context, args []string, stdin io.Reader, stdout io.Writer) error {
	code, said, err := c.inside(ctx, client.Command{Path: "tar", Args: args}, stdin, stdout)
	switch {
	case err == nil && said != "":
		cli.Notice(c.cmd, "tar in the sandbox says: %s", said)
	case code == 127:
		return berm.Errorf(berm.Unsupported, "there is no tar in the sandbox").WithHint("Copy file by file, or use a template with tar.")
	case code != 0:
		return berm.Errorf(berm.Internal, "tar in the sandbox failed: %s", said)
	}
	return err
}

// inside runs a command in the sandbox and returns its code and what it said on
// stderr. An error is one of the way, or a code that is not 0. Nothing is attached
// again after a lost connection: bytes would be missing.
func (c *copier) inside(ctx context.Context, command client.Command, stdin io.Reader, stdout io.Writer) (code int, said string, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	command.Stdin = stdin != nil
	process, err := c.agent.Start(ctx, command)
	if err != nil {
		return 0, err.Error(), err
	}
	if stdin != nil {
		go func() {
			if err := process.Pipe(ctx, stdin); err != nil {
				cancel(err)
			}
		}()
	}
	var stderr limitedBuffer
	end, err := process.Wait(ctx, client.Output{Stdout: stdout, Stderr: &stderr})
	if err != nil {
		stop, done := brief()
		defer done()
		_ = process.Signal(stop, syscall.SIGKILL) // whatever it is still doing is of no use
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		return 0, err.Error(), err
	}
	said = strings.TrimSpace(stderr.String())
	if code := end.ExitCode(); code != 0 {
		if said == "" {
			said = fmt.Sprintf("exit code %d", code)
		}
		return code, said, errors.New(said)
	}
	return 0, said, nil
}

// limitedBuffer keeps the first 4 KiB.
type limitedBuffer struct{ bytes.Buffer }

func (b *limitedBuffer) Write(p []byte) (int, error) {
	if room := 4096 - b.Len(); room > 0 {
		b.Buffer.Write(p[:min(room, len(p))])
	}
	return len(p), nil
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

// clear takes the progress off the terminal.
func (c *copier) clear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if stderr := c.cmd.ErrOrStderr(); c.last != c.began && terminal.Is(stderr) {
		_, _ = fmt.Fprint(stderr, "\r\x1b[K")
	}
}
