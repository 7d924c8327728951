package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit/index"
	"github.com/berm-sandbox/berm/internal/audit/replay"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
	"github.com/berm-sandbox/berm/internal/local/session"
)

// records is a log that a command reads, wherever it is.
type records interface {
	// find returns records of a query, and the number to ask on after; none are the last.
	find(ctx context.Context, q index.Query) (lines []json.RawMessage, next uint64, err error)
	// of is what the log has of a sandbox.
	of(ctx context.Context, id berm.SandboxID) trail.Source
	close()
}

// logFlags choose the log that a command reads.
type logFlags struct {
	path  string
	local bool
}

func (f *logFlags) add(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().StringVar(&f.path, "log", "", "directory of an audit log, or an export of one, to read without\na server")
	cmd.Flags().BoolVar(&f.local, "local", false, "read the log of berm run (default when no server is configured)")
	return serverCommand(cmd)
}

// open opens the log that the flags name; without them the server's, or, where none is
// configured, that of berm run.
func (f *logFlags) open(cmd *cobra.Command) (records, error) {
	switch {
	case f.path != "" && f.local:
		return nil, cli.UsageError{Err: berm.Errorf(berm.Invalid, "--log and --local name two logs")}
	case f.path != "":
		return openLog(f.path)
	case f.local:
		return openOwnLog()
	}
	c, err := server(cmd)
	if err == nil {
		return serverLog{c}, nil
	}
	if configured, other := serverConfigured(cmd); configured || other != nil {
		return nil, errors.Join(other, err)
	}
	return openOwnLog()
}

// serverConfigured says whether somebody named a server.
func serverConfigured(cmd *cobra.Command) (bool, error) {
	for _, name := range []string{"BERM_URL", "E2B_API_URL", "E2B_DOMAIN", "BERM_API_KEY", "E2B_API_KEY"} {
		if os.Getenv(name) != "" {
			return true, nil
		}
	}
	contexts, err := loadContexts()
	if err != nil {
		return false, err
	}
	return contexts.Current != "" || cmd.Flags().Changed("context"), nil
}

func openOwnLog() (records, error) {
	state, err := session.StateDir()
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(state, "audit")
	if _, err := os.Stat(dir); err != nil {
		return nil, berm.Errorf(berm.NotFound, "there is no log of berm run in %s", dir).
			WithHint("name a server (BERM_URL, berm context add) or a log (--log)")
	}
	return openLog(dir)
}

// openLog opens the directory of a log, with an index in the user's cache, or an export.
func openLog(path string) (records, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, berm.Errorf(berm.KindOf(err), "audit log: %w", err)
	}
	if !info.IsDir() {
		f, err := os.Open(path)
		if err != nil {
			return nil, berm.Errorf(berm.KindOf(err), "audit log: %w", err)
		}
		archive, err := trail.OpenArchive(f, info.Size())
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		return &scannedLog{archive, f}, nil
	}
	if path, err = filepath.Abs(path); err != nil {
		return nil, err
	}
	if cache, err := os.UserCacheDir(); err == nil {
		sum := sha256.Sum256([]byte(path))
		x, err := index.Open(filepath.Join(cache, "berm", "audit", hex.EncodeToString(sum[:8])+".db"), trail.Dir(path))
		if err == nil {
			return &indexedLog{x}, nil
		}
	}
	return &scannedLog{trail.Dir(path), nil}, nil // slower, and as good
}

type serverLog struct{ *client.Client }

func (l serverLog) find(ctx context.Context, q index.Query) ([]json.RawMessage, uint64, error) {
	return l.Records(ctx, q.Values())
}

func (l serverLog) of(ctx context.Context, id berm.SandboxID) trail.Source { return l.Trail(ctx, id) }

func (serverLog) close() {}

type indexedLog struct{ *index.Index }

func (l indexedLog) find(ctx context.Context, q index.Query) (lines []json.RawMessage, next uint64, err error) {
	found, err := l.Query(ctx, q)
	next = q.After
	for _, f := range found {
		lines, next = append(lines, f.Line), f.Seq
	}
	return lines, next, err
}

func (l indexedLog) of(ctx context.Context, id berm.SandboxID) trail.Source { return l.Of(ctx, id) }

func (l indexedLog) close() { _ = l.Close() }

type scannedLog struct {
	trail.Source
	file *os.File
}

func (l *scannedLog) find(ctx context.Context, q index.Query) (lines []json.RawMessage, next uint64, err error) {
	next = q.After
	for line, err := range index.Scan(l.Source, q) {
		if err = errors.Join(err, ctx.Err()); err != nil {
			return lines, next, err
		}
		lines, next = append(lines, append([]byte(nil), line.Raw...)), line.Seq
	}
	return lines, next, nil
}

func (l *scannedLog) of(context.Context, berm.SandboxID) trail.Source { return l.Source }

func (l *scannedLog) close() {
	if l.file != nil {
		_ = l.file.Close()
	}
}

// timeline loads the timeline of a sandbox from the log that the flags name. A sandbox of
// berm run is found although a server is configured. done must be called when the timeline is
// not read any more.
func (f *logFlags) timeline(cmd *cobra.Command, id berm.SandboxID) (t *replay.Timeline, done func(), err error) {
	log, err := f.open(cmd)
	if err != nil {
		return nil, nil, err
	}
	t, err = replay.Load(log.of(cmd.Context(), id), id)
	if err == nil {
		return t, log.close, nil
	}
	log.close()
	if _, ofServer := log.(serverLog); ofServer && berm.KindOf(err) == berm.NotFound && !cmd.Flags().Changed("context") {
		if own, ownErr := openOwnLog(); ownErr == nil {
			if t, ownErr = replay.Load(own.of(cmd.Context(), id), id); ownErr == nil {
				return t, own.close, nil
			}
			own.close()
		}
	}
	return nil, nil, err
}
