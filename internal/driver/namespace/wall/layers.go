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
	lower := s.layers(l.Layers)
	var upper string
	switch {
	case l.Upper.Image != "":
		s.place(stageUpper, launch.Tree{Upper: true})
		upper = fmt.Sprintf("at most %s on disk", amount(uint64(c.Limits.Disk)))
	case l.Upper.Directory != "":
		s.place(stageUpper, launch.Tree{Upper: true})
		upper = "on the host's disk, not limited"
	default:
		upper = s.memoryUpper(c.Limits.Disk)
	}
	// Times of access are writes: with them a sandbox that only reads would have changed.
	flags := uint64(unix.MS_NODEV | unix.MS_NOATIME)
	if !c.Setuid {
		flags |= unix.MS_NOSUID
	}
	s.add(plan.Step{Op: plan.Mkdir, Target: stageRoot, Flags: 0o755})
	s.overlay(stageRoot, lower, stageUpper, flags)
	s.show("/", "overlay", flags, fmt.Sprintf("%d read-only layers; writes: %s", len(lower), upper))
	for _, dir := range []string{"/proc", "/dev", "/sys"} {
		s.add(plan.Step{Op: plan.Mkdir, Target: stageRoot + dir, Flags: 0o755})
	}
}

func (l Layers) finish(s *SetUp, c Config) {
	s.add(plan.Step{Op: plan.Enter, Target: stageRoot})
	for _, f := range Identity(c.Hostname, c.Link) {
		s.add(plan.Step{Op: plan.Identity, Target: "/etc/" + f[0], Flags: 0o644, Data: f[1]})
	}
}

// layers attaches layers, given lowest first, to the stage, and names them as overlayfs
// wants them, the top first.
func (s *SetUp) layers(layers []berm.Layer) []string {
	lower := make([]string, len(layers))
	for i, layer := range layers {
		name := strconv.Itoa(i)
		s.place(name, launch.Tree{Path: layer.Path})
		lower[len(lower)-1-i] = name
	}
	return lower
}

// memoryUpper makes a writable layer of at most size bytes, or half of the host's memory,
// and says so.
func (s *SetUp) memoryUpper(size int64) string {
	options, text := "mode=0755", "in memory, at most half of the host's"
	if size > 0 {
		options += ",size=" + strconv.FormatInt(size, 10)
		text = "in memory, at most " + amount(uint64(size))
	}
	s.add(plan.Step{Op: plan.Mkdir, Target: stageUpper, Flags: 0o755})
	s.add(plan.Step{Op: plan.Mount, Target: stageUpper, Source: "tmpfs", Flags: unix.MS_NODEV, Data: options})
	return text
}

// overlay mounts lower directories of the stage, the top first, on target, with the
// writable layer upper above them. Nothing waits for the disk (volatile): the layer does not
// outlive the sandbox, or need not survive a crash of the machine.
func (s *SetUp) overlay(target string, lower []string, upper string, flags uint64) {
	s.add(plan.Step{Op: plan.Mkdir, Target: upper + "/upper", Flags: 0o755})
	s.add(plan.Step{Op: plan.Mkdir, Target: upper + "/work", Flags: 0o700})
	s.add(plan.Step{Op: plan.Mount, Target: target, Source: "overlay", Flags: flags,
		Data: "lowerdir=" + strings.Join(lower, ":") + ",upperdir=" + upper + "/upper,workdir=" + upper + "/work,userxattr,volatile"})
}
