package apply

import (
	"io"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// repository returns the .git directory that name is in, or is.
func repository(name string) (string, bool) {
	for i := 0; i < len(name); {
		end := strings.IndexByte(name[i:], '/')
		if end < 0 {
			end = len(name) - i
		}
		if name[i:i+end] == ".git" {
			return name[:i+end], true
		}
		i += end + 1
	}
	return "", false
}

func inRepository(name string) bool {
	_, ok := repository(name)
	return ok
}

// isObject: loose objects and packs are named by what they hold.
func isObject(name string) bool {
	unit, ok := repository(name)
	if !ok {
		return false
	}
	_, object, ok := strings.Cut(name[len(unit):], "/objects/")
	if !ok || strings.Count(object, "/") != 1 {
		return false
	}
	dir, file, _ := strings.Cut(object, "/")
	return len(dir) == 2 || dir == "pack" && strings.HasPrefix(file, "pack-")
}

func isLock(name string) bool {
	return inRepository(name) && strings.HasSuffix(name, ".lock")
}

// rank orders the writes into a repository: what a reference names is there before the
// reference, and HEAD and index, from which git starts, come last.
func rank(s *step) int {
	name := string(s.Path)
	switch base := path.Base(name); {
	case s.Mode.IsDir() || !inRepository(name):
		return 0
	case strings.Contains(name, "/objects/"):
		return 1
	case base == "HEAD" && !strings.Contains(name, "/logs/") || base == "index":
		return 3
	}
	return 2
}

// gitDirectory returns the git directory within unit that name belongs to: the unit, or
// that of a submodule or further work tree in it.
func gitDirectory(unit, name string) string {
	rest := name[len(unit):]
	end := len(rest)
	for _, part := range []string{"/objects/", "/refs/", "/logs/", "/reftable/", "/HEAD", "/index", "/packed-refs"} {
		if i := strings.Index(rest+"/", part); i >= 0 {
			end = min(end, i)
		}
	}
	if end == len(rest) {
		return unit
	}
	return unit + rest[:end]
}

// judgeRepositories treats each .git as a unit: what the session committed rests on the
// references and the index that it saw.
func (p *Plan) judgeRepositories() {
	units, roots := map[string][]*step{}, map[string]*step{}
	for _, s := range p.steps {
		switch unit, ok := repository(string(s.Path)); {
		case !ok:
		case string(s.Path) == unit:
			roots[unit] = s // which may be a file that leads to a repository
		default:
			units[unit] = append(units[unit], s)
		}
	}
	for unit, steps := range units {
		reason := ""
		seen := map[string]bool{}
		for _, s := range steps {
			dir := gitDirectory(unit, string(s.Path))
			if reason == "" && !seen[dir] {
				seen[dir] = true
				reason = p.movedOutside(dir)
			}
		}
		if reason == "" {
			for _, s := range steps {
				if rank(s) == 1 && !s.planned() && s.Outcome != Same && s.Outcome != Skipped {
					reason = "its object " + path.Base(string(s.Path)) + " is not applied: " + s.Reason
					break
				}
			}
		}
		if reason == "" {
			continue
		}
		if root := roots[unit]; root != nil {
			steps = append(steps, root)
		}
		for _, s := range steps {
			if s.planned() || s.Outcome == Flagged || s.Outcome == Conflict {
				s.refuse(Conflict, "%s", reason)
				s.unit = unit
			}
		}
	}
}

// movedOutside says why a git directory is not what the session began with, or "".
func (p *Plan) movedOutside(dir string) string {
	for _, name := range []string{"index.lock", "HEAD.lock"} {
		if st, err := p.project.stat(dir + "/" + name); err != nil || st != nil {
			return "git is at work in the project's repository, or left " + name
		}
	}
	changed := ""
	references(p.project, dir, func(name string, st *unix.Stat_t) {
		was, state := p.base.stat(name)
		moved := false
		switch {
		case st == nil:
			moved = state == Present
		case st.Mode&unix.S_IFMT == unix.S_IFDIR:
			// Its mtime tells of references that came and went.
			moved = state == Absent || state == Present && was.Mtime != st.Mtim.Nano() ||
				state == Unknown && p.base.since(st.Mtim.Nano())
		default:
			moved = p.moved(name, st)
		}
		if moved && changed == "" {
			changed = "the project's repository changed outside since the session began (" + path.Base(name) + ")"
		}
	})
	return changed
}

// referenceLimit bounds the references that are looked at, all told.
const referenceLimit = 1 << 20

// references visits what decides where a git directory stands; st is nil for one of the
// fixed names that is not there.
func references(project *tree, dir string, visit func(name string, st *unix.Stat_t)) {
	pending := []string{}
	for _, name := range []string{"HEAD", "index", "packed-refs", "refs", "reftable"} {
		pending = append(pending, dir+"/"+name)
	}
	for n := 0; len(pending) > 0 && n < referenceLimit; n++ {
		name := pending[len(pending)-1]
		pending = pending[:len(pending)-1]
		st, err := project.stat(name)
		if err != nil {
			continue
		}
		visit(name, st)
		if st == nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
			continue
		}
		f, err := project.open(name, unix.O_RDONLY|unix.O_DIRECTORY)
		if err != nil {
			continue
		}
		names, err := readNames(f)
		f.Close()
		if err != nil {
			continue
		}
		for _, child := range names {
			pending = append(pending, name+"/"+child)
		}
	}
}

func readNames(f *os.File) ([]string, error) {
	names, err := f.Readdirnames(-1)
	if err == io.EOF {
		err = nil
	}
	return names, err
}
