package trail

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
)

// Files of an export, which is a zip archive. Blobs lie beside them as in a log.
const (
	exportManifest   = "manifest.txt"
	exportRecords    = "records.jsonl"
	exportProof      = "proof.json"
	exportCheckpoint = "checkpoint.txt"
	exportKeys       = handoverFile
)

const exportTitle = "berm audit export"

// Bounds of what is read of an export.
const (
	maxExportText    = 1 << 20
	maxExportProof   = 512 << 20
	maxExportRecords = 8 << 30
)

// manifest is what an export says of itself, signed as a note: that this is all that the log
// had of a sandbox.
type manifest struct {
	Origin  string
	Sandbox berm.SandboxID // "" is all sandboxes
	Through uint64         // the last record of the log that was looked at
	Time    time.Time
	Seqs    []uint64          // of the records, in order
	Files   map[string]string // hashes of the other files
}

func (m manifest) text() string {
	sandbox := string(m.Sandbox)
	if sandbox == "" {
		sandbox = "*"
	}
	text := fmt.Sprintf("%s\n%s\nsandbox %s\nthrough %d\ntime %s\nrecords %s\n", exportTitle, m.Origin, sandbox, m.Through, m.Time.UTC().Format(time.RFC3339), ranges(m.Seqs))
	for _, name := range slices.Sorted(maps.Keys(m.Files)) {
		text += "sha256 " + m.Files[name] + " " + name + "\n"
	}
	return text
}

// ranges shows ascending numbers as 1-5,9.
func ranges(numbers []uint64) string {
	if len(numbers) == 0 {
		return "none"
	}
	var b strings.Builder
	for i := 0; i < len(numbers); {
		j := i
		for j+1 < len(numbers) && numbers[j+1] == numbers[j]+1 {
			j++
		}
		if b.Len() > 0 {
			b.WriteByte(',')
		}
		b.WriteString(spanText(audit.Removal{From: numbers[i], To: numbers[j]}))
		i = j + 1
	}
	return b.String()
}

// maxSeqs bounds the records of an export.
const maxSeqs = 50_000_000

func parseRanges(text string) ([]uint64, error) {
	if text == "none" {
		return nil, nil
	}
	spans, err := parseSpans(text)
	if err != nil {
		return nil, err
	}
	var all []uint64
	for _, s := range spans {
		if s.To-s.From > uint64(maxSeqs-len(all)) {
			return nil, fmt.Errorf("these are more than %d numbers", maxSeqs)
		}
		for n := s.From; n <= s.To; n++ {
			all = append(all, n)
		}
	}
	return all, nil
}

func parseManifest(text string) (manifest, error) {
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	if len(lines) < 6 || lines[0] != exportTitle {
		return manifest{}, errors.New("this is not the manifest of an export")
	}
	m := manifest{Origin: lines[1], Files: map[string]string{}}
	for _, line := range lines[2:] {
		name, value, _ := strings.Cut(line, " ")
		var err error
		switch name {
		case "sandbox":
			if value != "*" {
				m.Sandbox = berm.SandboxID(value)
			}
		case "through":
			m.Through, err = strconv.ParseUint(value, 10, 63)
		case "time":
			m.Time, err = time.Parse(time.RFC3339, value)
		case "records":
			m.Seqs, err = parseRanges(value)
		case "sha256":
			hash, file, ok := strings.Cut(value, " ")
			if !ok || !isHash(hash) {
				err = errors.New("it is not a hash and a name")
			}
			m.Files[file] = hash
		}
		if err != nil {
			return manifest{}, fmt.Errorf("manifest: %s: %w", name, err)
		}
	}
	return m, nil
}

// proof holds the hashes of a tree from which it follows that lines are in it.
type proof struct {
	Nodes map[int64]tlog.Hash `json:"nodes"` // by their index, see tlog.StoredHashIndex
}

// ReadHashes implements tlog.HashReader.
func (p proof) ReadHashes(indexes []int64) ([]tlog.Hash, error) {
	hashes := make([]tlog.Hash, len(indexes))
	for i, index := range indexes {
		h, ok := p.Nodes[index]
		if !ok {
			return nil, errors.New("the proof lacks a hash")
		}
		hashes[i] = h
	}
	return hashes, nil
}

// gather keeps the hashes that are read through it.
type gather struct {
	from tlog.HashReader
	proof
}

func (g gather) ReadHashes(indexes []int64) ([]tlog.Hash, error) {
	hashes, err := g.from.ReadHashes(indexes)
	for i := range hashes {
		g.Nodes[indexes[i]] = hashes[i]
	}
	return hashes, err
}

// Export writes what the log in dir has of a sandbox, or of all if it is "", with its blobs and
// the proof that this is what was signed, to w. It reaches to the last checkpoint. It needs to
// read the key of the log. Kinds: NotFound when there are no records, Denied, Internal.
func Export(w io.Writer, dir string, sandbox berm.SandboxID) error {
	handovers, err := os.ReadFile(filepath.Join(dir, handoverFile))
	if err != nil {
		return berm.Errorf(berm.KindOf(err), "the keys of the log: %w", err)
	}
	keys, err := keyChain(parseStrings(handovers))
	if err != nil {
		return berm.Errorf(berm.Internal, "audit log: %w", err)
	}
	signer, err := exportKey(dir)
	if err != nil {
		return err
	}
	notes, err := readStrings(filepath.Join(dir, checkpointFile))
	if err != nil {
		return err
	}
	if len(notes) == 0 {
		return berm.Errorf(berm.NotFound, "the log in %s has no checkpoint yet", dir)
	}
	last := notes[len(notes)-1]
	checkpoint, _, err := openCheckpoint(last, keys)
	if err != nil {
		return berm.Errorf(berm.Internal, "the last checkpoint: %w", err)
	}
	hashes, err := os.Open(filepath.Join(dir, treeFile))
	if err != nil {
		return berm.Errorf(berm.KindOf(err), "audit tree: %w", err)
	}
	defer hashes.Close()

	archive := zip.NewWriter(w)
	m := manifest{Origin: checkpoint.Origin, Sandbox: sandbox, Through: checkpoint.Size, Time: time.Now(), Files: map[string]string{}}
	g := gather{from: hashFile{hashes}, proof: proof{Nodes: map[int64]tlog.Hash{}}}
	blobs := map[string]bool{}
	// Records first: the rest is known when they are written.
	out, sum, err := create(archive, exportRecords)
	if err != nil {
		return err
	}
	for line, err := range Dir(dir).Records(0) {
		if err != nil {
			return berm.Errorf(berm.Internal, "audit log: %w", err).WithHint("`berm audit verify` tells what is wrong")
		}
		if line.Seq > checkpoint.Size {
			break
		}
		if sandbox != "" && line.Sandbox != sandbox {
			continue
		}
		if _, err := tlog.ProveRecord(int64(checkpoint.Size), int64(line.Seq-1), g); err != nil {
			return berm.Errorf(berm.Internal, "audit tree: record %d: %w", line.Seq, err)
		}
		m.Seqs = append(m.Seqs, line.Seq)
		for _, b := range line.Blobs {
			blobs[b.SHA256] = true
		}
		if _, err := out.Write(append(line.Raw, '\n')); err != nil {
			return berm.Errorf(berm.Internal, "export: %w", err)
		}
	}
	if len(m.Seqs) == 0 {
		return berm.Errorf(berm.NotFound, "the log in %s has no signed records of sandbox %q", dir, sandbox).
			WithHint("records are signed some seconds after they are written; berm audit finds those that are not")
	}
	m.Files[exportRecords] = sum()
	for _, hash := range slices.Sorted(maps.Keys(blobs)) {
		if err := copyBlob(archive, Dir(dir), hash); err != nil {
			return err
		}
	}
	text, err := json.Marshal(g.proof)
	if err != nil {
		return berm.Errorf(berm.Internal, "export: %w", err)
	}
	for _, f := range []struct {
		name    string
		content []byte
	}{{exportProof, text}, {exportCheckpoint, []byte(last)}, {exportKeys, handovers}} {
		if m.Files[f.name], err = put(archive, f.name, f.content); err != nil {
			return err
		}
	}
	signed, err := note.Sign(&note.Note{Text: m.text()}, signer)
	if err != nil {
		return berm.Errorf(berm.Internal, "export: %w", err)
	}
	if _, err := put(archive, exportManifest, signed); err != nil {
		return err
	}
	if err := archive.Close(); err != nil {
		return berm.Errorf(berm.Internal, "export: %w", err)
	}
	return nil
}

// exportKey is the key that signs now, for reading only.
func exportKey(dir string) (note.Signer, error) {
	private, err := os.ReadFile(filepath.Join(dir, keyFile))
	if err != nil {
		return nil, berm.Errorf(berm.KindOf(err), "audit key: %w", err).
			WithHint("run it as the user who runs the server, since an export is signed")
	}
	signer, err := note.NewSigner(strings.TrimSpace(string(private)))
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "audit key: %w", err)
	}
	return signer, nil
}

// create begins a file of an archive. sum is the hash of what was written to it.
func create(archive *zip.Writer, name string) (w io.Writer, sum func() string, err error) {
	f, err := archive.Create(name)
	if err != nil {
		return nil, nil, berm.Errorf(berm.Internal, "export: %w", err)
	}
	h := sha256.New()
	return io.MultiWriter(f, h), func() string { return hex.EncodeToString(h.Sum(nil)) }, nil
}

func put(archive *zip.Writer, name string, content []byte) (hash string, err error) {
	w, sum, err := create(archive, name)
	if err != nil {
		return "", err
	}
	if _, err := w.Write(content); err != nil {
		return "", berm.Errorf(berm.Internal, "export: %w", err)
	}
	return sum(), nil
}

// copyBlob adds content that a record names. One that is not kept any more is left out, which
// a check of the export tells.
func copyBlob(archive *zip.Writer, from Source, hash string) error {
	f, err := from.Blob(hash)
	if berm.KindOf(err) == berm.NotFound {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	w, err := archive.Create(audit.BlobDir + "/" + hash)
	if err == nil {
		_, err = io.Copy(w, f)
	}
	if err != nil {
		return berm.Errorf(berm.Internal, "export: %w", err)
	}
	return nil
}

// Archive is an export, for reading.
type Archive struct{ zip *zip.Reader }

// OpenArchive reads the directory of an export. Kind Invalid when it is none.
func OpenArchive(r io.ReaderAt, size int64) (*Archive, error) {
	z, err := zip.NewReader(r, size)
	names := map[string]bool{}
	if err == nil {
		for _, f := range z.File {
			if names[f.Name] { // readers differ in which of them they take
				err = fmt.Errorf("it has two files %q", f.Name)
			}
			names[f.Name] = true
		}
	}
	if err == nil && !names[exportManifest] {
		err = errors.New("it has no " + exportManifest)
	}
	if err != nil {
		return nil, berm.Errorf(berm.Invalid, "this is not an export of an audit log: %w", err)
	}
	return &Archive{z}, nil
}

// Records implements Source.
func (a *Archive) Records(from uint64) iter.Seq2[Line, error] {
	return func(yield func(Line, error) bool) {
		f, err := a.open(exportRecords)
		if err != nil {
			yield(Line{}, err)
			return
		}
		defer f.Close()
		records(func(yield func([]byte, error) bool) {
			lines(io.LimitReader(f, maxExportRecords), exportRecords, false, yield)
		}, from, yield)
	}
}

// Blob implements Source.
func (a *Archive) Blob(sha256 string) (io.ReadCloser, error) {
	if !isHash(sha256) {
		return nil, berm.Errorf(berm.Invalid, "%q is not a SHA-256", sha256)
	}
	return a.open(audit.BlobDir + "/" + sha256)
}

// open opens a file of the archive. What is unpacked may be any size.
func (a *Archive) open(name string) (io.ReadCloser, error) {
	for _, f := range a.zip.File {
		if f.Name == name {
			r, err := f.Open()
			if err != nil {
				return nil, berm.Errorf(berm.Invalid, "%s of the export: %w", name, err)
			}
			return r, nil
		}
	}
	return nil, berm.Errorf(berm.NotFound, "the export has no %s", name)
}

// read returns a file of at most limit bytes.
func (a *Archive) read(name string, limit int64) ([]byte, error) {
	f, err := a.open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	content, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(content)) > limit {
		err = errors.New("it is too large")
	}
	if err != nil {
		return nil, berm.Errorf(berm.Invalid, "%s of the export: %w", name, err)
	}
	return content, nil
}

// Verify checks an export: that its records, all of them and no others, were in the log when
// its checkpoint was signed, and the blobs. Nothing in it is trusted but what trust names. What
// is wrong is in the report.
func (a *Archive) Verify(trust Trust) *Report {
	r := &Report{Problems: []Problem{}, Steps: []uint64{}, Keys: []string{}}
	handovers, err := a.read(exportKeys, maxExportText)
	if err != nil {
		r.problem(0, "%v", err)
		return r
	}
	keys := r.keys(parseStrings(handovers), trust)
	m, point, ok := a.signed(r, keys)
	if !ok {
		return r
	}
	r.SignedTo, r.SignedAt, r.Checkpoints = point.Size, point.Time, 1
	for _, anchor := range r.anchors(trust.Anchors, keys) {
		if anchor.Size == point.Size && anchor.Root != point.Root {
			r.problem(0, "%s has other records", anchor.name)
		}
	}
	var p proof
	if content, err := a.read(exportProof, maxExportProof); err != nil {
		r.problem(0, "%v", err)
	} else if err := json.Unmarshal(content, &p); err != nil {
		r.problem(0, "%s: %v", exportProof, err)
	}
	a.checkFiles(r, m, a.checkRecords(r, m, point, p))
	r.sort()
	return r
}

// signed reads what a key of the log vouches for.
func (a *Archive) signed(r *Report, keys []note.Verifier) (m manifest, point Checkpoint, ok bool) {
	text, err := a.read(exportManifest, maxExportText*64)
	if err == nil {
		var opened *note.Note
		opened, err = note.Open(text, note.VerifierList(keys...))
		if err == nil {
			m, err = parseManifest(opened.Text)
		}
	}
	if err != nil {
		r.problem(0, "%s: %v", exportManifest, err)
		return m, point, false
	}
	text, err = a.read(exportCheckpoint, maxExportText)
	if err == nil {
		point, _, err = openCheckpoint(string(text), keys)
	}
	if err == nil && (point.Size != m.Through || point.Origin != m.Origin) {
		err = errors.New("it is of another export")
	}
	if err != nil {
		r.problem(0, "%s: %v", exportCheckpoint, err)
	}
	return m, point, err == nil
}

// checkRecords checks each record against the manifest's numbers and the tree. It returns the
// hashes of the contents that they name.
func (a *Archive) checkRecords(r *Report, m manifest, point Checkpoint, p proof) map[string]bool {
	c := checker{report: r, source: a, blobs: map[string]bool{}, prev: audit.Chain(nil)}
	f, err := a.open(exportRecords)
	if err != nil {
		r.problem(0, "%v", err)
		return nil
	}
	defer f.Close()
	wanted := m.Seqs
	var before uint64
	lines(io.LimitReader(f, maxExportRecords), exportRecords, false, func(raw []byte, err error) bool {
		var h header
		if err == nil {
			err = decode(raw, &h, false)
		}
		if err != nil {
			at := uint64(0)
			if len(wanted) > 0 {
				at = wanted[0]
				wanted = wanted[1:]
			}
			r.problem(at, "this is not a record: %v", err)
			return raw != nil
		}
		r.Records++
		if r.First == 0 {
			r.First = h.Seq
		}
		for len(wanted) > 0 && wanted[0] < h.Seq {
			r.problem(wanted[0], "it is missing")
			wanted = wanted[1:]
		}
		if len(wanted) == 0 || wanted[0] != h.Seq {
			r.problem(h.Seq, "it does not belong here")
			return true
		}
		wanted = wanted[1:]
		if h.Seq != before+1 {
			c.prev = h.Prev // the record before is not of this export
		}
		c.content(h)
		before, c.prev = h.Seq, audit.Chain(raw)
		if err := included(point, h.Seq, raw, p); err != nil {
			r.problem(h.Seq, "it is not what was signed: %v", err)
		}
		return true
	})
	for _, n := range wanted[:min(len(wanted), maxProblems)] {
		r.problem(n, "it is missing")
	}
	return c.blobs
}

// included checks that a line is in the tree of a checkpoint.
func included(point Checkpoint, seq uint64, line []byte, p proof) error {
	if seq == 0 || seq > point.Size {
		return errors.New("it is beyond the checkpoint")
	}
	path, err := tlog.ProveRecord(int64(point.Size), int64(seq-1), p)
	if err != nil {
		return err
	}
	return tlog.CheckRecord(path, int64(point.Size), point.Root, int64(seq-1), tlog.RecordHash(line))
}

// checkFiles checks that each file is what the manifest says, and that there is no other but
// the contents that are named.
func (a *Archive) checkFiles(r *Report, m manifest, named map[string]bool) {
	for _, name := range slices.Sorted(maps.Keys(m.Files)) {
		f, err := a.open(name)
		if err != nil {
			r.problem(0, "%v", err)
			continue
		}
		h := sha256.New()
		_, err = io.Copy(h, io.LimitReader(f, maxExportRecords))
		f.Close()
		if err != nil || hex.EncodeToString(h.Sum(nil)) != m.Files[name] {
			r.problem(0, "%s is not what was exported", name)
		}
	}
	for _, f := range a.zip.File {
		blob, isBlob := strings.CutPrefix(f.Name, audit.BlobDir+"/")
		if _, known := m.Files[f.Name]; !known && f.Name != exportManifest && (!isBlob || !named[blob]) {
			r.problem(0, "%q does not belong here", f.Name)
		}
	}
}

// parseStrings reads JSON strings, a line each, as far as they are whole.
func parseStrings(content []byte) []string {
	var all []string
	for line := range bytes.Lines(content) {
		var s string
		if json.Unmarshal(line, &s) != nil {
			break
		}
		all = append(all, s)
	}
	return all
}
