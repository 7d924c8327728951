package client

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/berm-sandbox/berm"
)

// Copier copies files and directories between here and one sandbox.
type Copier struct {
	Agent *Agent
	// Note is told what was left out, and what went wrong that is no failure.
	Note func(text string)
	// Progress gets every byte that is copied; nil for nobody.
	Progress io.Writer
}

func (c *Copier) counted(r io.Reader) io.Reader {
	if c.Progress == nil {
		return r
	}
	return io.TeeReader(r, c.Progress)
}

// Put copies a file or a directory of this machine into the sandbox, where the copy gets the name to.
// A directory needs tar in the sandbox; one that exists there gets what is in the other.
func (c *Copier) Put(ctx context.Context, from, to string) error {
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	if info.IsDir() {
		return c.putTree(ctx, from, to)
	}
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer f.Close()
	if !info.Mode().IsRegular() { // a pipe or a device
		return c.PutFile(ctx, f, -1, to, 0)
	}
	return c.PutFile(ctx, f, info.Size(), to, info.Mode())
}

// PutFile makes a file in the sandbox of what r has; a size of -1 is not known. Of the mode it gets
// the right to be executed, which the agent does not give by itself.
func (c *Copier) PutFile(ctx context.Context, r io.Reader, size int64, to string, mode fs.FileMode) error {
	if err := c.Agent.Upload(ctx, to, c.counted(r), size); err != nil || mode.Perm()&0o111 == 0 {
		return err
	}
	made, err := c.Agent.Stat(ctx, to)
	if err != nil {
		return err
	}
	if _, said, err := c.inside(ctx, Command{Path: "chmod", Args: []string{fmt.Sprintf("%04o", mode.Perm()), made.Path}}, nil, nil); err != nil {
		c.Note("the copy is not executable: " + said)
	}
	return nil
}

// PutText makes a file in the sandbox with this content.
func (c *Copier) PutText(ctx context.Context, content, to string) error {
	return c.PutFile(ctx, strings.NewReader(content), int64(len(content)), to, 0)
}

func (c *Copier) putTree(ctx context.Context, from, to string) error {
	if err := c.Agent.MakeDir(ctx, to); err != nil {
		return err
	}
	made, err := c.Agent.Stat(ctx, to) // tells the absolute path
	if err != nil {
		return err
	}
	r, w := io.Pipe()
	defer r.CloseWithError(io.ErrClosedPipe) // ends the writer
	go func() {
		// A tar writer writes in small pieces, and each piece would be a call.
		pieces := bufio.NewWriterSize(w, InputChunk)
		err := WriteTree(pieces, from, c.leftOut)
		if err == nil {
			err = pieces.Flush()
		}
		w.CloseWithError(err)
	}()
	return c.tar(ctx, []string{"-x", "-f", "-", "-C", made.Path}, c.counted(r), nil)
}

// Get copies what Stat told of to this machine, where the copy gets the name to. A file comes whole or
// not at all. A directory needs tar in the sandbox; of it, links that lead outside, devices and
// set-uid bits are left out.
func (c *Copier) Get(ctx context.Context, from FileInfo, to string) error {
	if from.Dir {
		return c.getTree(ctx, from.Path, to)
	}
	body, err := c.Agent.Download(ctx, from.Path)
	if err != nil {
		return err
	}
	defer body.Close()
	if info, err := os.Stat(to); err == nil && !info.Mode().IsRegular() { // a pipe, a device
		f, err := os.OpenFile(to, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = io.Copy(f, c.counted(body))
		return err
	}
	temporary := filepath.Join(filepath.Dir(to), ".berm-"+rand.Text())
	f, err := os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL, from.Mode|0o600)
	if err != nil {
		return err
	}
	defer os.Remove(temporary)
	_, err = io.Copy(f, c.counted(body))
	if closing := f.Close(); err == nil {
		err = closing
	}
	if err != nil {
		return err
	}
	return os.Rename(temporary, to)
}

func (c *Copier) getTree(ctx context.Context, from, to string) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	r, w := io.Pipe()
	unpacked := make(chan error, 1)
	go func() {
		err := ReadTree(r, to, c.leftOut)
		if err == nil {
			_, err = io.Copy(io.Discard, r) // padding behind the end
		}
		r.CloseWithError(err)
		unpacked <- err
	}()
	out := io.Writer(w)
	if c.Progress != nil {
		out = io.MultiWriter(w, c.Progress)
	}
	err := c.tar(ctx, []string{"-c", "-f", "-", "-C", from, "."}, nil, out)
	w.CloseWithError(err)
	if unpackErr := <-unpacked; err == nil || errors.Is(err, io.ErrClosedPipe) {
		err = unpackErr
	}
	return err
}

func (c *Copier) leftOut(name, why string) { c.Note("left out " + name + ": " + why) }

// tar runs tar in the sandbox.
func (c *Copier) tar(ctx context.Context, args []string, stdin io.Reader, stdout io.Writer) error {
	code, said, err := c.inside(ctx, Command{Path: "tar", Args: args}, stdin, stdout)
	switch {
	case err == nil && said != "":
		c.Note("tar in the sandbox says: " + said)
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
func (c *Copier) inside(ctx context.Context, command Command, stdin io.Reader, stdout io.Writer) (code int, said string, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	command.Stdin = stdin != nil
	process, err := c.Agent.Start(ctx, command)
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
	end, err := process.Wait(ctx, Output{Stdout: stdout, Stderr: &stderr})
	if err != nil {
		stop, done := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer done()
		_ = process.Signal(stop, syscall.SIGKILL) // whatever it is still doing is of no use
		err = cmp.Or(context.Cause(ctx), err)
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
