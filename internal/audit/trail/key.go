package trail

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/mod/sumdb/note"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/failpoint"
)

// Files of the signing key.
const (
	keyFile      = "key"        // 0600, as note.GenerateKey makes it
	nextKeyFile  = "key.new"    // while the key changes
	handoverFile = "keys.jsonl" // the public keys, each handed over by the one before
)

// handoverTitle is the first line of the note by which a key hands over to another.
const handoverTitle = "berm audit key"

// newKey makes an Ed25519 key. The name tells one log from another.
func newKey(name string) (private, public string, err error) {
	private, public, err = note.GenerateKey(rand.Reader, name)
	if err != nil {
		return "", "", berm.Errorf(berm.Internal, "audit key: %w", err)
	}
	return private, public, nil
}

// publicOf is the last key that the notes name.
func publicOf(handovers []string) (string, error) {
	if len(handovers) == 0 {
		return "", errors.New("there is no public key")
	}
	_, key, err := parseHandover(handovers[len(handovers)-1])
	return key, err
}

// handover is a note that names a new key, signed by it and by the key before.
func handover(public string, signers ...note.Signer) (string, error) {
	n, err := note.Sign(&note.Note{Text: handoverTitle + "\n" + public + "\n"}, signers...)
	return string(n), err
}

// parseHandover reads a note without checking who signed it.
func parseHandover(text string) (signed []byte, public string, err error) {
	lines := strings.Split(text, "\n")
	if len(lines) < 3 || lines[0] != handoverTitle {
		return nil, "", errors.New("this is not the note of a key")
	}
	return []byte(text), lines[1], nil
}

// keyChain checks that each key was handed over by the one before, and returns all of them.
// The first vouches for itself alone.
func keyChain(handovers []string) ([]note.Verifier, error) {
	var keys []note.Verifier
	for i, text := range handovers {
		signed, public, err := parseHandover(text)
		if err != nil {
			return keys, fmt.Errorf("key %d: %w", i+1, err)
		}
		v, err := note.NewVerifier(public)
		if err != nil {
			return keys, fmt.Errorf("key %d: %w", i+1, err)
		}
		wanted := []note.Verifier{v}
		if i > 0 {
			wanted = append(wanted, keys[i-1])
		}
		for _, w := range wanted {
			if _, err := note.Open(signed, note.VerifierList(w)); err != nil {
				return keys, fmt.Errorf("key %d is not signed by %s: %w", i+1, w.Name(), err)
			}
		}
		keys = append(keys, v)
	}
	return keys, nil
}

// loadKey reads the signing key of a log, or makes the first one, and completes a change that
// a crash interrupted. It returns the notes of all keys too.
func loadKey(dir string) (note.Signer, []string, error) {
	handovers, err := readStrings(filepath.Join(dir, handoverFile))
	if err != nil {
		return nil, nil, err
	}
	private, err := os.ReadFile(filepath.Join(dir, keyFile))
	switch {
	case errors.Is(err, fs.ErrNotExist) && len(handovers) == 0:
		return firstKey(dir)
	case err != nil:
		return nil, nil, berm.Errorf(berm.Internal, "audit key: %w", err).
			WithHint("restore the file, or move the log away to begin another")
	}
	signer, err := note.NewSigner(strings.TrimSpace(string(private)))
	if err != nil {
		return nil, nil, berm.Errorf(berm.Internal, "audit key: %w", err)
	}
	if next, err := os.ReadFile(filepath.Join(dir, nextKeyFile)); err == nil {
		after, err := note.NewSigner(strings.TrimSpace(string(next)))
		if err != nil {
			return nil, nil, berm.Errorf(berm.Internal, "audit key: %w", err)
		}
		// Before the note was written, the change never began; after it, the new key signs.
		if last, err := publicOf(handovers); err == nil && isKeyOf(last, after) {
			return after, handovers, rename(dir, nextKeyFile, keyFile)
		}
		if err := os.Remove(filepath.Join(dir, nextKeyFile)); err != nil {
			return nil, nil, berm.Errorf(berm.Internal, "audit key: %w", err)
		}
	}
	if last, err := publicOf(handovers); err == nil && isKeyOf(last, signer) {
		return signer, handovers, nil
	}
	if len(handovers) > 0 {
		return nil, nil, berm.Errorf(berm.Internal, "the audit key in %s is not the one that %s names last", keyFile, handoverFile).
			WithHint("restore the file, or move the log away to begin another")
	}
	// A crash came before the key was named.
	public, err := publicKey(strings.TrimSpace(string(private)))
	if err != nil {
		return nil, nil, berm.Errorf(berm.Internal, "audit key: %w", err)
	}
	text, err := handover(public, signer)
	if err != nil {
		return nil, nil, berm.Errorf(berm.Internal, "audit key: %w", err)
	}
	return signer, []string{text}, nil
}

// publicKey is the verifier's form of a private key, whose last part is an algorithm's byte and
// the seed (golang.org/x/mod/sumdb/note, GenerateKey).
func publicKey(private string) (string, error) {
	parts := strings.SplitN(private, "+", 5) // PRIVATE, KEY, name, hash, and base64, which may have a + too
	if len(parts) < 5 {
		return "", errors.New("this is no private key")
	}
	seed, err := base64.StdEncoding.DecodeString(parts[4])
	if err != nil || len(seed) != 1+ed25519.SeedSize {
		return "", errors.New("this is no Ed25519 key")
	}
	key := ed25519.NewKeyFromSeed(seed[1:]).Public().(ed25519.PublicKey)
	return note.NewEd25519VerifierKey(parts[2], key)
}

// isKeyOf reports whether a public key is that of a signer.
func isKeyOf(public string, s note.Signer) bool {
	v, err := note.NewVerifier(public)
	return err == nil && v.Name() == s.Name() && v.KeyHash() == s.KeyHash()
}

// firstKey makes the key of a log. The note that names it comes later, see announce: a log
// whose key is named has a checkpoint.
func firstKey(dir string) (note.Signer, []string, error) {
	var id [8]byte
	rand.Read(id[:])
	private, public, err := newKey(fmt.Sprintf("berm-audit-%x", id))
	if err != nil {
		return nil, nil, err
	}
	signer, err := note.NewSigner(private)
	if err != nil {
		return nil, nil, berm.Errorf(berm.Internal, "audit key: %w", err)
	}
	text, err := handover(public, signer)
	if err != nil {
		return nil, nil, berm.Errorf(berm.Internal, "audit key: %w", err)
	}
	return signer, []string{text}, writeFile(filepath.Join(dir, keyFile), private+"\n")
}

// announce names the first key of a log beside it, if that was not done.
func announce(dir string, handovers []string) error {
	path := filepath.Join(dir, handoverFile)
	if named, err := readStrings(path); err != nil || len(named) > 0 {
		return err
	}
	return appendString(path, handovers[0])
}

// rotateKey makes a new key that the old one hands over to.
func rotateKey(dir string, old note.Signer) (note.Signer, string, error) {
	private, public, err := newKey(old.Name())
	if err != nil {
		return nil, "", err
	}
	signer, err := note.NewSigner(private)
	if err != nil {
		return nil, "", berm.Errorf(berm.Internal, "audit key: %w", err)
	}
	text, err := handover(public, old, signer)
	if err != nil {
		return nil, "", berm.Errorf(berm.Internal, "audit key: %w", err)
	}
	if err := writeFile(filepath.Join(dir, nextKeyFile), private+"\n"); err != nil {
		return nil, "", err
	}
	if err := appendString(filepath.Join(dir, handoverFile), text); err != nil {
		return nil, "", err
	}
	if err := failpoint.Hit("audit/key"); err != nil {
		return nil, "", err
	}
	return signer, text, rename(dir, nextKeyFile, keyFile)
}

// readStrings reads a file of JSON strings, a line each. A last line that a crash cut off is
// left out; no file is no strings.
func readStrings(path string) ([]string, error) {
	content, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "audit log: %w", err)
	}
	var all []string
	for line := range strings.Lines(string(content)) {
		if !strings.HasSuffix(line, "\n") {
			break
		}
		var s string
		if err := json.Unmarshal([]byte(line), &s); err != nil {
			return all, berm.Errorf(berm.Internal, "audit log %s: line %d: %w", path, len(all)+1, err)
		}
		all = append(all, s)
	}
	return all, nil
}

// appendString adds a JSON string as a line and forces it to disk.
func appendString(path, s string) error {
	f, err := openStrings(path)
	if err != nil {
		return err
	}
	return errors.Join(f.add(s), f.file.Close())
}

// stringsFile is a file of JSON strings that grows.
type stringsFile struct {
	file *os.File
	size int64
}

// openStrings opens or creates such a file; what a crash cut off is taken away.
func openStrings(path string) (*stringsFile, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, berm.Errorf(berm.Unavailable, "audit log: %w", err)
	}
	content, err := io.ReadAll(f)
	size := int64(bytes.LastIndexByte(content, '\n') + 1)
	if err == nil {
		err = f.Truncate(size)
	}
	if err != nil {
		f.Close()
		return nil, berm.Errorf(berm.Unavailable, "audit log: %w", err)
	}
	return &stringsFile{file: f, size: size}, nil
}

// add appends a string and forces it to disk.
func (f *stringsFile) add(s string) error {
	line, err := json.Marshal(s)
	if err == nil {
		_, err = f.file.WriteAt(append(line, '\n'), f.size)
	}
	if err == nil {
		err = f.file.Sync()
	}
	if err != nil {
		return berm.Errorf(berm.Unavailable, "audit log: %w", err)
	}
	f.size += int64(len(line)) + 1
	return nil
}

// writeFile makes a file that only its owner reads, all of it or nothing.
func writeFile(path, content string) error {
	f, err := os.OpenFile(path+".tmp", os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return berm.Errorf(berm.Unavailable, "audit log: %w", err)
	}
	_, err = f.WriteString(content)
	if err == nil {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(path+".tmp", path)
	}
	if err != nil {
		return berm.Errorf(berm.Unavailable, "audit log: %w", err)
	}
	return nil
}

func rename(dir, from, to string) error {
	if err := os.Rename(filepath.Join(dir, from), filepath.Join(dir, to)); err != nil {
		return berm.Errorf(berm.Internal, "audit key: %w", err)
	}
	return nil
}
