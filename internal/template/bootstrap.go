package template

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// recipe says how a template is made from a distribution's packages.
type recipe struct {
	Version  int               `json:"version"` // raised when the code below makes something else of the same lists
	Suite    string            `json:"suite"`
	Arch     string            `json:"arch"`
	Packages []string          `json:"packages"`
	Exclude  []string          `json:"exclude"`          // paths that dpkg leaves out
	Include  []string          `json:"include"`          // exceptions to Exclude
	Python   []string          `json:"python,omitempty"` // "name==version", all that is needed, from Python's package index
	Epoch    int64             `json:"epoch"`            // no file is younger
	Files    map[string]string `json:"files"`            // written at the end, over what packages brought
	Setup    string            `json:"setup"`            // shell commands, run inside as root at the end
}

// epoch is the time of the newest file of a recipe: 2025-01-01.
const epoch = 1735689600

// base is the recipe of the default template.
func base() recipe {
	return recipe{
		Version: 2,
		Suite:   "bookworm",
		Arch:    runtime.GOARCH, // Debian names amd64 and arm64 like Go
		Packages: []string{
			"bash", "ca-certificates", "curl", "file", "git", "iproute2", "jq", "less", "nano",
			"ncurses-bin", "nodejs", "npm", "openssh-client", "procps", "python-is-python3",
			"python3", "python3-pip", "python3-venv", "ripgrep", "sudo", "tzdata", "unzip",
			"wget", "xz-utils", "zip",
		},
		Exclude: []string{"/usr/share/doc/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/man/*", "/usr/share/lintian/*"},
		Include: []string{"/usr/share/doc/*/copyright", "/usr/share/doc/apt/examples/sources.list", "/usr/share/locale/locale.alias"},
		Epoch:   epoch,
		Files: map[string]string{
			"etc/hostname":       "",
			"etc/hosts":          "127.0.0.1\tlocalhost\n::1\tlocalhost\n",
			"etc/machine-id":     "",
			"etc/resolv.conf":    "",
			"etc/sudoers.d/user": "user ALL=(ALL:ALL) NOPASSWD: ALL\n",
			"etc/default/locale": "LANG=C.UTF-8\n",
		},
		Setup: `
useradd --uid 1000 --user-group --create-home --shell /bin/bash user
chmod 0440 /etc/sudoers.d/user
mkdir -p /code && chown user:user /code
rm -rf /var/cache/apt/*.bin /var/cache/debconf/*-old /var/lib/dpkg/*-old \
  /var/log/* /etc/apt/apt.conf.d/99mmdebstrap \
  /etc/ssh/ssh_host_* /root/.wget-hsts /etc/.pwd.lock /etc/passwd- /etc/group- /etc/shadow- /etc/gshadow- /etc/subuid- /etc/subgid-
mkdir -p /var/log/apt
# What apt inside asks, whatever mirror the host used: the distribution's own servers, as
# the package of apt names them.
sed -n 's/^\(deb [^ ]* [^ ]* main\) .*/\1/p' /usr/share/doc/apt/examples/sources.list >/etc/apt/sources.list
test -s /etc/apt/sources.list
`,
	}
}

// key changes when the recipe does.
func (r recipe) key() string {
	b, err := json.Marshal(r)
	if err != nil {
		panic(err) // strings and numbers always marshal
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// debianGlibc is the minor version of Debian 12's C library, for which Python's packages are chosen;
// its Python is 3.11.2.
const debianGlibc = 36

// installWheels installs what fetchWheels brought. Bytecode is not checked against its source,
// whose times the archive changes.
const installWheels = `set -e
python3 -m pip install --quiet --no-index --no-deps --no-compile --break-system-packages --root-user-action=ignore /.wheels/*.whl
rm -r /.wheels
python3 -m compileall -q -j 0 -f --invalidation-mode unchecked-hash /usr/lib/python3 /usr/lib/python3.11 /usr/local/lib/python3.11 || true`

// packageList is where the built tree lists its packages, for the record.
const packageList = "usr/share/berm/packages"

// bootstrap is what the helper is told.
type bootstrap struct {
	Recipe  recipe
	Sources []string // what apt of this host asks
	Options []string // how: the Acquire options of this host
	Keyring string
}

// runBootstrap runs in the builder's namespace, in an empty directory that it
// owns, and writes the tree as a tar stream to standard output.
func runBootstrap(ctx context.Context, args []byte) error {
	var b bootstrap
	if err := json.Unmarshal(args, &b); err != nil {
		return err
	}
	// The directory lies below parents that these ids cannot enter; mounted over
	// /var/tmp it has a path of its own here.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount(".", "/var/tmp", "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount the build directory: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	files, err := writeFiles("/var/tmp", b.Recipe)
	if err != nil {
		return err
	}
	if err := b.fetchWheels(ctx); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "mmdebstrap", b.arguments(files)...)
	cmd.Dir = "/var/tmp"
	cmd.Env = append(os.Environ(), "TMPDIR=/var/tmp", fmt.Sprintf("SOURCE_DATE_EPOCH=%d", b.Recipe.Epoch), "DEBIAN_FRONTEND=noninteractive")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return berm.Errorf(berm.Internal, "mmdebstrap failed: %w", err).
			WithHint("The lines above say why. The host's apt must be able to reach its mirror: try `apt-get update`.")
	}
	return nil
}

// writeFiles lays the recipe's files and set-up script into dir for the hooks to
// take, and returns where.
func writeFiles(dir string, r recipe) (string, error) {
	root := filepath.Join(dir, "files")
	for name, content := range r.Files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return "", err
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			return "", err
		}
	}
	return root, os.WriteFile(filepath.Join(dir, "setup"), []byte("set -eu\n"+r.Setup), 0o755)
}

func (b bootstrap) arguments(files string) []string {
	r := b.Recipe
	args := []string{
		"--mode=root", // root of the namespace, not of the host
		"--variant=essential", "--format=tar", "--architectures=" + r.Arch,
		"--verbose", // what apt and dpkg are at
		"--include=apt," + strings.Join(r.Packages, ","),
		"--aptopt=APT::Install-Recommends \"false\"",
		"--dpkgopt=force-unsafe-io",
	}
	if b.Keyring != "" {
		args = append(args, "--keyring="+b.Keyring)
	}
	for _, o := range b.Options {
		args = append(args, "--aptopt="+o)
	}
	for _, p := range r.Exclude {
		args = append(args, "--dpkgopt=path-exclude="+p)
	}
	for _, p := range r.Include {
		args = append(args, "--dpkgopt=path-include="+p)
	}
	list := `"$1/` + packageList + `"`
	if len(r.Python) > 0 {
		args = append(args, `--customize-hook=cp -r --no-preserve=mode /var/tmp/wheels "$1/.wheels" && chroot "$1" /bin/sh -c '`+installWheels+`'`)
	}
	args = append(args,
		`--customize-hook=mkdir -p "$1/usr/share/berm" && dpkg-query --admindir="$1/var/lib/dpkg" -W -f '${Package} ${Version}\n' >`+list,
		`--customize-hook=rm -f "$1/etc/resolv.conf" "$1/etc/hostname" && cp -r --no-preserve=mode "`+files+`/." "$1/"`,
		`--customize-hook=cp /var/tmp/setup "$1/.setup" && chroot "$1" /bin/sh /.setup && rm "$1/.setup"`,
		r.Suite, "-")
	return append(args, b.Sources...)
}

// fetchWheels downloads the recipe's Python packages: ready-made ones only, so that nothing of
// them runs. What pip of this host is configured to ask, it asks.
func (b bootstrap) fetchWheels(ctx context.Context) error {
	if len(b.Recipe.Python) == 0 {
		return nil
	}
	machine := map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[b.Recipe.Arch]
	args := []string{"-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest=/var/tmp/wheels",
		"--implementation=cp", "--python-version=3.11.2", "--abi=cp311", "--abi=abi3", "--abi=none",
		"--platform=manylinux2014_" + machine, "--platform=linux_" + machine, "--platform=any"}
	for minor := 17; minor <= debianGlibc; minor++ {
		args = append(args, fmt.Sprintf("--platform=manylinux_2_%d_%s", minor, machine))
	}
	for _, c := range [][]string{
		{"python3", "-m", "venv", "/var/tmp/venv"}, // hosts have this pip, not always one of their own
		append(append([]string{"/var/tmp/venv/bin/python"}, args...), b.Recipe.Python...),
	} {
		cmd := exec.CommandContext(ctx, c[0], c[1:]...)
		cmd.Dir, cmd.Env = "/var/tmp", append(os.Environ(), "HOME=/var/tmp", "TMPDIR=/var/tmp")
		cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr // standard output is the tree's
		if err := cmd.Run(); err != nil {
			return berm.Errorf(berm.Unavailable, "fetch the Python packages: %w", err).
				WithHint("The lines above say why. The host needs python3-venv, and its pip must be able to reach its index.")
		}
	}
	return nil
}

// hostApt reads how apt of this host reaches the distribution: its sources for
// the recipe's suite, and its Acquire options. Neither gets into the template.
func hostApt(ctx context.Context, r recipe) (bootstrap, error) {
	b := bootstrap{Recipe: r}
	if _, err := exec.LookPath("mmdebstrap"); err != nil {
		return b, berm.Errorf(berm.Unsupported, "mmdebstrap is not installed").WithHint("Install it: `apt-get install mmdebstrap uidmap`.")
	}
	for _, keyring := range []string{"/usr/share/keyrings/debian-archive-keyring.gpg", "/etc/apt/trusted.gpg.d/debian-archive-keyring.gpg"} {
		if _, err := os.Stat(keyring); err == nil {
			b.Keyring = keyring
			break
		}
	}
	if b.Keyring == "" {
		return b, berm.Errorf(berm.Unsupported, "no keyring of Debian's archive").WithHint("Install it: `apt-get install debian-archive-keyring`.")
	}
	dump, err := exec.CommandContext(ctx, "apt-config", "dump", "--no-empty", "--format", "%F \"%v\";%n").Output()
	if err != nil {
		return b, berm.Errorf(berm.Unsupported, "read apt's configuration: %w", err)
	}
	for line := range strings.Lines(string(dump)) {
		line = strings.TrimSuffix(strings.TrimSpace(line), ";")
		name := strings.ToLower(line)
		for _, prefix := range []string{"acquire::http", "acquire::https", "acquire::ftp", "acquire::retries", "acquire::check-", "acquire::forceipv"} {
			if strings.HasPrefix(name, prefix) {
				b.Options = append(b.Options, line)
				break
			}
		}
	}
	// apt itself parses its source formats; indextargets prints them resolved.
	out, err := exec.CommandContext(ctx, "apt-get", "indextargets", "--no-release-info", "--format", "$(REPO_URI)\t$(RELEASE)\t$(COMPONENT)", "Created-By: Packages").Output()
	if err != nil {
		return b, berm.Errorf(berm.Unsupported, "read apt's sources: %w", err)
	}
	for line := range strings.Lines(string(out)) {
		uri, rest, _ := strings.Cut(strings.TrimSpace(line), "\t")
		suite, component, _ := strings.Cut(rest, "\t")
		if component != "main" || (suite != r.Suite && !strings.HasPrefix(suite, r.Suite+"-")) || !strings.Contains(uri, "debian") {
			continue
		}
		if source := fmt.Sprintf("deb %s %s main", uri, suite); !slices.Contains(b.Sources, source) {
			b.Sources = append(b.Sources, source)
		}
	}
	// A host of another suite has none of it: mmdebstrap knows the public servers.
	return b, nil
}
