// Package config holds what the guest agent was told about its sandbox, and tells
// the agent's parts.
package config

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/guest/account"
)

// RunDir holds the sandbox's ids as files, for programs that lost their environment.
const RunDir = "/run/e2b"

// maxConfig bounds a configuration: environments of more than 128 KiB per string
// could not be passed to a process anyway.
const maxConfig = 1 << 20

// Config is the current configuration. The zero value is not configured.
type Config struct {
	file *os.File // written back to, so that the next agent finds it; may be nil
	run  string   // directory of the id files; "" for none

	mu    sync.Mutex // one change at a time
	cur   atomic.Pointer[berm.GuestConfig]
	trust atomic.Pointer[map[string]string] // variables that have programs trust the authority
}

// Open reads the configuration from file, which may be empty or nil: then there is
// none until Init. Later changes are written back to file, and the ids to run,
// unless that is "".
func Open(file *os.File, run string) (*Config, error) {
	c := &Config{file: file, run: run}
	if file == nil {
		return c, nil
	}
	data, err := io.ReadAll(io.NewSectionReader(file, 0, maxConfig+1))
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	if len(data) == 0 {
		return c, nil
	}
	g, err := parse(data)
	if err != nil {
		return nil, err
	}
	if err := c.trustAuthority(g); err != nil {
		return nil, err
	}
	c.cur.Store(g)
	c.writeIDs(g)
	return c, nil
}

func parse(data []byte) (*berm.GuestConfig, error) {
	if len(data) > maxConfig {
		return nil, errors.New("configuration is too large")
	}
	g := new(berm.GuestConfig)
	if err := json.Unmarshal(data, g); err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	return g, nil
}

// Init changes the configuration to what data (JSON) says. What data leaves out
// stays as it is: above all a call without a token cannot take away the token. A
// call whose timestamp is older than the current one is a late copy and changes
// nothing.
func (c *Config) Init(data []byte) error {
	next := new(berm.GuestConfig)
	if len(data) > 0 {
		var err error
		if next, err = parse(data); err != nil {
			return err
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if cur := c.cur.Load(); cur != nil {
		if !next.Timestamp.IsZero() && next.Timestamp.Before(cur.Timestamp) {
			return nil
		}
		merge(next, cur)
	}
	return c.become(next)
}

// become makes a configuration the current one. The caller holds the lock.
func (c *Config) become(next *berm.GuestConfig) error {
	if err := c.trustAuthority(next); err != nil {
		return err
	}
	if c.file != nil {
		if err := writeBack(c.file, next); err != nil {
			return fmt.Errorf("keep configuration: %w", err)
		}
	}
	c.writeIDs(next)
	c.cur.Store(next)
	return nil
}

// Renew takes the configuration in file, with all that it leaves out, in the place of the one
// that was: the agent goes on as that of another sandbox.
func (c *Config) Renew(file *os.File) error {
	data, err := io.ReadAll(io.LimitReader(file, maxConfig+1))
	if err != nil {
		return fmt.Errorf("read configuration: %w", err)
	}
	next, err := parse(data)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.become(next)
}

// merge fills what next leaves out from cur.
func merge(next, cur *berm.GuestConfig) {
	if next.SandboxID == "" {
		next.SandboxID = cur.SandboxID
	}
	if next.TemplateID == "" {
		next.TemplateID = cur.TemplateID
	}
	if next.AccessToken == "" {
		next.AccessToken = cur.AccessToken
	}
	if next.Env == nil {
		next.Env = cur.Env
	}
	if next.User == "" {
		next.User = cur.User
	}
	if next.Workdir == "" {
		next.Workdir = cur.Workdir
	}
	if next.Authority == "" {
		next.Authority = cur.Authority
	}
	if next.Placeholders == nil {
		next.Placeholders = cur.Placeholders
	}
	if next.Timestamp.IsZero() {
		next.Timestamp = cur.Timestamp
	}
}

// writeBack replaces the content in one write, padded over what was there: an agent
// that is killed in the middle must not leave a file that the next one cannot read.
func writeBack(f *os.File, g *berm.GuestConfig) error {
	data, err := json.Marshal(g)
	if err != nil {
		return err
	}
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	if pad := int(fi.Size()) - len(data); pad > 0 {
		data = append(data, bytes.Repeat([]byte{' '}, pad)...)
	}
	_, err = f.WriteAt(data, 0)
	return err
}

// writeIDs is best effort: a read-only /run takes nothing but the convenience.
func (c *Config) writeIDs(g *berm.GuestConfig) {
	if c.run == "" || os.MkdirAll(c.run, 0o755) != nil {
		return
	}
	for name, value := range identity(g) {
		path := filepath.Join(c.run, "."+name)
		os.Remove(path)
		_ = os.WriteFile(path, []byte(value), 0o444)
	}
}

func identity(g *berm.GuestConfig) map[string]string {
	ids := map[string]string{"E2B_SANDBOX": "true"}
	if g.SandboxID != "" {
		ids["E2B_SANDBOX_ID"] = string(g.SandboxID)
	}
	if g.TemplateID != "" {
		ids["E2B_TEMPLATE_ID"] = string(g.TemplateID)
	}
	return ids
}

// Ready says whether there is a configuration.
func (c *Config) Ready() bool { return c.cur.Load() != nil }

func (c *Config) load() *berm.GuestConfig {
	if g := c.cur.Load(); g != nil {
		return g
	}
	return new(berm.GuestConfig)
}

// Secured says whether callers need the access token.
func (c *Config) Secured() bool { return c.load().AccessToken != "" }

// Authorized says whether token opens the agent, in constant time.
func (c *Config) Authorized(token string) bool {
	want := c.load().AccessToken
	if want == "" {
		return true
	}
	// Digests, so that the length does not tell either.
	a, b := sha256.Sum256([]byte(token)), sha256.Sum256([]byte(want))
	return subtle.ConstantTimeCompare(a[:], b[:]) == 1
}

// Token is the access token, "" when there is none.
func (c *Config) Token() string { return c.load().AccessToken }

// Env is a copy of the environment that every process gets. What the template and the
// sandbox's creator set wins.
func (c *Config) Env() map[string]string {
	g := c.load()
	env := identity(g)
	if trust := c.trust.Load(); trust != nil {
		maps.Copy(env, *trust)
	}
	maps.Copy(env, g.Placeholders)
	maps.Copy(env, g.Env)
	return env
}

// Workdir is the directory that stands for an empty path; "" is the user's home.
func (c *Config) Workdir() string { return c.load().Workdir }

// DefaultUser is the user of calls that name none.
const DefaultUser = "user"

// Account finds the user called name, or the default user when name is "".
func (c *Config) Account(name string) (*account.Account, error) {
	if name == "" {
		name = c.load().User
	}
	if name == "" {
		name = DefaultUser
	}
	a, err := account.Lookup(name)
	if errors.Is(err, account.ErrUnknown) {
		return nil, &UserError{name}
	}
	return a, err
}

// UserError says that there is no such user.
type UserError struct{ Name string }

func (e *UserError) Error() string { return fmt.Sprintf("invalid username: '%s'", e.Name) }
