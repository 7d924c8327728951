package preset

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// maxFile is the most bytes that a file may have.
const maxFile = 256 << 10

// maxList is the most entries that one list may have: each path costs a mount.
const maxList = 256

// ProjectFile is the name of a project's file, in the root of the workspace.
const ProjectFile = "berm.yaml"

// Config is what the user's configuration file says about runs.
type Config struct {
	Preset string // used when the command line names none
	// UpstreamProxy and UpstreamCA are how networks are reached when the command line does not
	// say; see egress.ReadUpstream.
	UpstreamProxy, UpstreamCA string

	Presets map[string]Rights // a name of a built-in preset replaces it
	path    string
	extends map[string]int // the line where a preset says so
}

// LoadConfig reads the user's configuration file. A file that does not exist is an
// empty one. It fails with Invalid and the line when it is not in the documented form,
// and with Denied when others than its reader can write it: it gives rights.
func LoadConfig(path string) (*Config, error) {
	content, err := readFile(path, 0, true)
	if errors.Is(err, fs.ErrNotExist) {
		return &Config{path: path}, nil
	}
	if err != nil {
		return nil, err
	}
	return parseConfig(path, content)
}

// LoadProject reads the workspace's berm.yaml; nil when there is none. A symbolic link,
// or anything else that is not a regular file, fails with Denied: passing over it would
// pass over restrictions. Its owner does not matter, since it can only take away.
func LoadProject(workspace string) (*Rights, error) {
	path := workspace + "/" + ProjectFile
	content, err := readFile(path, unix.O_NOFOLLOW, false)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return parseProject(path, content)
}

// readFile reads a regular file. O_NONBLOCK keeps a FIFO from blocking the open.
func readFile(path string, flags int, private bool) ([]byte, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC|flags, 0)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return nil, fs.ErrNotExist
	case errors.Is(err, unix.ELOOP):
		return nil, berm.Errorf(berm.Denied, "%s is a symbolic link", quoted(path)).
			WithHint("put a regular file there, or remove it")
	case errors.Is(err, unix.ENXIO): // a socket
		return nil, notRegular(path)
	case err != nil:
		return nil, berm.Errorf(berm.Denied, "open %s: %w", quoted(path), err)
	}
	file := os.NewFile(uintptr(fd), path)
	defer file.Close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, berm.Errorf(berm.Internal, "stat %s: %w", quoted(path), err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, notRegular(path)
	}
	if private && st.Uid != 0 && int(st.Uid) != os.Geteuid() {
		return nil, berm.Errorf(berm.Denied, "%s belongs to user %d, neither to you nor to root", quoted(path), st.Uid).
			WithHint("whoever owns this file can give rights to your sandboxes: make it your own")
	}
	if private && st.Mode&0o002 != 0 {
		return nil, berm.Errorf(berm.Denied, "%s can be written by every user", quoted(path)).
			WithHint("whoever writes this file can give rights to your sandboxes: chmod o-w it")
	}
	content, err := io.ReadAll(io.LimitReader(file, maxFile+1))
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "read %s: %w", quoted(path), err)
	}
	if len(content) > maxFile {
		return nil, berm.Errorf(berm.Invalid, "%s is larger than %d KiB", quoted(path), maxFile>>10)
	}
	return content, nil
}

func notRegular(path string) error {
	return berm.Errorf(berm.Denied, "%s is not a regular file", quoted(path)).WithHint("put a regular file there, or remove it")
}

// quoted is a path as it is, unless it holds what would act on a terminal.
func quoted(path string) string {
	if q := strconv.Quote(path); q != `"`+path+`"` {
		return q
	}
	return path
}

func parseConfig(path string, content []byte) (*Config, error) {
	config := &Config{path: path, Presets: map[string]Rights{}, extends: map[string]int{}}
	f := file{path}
	root, err := f.root(content)
	if err != nil {
		return nil, err
	}
	return config, f.mapping(root, true, func(key string, value *yaml.Node) (bool, error) {
		switch key {
		case "preset":
			return true, f.text(value, key, &config.Preset, nil)
		case "upstream-proxy":
			return true, f.text(value, key, &config.UpstreamProxy, nil)
		case "upstream-ca":
			return true, f.text(value, key, &config.UpstreamCA, nil)
		case "presets":
			return true, f.mapping(value, false, func(name string, value *yaml.Node) (bool, error) {
				if strings.Trim(name, nameChars+"-.") != "" || name == "" || len(name) > 64 {
					return true, f.errorf(value, "%q cannot be the name of a preset", clip(name))
				}
				var r Rights
				err := f.mapping(value, false, func(key string, value *yaml.Node) (bool, error) {
					switch key {
					case "extends":
						config.extends[name] = value.Line
						return true, f.text(value, key, &r.Extends, nil)
					case "cred":
						return true, f.list(value, key, &r.Credentials, CheckCredential)
					case "keyless":
						r.Keyless = &Rights{}
						return true, f.keyless(r.Keyless, value)
					}
					return f.right(&r, key, value)
				})
				config.Presets[name] = r
				return true, err
			})
		case "serve", "registries": // are read by who uses them
			return true, nil
		}
		return false, nil
	})
}

func parseProject(path string, content []byte) (*Rights, error) {
	f, r := file{path}, &Rights{}
	root, err := f.root(content)
	if err != nil {
		return nil, err
	}
	return r, f.mapping(root, true, func(key string, value *yaml.Node) (bool, error) {
		if key == "cred" {
			return true, f.list(value, key, &r.Credentials, checkNamed)
		}
		return f.right(r, key, value)
	})
}

// keyless reads what a preset says of running without a key.
func (f file) keyless(r *Rights, node *yaml.Node) error {
	return f.mapping(node, false, func(key string, value *yaml.Node) (bool, error) {
		switch key {
		case "cred":
			return true, f.list(value, key, &r.Credentials, CheckCredential)
		case "allow", "env", "hide":
			return f.right(r, key, value)
		}
		return false, nil
	})
}

// file reads the nodes of one YAML file. It walks them itself instead of decoding into a
// struct: its errors then name the line and the documented key, and neither aliases nor
// merge keys multiply anything.
type file struct{ path string }

func (f file) errorf(node *yaml.Node, format string, args ...any) *berm.Error {
	e := berm.Errorf(berm.Invalid, format, args...)
	e.Msg = quoted(f.path) + ":" + strconv.Itoa(node.Line) + ": " + e.Msg
	return e
}

// root is the file's only document.
func (f file) root(content []byte) (*yaml.Node, error) {
	decoder := yaml.NewDecoder(bytes.NewReader(content))
	var document, more yaml.Node
	err := decoder.Decode(&document)
	if errors.Is(err, io.EOF) {
		return nil, berm.Errorf(berm.Invalid, "%s:1: the file is empty, it must begin with version: 1", quoted(f.path))
	}
	if err == nil {
		if err = decoder.Decode(&more); errors.Is(err, io.EOF) {
			return document.Content[0], nil
		} else if err == nil {
			return nil, f.errorf(&more, "a second document")
		}
	}
	// The library says "yaml: line N: what".
	line, what, ok := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(err.Error(), "yaml: "), "line "), ": ")
	if _, e := strconv.Atoi(line); e != nil || !ok {
		line, what = "1", strings.TrimPrefix(err.Error(), "yaml: ")
	}
	return nil, berm.Errorf(berm.Invalid, "%s:%s: %s", quoted(f.path), line, what)
}

// mapping calls set for each key of a mapping; set says whether it knows the key. The
// top of a file has a version too.
func (f file) mapping(node *yaml.Node, top bool, set func(key string, value *yaml.Node) (known bool, err error)) error {
	if node.Kind != yaml.MappingNode {
		return f.errorf(node, "this must be a mapping of keys to values")
	}
	seen := make(map[string]bool, len(node.Content)/2)
	for i := 0; i < len(node.Content); i += 2 {
		key, value := node.Content[i], node.Content[i+1]
		if key.Kind != yaml.ScalarNode {
			return f.errorf(key, "a key must be a word")
		}
		if seen[key.Value] {
			return f.errorf(key, "%q stands here a second time", clip(key.Value))
		}
		seen[key.Value] = true
		if value.Kind == yaml.AliasNode {
			return f.errorf(value, "aliases are not supported")
		}
		if top && key.Value == "version" {
			if value.Kind != yaml.ScalarNode || value.Value != "1" {
				return f.errorf(value, "want version: 1")
			}
			continue
		}
		known, err := set(key.Value, value)
		if err != nil {
			return err
		}
		if !known {
			return f.errorf(key, "unknown key %q", clip(key.Value))
		}
	}
	if top && !seen["version"] {
		return f.errorf(node, "the version is missing: want version: 1")
	}
	return nil
}

// right sets what a key says about rights.
func (f file) right(r *Rights, key string, value *yaml.Node) (known bool, err error) {
	switch key {
	case "workspace":
		err = choose(f, value, key, &r.Workspace, WorkspaceReadOnly, WorkspaceCopyOnWrite, WorkspaceReadWrite)
	case "ro":
		err = f.list(value, key, &r.ReadOnly, CheckPath)
	case "rw":
		err = f.list(value, key, &r.ReadWrite, CheckPath)
	case "hide":
		err = f.list(value, key, &r.Hide, CheckPath)
	case "env":
		err = f.list(value, key, &r.Env, CheckEnv)
	case "allow":
		err = f.list(value, key, &r.Allow, CheckAllow)
	case "memory":
		err = number(f, value, key, &r.Limits.Memory, ParseSize)
	case "cpus":
		err = number(f, value, key, &r.Limits.CPU, ParseCPUs)
	case "pids":
		err = number(f, value, key, &r.Limits.PIDs, ParsePIDs)
	case "timeout":
		err = number(f, value, key, &r.Timeout, ParseDuration)
	case "profile":
		err = choose(f, value, key, &r.Profile, profiles[:]...)
	case "network":
		err = choose(f, value, key, &r.Network, NetworkNone, NetworkHost)
	case "checkpoint":
		if value.Kind != yaml.ScalarNode || value.ShortTag() != "!!bool" {
			return true, f.errorf(value, "%s must be true or false", key)
		}
		yes := strings.EqualFold(value.Value, "true")
		r.Checkpoint = &yes
	default:
		return false, nil
	}
	return true, err
}

// text reads one word or sentence.
func (f file) text(node *yaml.Node, key string, to *string, check func(string) error) error {
	if node.Kind != yaml.ScalarNode {
		return f.errorf(node, "%s must be a single value", key)
	}
	if node.ShortTag() == "!!null" {
		err := f.errorf(node, "%s has no value here", key)
		if node.Value == "~" {
			return err.WithHint(`write "~" in quotes: without, it is YAML for nothing`)
		}
		return err
	}
	if check != nil {
		if err := check(node.Value); err != nil {
			return f.errorf(node, "%s %q: %w", key, clip(node.Value), err)
		}
	}
	*to = node.Value
	return nil
}

func (f file) list(node *yaml.Node, key string, to *[]string, check func(string) error) error {
	if node.Kind != yaml.SequenceNode {
		return f.errorf(node, "%s must be a list", key)
	}
	if len(node.Content) > maxList {
		return f.errorf(node, "%s has more than %d entries", key, maxList)
	}
	*to = make([]string, len(node.Content))
	for i, item := range node.Content {
		if err := f.text(item, key, &(*to)[i], check); err != nil {
			return err
		}
	}
	return nil
}

func number[T any](f file, node *yaml.Node, key string, to *T, parse func(string) (T, error)) error {
	var s string
	return f.text(node, key, &s, func(s string) (err error) {
		*to, err = parse(s)
		return err
	})
}

func choose[T ~string](f file, node *yaml.Node, key string, to *T, choices ...T) error {
	var s string
	if err := f.text(node, key, &s, nil); err != nil {
		return err
	}
	names := make([]string, len(choices))
	for i, c := range choices {
		if names[i] = string(c); s == names[i] {
			*to = c
			return nil
		}
	}
	return f.errorf(node, "%s %q: it must be one of %s", key, clip(s), strings.Join(names, ", "))
}

// clip keeps a message short.
func clip(s string) string {
	if len(s) > 200 {
		return s[:200] + "…"
	}
	return s
}
