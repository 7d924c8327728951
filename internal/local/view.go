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

// withoutState adds to the paths of a grant that Berm's own directory is hidden where it
// would be seen: what a command writes there, Berm would believe.
func withoutState(g preset.Grant, place preset.Place) ([]preset.Path, error) {
	state := realStateDir()
	if state == "" {
		return g.Paths, nil
	}
	seen := below(state, place.Workspace) || slices.ContainsFunc(g.Paths, func(p preset.Path) bool {
		return p.Access != preset.Hide && p.Target == "" && (below(state, p.Path) || below(p.Path, state))
	})
	if !seen {
		return g.Paths, nil
	}
	// Only what is there can be covered, and another run may be about to make it.
	if err := os.MkdirAll(state, 0o700); err != nil {
		return nil, berm.Errorf(berm.KindOf(err), "make the directory of sessions, to hide it: %w", err).WithHint("set XDG_STATE_HOME to a directory outside")
	}
	paths := slices.DeleteFunc(slices.Clone(g.Paths), func(p preset.Path) bool { return below(p.Path, state) })
	paths = append(paths, preset.Path{Path: state, Access: preset.Hide})
	slices.SortStableFunc(paths, func(a, b preset.Path) int { return strings.Compare(a.Path, b.Path) })
	return paths, nil
}

// realStateDir is Berm's own directory without symbolic links, which may not be there yet;
// "" when the user has none.
func realStateDir() string {
	dir, err := session.StateDir()
	if err != nil {
		return ""
	}
	for rest := ""; ; dir, rest = filepath.Dir(dir), filepath.Join(filepath.Base(dir), rest) {
		if real, err := filepath.EvalSymlinks(dir); err == nil || dir == "/" {
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
	if state := realStateDir(); state != "" && below(p.Workspace, state) {
		return refuse("it is where Berm keeps its sessions")
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
