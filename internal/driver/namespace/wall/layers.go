package wall

import (
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/namespace/launch"
	"github.com/berm-sandbox/berm/internal/driver/namespace/plan"
)

// Layers is a root made of a template's layers with a writable one on top.
type Layers struct {
	Layers []berm.Layer // lowest first
	Upper  launch.Upper
}

// build puts the layers and the writable layer on top of each other. All names are
// relative, so that no path of the host shows in /proc/self/mountinfo.
func (l Layers) build(s *SetUp, c Config) {
	lower := make([]string, len(l.Layers))
	for i, layer := range l.Layers {
		name := strconv.Itoa(i)
		s.place(name, launch.Tree{Path: layer.Path})
		lower[len(lower)-1-i] = name // overlayfs wants the top first
	}
	var upper string
	switch {
	case l.Upper.Image != "":
		s.place(stageUpper, launch.Tree{Upper: true})
		upper = fmt.Sprintf("at most %s on disk", amount(uint64(c.Limits.Disk)))
	case l.Upper.Directory != "":
		s.place(stageUpper, launch.Tree{Upper: true})
		upper = "on the host's disk, not limited"
	default:
		options := "mode=0755"
		upper = "in memory, at most half of the host's"
		if c.Limits.Disk > 0 {
			options += ",size=" + strconv.FormatInt(c.Limits.Disk, 10)
			upper = "in memory, at most " + amount(uint64(c.Limits.Disk))
		}
		s.add(plan.Step{Op: plan.Mkdir, Target: stageUpper, Flags: 0o755})
		s.add(plan.Step{Op: plan.Mount, Target: stageUpper, Source: "tmpfs", Flags: unix.MS_NODEV, Data: options})
	}
	flags := uint64(unix.MS_NODEV)
	if !c.Setuid {
		flags |= unix.MS_NOSUID
	}
	s.add(plan.Step{Op: plan.Mkdir, Target: stageRoot, Flags: 0o755})
	s.overlay(stageRoot, lower, flags)
	s.show("/", "overlay", flags, fmt.Sprintf("%d read-only layers; writes: %s", len(lower), upper))
	for _, dir := range []string{"/proc", "/dev", "/sys", "/etc"} {
		s.add(plan.Step{Op: plan.Mkdir, Target: stageRoot + dir, Flags: 0o755})
	}
}

func (l Layers) finish(s *SetUp, c Config) {
	s.add(plan.Step{Op: plan.Enter, Target: stageRoot})
	for _, f := range identity(c.Hostname) {
		s.add(plan.Step{Op: plan.File, Target: "/etc/" + f[0], Flags: 0o644, Data: f[1]})
	}
}

// overlay mounts lower directories of the stage, the top first, on target, with the
// writable layer above them. Nothing waits for the disk (volatile): the layer does not
// outlive the sandbox, or need not survive a crash of the machine.
func (s *SetUp) overlay(target string, lower []string, flags uint64) {
	s.add(plan.Step{Op: plan.Mkdir, Target: stageUpper + "/upper", Flags: 0o755})
	s.add(plan.Step{Op: plan.Mkdir, Target: stageUpper + "/work", Flags: 0o700})
	s.add(plan.Step{Op: plan.Mount, Target: target, Source: "overlay", Flags: flags,
		Data: "lowerdir=" + strings.Join(lower, ":") + ",upperdir=u/upper,workdir=u/work,userxattr,volatile"})
}
