package local

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/namespace/launch"
	"github.com/berm-sandbox/berm/internal/driver/namespace/wall"
	"github.com/berm-sandbox/berm/internal/local/preset"
	"github.com/berm-sandbox/berm/internal/local/session"
)

// view is the file system of a run.
func view(r *Request, upper launch.Upper) (wall.Host, error) {
	h := wall.Host{
		Home:      r.Place.Home,
		Workspace: wall.Workspace{Path: r.Place.Workspace, Upper: upper, Write: r.Grant.Workspace == preset.WorkspaceReadWrite},
	}
	if r.Template != nil {
		h.Layers = r.Template.Layers
	}
	if terminal(r.Streams[0]) {
		// The name belongs to this mount namespace; a terminal of another one has none.
		if name, err := os.Readlink("/proc/self/fd/0"); err == nil && r.Streams[0] == os.Stdin && strings.HasPrefix(name, "/dev/") {
			h.Console = name
		}
	}
	paths := r.Grant.Paths
	if r.Grant.Network == preset.NetworkHost {
		paths = withResolver(paths)
	}
	for _, p := range paths {
		shown := wall.Shown{Path: p.Path, Target: p.Target, Write: p.Access == preset.ReadWrite, Own: !preset.OfSystem(p.Path), Hide: p.Access == preset.Hide}
		if p.Target == "" {
			info, err := os.Lstat(p.Path)
			switch {
			case errors.Is(err, fs.ErrNotExist):
				continue // it went away meanwhile
			case err != nil:
				return h, berm.Errorf(berm.Invalid, "show %s: %w", p.Path, err)
			case info.Mode()&fs.ModeSymlink != 0:
				return h, berm.Errorf(berm.Conflict, "%s became a symbolic link", p.Path)
			}
			shown.File = !info.IsDir()
		}
		h.Shown = append(h.Shown, shown)
	}
	for _, c := range r.Covered {
		h.Shown = append(h.Shown, wall.Shown{Path: c.Path, Source: c.Source, File: true})
	}
	slices.SortStableFunc(h.Shown, func(a, b wall.Shown) int { return strings.Compare(a.Path, b.Path) })
	return h, nil
}

// withResolver adds the file that /etc/resolv.conf points to, which lies in /run where
// systemd-resolved or NetworkManager write it.
func withResolver(paths []preset.Path) []preset.Path {
	real, err := filepath.EvalSymlinks("/etc/resolv.conf")
	if err != nil || strings.HasPrefix(real, "/etc/") {
		return paths
	}
	paths = append(slices.Clone(paths), preset.Path{Path: real, Access: preset.ReadOnly})
	slices.SortStableFunc(paths, func(a, b preset.Path) int { return strings.Compare(a.Path, b.Path) })
	return paths
}

// withoutOwn adds to the paths of a grant that Berm's own directories are hidden where they
// would be seen: what a command writes there, Berm would believe or obey in later runs.
func withoutOwn(g preset.Grant, place preset.Place) ([]preset.Path, error) {
	paths := g.Paths
	for _, own := range ownDirs() {
		seen := below(own, place.Workspace) || slices.ContainsFunc(paths, func(p preset.Path) bool {
			return p.Access != preset.Hide && p.Target == "" && (below(own, p.Path) || below(p.Path, own))
		})
		if !seen {
			continue
		}
		// Only what is there can be covered, and another run may be about to make it.
		if err := os.MkdirAll(own, 0o700); err != nil {
			return nil, berm.Errorf(berm.KindOf(err), "make Berm's own directory, to hide it: %w", err).
				WithHint("set XDG_STATE_HOME and XDG_CONFIG_HOME to directories outside")
		}
		paths = slices.DeleteFunc(slices.Clone(paths), func(p preset.Path) bool { return below(p.Path, own) })
		paths = append(paths, preset.Path{Path: own, Access: preset.Hide})
		slices.SortStableFunc(paths, func(a, b preset.Path) int { return strings.Compare(a.Path, b.Path) })
	}
	return paths, nil
}

// ownDirs are where Berm keeps its sessions and is configured, without symbolic links. They
// may not be there yet.
func ownDirs() []string {
	var dirs []string
	state, err := session.StateDir()
	if err == nil {
		dirs = append(dirs, realPath(state))
	}
	if config, err := configDir(os.Environ()); err == nil && config != "" {
		dirs = append(dirs, realPath(config))
	}
	return dirs
}

// realPath is a path without symbolic links, of which the end need not be there.
func realPath(path string) string {
	for rest := ""; ; path, rest = filepath.Dir(path), filepath.Join(filepath.Base(path), rest) {
		if real, err := filepath.EvalSymlinks(path); err == nil || path == "/" {
			return filepath.Join(real, rest)
		}
	}
}

// below says whether path is dir or lies in it.
func below(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}

// checkPlace refuses workspaces that would show or cover too much.
func checkPlace(p preset.Place) error {
	for _, path := range []string{p.Home, p.Workspace} {
		if !filepath.IsAbs(path) || filepath.Clean(path) != path {
			return berm.Errorf(berm.Invalid, "%q is no absolute, clean path", path)
		}
	}
	refuse := func(why string) error {
		return berm.Errorf(berm.Denied, "%s would be the workspace: %s", p.Workspace, why).
			WithHint("change to the directory of a project, or name one with --workdir")
	}
	if p.Workspace == p.Home || strings.HasPrefix(p.Home, strings.TrimSuffix(p.Workspace, "/")+"/") {
		return refuse("everything in your home directory would be visible")
	}
	for _, dir := range []string{"/", "/proc", "/sys", "/dev", "/etc", "/usr", "/bin", "/sbin", "/lib", "/lib64", "/tmp", "/var", "/var/tmp", "/run", "/home", "/root", "/opt", "/boot"} {
		if p.Workspace == dir {
			return refuse("it is a directory of the system")
		}
	}
	for _, own := range ownDirs() {
		if below(p.Workspace, own) {
			return refuse("it is Berm's own")
		}
	}
	for _, dir := range []string{"/proc/", "/sys/", "/dev/"} {
		if strings.HasPrefix(p.Workspace, dir) && !strings.HasPrefix(p.Workspace, "/dev/shm/") {
			return refuse("the sandbox has a " + strings.Trim(dir, "/") + " of its own")
		}
	}
	return nil
}

// checkStreams refuses directories: an open one leads out of every sandbox.
func checkStreams(streams [3]*os.File) error {
	for i, f := range streams {
		var st unix.Stat_t
		if f == nil {
			return berm.Errorf(berm.Invalid, "standard stream %d is closed", i)
		}
		if err := unix.Fstat(int(f.Fd()), &st); err != nil {
			return berm.Errorf(berm.Invalid, "standard stream %d: %w", i, err).WithHint("redirect it to /dev/null")
		}
		if st.Mode&unix.S_IFMT == unix.S_IFDIR {
			return berm.Errorf(berm.Denied, "standard stream %d is a directory: whoever has it open gets out of the sandbox", i).
				WithHint("redirect it to /dev/null")
		}
	}
	return nil
}

func terminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
