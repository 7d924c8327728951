package preset

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// profiles are those of internal/kernel/seccomp, least strict first.
var profiles = [...]string{"default", "strict"}

// Profiles lists the seccomp profiles.
func Profiles() []string { return profiles[:] }

// Request is what Resolve makes a grant of.
type Request struct {
	Place   Place
	Config  *Config  // nil: no configuration file
	Preset  string   // "" leaves the choice to Config
	Flags   Rights   // the command line, above everything else
	Keyless bool     // with what the preset says of that
	Environ []string // the caller's environment, from which the toolchain is found
	// NoToolchain leaves out what every sandbox sees of the host: its root file system
	// comes from a template.
	NoToolchain bool
}

// source is where rights come from, which decides what a path that does not exist means.
type source int

const (
	fromBuiltin source = iota // nothing
	fromConfig                // a notice
	fromFlags                 // an error
)

type part struct {
	Rights
	from     source
	optional bool // its credentials
}

// Resolve puts a run's rights together: the built-in default, then the preset with what
// it extends, then the command line. Later ones win; lists add up. It fails with Invalid
// for an unknown preset, presets that extend each other and flags that contradict each
// other, with NotFound for a path of the command line that does not exist, and with Denied
// for one below a place that sandboxes can write, when a symbolic link lies on it.
func Resolve(request Request) (Grant, error) {
	config := request.Config
	if config == nil {
		config = &Config{}
	}
	name := request.Preset
	if name == "" {
		name = config.Preset
	}
	if name == "" {
		name = Default
	}
	parts, err := chain(config, name)
	if err != nil {
		return Grant{}, err
	}
	if request.Keyless {
		if parts = keyless(parts); parts == nil {
			return Grant{}, berm.Errorf(berm.Invalid, "the preset %s does not say which key its program has", name).
				WithHint("--cred gives requests a key; or write keyless: into a preset of your own")
		}
	}
	parts = append(parts, part{Rights: request.Flags, from: fromFlags})

	g := Grant{Preset: name}
	if !request.NoToolchain {
		g.Paths, g.Notices = Toolchain(request.Environ, request.Place)
	}
	for _, p := range parts {
		g.set(p.Rights, request.Place)
		g.bind(p.Credentials, p.optional)
	}
	if err := g.addPaths(request.Place, parts); err != nil {
		return Grant{}, err
	}
	g.hideSecrets(request.Place)
	return g, nil
}

// Names lists the presets that there are: Berm's own and those of a configuration, which may
// be nil.
func Names(config *Config) ([]string, error) {
	all, err := builtins()
	if err != nil {
		return nil, err
	}
	all[Default] = base
	if config != nil {
		maps.Copy(all, config.Presets)
	}
	return slices.Sorted(maps.Keys(all)), nil
}

// chain lists a preset and what lies below it, lowest first.
func chain(config *Config, name string) ([]part, error) {
	ours := map[string]Rights{Default: base}
	type step struct {
		name string
		from source
	}
	var parts []part
	var seen []step
	for at := (step{name, fromConfig}); at.name != ""; {
		rights, ok := config.Presets[at.name]
		if !ok || at.from == fromBuiltin {
			at.from = fromBuiltin
			if rights, ok = ours[at.name]; !ok && len(ours) == 1 {
				more, err := builtins()
				if err != nil {
					return nil, err
				}
				maps.Copy(ours, more)
				rights, ok = ours[at.name]
			}
		}
		if !ok {
			err := berm.Errorf(berm.Invalid, "there is no preset %q", clip(at.name))
			if len(seen) > 0 {
				by := seen[len(seen)-1].name
				err = berm.Errorf(berm.Invalid, "%s:%d: preset %q extends %q, which does not exist", quoted(config.path), config.extends[by], by, clip(at.name))
			} else if at.name == config.Preset {
				err = berm.Errorf(berm.Invalid, "%s: there is no preset %q", quoted(config.path), clip(at.name))
			}
			names, _ := Names(config)
			return nil, err.WithHint("the presets are %s", strings.Join(names, ", "))
		}
		if slices.Contains(seen, at) {
			return nil, berm.Errorf(berm.Invalid, "%s: preset %q extends itself", quoted(config.path), at.name)
		}
		seen = append(seen, at)
		parts = append(parts, part{Rights: rights, from: at.from})
		if rights.Extends == at.name {
			at.from = fromBuiltin // a preset of a built-in's name adds to that one
		} else {
			at = step{rights.Extends, fromConfig}
		}
	}
	parts = append(parts, part{Rights: base, from: fromBuiltin})
	slices.Reverse(parts)
	return parts, nil
}

// keyless adds to parts what they say of running without a key; nil when they say nothing.
func keyless(parts []part) []part {
	all, found := slices.Clone(parts), false
	for _, p := range parts {
		if p.Keyless != nil {
			all, found = append(all, part{Rights: *p.Keyless, from: p.from, optional: true}), true
		}
	}
	if !found {
		return nil
	}
	return all
}

// bind takes over credentials, each in the place of one of the same name. They were checked.
func (g *Grant) bind(credentials []string, optional bool) {
	for _, text := range credentials {
		c, err := ParseCredential(text)
		if err != nil {
			c.Name = strings.TrimPrefix(text, "-")
		}
		g.Credentials = slices.DeleteFunc(g.Credentials, func(have Credential) bool { return have.Name == c.Name })
		if c.Optional = optional; err == nil {
			g.Credentials = append(g.Credentials, c)
		}
	}
}

// set takes over everything but paths other than the workspace's.
func (g *Grant) set(r Rights, place Place) {
	isWorkspace := func(path string) bool { return place.expand(path) == place.Workspace }
	override(&g.Workspace, r.Workspace)
	if slices.ContainsFunc(r.ReadOnly, isWorkspace) {
		g.Workspace = WorkspaceReadOnly
	}
	if slices.ContainsFunc(r.ReadWrite, isWorkspace) {
		g.Workspace = WorkspaceReadWrite
	}
	override(&g.Limits.Memory, r.Limits.Memory)
	override(&g.Limits.CPU, r.Limits.CPU)
	override(&g.Limits.PIDs, r.Limits.PIDs)
	override(&g.Timeout, r.Timeout)
	override(&g.Profile, r.Profile)
	override(&g.Network, r.Network)
	g.Env = append(g.Env, r.Env...)
	for _, entry := range r.Allow {
		if !slices.Contains(g.Allow, entry) {
			g.Allow = append(g.Allow, entry)
		}
	}
	if r.Checkpoint != nil {
		g.Checkpoint = *r.Checkpoint
	}
}

func override[T comparable](to *T, value T) {
	var zero T
	if value != zero {
		*to = value
	}
}

// asked is a path that a part names.
type asked struct {
	path    string
	access  Access
	from    source
	written string
}

// flag is how the command line asks for it.
func (a asked) flag() string {
	if a.access == copyOnWrite {
		return "--cow"
	}
	return "--" + string(a.access) + " " + quoted(a.written)
}

// addPaths adds the parts' paths.
func (g *Grant) addPaths(place Place, parts []part) error {
	var wanted []asked // in the order in which later ones win
	flags := map[string]asked{}
	for _, p := range parts {
		if p.from == fromFlags && p.Workspace != "" {
			flags[place.Workspace] = asked{place.Workspace, Access(p.Workspace), p.from, "."}
		}
		for _, list := range []struct {
			paths  []string
			access Access
		}{{p.ReadOnly, ReadOnly}, {p.ReadWrite, ReadWrite}, {p.Hide, Hide}} {
			for _, path := range list.paths {
				a := asked{place.expand(path), list.access, p.from, path}
				if other, twice := flags[a.path]; twice && other.access != a.access {
					// The order between two flags is not kept.
					return berm.Errorf(berm.Invalid, "%s and %s contradict each other", other.flag(), a.flag()).WithHint("leave one of them out")
				}
				if a.from == fromFlags {
					flags[a.path] = a
				}
				if a.path != place.Workspace {
					wanted = append(wanted, a)
				} else if a.access == Hide {
					return berm.Errorf(berm.Invalid, "the workspace itself cannot be hidden")
				}
			}
		}
	}
	// Places that sandboxes can write come first, outer ones before inner ones: below
	// them no link is followed.
	writable := []string{place.Workspace}
	order := slices.Clone(wanted)
	slices.SortStableFunc(order, func(a, b asked) int {
		if (a.access == ReadWrite) != (b.access == ReadWrite) {
			return b.access.rank() - a.access.rank()
		}
		return len(a.path) - len(b.path)
	})
	real := make(map[string]string, len(wanted))
	for _, a := range order {
		if _, ok := real[a.path]; ok {
			continue
		}
		path, err := resolve(a.path, writable...)
		switch {
		case err == nil && path == place.Workspace:
			return berm.Errorf(berm.Invalid, "%q is the workspace", a.path).WithHint(`name it "."`)
		case err == nil:
			real[a.path] = path
			if a.access == ReadWrite {
				writable = append(writable, path)
			}
		case a.from == fromBuiltin: // no such tool here
		case errors.Is(err, unix.ELOOP):
			return berm.Errorf(berm.Denied, "%q leads over a symbolic link in a directory that sandboxes write", a.path).
				WithHint("name the path that the link leads to")
		case a.access == Hide && a.from != fromFlags: // nothing is there
		case a.from == fromConfig:
			g.Notices = append(g.Notices, fmt.Sprintf("preset %s: %q is not shown: %v", g.Preset, a.path, err))
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
			return berm.Errorf(berm.NotFound, "%s: there is no %q", a.flag(), a.path)
		default:
			return berm.Errorf(berm.Denied, "%s: open %q: %w", a.flag(), a.path, err)
		}
	}
	for _, a := range wanted {
		path, ok := real[a.path]
		if !ok {
			continue
		}
		if path != a.path && a.access != Hide {
			g.Paths = append(g.Paths, Path{Path: a.path, Access: ReadOnly, Target: path})
		}
		g.Paths = append(g.Paths, Path{Path: path, Access: a.access})
	}
	g.Paths = sorted(g.Paths)
	g.dropLinks(place)
	return nil
}

// dropLinks takes out the links that are there without being made: below what is shown,
// and below another link.
func (g *Grant) dropLinks(place Place) {
	kept := make([]Path, 0, len(g.Paths))
	for _, p := range g.Paths {
		below := func(link Path) bool { return link.Target != "" && within(p.Path, link.Path) }
		if p.Target == "" || g.access(place, p.Path) == Hide && !slices.ContainsFunc(kept, below) {
			kept = append(kept, p)
		}
	}
	g.Paths = kept
}

// sorted orders paths, outer ones first, and leaves the last entry for each.
func sorted(paths []Path) []Path {
	slices.Reverse(paths)
	slices.SortStableFunc(paths, func(a, b Path) int { return strings.Compare(a.Path, b.Path) })
	return slices.CompactFunc(paths, func(a, b Path) bool { return a.Path == b.Path })
}

// expand makes an absolute, clean path of what a person wrote.
func (p Place) expand(path string) string {
	switch {
	case path == "~" || strings.HasPrefix(path, "~/"):
		return filepath.Join(p.Home, path[1:])
	case !filepath.IsAbs(path):
		return filepath.Join(p.Workspace, path)
	}
	return filepath.Clean(path)
}

// maxLinks is how many links are followed on one path, as in the kernel.
const maxLinks = 40

// resolve returns where a path leads, without a symbolic link on it. A link that lies
// below one of the directories unsafe is ELOOP: whoever writes there does not choose what
// of the host is shown.
func resolve(path string, unsafe ...string) (string, error) {
	for range maxLinks {
		fd, err := unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS})
		if err == nil {
			return path, unix.Close(fd)
		}
		if !errors.Is(err, unix.ELOOP) {
			return "", err
		}
		if path, err = followFirst(path, unsafe); err != nil {
			return "", err
		}
	}
	return "", unix.ELOOP
}

// followFirst replaces the first symbolic link on a path by its content.
func followFirst(path string, unsafe []string) (string, error) {
	for end := 1; end <= len(path); end++ {
		if end < len(path) && path[end] != '/' {
			continue
		}
		link := path[:end]
		target, err := os.Readlink(link)
		if errors.Is(err, unix.EINVAL) { // not a link
			continue
		}
		if err != nil {
			return "", err
		}
		if slices.ContainsFunc(unsafe, func(dir string) bool { return within(link, dir) }) {
			return "", unix.ELOOP
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(filepath.Dir(link), target)
		}
		return filepath.Join(target, path[end:]), nil
	}
	return path, nil // it was a link a moment ago
}

// secrets lie below home: log-ins, keys and what a person did. Nothing shows them
// but a path that names them or lies below them.
var secrets = [...]string{
	".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".netrc", ".git-credentials", ".pgpass", ".my.cnf", ".npmrc", ".pypirc",
	".yarnrc.yml", ".vault-token", ".terraform.d", ".terraformrc", ".password-store", ".boto", ".s3cfg", ".oci", ".pki",
	".cargo/credentials", ".cargo/credentials.toml", ".gem/credentials", ".m2/settings.xml", ".m2/settings-security.xml",
	".gradle/gradle.properties", ".claude/.credentials.json", ".claude.json", ".codex/auth.json",
	".config/gcloud", ".config/gh", ".config/glab-cli", ".config/hub", ".config/git/credentials", ".config/rclone", ".config/op",
	".config/containers", ".config/doctl", ".config/sops", ".config/berm", ".local/share/keyrings", ".local/share/kwalletd",
	".local/state/berm", ".mozilla", ".thunderbird", ".config/google-chrome", ".config/chromium", ".config/BraveSoftware",
	".config/microsoft-edge", ".config/vivaldi", ".bash_history", ".zsh_history", ".python_history", ".node_repl_history",
	".psql_history", ".mysql_history", ".Xauthority", ".ICEauthority",
}

// hideSecrets hides the secrets that a wider path, or a workspace around the home
// directory, would show.
func (g *Grant) hideSecrets(place Place) {
	granted := func(path string) bool {
		return slices.ContainsFunc(g.Paths, func(p Path) bool { return p.Path == path })
	}
	for _, name := range secrets {
		path := place.Home + "/" + name
		if within(place.Workspace, path) || granted(path) {
			continue
		}
		if g.access(place, path) == Hide {
			continue
		}
		if real, err := resolve(path); err == nil && g.access(place, real) != Hide && !granted(real) {
			g.Paths = append(g.Paths, Path{Path: real, Access: Hide})
		}
	}
	g.Paths = sorted(g.Paths)
}
