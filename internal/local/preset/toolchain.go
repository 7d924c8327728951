package preset

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// system is what every sandbox sees of the host outside home.
var system = [...]string{
	"/usr", "/opt", "/etc",
	"/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", // links into /usr, or directories
	"/nix/store", "/gnu/store",
	// Of /var only what programs read that were installed with the system: the table of
	// packages, Ruby's gems, TeX's formats, and SUSE's certificates, to which /etc/ssl links.
	"/var/lib/dpkg", "/var/lib/gems", "/var/lib/texmf", "/var/lib/ca-certificates",
}

// OfSystem says whether path lies in what was installed with the system.
func OfSystem(path string) bool {
	return slices.ContainsFunc(system[:], func(dir string) bool { return within(path, dir) })
}

// guarded are keys and passwords in /etc. They are hidden where the caller can read them:
// who cannot, cannot inside either.
var guarded = [...]string{
	"/etc/shadow", "/etc/shadow-", "/etc/gshadow", "/etc/gshadow-", "/etc/sudoers", "/etc/sudoers.d", "/etc/krb5.keytab",
	"/etc/ssl/private", "/etc/pki/tls/private", "/etc/letsencrypt", "/etc/wireguard", "/etc/openvpn", "/etc/ppp",
	"/etc/ssh/ssh_host_rsa_key", "/etc/ssh/ssh_host_ecdsa_key", "/etc/ssh/ssh_host_ed25519_key",
	"/etc/NetworkManager/system-connections", "/etc/netplan", "/etc/wpa_supplicant", "/etc/kubernetes", "/etc/rancher",
}

// never are places of which no entry of PATH is shown: sockets, other disks, and what
// every user writes.
var never = []string{"/run", "/var/run", "/proc", "/sys", "/dev", "/tmp", "/var/tmp", "/mnt", "/media", "/snap"}

// tool is a toolchain that lives in a directory of its own, mostly below home.
type tool struct {
	root     string // below home, or absolute; "" when there is no usual place
	variable string // names another place
	show     string // the only part that is shown; "" is all
	hide     string // below root, not shown: log-ins and keys
	needs    string // the root of a tool that this one cannot work without
}

var tools = [...]tool{
	{root: ".cargo", variable: "CARGO_HOME", show: "bin", needs: ".rustup"},
	{root: ".rustup", variable: "RUSTUP_HOME"},
	{root: "go", variable: "GOPATH", show: "bin"},
	{variable: "GOROOT"},
	{root: ".pyenv", variable: "PYENV_ROOT"},
	{root: ".local/share/uv", hide: "credentials"},
	{root: ".local/share/pipx"},
	{root: ".local/pipx"},
	{variable: "VIRTUAL_ENV"},
	{variable: "CONDA_PREFIX", hide: ".condarc"},
	{root: "miniconda3", hide: ".condarc"},
	{root: "anaconda3", hide: ".condarc"},
	{root: "miniforge3", hide: ".condarc"},
	{root: "mambaforge", hide: ".condarc"},
	{root: ".nvm", variable: "NVM_DIR"},
	{root: ".local/share/fnm", variable: "FNM_DIR"},
	{root: ".local/share/pnpm", variable: "PNPM_HOME"},
	{root: ".npm-global", hide: "etc/npmrc"},
	{root: ".volta", variable: "VOLTA_HOME"},
	{root: ".bun", variable: "BUN_INSTALL"},
	{root: ".deno", variable: "DENO_INSTALL", show: "bin"},
	{root: ".rbenv", variable: "RBENV_ROOT"},
	{root: ".rvm"},
	{root: ".gem", variable: "GEM_HOME", hide: "credentials"},
	{root: ".sdkman", variable: "SDKMAN_DIR"},
	{variable: "JAVA_HOME"},
	{root: ".dotnet", variable: "DOTNET_ROOT", hide: "corefx"}, // private keys of certificates
	{root: ".ghcup"},
	{root: ".opam"},
	{root: ".juliaup"},
	{root: ".asdf", variable: "ASDF_DIR"},
	{variable: "ASDF_DATA_DIR"},
	{root: ".local/share/mise", variable: "MISE_DATA_DIR"},
	{root: "/home/linuxbrew/.linuxbrew"},
}

// maxScan is how many entries of a directory of programs are looked at for links.
const maxScan = 1024

// Toolchain lists what of the host every sandbox sees, read-only: the system's programs
// and settings, and the toolchains that PATH and well-known variables name. An entry of
// PATH that is not shown is named in a notice, unless it does not exist, lies in the
// workspace, or could not work inside.
func Toolchain(environ []string, place Place) (paths []Path, notices []string) {
	t := toolchain{place: place, environ: environ, shown: make(map[string]bool, 32)}
	for _, dir := range system {
		t.add(dir)
	}
	for _, file := range guarded {
		if unix.Faccessat(unix.AT_FDCWD, file, unix.R_OK, unix.AT_EACCESS) == nil {
			if real, err := resolve(file); err == nil {
				t.paths = append(t.paths, Path{Path: real, Access: Hide})
			}
		}
	}
	for _, tool := range tools {
		for root := range strings.SplitSeq(t.value(tool.variable), ":") { // GOPATH is a list
			if filepath.IsAbs(root) {
				t.addTool(tool, filepath.Clean(root))
			}
		}
	}
	for dir := range strings.SplitSeq(t.value("PATH"), ":") {
		if filepath.IsAbs(dir) { // others depend on the working directory
			t.addPrograms(filepath.Clean(dir))
		}
	}
	if len(t.refused) > 0 {
		t.notices = append(t.notices, fmt.Sprintf("not shown, though in PATH: %s", strings.Join(t.refused, ", ")))
	}
	return sorted(t.paths), t.notices
}

// toolchain collects what Toolchain returns.
type toolchain struct {
	place   Place
	environ []string
	paths   []Path
	shown   map[string]bool
	refused []string
	notices []string
}

func (t *toolchain) value(name string) string {
	if name == "" {
		return ""
	}
	for _, variable := range t.environ {
		if value, ok := strings.CutPrefix(variable, name); ok && value != "" && value[0] == '=' {
			return value[1:]
		}
	}
	return ""
}

// add shows a path, and where it leads when it is a link.
func (t *toolchain) add(path string) (ok bool) {
	real, err := resolve(path, t.place.Workspace)
	if err != nil || within(real, t.place.Workspace) {
		return false
	}
	t.addResolved(path, real)
	return true
}

// addResolved shows a path that leads to real.
func (t *toolchain) addResolved(path, real string) {
	if real != path && !t.covered(path) {
		target := real
		if content, err := os.Readlink(path); err == nil {
			target = content // as it is: /bin leads to usr/bin
		}
		t.show(Path{Path: path, Access: ReadOnly, Target: target})
	}
	if !t.covered(real) {
		t.show(Path{Path: real, Access: ReadOnly})
	}
}

func (t *toolchain) show(p Path) {
	if !t.shown[p.Path] {
		t.shown[p.Path] = true
		t.paths = append(t.paths, p)
	}
}

// covered says whether a path lies in what is shown already.
func (t *toolchain) covered(path string) bool {
	return slices.ContainsFunc(t.paths, func(p Path) bool {
		return p.Target == "" && p.Access == ReadOnly && within(path, p.Path)
	})
}

// addTool shows a toolchain at a root.
func (t *toolchain) addTool(tool tool, root string) {
	if real, err := resolve(root, t.place.Workspace); err != nil || t.why(real) != "" {
		return
	}
	if !t.add(filepath.Join(root, tool.show)) {
		return
	}
	if tool.hide != "" {
		if real, err := resolve(filepath.Join(root, tool.hide)); err == nil {
			t.paths = append(t.paths, Path{Path: real, Access: Hide})
		}
	}
	if tool.needs != "" {
		t.add(t.below(tool.needs))
	}
}

// below is an absolute path of one that may be relative to home.
func (t *toolchain) below(root string) string {
	if root[0] == '/' {
		return root
	}
	return t.place.Home + "/" + root
}

// why says why nothing of a path may be shown; "" when it may.
func (t *toolchain) why(path string) string {
	if within(t.place.Home, path) {
		return "home is not shown as a whole"
	}
	for _, dir := range never {
		if within(path, dir) && !within(path, t.place.Home) {
			return "nothing in " + dir + " is shown"
		}
	}
	for _, name := range secrets {
		if within(path, t.place.Home+"/"+name) {
			return "it is a place of secrets"
		}
	}
	if within(path, t.place.Home) {
		return ""
	}
	var st unix.Stat_t
	switch err := unix.Lstat(path, &st); {
	case err != nil:
		return err.Error()
	case st.Mode&0o002 != 0:
		return "every user can write it"
	case st.Uid != 0 && int(st.Uid) != os.Geteuid():
		return "it belongs to another user"
	}
	return ""
}

// addPrograms shows an entry of PATH: the toolchain that it belongs to, or else the
// directory alone with what its links lead to.
func (t *toolchain) addPrograms(dir string) {
	if t.shown[dir] {
		return
	}
	real, err := resolve(dir, t.place.Workspace)
	if err != nil || within(real, t.place.Workspace) {
		return
	}
	if within(real, "/snap") { // a snap's programs cannot start in a namespace
		return
	}
	if t.covered(real) {
		t.addResolved(dir, real) // a link may lead there
		return
	}
	why := t.why(real)
	if why == "" && t.addRoot(real) {
		t.addResolved(dir, real)
		return
	}
	if why == "" && within(t.place.Workspace, real) {
		why = "the project lies in it, and perhaps others"
	}
	if why != "" {
		if own, err := os.Executable(); err == nil && filepath.Dir(own) == real {
			return // where Berm lies, who uses it from a build knows
		}
		t.refused = append(t.refused, strconv.Quote(dir)+" ("+why+")")
		return
	}
	t.addResolved(dir, real)
	if within(real, t.place.Home) {
		t.addLinks(real)
	}
}

// addRoot shows the toolchain in whose directory a path lies.
func (t *toolchain) addRoot(path string) bool {
	for _, tool := range tools {
		if tool.root == "" {
			continue
		}
		if root := t.below(tool.root); within(path, filepath.Join(root, tool.show)) {
			t.addTool(tool, root)
			return true
		}
	}
	return false
}

// addLinks shows what the links of a directory of programs in home lead to, as
// ~/.local/bin has them: the toolchain, or a directory of ~/.local/share, or ~/.local/lib.
func (t *toolchain) addLinks(dir string) {
	f, err := os.Open(dir)
	if err != nil {
		return
	}
	defer f.Close()
	entries, err := f.ReadDir(maxScan)
	if err != nil {
		return
	}
	share := t.place.Home + "/.local/share/"
	if dir == t.place.Home+"/.local/bin" {
		t.add(t.place.Home + "/.local/lib") // where pip and npm put what the programs load
		t.addRoot(share + "uv")             // interpreters that virtual environments link to
	}
	for _, entry := range entries {
		if entry.Type()&os.ModeSymlink == 0 {
			continue
		}
		target, err := os.Readlink(dir + "/" + entry.Name())
		if err != nil {
			continue
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(dir, target)
		}
		if target = filepath.Clean(target); t.covered(target) || t.why(target) != "" || t.addRoot(target) {
			continue
		}
		if name, ok := strings.CutPrefix(target, share); ok {
			name, _, _ = strings.Cut(name, "/")
			if t.why(share+name) == "" {
				t.add(share + name)
			}
		}
	}
}
