package vault

import (
	"bytes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/crypto/chacha20poly1305"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

const (
	keyFile = "vault.key"
	// handed is the name that a service manager's credential has (systemd.exec,
	// LoadCredential and LoadCredentialEncrypted).
	handed = "berm-vault-key"
	// linePrefix begins each line of a key file, before 32 bytes in base64.
	linePrefix = "berm-vault-key-1:"
	maxKeyFile = 64 << 10
)

// keyring holds the keys, the one that encrypts last. Each has a random nonce of 192 bits
// per value: no counter has to be kept.
type keyring struct {
	path string // empty when the keys are not ours to change

	mu   sync.RWMutex
	keys []key
}

type key struct {
	id     string // the beginning of its hash
	secret []byte
	aead   cipher.AEAD
}

func newKey(secret []byte) (key, error) {
	aead, err := chacha20poly1305.NewX(secret)
	if err != nil {
		return key{}, err
	}
	sum := sha256.Sum256(append([]byte("berm vault key\x00"), secret...))
	return key{hex.EncodeToString(sum[:8]), secret, aead}, nil
}

// openKeys reads the keys, or makes the first one when nothing is encrypted yet. used are
// the ids of those that are needed.
func openKeys(dir string, used []string) (*keyring, error) {
	k := &keyring{}
	path := filepath.Join(os.Getenv("CREDENTIALS_DIRECTORY"), handed)
	var text []byte
	err := fs.ErrNotExist
	if filepath.IsAbs(path) {
		text, err = readKeys(path, false)
	}
	if errors.Is(err, fs.ErrNotExist) {
		k.path = filepath.Join(dir, keyFile)
		text, err = readKeys(k.path, true)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist) && len(used) == 0:
		if err := k.add(); err != nil {
			return nil, err
		}
		return k, nil
	case errors.Is(err, fs.ErrNotExist):
		return nil, berm.Errorf(berm.NotFound, "the key of the secrets is gone: %s", k.path).
			WithHint("bring the file back, or delete vault.db beside it and create the secrets again")
	case err != nil:
		return nil, err
	}
	defer clear(text)
	for line := range bytes.Lines(text) {
		encoded, ok := bytes.CutPrefix(bytes.TrimSpace(line), []byte(linePrefix))
		secret, err := base64.StdEncoding.AppendDecode(nil, encoded)
		if !ok || err != nil || len(secret) != chacha20poly1305.KeySize {
			return nil, berm.Errorf(berm.Invalid, "the file with the key of the secrets has a line that is no key").
				WithHint("each line is %s and 32 bytes in base64", linePrefix)
		}
		next, err := newKey(secret)
		if err != nil {
			return nil, berm.Errorf(berm.Internal, "the key of the secrets: %w", err)
		}
		k.keys = append(k.keys, next)
	}
	for _, id := range used {
		if !slices.ContainsFunc(k.keys, func(k key) bool { return k.id == id }) {
			return nil, berm.Errorf(berm.NotFound, "a key that secrets are encrypted with is gone").
				WithHint("bring back the key file that belongs to this vault.db")
		}
	}
	if len(k.keys) == 0 {
		return nil, berm.Errorf(berm.Invalid, "the file with the key of the secrets is empty")
	}
	return k, nil
}

// readKeys reads a key file; ours has to be private.
func readKeys(path string, ours bool) ([]byte, error) {
	flags := os.O_RDONLY | unix.O_NONBLOCK
	if ours {
		flags |= unix.O_NOFOLLOW
	}
	file, err := os.OpenFile(path, flags, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fs.ErrNotExist
	}
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "the key of the secrets: %w", err)
	}
	defer file.Close()
	info, err := file.Stat()
	switch {
	case err != nil:
		return nil, berm.Errorf(berm.Internal, "the key of the secrets: %w", err)
	case !info.Mode().IsRegular():
		return nil, berm.Errorf(berm.Invalid, "the key of the secrets, %s, is no regular file", path)
	case ours && info.Mode().Perm()&0o077 != 0:
		return nil, berm.Errorf(berm.Denied, "others can read the key of the secrets, %s", path).
			WithHint("run chmod 600 on it, and rotate the key if somebody may have")
	}
	text, err := io.ReadAll(io.LimitReader(file, maxKeyFile))
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "the key of the secrets: %w", err)
	}
	return text, nil
}

// write replaces the key file by one with the keys.
func (k *keyring) write(keys []key) error {
	var text []byte
	for _, key := range keys {
		text = append(text, linePrefix...)
		text = base64.StdEncoding.AppendEncode(text, key.secret)
		text = append(text, '\n')
	}
	defer clear(text)
	file, err := os.CreateTemp(filepath.Dir(k.path), "."+keyFile+"-*") // 0600
	if err == nil {
		_, err = file.Write(text)
		err = errors.Join(err, file.Sync(), file.Close())
		if err == nil {
			err = os.Rename(file.Name(), k.path)
		}
		if err != nil {
			os.Remove(file.Name())
		}
	}
	if err == nil {
		err = syncDir(filepath.Dir(k.path))
	}
	if err != nil {
		return berm.Errorf(berm.Internal, "write the key of the secrets: %w", err)
	}
	return nil
}

func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Sync()
}

// add makes a key, which encrypts from now on. One that is there beside an older one, since
// a rotation was interrupted or the service manager gave both, will do.
func (k *keyring) add() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.keys) > 1 {
		return nil
	}
	if k.path == "" {
		return berm.Errorf(berm.Unsupported, "the key of the secrets comes from the service manager, which has to rotate it").
			WithHint("add a line with a new key to the credential %s, start again, rotate, and take the old line out", handed)
	}
	secret := make([]byte, chacha20poly1305.KeySize)
	rand.Read(secret)
	next, err := newKey(secret)
	if err != nil {
		return berm.Errorf(berm.Internal, "the key of the secrets: %w", err)
	}
	keys := append(slices.Clone(k.keys), next)
	if err := k.write(keys); err != nil {
		return err
	}
	k.keys = keys
	return nil
}

// forget keeps the last key alone.
func (k *keyring) forget() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	last := len(k.keys) - 1
	if k.path != "" {
		if err := k.write(k.keys[last:]); err != nil {
			return err
		}
	}
	for _, old := range k.keys[:last] {
		clear(old.secret)
	}
	k.keys = k.keys[last:]
	return nil
}

func (k *keyring) wipe() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, key := range k.keys {
		clear(key.secret)
	}
	k.keys = nil
}

// about binds a value to its team, secret and version: what is moved in the database does not
// open. Of the server's own team it is what it was before there were others.
func about(team berm.Team, id string, version int64) []byte {
	return append(binary.BigEndian.AppendUint64([]byte(id+"\x00"), uint64(version)), team...)
}

func (k *keyring) seal(team berm.Team, id string, version int64, value []byte) (keyID string, sealed []byte, err error) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	if len(k.keys) == 0 {
		return "", nil, berm.Errorf(berm.Unavailable, "the vault of secrets is closed")
	}
	last := k.keys[len(k.keys)-1]
	sealed = make([]byte, chacha20poly1305.NonceSizeX, chacha20poly1305.NonceSizeX+len(value)+chacha20poly1305.Overhead)
	rand.Read(sealed)
	return last.id, last.aead.Seal(sealed, sealed, value, about(team, id, version)), nil
}

func (k *keyring) open(team berm.Team, id string, version int64, keyID string, sealed []byte) ([]byte, error) {
	// With a zero byte in the id, about says the same of another id, version and team.
	if strings.Contains(id, "\x00") {
		return nil, corrupt(id)
	}
	k.mu.RLock()
	defer k.mu.RUnlock()
	for _, key := range k.keys {
		if key.id != keyID || len(sealed) < chacha20poly1305.NonceSizeX {
			continue
		}
		value, err := key.aead.Open(nil, sealed[:chacha20poly1305.NonceSizeX], sealed[chacha20poly1305.NonceSizeX:], about(team, id, version))
		if err == nil {
			return value, nil
		}
	}
	return nil, corrupt(id)
}

func corrupt(id string) error {
	return berm.Errorf(berm.Internal, "the secret %q cannot be decrypted: the database was changed, or the key is not its own", id)
}
