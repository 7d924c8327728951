package preset

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Narrow returns what is left of a grant after a project's own file took away from it.
// What the file asks for beyond the grant is not given: it becomes a notice that names
// the flag which gives it.
func Narrow(grant Grant, project *Rights, place Place) Grant {
	n := narrowing{grant, place}
	n.Paths, n.Env, n.Notices, n.Credentials = slices.Clone(grant.Paths), slices.Clone(grant.Env), slices.Clone(grant.Notices), slices.Clone(grant.Credentials)
	if project == nil {
		return n.Grant
	}
	if project.Workspace != "" {
		n.workspace(Access(project.Workspace))
	}
	for _, path := range project.ReadWrite {
		n.readWrite(path)
	}
	for _, path := range project.ReadOnly {
		n.readOnly(path)
	}
	for _, path := range project.Hide {
		n.hide(path)
	}
	n.Paths = sorted(n.Paths)
	for _, entry := range project.Env {
		n.env(entry)
	}
	lower(&n, &n.Limits.Memory, project.Limits.Memory, "memory", func(v int64) string { return strconv.FormatInt(v, 10) })
	lower(&n, &n.Limits.CPU, project.Limits.CPU, "cpus", func(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) })
	lower(&n, &n.Limits.PIDs, project.Limits.PIDs, "pids", func(v int64) string { return strconv.FormatInt(v, 10) })
	lower(&n, &n.Timeout, project.Timeout, "timeout", time.Duration.String)
	if project.Profile != "" {
		if slices.Index(profiles[:], project.Profile) >= slices.Index(profiles[:], n.Profile) {
			n.Profile = project.Profile
		} else {
			n.refuse("--profile "+project.Profile, "the seccomp profile %s", project.Profile)
		}
	}
	switch {
	case project.Network == NetworkNone:
		n.Network, n.Allow, n.Credentials = NetworkNone, nil, nil
	case project.Network != "" && project.Network != n.Network:
		n.refuse("--network "+string(project.Network), "the network %s", project.Network)
	}
	for _, entry := range project.Allow {
		if n.Network != NetworkHost && !slices.Contains(n.Allow, entry) {
			n.refuse("--allow "+entry, "a network that reaches %s", entry)
		}
	}
	for _, entry := range project.Credentials {
		name, taken := strings.CutPrefix(entry, "-")
		has := func(c Credential) bool { return c.Name == name }
		if taken {
			n.Credentials = slices.DeleteFunc(n.Credentials, has)
		} else if n.Network != NetworkHost && !slices.ContainsFunc(n.Credentials, has) {
			n.refuse("--cred "+entry+"=SOURCE", "the credential %s", entry)
		}
	}
	if project.Checkpoint != nil {
		// Without checkpoints more can be lost: not to keep them is a right too.
		if *project.Checkpoint {
			n.Checkpoint = true
		} else if n.Checkpoint {
			n.refuse("--checkpoint=false", "no checkpoints")
		}
	}
	return n.Grant
}

type narrowing struct {
	Grant
	place Place
}

// refuse notes what is not given.
func (n *narrowing) refuse(flag, format string, args ...any) {
	n.Notices = append(n.Notices, fmt.Sprintf("%s asks for %s, which it cannot give itself: add %s", ProjectFile, fmt.Sprintf(format, args...), flag))
}

func (n *narrowing) workspace(want Access) {
	switch have := Access(n.Workspace); {
	case want.rank() <= have.rank():
		n.Workspace = Workspace(want)
	case want == ReadWrite:
		n.refuse("--rw .", "a workspace that is written in place")
	default:
		n.refuse("--cow", "a copy-on-write workspace")
	}
}

// named expands a path of the file. What no mount can be put over, because it does not
// exist or is reached over a link, is not ok.
func (n *narrowing) named(written string) (path string, ok bool) {
	path = n.place.expand(written)
	_, err := resolve(path, "/")
	if errors.Is(err, unix.ELOOP) {
		n.Notices = append(n.Notices, fmt.Sprintf("%s names %s, which leads over a symbolic link: passed over", ProjectFile, strconv.Quote(clip(written))))
	}
	return path, err == nil
}

func (n *narrowing) readWrite(written string) {
	path := n.place.expand(written)
	if path == n.place.Workspace {
		n.workspace(ReadWrite)
	} else if n.access(n.place, path) != ReadWrite {
		n.refuse("--rw "+shell(written), "write access to %s", strconv.Quote(clip(written)))
	}
}

func (n *narrowing) readOnly(written string) {
	path := n.place.expand(written)
	if path == n.place.Workspace {
		n.workspace(ReadOnly)
		return
	}
	have := n.access(n.place, path)
	if have == Hide {
		n.refuse("--ro "+shell(written), "%s", strconv.Quote(clip(written)))
		return
	}
	for i, p := range n.Paths {
		if p.Access == ReadWrite && within(p.Path, path) {
			n.Paths[i].Access = ReadOnly
		}
	}
	if within(n.place.Workspace, path) {
		n.Workspace = WorkspaceReadOnly
	}
	if n.access(n.place, path) == ReadOnly {
		return
	}
	if path, ok := n.named(written); ok {
		n.Paths = append(n.Paths, Path{Path: path, Access: ReadOnly})
	}
}

func (n *narrowing) hide(written string) {
	path := n.place.expand(written)
	if path == n.place.Workspace {
		n.Notices = append(n.Notices, ProjectFile+" hides the workspace itself: passed over")
		return
	}
	// What was given below goes too, but what lies in the workspace stays with it when
	// the path is around the workspace.
	around := within(n.place.Workspace, path)
	below := func(p Path) bool {
		return within(p.Path, path) && (!around || !within(p.Path, n.place.Workspace))
	}
	visible := n.access(n.place, path) != Hide
	if _, ok := n.named(written); visible && !ok {
		// Nothing can be mounted there. An entry that is taken out would leave its place to
		// a wider one.
		for i := range n.Paths {
			if below(n.Paths[i]) {
				n.Paths[i] = Path{Path: n.Paths[i].Path, Access: Hide}
			}
		}
		return
	}
	n.Paths = slices.DeleteFunc(n.Paths, func(p Path) bool { return below(p) && p.Path != path })
	if visible {
		n.Paths = append(n.Paths, Path{Path: path, Access: Hide})
	}
}

// env takes a variable away. It sets none: the address of a model service is as good as
// its key, and no list of such names is complete.
func (n *narrowing) env(entry string) {
	if entry[0] == '-' {
		n.Env = append(n.Env, entry)
	} else if !n.passes(entry) {
		n.refuse("--env "+shell(entry), "the variable %s", strconv.Quote(clip(entry)))
	}
}

// passes says whether the grant gives what a positive entry asks for.
func (n *narrowing) passes(entry string) bool {
	name, _, sets := strings.Cut(entry, "=")
	for _, have := range slices.Backward(n.Env) {
		if have == entry {
			return true
		}
		pattern, taken := strings.CutPrefix(have, "-")
		if pattern, _, _ = strings.Cut(pattern, "="); matches(pattern, name) {
			return !taken && !sets
		}
	}
	return false
}

// lower sets a limit that is less; zero is no limit.
func lower[T int64 | float64 | time.Duration](n *narrowing, have *T, want T, key string, format func(T) string) {
	switch {
	case want == 0:
	case *have == 0 || want <= *have:
		*have = want
	default:
		n.refuse("--"+key+" "+format(want), "%s %s", key, format(want))
	}
}

// shell writes an argument so that a person can paste it, whatever a project put into
// it: within single quotes a shell reads nothing but their end.
func shell(s string) string {
	if strings.Trim(s, nameChars+"./~=-:@%+,") == "" {
		return s
	}
	if strings.ContainsFunc(s, func(r rune) bool { return r == '\'' || r < ' ' || r > '~' }) || len(s) > 200 {
		return "with it"
	}
	return "'" + s + "'"
}
