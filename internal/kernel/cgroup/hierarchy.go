package cgroup

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// A hierarchy is one mounted tree of groups: all of v2, or some controllers of v1.
type hierarchy struct {
	v2          bool
	mount       string   // where the tree is mounted
	own         string   // the directory of the caller's own group
	base        string   // the directory below which parent lies: own, or mount
	parent      string   // the directory of the parent of all sandboxes' groups
	controllers []string // those of v1 by their v2 names, but "cpuacct", "freezer"

	handed []string // v2: controllers that the own group gives to its children since delegate
}

// path is the directory of a sandbox's group.
func (h *hierarchy) path(id string) string { return filepath.Join(h.parent, id) }

// v2Names gives the v2 name to v1 controllers that changed it.
var v2Names = map[string]string{"blkio": "io"}

// discover lists the mounted hierarchies with the caller's place in them.
func discover(c Config) ([]*hierarchy, error) {
	mounts, err := os.ReadFile(filepath.Join(c.Proc, "self/mountinfo"))
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "find cgroup mounts: %w", err)
	}
	own, err := os.ReadFile(filepath.Join(c.Proc, "self/cgroup"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // absent: a kernel without cgroups
		return nil, berm.Errorf(berm.Internal, "find own cgroup: %w", err)
	}
	groups := ownGroups(string(own))
	var list []*hierarchy
	for line := range strings.Lines(string(mounts)) {
		h, root := parseMount(line)
		if h == nil || slices.ContainsFunc(list, func(o *hierarchy) bool { return o.same(h) }) {
			continue
		}
		group, ok := groups[""]
		if !h.v2 {
			group, ok = groups[h.controllers[0]]
		}
		if !ok {
			continue
		}
		h.place(root, group, c.Parent)
		if h.v2 {
			available, err := os.ReadFile(filepath.Join(h.base, "cgroup.controllers"))
			if err != nil {
				continue // the own group is out of sight here: nothing can be made in it
			}
			h.controllers = strings.Fields(string(available))
		} else {
			for i, name := range h.controllers {
				if v2, renamed := v2Names[name]; renamed {
					h.controllers[i] = v2
				}
			}
		}
		list = append(list, h)
	}
	return list, nil
}

// ownGroups reads /proc/self/cgroup: controller → group; "" is v2.
func ownGroups(text string) map[string]string {
	groups := map[string]string{}
	for line := range strings.Lines(text) {
		parts := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(parts) != 3 {
			continue
		}
		for controller := range strings.SplitSeq(parts[1], ",") {
			groups[controller] = parts[2]
		}
	}
	return groups
}

// parseMount reads one line of mountinfo: a hierarchy and the group that is the
// root of its mount, or nil if it is none with controllers.
func parseMount(line string) (h *hierarchy, root string) {
	fields := strings.Fields(line)
	dash := slices.Index(fields, "-")
	if dash < 6 || len(fields) < dash+4 {
		return nil, ""
	}
	h = &hierarchy{mount: unescape(fields[4])}
	switch fields[dash+1] {
	case "cgroup2":
		h.v2 = true
	case "cgroup":
		for option := range strings.SplitSeq(fields[dash+3], ",") {
			switch option {
			case "memory", "cpu", "cpuacct", "pids", "blkio", "freezer":
				h.controllers = append(h.controllers, option)
			}
		}
		if len(h.controllers) == 0 {
			return nil, ""
		}
	default:
		return nil, ""
	}
	return h, unescape(fields[3])
}

// unescape undoes mountinfo's \040 for blanks and the like.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// same says whether two mounts show the same tree.
func (h *hierarchy) same(o *hierarchy) bool {
	return h.v2 == o.v2 && (h.v2 || slices.Equal(h.controllers, o.controllers))
}

// place finds the directories of the caller's group and of the parent. root is the
// group that the mount shows as its top: not "/" in a container.
func (h *hierarchy) place(root, own, parent string) {
	if inside, ok := strings.CutPrefix(own, strings.TrimSuffix(root, "/")); ok {
		own = inside
	}
	h.own = filepath.Join(h.mount, own)
	switch {
	case parent != "":
		h.base, h.parent = h.mount, filepath.Join(h.mount, parent)
	case h.v2 && path.Base(own) == hostLeaf:
		h.base = filepath.Dir(h.own)
		h.parent = filepath.Join(h.base, "berm")
	case h.v2 && root == "/" && os.Geteuid() == 0 && !h.delegated():
		// Root may use the top. The group of a login session has other processes, so that
		// it hands no controller down, and the next login has another one.
		h.base, h.parent = h.mount, filepath.Join(h.mount, "berm")
	default:
		h.base = h.own
		h.parent = filepath.Join(h.base, "berm")
	}
}

// delegated says whether systemd gave the own group to its processes, to make groups
// in: it then marks the group of the unit, https://systemd.io/CGROUP_DELEGATION.
func (h *hierarchy) delegated() bool {
	for dir := h.own; dir != h.mount && dir != "/"; dir = filepath.Dir(dir) {
		for _, mark := range []string{"trusted.delegate", "user.delegate"} {
			var value [1]byte
			if n, err := unix.Getxattr(dir, mark, value[:]); err == nil && n == 1 && value[0] == '1' {
				return true
			}
		}
	}
	return false
}

// unusable says why no group can be made here, or "".
func (h *hierarchy) unusable() string {
	dir := h.parent
	for dir != h.base && unix.Access(dir, unix.F_OK) != nil {
		dir = filepath.Dir(dir)
	}
	switch err := unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK, unix.AT_EACCESS); err {
	case nil:
		return ""
	case unix.ENOENT:
		return "the own group " + dir + " is not visible here"
	case unix.EROFS:
		return dir + " is mounted read-only"
	default:
		return dir + " is not delegated to this user"
	}
}

// wanted are the controllers that sandboxes need.
var wanted = []string{"memory", "cpu", "pids", "io"}

// delegate hands the wanted controllers of a v2 tree down from base to parent, and
// tells which cannot be had, with the reason.
func (h *hierarchy) delegate(mkdir func(string) error) map[string]string {
	missing := map[string]string{}
	if !h.v2 {
		return missing
	}
	down, _ := filepath.Rel(h.base, h.parent)
	dir := h.base
	for step := range strings.SplitSeq("./"+down, "/") {
		dir = filepath.Join(dir, step)
		on, _ := os.ReadFile(filepath.Join(dir, "cgroup.subtree_control"))
		for _, controller := range wanted {
			if !slices.Contains(h.controllers, controller) || missing[controller] != "" ||
				slices.Contains(strings.Fields(string(on)), controller) {
				continue
			}
			err := write(dir, "cgroup.subtree_control", "+"+controller)
			if errors.Is(err, unix.EBUSY) && dir == h.base {
				// The rule of no internal processes: go out of the way ourselves. Other
				// processes of the group are not ours to move.
				leaf := filepath.Join(dir, hostLeaf)
				if err := mkdir(leaf); err == nil || errors.Is(err, fs.ErrExist) {
					_ = write(leaf, "cgroup.procs", strconv.Itoa(os.Getpid()))
				}
				err = write(dir, "cgroup.subtree_control", "+"+controller)
			}
			if err != nil {
				missing[controller] = "cannot be handed down in " + dir + ": " + reason(err)
			} else if dir == h.own {
				h.handed = append(h.handed, controller)
			}
		}
	}
	return missing
}

// takeBack undoes delegate in the own group, so that it can have processes again, this
// one first. It does nothing while another process of ours is out of the way.
func (h *hierarchy) takeBack() {
	leaf := filepath.Join(h.base, hostLeaf)
	others, err := read(leaf, "cgroup.procs")
	if err != nil || others != strconv.Itoa(os.Getpid()) {
		return
	}
	for _, controller := range h.handed {
		_ = write(h.base, "cgroup.subtree_control", "-"+controller)
	}
	h.handed = nil
	if write(h.base, "cgroup.procs", strconv.Itoa(os.Getpid())) == nil {
		_ = unix.Rmdir(leaf)
	}
}

func reason(err error) string {
	if errors.Is(err, unix.EBUSY) {
		return "the group has processes of its own"
	}
	var errno unix.Errno
	if errors.As(err, &errno) {
		return errno.Error()
	}
	return err.Error()
}

// layoutOf names the layout of the hierarchies.
func layoutOf(list []*hierarchy) Layout {
	v1, v2 := false, false
	for _, h := range list {
		v1, v2 = v1 || !h.v2, v2 || h.v2
	}
	switch {
	case v1 && v2:
		return Hybrid
	case v1:
		return V1
	case v2:
		return V2
	}
	return None
}
