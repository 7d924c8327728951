package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit/ocsf"
	"github.com/berm-sandbox/berm/internal/audit/replay"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/audit/writer"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/local/session"
	"github.com/berm-sandbox/berm/internal/terminal"
)

// exitProblems is the exit code of a check that found something.
const exitProblems = 3

func newAuditCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "Find records in the audit log; check and export it",
		Long: `Print the records of the audit log that the flags name, oldest first: who did what to which
sandbox, when, with which result. Without a configured server, or with --local, the log is that
of berm run; --log reads one in a directory, or an export.

Records are found by an index that is a cache of the log: it is made anew when it is lost.`,
		Example: `  berm audit --type exec.start --since 24h
  berm audit --verdict denied --type net,credential
  berm audit --host example.com --actor k1a2b3c4
  berm audit --path /workspace/secrets --json | jq -r .sandbox
  berm audit --follow --sandbox i0abcdefghijklmnopqrs`,
	}
	queryAudit(cmd)
	cmd.AddCommand(newAuditChangesCommand(), newAuditVerifyCommand(), newAuditExportCommand(), newAuditHoldCommand(), newAuditEraseCommand(), newAuditKeyCommand(), newAuditWitnessCommand())
	return cmd
}

// auditDir is the log that is meant when none is named: the server's, where its data directory
// is the default one, else that of `berm run`. local tells which, and so does a line on stderr.
func auditDir(cmd *cobra.Command, data string) (dir string, local bool, err error) {
	if data != "" {
		return logOf(data), false, checkData(data)
	}
	defer func() {
		switch configured, _ := serverConfigured(cmd); {
		case err != nil:
		case local && configured:
			cli.Notice(cmd, "reading the log of berm run, %s, and not that of the server that is configured: name its data directory with --data", dir)
		case local:
			cli.Notice(cmd, "reading the log of berm run, %s; --data names a server's", dir)
		default:
			cli.Notice(cmd, "reading the log of the server here, %s", dir)
		}
	}()
	dir = filepath.Join(defaultData(), "audit")
	if _, err := os.Stat(dir); err == nil {
		return dir, false, nil
	}
	state, err := session.StateDir()
	if err != nil {
		return "", false, err
	}
	dir = filepath.Join(state, "audit")
	if _, err := os.Stat(dir); err != nil {
		return "", false, berm.Errorf(berm.NotFound, "there is no audit log in %s and none in %s", filepath.Join(defaultData(), "audit"), dir).
			WithHint("name the server's data directory with --data, or the log's own as an argument")
	}
	return dir, true, nil
}

// logOf is the log in a data directory of a server, or the directory itself if it is the log.
func logOf(dir string) string {
	if inside := filepath.Join(dir, "audit"); exists(inside) || !exists(filepath.Join(dir, "log.jsonl")) {
		return inside
	}
	return dir
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func dataFlag(cmd *cobra.Command, data *string) {
	cmd.Flags().StringVar(data, "data", "", "data directory of the server (default: that of berm serve, if it is\nthere, else the log of berm run)")
}

func newAuditVerifyCommand() *cobra.Command {
	var data string
	var trust trail.Trust
	var anchors []string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "verify [DIRECTORY | EXPORT]",
		Short: "Check that nobody changed the audit log",
		Long: `Check a log, or an export of one, without a server: each record, the chain of their
hashes, the tree over them, what was signed, and the content kept beside. Exit code 3 when
something is wrong; the first record that is not what it was is named.

The key comes from the log itself, so that whoever can write all of it can make it anew: give
the key that ` + "`berm audit key`" + ` printed when you still trusted the machine (--key), and checkpoints
that were kept elsewhere (--anchor), which also find a log that was put back to an earlier
state. What was written after the last checkpoint (up to five seconds) is covered by the chain
alone.`,
		Example: `  berm audit verify
  berm audit verify --data /var/lib/berm --key berm-audit-0123456789abcdef+0f3a…
  berm audit verify session.zip --anchor /mnt/other/berm.anchors`,
		Args: cli.UsageArgs(cobra.MaximumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			for _, path := range anchors {
				content, err := os.ReadFile(path)
				if err != nil {
					return berm.Errorf(berm.KindOf(err), "checkpoints that were kept: %w", err)
				}
				kept := trail.ParseAnchors(string(content))
				if len(kept) == 0 {
					return berm.Errorf(berm.Invalid, "%s has no checkpoint", path)
				}
				trust.Anchors = append(trust.Anchors, kept...)
			}
			report, path, err := verifyAudit(cmd, data, args, trust)
			if err != nil {
				return err
			}
			if asJSON {
				err = json.NewEncoder(cmd.OutOrStdout()).Encode(report)
			} else {
				err = printReport(cmd.OutOrStdout(), path, report)
			}
			if err == nil && len(report.Problems) > 0 {
				return cli.ExitError(exitProblems)
			}
			return err
		},
	}
	dataFlag(cmd, &data)
	cmd.Flags().StringVar(&trust.Key, "key", "", "public key that the log must have")
	cmd.Flags().StringArrayVar(&anchors, "anchor", nil, "`FILE` of checkpoints that were kept elsewhere; may be repeated")
	cmd.Flags().BoolVar(&trust.Unsigned, "unsigned", false, "take a log without signatures, as berm run keeps")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the report as JSON")
	return cmd
}

// verifyAudit checks what the arguments name.
func verifyAudit(cmd *cobra.Command, data string, args []string, trust trail.Trust) (*trail.Report, string, error) {
	if len(args) == 0 {
		dir, local, err := auditDir(cmd, data)
		if err != nil {
			return nil, "", err
		}
		trust.Unsigned = trust.Unsigned || local
		report, err := trail.Verify(dir, trust)
		return report, dir, err
	}
	f, err := os.Open(args[0])
	if err != nil {
		return nil, "", berm.Errorf(berm.KindOf(err), "audit log: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, "", berm.Errorf(berm.Internal, "audit log: %w", err)
	}
	if info.IsDir() {
		dir := logOf(args[0])
		if !exists(dir) {
			dir = args[0]
		}
		report, err := trail.Verify(dir, trust)
		return report, dir, err
	}
	archive, err := trail.OpenArchive(f, info.Size())
	if err != nil {
		return nil, "", err
	}
	return archive.Verify(trust), args[0], nil
}

// printReport tells a person what was found, and what that proves.
func printReport(out io.Writer, path string, r *trail.Report) error {
	w := new(strings.Builder)
	fmt.Fprintf(w, "%s: %d records", path, r.Records)
	if r.Records > 0 {
		fmt.Fprintf(w, " (%d to %d)", r.First, r.Last)
	}
	fmt.Fprintf(w, ", %d pieces of content\n", r.Blobs)
	switch {
	case len(r.Keys) == 0:
		fmt.Fprintln(w, "not signed: the chain of hashes is all there is, and whoever may write the log can make it anew")
	case r.Checkpoints > 0:
		fmt.Fprintf(w, "signed up to record %d, at %s, by %s\n", r.SignedTo, r.SignedAt.Local().Format(time.DateTime), r.Keys[len(r.Keys)-1])
		if r.Trusted == "" {
			fmt.Fprintln(w, "the key is the log's own word: compare it with what `berm audit key` printed before, or give that with --key")
		}
	}
	if r.Anchored > 0 {
		fmt.Fprintf(w, "checkpoints that were kept elsewhere cover records up to %d\n", r.Anchored)
	}
	for _, e := range r.Erasures {
		fmt.Fprintf(w, "record %d: %d records of sandbox %s were erased by %s: %s\n", e.By, e.Records, terminal.Escape(string(e.Sandbox)),
			terminal.Escape(strings.TrimSpace(e.Actor.Type+" "+e.Actor.ID)), terminal.Escape(e.Reason))
		if e.Left > 0 {
			fmt.Fprintf(w, "  %d of them are still there: the server finishes that when it is started\n", e.Left)
		}
	}
	if r.Gaps > 0 {
		fmt.Fprintf(w, "%d records tell of others that were lost\n", r.Gaps)
	}
	if r.Unrecorded > 0 {
		fmt.Fprintf(w, "%d records tell what was not recorded: berm audit --type audit.gap\n", r.Unrecorded)
	}
	for _, seq := range r.Steps[:min(len(r.Steps), 5)] {
		fmt.Fprintf(w, "record %d is dated before the one before: the clock was set back\n", seq)
	}
	for _, problem := range r.Problems {
		fmt.Fprintln(w, problem)
	}
	if len(r.Keys) == 0 && len(r.Problems) > 0 {
		fmt.Fprintln(w, "nobody signs the log of berm run: if it is one, --unsigned takes it as it is")
	}
	switch {
	case len(r.Problems) > 0:
	case len(r.Erasures) > 0:
		fmt.Fprintln(w, "nothing else was changed")
	default:
		fmt.Fprintln(w, "nothing was changed")
	}
	_, err := io.WriteString(out, w.String())
	return err
}

func newAuditExportCommand() *cobra.Command {
	var data, out, format string
	var all bool
	cmd := &cobra.Command{
		Use:   "export SANDBOX | --all",
		Short: "Write what the log has of a sandbox to a file that proves itself",
		Long: `Write the records of a sandbox (or with --all the whole log) and the content beside them to a
zip archive, with the proof that they are what was signed and that there are no others. Anyone
can check it with ` + "`berm audit verify FILE`" + `. It reaches to the last checkpoint, which is at most five
seconds old.

--format ocsf writes events of the Open Cybersecurity Schema Framework instead, one JSON object a
line, for other systems to read: they prove nothing.

It reads the server's data directory and its signing key: run it as the server's user.`,
		Example: `  berm audit export i1abcdefghijklmnopqrs -o session.zip
  berm audit export --all -o log.zip
  berm audit export --all --format ocsf -o events.jsonl`,
		Args: cli.UsageArgs(cobra.MaximumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if all == (len(args) == 1) {
				return cli.UsageError{Err: berm.Errorf(berm.Invalid, "name a sandbox, or give --all")}
			}
			dir, _, err := auditDir(cmd, data)
			if err != nil {
				return err
			}
			var id berm.SandboxID
			if !all {
				if id, err = sandboxID(args[0]); err != nil {
					return err
				}
			}
			switch format {
			case formatZip:
				err = writeWhole(cmp.Or(out, "audit.zip"), func(w io.Writer) error { return trail.Export(w, dir, id) })
			case formatOCSF:
				if out == "" {
					return exportOCSF(cmd.OutOrStdout(), trail.Dir(dir), id)
				}
				return writeWhole(out, func(w io.Writer) error { return exportOCSF(w, trail.Dir(dir), id) })
			default:
				return cli.UsageError{Err: berm.Errorf(berm.Invalid, "--format %q: it must be %s or %s", format, formatZip, formatOCSF)}
			}
			if err != nil && data == "" {
				err = berm.Errorf(berm.KindOf(err), "%w", err).WithHint("the log of another server is named by its data directory: --data")
			}
			return err
		},
	}
	dataFlag(cmd, &data)
	cmd.Flags().StringVarP(&out, "output", "o", "", "`FILE` to write (default: audit.zip; of ocsf, standard output)")
	cmd.Flags().StringVar(&format, "format", formatZip, "zip, which proves itself, or ocsf")
	completeFlag(cmd, "format", cobra.FixedCompletions([]cobra.Completion{formatZip, formatOCSF}, cobra.ShellCompDirectiveNoFileComp))
	cmd.Flags().BoolVar(&all, "all", false, "export all records")
	return cmd
}

// The forms of an export.
const (
	formatZip  = "zip"
	formatOCSF = "ocsf"
)

// exportOCSF writes what a log has of a sandbox, or of all if it is "", as events.
func exportOCSF(w io.Writer, log trail.Source, id berm.SandboxID) error {
	out := bufio.NewWriter(w)
	for line, err := range log.Records(0) {
		if err != nil {
			return berm.Errorf(berm.Internal, "audit log: %w", err).WithHint("`berm audit verify` tells what is wrong")
		}
		if id != "" && line.Sandbox != id {
			continue
		}
		for _, e := range ocsf.Events(line, func(hash string) ([]byte, error) { return replay.Content(log, hash) }) {
			text, err := json.Marshal(e)
			if err == nil {
				_, err = out.Write(append(terminal.EscapeJSON(text), '\n'))
			}
			if err != nil {
				return berm.Errorf(berm.Internal, "export: %w", err)
			}
		}
	}
	if err := out.Flush(); err != nil {
		return berm.Errorf(berm.Internal, "export: %w", err)
	}
	return nil
}

// writeWhole writes a file that is there when all of it was written.
func writeWhole(path string, write func(io.Writer) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return berm.Errorf(berm.KindOf(err), "%w", err)
	}
	err = write(f)
	if err == nil {
		if err = errors.Join(f.Sync(), f.Close()); err == nil {
			err = os.Rename(f.Name(), path)
		}
		if err != nil {
			err = berm.Errorf(berm.Internal, "%w", err)
		}
	}
	if err != nil {
		_ = f.Close()
		_ = os.Remove(f.Name())
	}
	return err
}

func newAuditKeyCommand() *cobra.Command {
	var data string
	var rotate bool
	cmd := &cobra.Command{
		Use:   "key",
		Short: "Print the public keys of the audit log",
		Long: `Print the public keys that signed the log, the newest last. Keep them where the machine cannot
change them: ` + "`berm audit verify --key`" + ` compares.

--rotate has a new key sign from now on, which the old one vouches for. The server must not be
running meanwhile.`,
		Example: `  berm audit key
  berm audit key --rotate`,
		Args: cli.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			dir, local, err := auditDir(cmd, data)
			if err != nil {
				return err
			}
			if local {
				return berm.Errorf(berm.NotFound, "the log of berm run is not signed: who runs it can write it")
			}
			if rotate {
				if err := rotateKey(dir); err != nil {
					return err
				}
			}
			keys, err := trail.Keys(dir)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), strings.Join(keys, "\n"))
			return err
		},
	}
	dataFlag(cmd, &data)
	cmd.Flags().BoolVar(&rotate, "rotate", false, "make a new key first")
	return cmd
}

// rotateKey has the key of a log changed by who writes the log.
func rotateKey(dir string) error {
	if os.Geteuid() != 0 {
		log, err := trail.Open(dir, trail.Options{})
		if err != nil {
			return err
		}
		return errors.Join(log.RotateKey(), log.Close())
	}
	log, err := writer.Open(writer.Config{Dir: dir, Program: ownProgram, Log: slog.Default(), Wait: time.Second})
	if err != nil {
		return err
	}
	return errors.Join(log.RotateKey(), log.Close())
}

func newAuditWitnessCommand() *cobra.Command {
	var listen, keep string
	var keys []string
	cmd := &cobra.Command{
		Use:   "witness --key KEY --keep FILE",
		Short: "Keep the checkpoints of another machine's audit log",
		Long: `Take the checkpoints that ` + "`berm serve --audit-witness URL`" + ` of another machine sends, and append
those that its key signed to a file. One with fewer records than before is refused: the log was
cut or put back. ` + "`berm audit verify --anchor FILE`" + ` compares a log with what was kept.`,
		Example: `  berm audit witness --listen 10.0.0.2:7680 --key berm-audit-0123456789abcdef+0f3a… --keep berm.anchors`,
		Args:    cli.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			content, err := os.ReadFile(keep)
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				return berm.Errorf(berm.KindOf(err), "checkpoints that were kept: %w", err)
			}
			witness, err := trail.NewWitness(keys, trail.ParseAnchors(string(content)), trail.FileAnchor(keep))
			if err != nil {
				return err
			}
			server := &http.Server{Addr: listen, Handler: witness, ReadTimeout: 10 * time.Second, WriteTimeout: 10 * time.Second, MaxHeaderBytes: 8 << 10}
			go func() { <-cmd.Context().Done(); _ = server.Close() }()
			if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
				return berm.Errorf(berm.Unavailable, "witness: %w", err)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&listen, "listen", "127.0.0.1:7680", "address to serve on, HOST:PORT")
	cmd.Flags().StringVar(&keep, "keep", "", "`FILE` to append checkpoints to")
	cmd.Flags().StringArrayVar(&keys, "key", nil, "public `KEY` of the log; repeat it for those that followed")
	_ = cmd.MarkFlagRequired("keep")
	_ = cmd.MarkFlagRequired("key")
	return cmd
}
