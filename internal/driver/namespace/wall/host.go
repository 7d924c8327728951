package wall

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/namespace/launch"
	"github.com/berm-sandbox/berm/internal/driver/namespace/plan"
)

// Host is a root in which parts of the host lie at their own paths, on memory that is
// empty but for them, or on the layers of a template.
type Host struct {
	Layers    []berm.Layer // lowest first; what is written over them lies in memory
	Workspace Workspace
	Home      string // a directory of memory, writable
	Shown     []Shown
	Console   string // the terminal that is the standard input; "" is none
}

// Workspace is the directory that the sandbox works in.
type Workspace struct {
	Path  string
	Upper launch.Upper // what is written lies here, if it has a directory
	Write bool         // without an upper: what is written lies in Path itself
}

// Shown is a part of the host at its own path. Paths come before those below them, and
// none has a symbolic link in the middle.
type Shown struct {
	Path   string
	Source string // what lies there, if it is not the host's own
	Target string // of a symbolic link, which is made anew
	File   bool   // no directory
	Write  bool
	Own    bool // the user's own files, which may be for nobody else
	Hide   bool // the opposite: whatever is there shows nothing
}

// build puts the root together in memory. The stage has the parts that only overlayfs
// needs.
func (h Host) build(s *SetUp, c Config) {
	const flags = unix.MS_NOSUID | unix.MS_NODEV
	if len(h.Layers) > 0 {
		lower := s.layers(h.Layers)
		upper := s.memoryUpper(c.Limits.Memory)
		s.add(plan.Step{Op: plan.Mkdir, Target: stageRoot, Flags: 0o755})
		s.overlay(stageRoot, lower, stageUpper, flags)
		s.show("/", "overlay", flags, fmt.Sprintf("%d read-only layers; writes: %s", len(lower), upper))
	} else {
		s.add(plan.Step{Op: plan.Mkdir, Target: stageRoot, Flags: 0o755})
		s.add(plan.Step{Op: plan.Mount, Target: stageRoot, Source: "tmpfs", Flags: flags, Data: "mode=0755,size=4m"})
		s.show("/", "tmpfs", flags|unix.MS_RDONLY, "")
	}
	made := map[string]bool{"": true}
	for _, dir := range []string{"/proc", "/dev", "/sys", "/etc"} {
		s.parents(made, dir+"/")
	}
	memory := func(target, mode string) {
		options := "mode=" + mode
		if c.Limits.Memory > 0 {
			options += ",size=" + strconv.FormatInt(c.Limits.Memory, 10)
		}
		s.parents(made, target+"/")
		s.mount(target, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, options)
	}
	memory("/tmp", "1777")
	memory("/var/tmp", "1777")
	memory("/run", "0755")
	memory(h.Home, "0700")
	workspace := false
	for _, p := range h.Shown {
		if !workspace && strings.HasPrefix(p.Path, h.Workspace.Path+"/") {
			h.workspace(s, c, made)
			workspace = true
		}
		switch {
		case p.Hide:
			h.pin(s, p.Path)
			s.add(plan.Step{Op: plan.Mask, Target: stageRoot + p.Path})
			s.policy.Masked = append(s.policy.Masked, p.Path)
			continue
		case p.Target != "":
			s.parents(made, p.Path)
			s.add(plan.Step{Op: plan.Symlink, Source: p.Target, Target: stageRoot + p.Path})
			s.show(p.Path, "link", 0, p.Target)
			continue
		case p.File:
			if !h.within(p.Path) { // where a part of the host lies already, it is there
				s.parents(made, p.Path)
				s.add(plan.Step{Op: plan.File, Target: stageRoot + p.Path, Flags: 0o644})
			}
		default:
			s.parents(made, p.Path+"/")
		}
		if !p.Write {
			h.pin(s, p.Path)
		}
		source := p.Source
		if source == "" {
			source = p.Path
		}
		s.attach(stageRoot+p.Path, launch.Tree{Path: source, Write: p.Write, Host: !p.Write, Own: p.Own && !p.Write, NoSetuid: true, Exact: true})
		flags := attached(c)
		if !p.Write {
			flags |= unix.MS_RDONLY
		}
		s.show(p.Path, "host", flags, "")
	}
	if !workspace {
		h.workspace(s, c, made)
	}
}

// ofHost says whether what lies at path is the host's own.
func (h Host) ofHost(path string) bool {
	return h.within(path) || slices.ContainsFunc(h.Shown, func(p Shown) bool { return p.Path == path && !p.Hide && p.Target == "" })
}

// within says whether path lies in a directory of the host that is shown.
func (h Host) within(path string) bool {
	for _, p := range h.Shown {
		if !p.Hide && !p.File && p.Target == "" && strings.HasPrefix(path, p.Path+"/") {
			return true
		}
	}
	return strings.HasPrefix(path, h.Workspace.Path+"/")
}

// pin makes mounts of the directories between path and the writable one that it lies in: a
// directory is renamed with the mounts below it, and then the next run, or the rest of this
// one, would find something else at path, and elsewhere what is to be protected.
func (h Host) pin(s *SetUp, path string) {
	around, writable := h.Workspace.Path, h.Workspace.Write
	if !strings.HasPrefix(path, around+"/") {
		around = ""
	}
	for _, p := range h.Shown {
		if !p.Hide && !p.File && p.Target == "" && len(p.Path) > len(around) && strings.HasPrefix(path, p.Path+"/") {
			around, writable = p.Path, p.Write
		}
	}
	if around == "" || !writable {
		return
	}
	for i := len(around) + 1; i < len(path); i++ {
		if dir := path[:i]; path[i] == '/' && !s.pinned[dir] {
			if s.pinned == nil {
				s.pinned = map[string]bool{}
			}
			s.pinned[dir] = true
			s.add(plan.Step{Op: plan.Pin, Target: stageRoot + dir})
		}
	}
}

// parents makes the directories that lead to path and are not there yet.
func (s *SetUp) parents(made map[string]bool, path string) {
	for i := range len(path) {
		if dir := path[:i]; path[i] == '/' && !made[dir] {
			made[dir] = true
			s.add(plan.Step{Op: plan.Mkdir, Target: stageRoot + dir, Flags: 0o755})
		}
	}
}

// attached are the flags of every part of the host. Where an ordinary user's init attaches
// them, set-uid bits are without effect because nobody else's id is mapped.
func attached(c Config) uint64 {
	if c.IDs.Kind == launch.Leased {
		return unix.MS_NOSUID | unix.MS_NODEV
	}
	return unix.MS_NODEV
}

func (h Host) workspace(s *SetUp, c Config, made map[string]bool) {
	w := h.Workspace
	s.parents(made, w.Path+"/")
	if !w.Write {
		h.pin(s, w.Path)
	}
	if w.Upper.Directory == "" {
		s.attach(stageRoot+w.Path, launch.Tree{Path: w.Path, Write: w.Write, Host: !w.Write, Own: !w.Write, NoSetuid: true, Exact: true})
		how, flags := "the directory itself", attached(c)
		if !w.Write {
			flags |= unix.MS_RDONLY
		}
		s.show(w.Path, "workspace", flags, how)
		return
	}
	s.place(stageProject, launch.Tree{Path: w.Path, Exact: true})
	s.place(stageSession, launch.Tree{Upper: true})
	s.overlay(stageRoot+w.Path, []string{stageProject}, stageSession, unix.MS_NOSUID|unix.MS_NODEV)
	s.show(w.Path, "workspace", unix.MS_NOSUID|unix.MS_NODEV, fmt.Sprintf("copy on write; changes are kept in %s", w.Upper.Directory))
}

// finish makes the root read-only. The files that name the machine cover the host's,
// which are not changed.
func (h Host) finish(s *SetUp, c Config) {
	if h.Console != "" { // as ttyname(3) finds the terminal of programs that have it open
		s.add(plan.Step{Op: plan.File, Target: stageRoot + "/dev/console", Flags: 0o600})
		s.add(plan.Step{Op: plan.Bind, Source: h.Console, Target: stageRoot + "/dev/console", Flags: unix.MS_NOSUID | unix.MS_NOEXEC})
		s.policy.Devices = append(s.policy.Devices, "/dev/console")
	}
	files := Identity(c.Hostname, c.Link)
	if !c.HostNetwork && !c.Link && len(h.Layers) == 0 {
		if content, err := os.ReadFile("/etc/nsswitch.conf"); err == nil {
			files = append(files, [2]string{"nsswitch.conf", withoutDNS(string(content))})
		}
	}
	for _, f := range files {
		if c.HostNetwork && (f[0] == "hosts" || f[0] == "resolv.conf") {
			continue // the host's are the right ones
		}
		if len(h.Layers) > 0 && !h.ofHost("/etc/"+f[0]) {
			s.add(plan.Step{Op: plan.File, Target: stageRoot + "/etc/" + f[0], Flags: 0o644, Data: f[1]})
			continue
		}
		s.add(plan.Step{Op: plan.File, Target: f[0], Flags: 0o444, Data: f[1]})
		s.add(plan.Step{Op: plan.Cover, Source: f[0], Target: stageRoot + "/etc/" + f[0]})
	}
	if len(h.Layers) == 0 {
		s.add(plan.Step{Op: plan.Remount, Target: stageRoot, Flags: unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV})
	}
	s.add(plan.Step{Op: plan.Enter, Target: stageRoot, Flags: 1})
	s.add(plan.Step{Op: plan.Workdir, Target: h.Workspace.Path})
}

// withoutDNS makes the C library, and Go, find names in /etc/hosts alone. Where there is no
// network, names then do not exist, which ends programs at once: that no server answers is
// what they try again, npm for more than a minute.
func withoutDNS(nsswitch string) string {
	var b strings.Builder
	for line := range strings.Lines(nsswitch) {
		if !strings.HasPrefix(strings.TrimSpace(line), "hosts:") {
			b.WriteString(line)
		}
	}
	return strings.TrimRight(b.String(), "\n") + "\nhosts: files\n"
}
