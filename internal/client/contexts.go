package client

import (
	"bytes"
	"cmp"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/berm-sandbox/berm"
)

// DefaultURL is where `berm serve` listens unless it is told otherwise.
const DefaultURL = "http://127.0.0.1:7676"

// Context is a server with a name.
type Context struct {
	Name       string `yaml:"name" json:"name"`
	URL        string `yaml:"url" json:"url"`
	SandboxURL string `yaml:"sandboxURL,omitempty" json:"sandboxURL,omitempty"`
	CA         string `yaml:"ca,omitempty" json:"ca,omitempty"` // absolute path of a PEM file
	Key        string `yaml:"key,omitempty" json:"-"`           // a secret
}

// Contexts is the file of all servers that a user has named.
type Contexts struct {
	Version  int       `yaml:"version"`
	Current  string    `yaml:"current,omitempty"`
	Contexts []Context `yaml:"contexts"`
	path     string
}

// ContextsPath is the file's default place, in the XDG configuration directory.
func ContextsPath() (string, error) {
	dir, err := os.UserConfigDir()
	if err != nil {
		return "", berm.Errorf(berm.Invalid, "no place for a configuration: %w", err)
	}
	return filepath.Join(dir, "berm", "contexts.yaml"), nil
}

// LoadContexts reads the file; one that does not exist is empty. It refuses keys
// that it does not know, other versions, and a file that other users may read.
func LoadContexts(path string) (*Contexts, error) {
	c := &Contexts{Version: 1, path: path}
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil
	}
	if err != nil {
		return nil, berm.Errorf(berm.Invalid, "%w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, berm.Errorf(berm.Denied, "%s holds API keys, and other users may read or change it (mode %04o)", path, info.Mode().Perm()).
			WithHint("chmod 600 %s", path)
	}
	text, err := io.ReadAll(io.LimitReader(f, 1<<20))
	if err != nil {
		return nil, err
	}
	c.Version = 0
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	decoder.KnownFields(true)
	if err := decoder.Decode(c); err != nil {
		return nil, berm.Errorf(berm.Invalid, "%s: %w", path, err)
	}
	if c.Version != 1 {
		return nil, berm.Errorf(berm.Invalid, "%s: version is %d, and this berm knows 1", path, c.Version)
	}
	seen := map[string]bool{}
	for _, context := range c.Contexts {
		if err := checkName(context.Name); err != nil {
			return nil, berm.Errorf(berm.Invalid, "%s: %w", path, err)
		}
		if seen[context.Name] {
			return nil, berm.Errorf(berm.Invalid, "%s: context %q is there twice", path, context.Name)
		}
		seen[context.Name] = true
	}
	return c, nil
}

func checkName(name string) error {
	bad := func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("-_.", r)
	}
	if name == "" || len(name) > 63 || strings.ContainsRune("-_.", rune(name[0])) || strings.ContainsFunc(name, bad) {
		return berm.Errorf(berm.Invalid, "%q is no name of a context: letters, digits, dot, dash and underscore", name)
	}
	return nil
}

// Save writes the file, for its owner only, in one step.
func (c *Contexts) Save() error {
	text, err := yaml.Marshal(c)
	if err != nil {
		return err
	}
	dir := filepath.Dir(c.path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, ".contexts-*") // mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if _, err := f.Write(text); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	return os.Rename(f.Name(), c.path)
}

// Get finds a context by name.
func (c *Contexts) Get(name string) (Context, error) {
	for _, context := range c.Contexts {
		if context.Name == name {
			return context, nil
		}
	}
	return Context{}, berm.Errorf(berm.NotFound, "no context %q", name).WithHint("`berm context ls` lists them.")
}

// Add stores a context, in place of one of the same name. The first one becomes
// the current one.
func (c *Contexts) Add(context Context) error {
	if err := checkName(context.Name); err != nil {
		return err
	}
	if _, err := New(Config{context.URL, context.SandboxURL, context.Key, context.CA}); err != nil {
		return err
	}
	if c.Current == "" {
		c.Current = context.Name
	}
	for i := range c.Contexts {
		if c.Contexts[i].Name == context.Name {
			c.Contexts[i] = context
			return nil
		}
	}
	c.Contexts = append(c.Contexts, context)
	return nil
}

// Remove forgets a context.
func (c *Contexts) Remove(name string) error {
	if _, err := c.Get(name); err != nil {
		return err
	}
	kept := c.Contexts[:0]
	for _, context := range c.Contexts {
		if context.Name != name {
			kept = append(kept, context)
		}
	}
	c.Contexts = kept
	if c.Current == name {
		c.Current = ""
	}
	return nil
}

// Choose finds the server to use: the context that is named, else the server of
// the environment, else the current context, else a server on this machine. A
// stored key goes to its own server only; the environment's key goes to the
// environment's server, to the local one, and to a context that has none.
func (c *Contexts) Choose(name string, env func(string) string) (Config, error) {
	key := cmp.Or(env("BERM_API_KEY"), env("E2B_API_KEY"))
	url, sandboxURL := urlOf(env), cmp.Or(env("BERM_SANDBOX_URL"), env("E2B_SANDBOX_URL"))
	if name == "" && url == "" {
		name = c.Current
	}
	if name == "" {
		if url == "" {
			url = DefaultURL
		}
		if key == "" {
			return Config{}, berm.Errorf(berm.Denied, "no API key for %s", url).
				WithHint("Set BERM_API_KEY, or store server and key: `berm context add NAME %s`. The first start of `berm serve` prints a key; `berm key create` makes more.", url)
		}
		return Config{URL: url, SandboxURL: sandboxURL, Key: key}, nil
	}
	context, err := c.Get(name)
	if err != nil {
		return Config{}, err
	}
	if context.Key != "" {
		key = context.Key
	}
	if key == "" {
		return Config{}, berm.Errorf(berm.Denied, "context %q has no API key", name).
			WithHint("Set BERM_API_KEY, or store one: `berm context add %s %s`.", name, context.URL)
	}
	return Config{context.URL, context.SandboxURL, key, context.CA}, nil
}

// Named says whether anything names a server, so that Choose does not fall back on this machine's.
func (c *Contexts) Named(name string, env func(string) string) bool {
	return name != "" || c.Current != "" || urlOf(env) != ""
}

// urlOf is the server of the environment.
func urlOf(env func(string) string) string {
	domain := env("E2B_DOMAIN")
	if domain != "" {
		domain = "https://api." + domain
	}
	return cmp.Or(env("BERM_URL"), env("E2B_API_URL"), domain)
}
