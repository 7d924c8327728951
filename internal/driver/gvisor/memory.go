package gvisor

import (
	"encoding/json"
	"os"
	"path/filepath"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/namespace/launch"
	"github.com/berm-sandbox/berm/internal/driver/namespace/plan"
	"github.com/berm-sandbox/berm/internal/driver/namespace/wall"
	"github.com/berm-sandbox/berm/internal/embedded"
)

// bootID is a file that lies over the kernel's, which gVisor saves with its memory.
const bootID = "/dev/boot_id"

// identity are steps that tell a sandbox from others.
func identity(spec berm.Spec) []plan.Step {
	steps := []plan.Step{{Op: plan.File, Target: bootID, Flags: 0o444, Data: berm.NewUUID() + "\n"}}
	for _, file := range wall.Identity(spec.Hostname, spec.Link) {
		steps = append(steps, plan.Step{Op: plan.Identity, Target: "/etc/" + file[0], Flags: 0o644, Data: file[1]})
	}
	return steps
}

// manifest says what a sandbox was made with, beside its memory: that goes on with the same
// alone.
type manifest struct {
	ID       berm.SandboxID `json:"id"`
	Version  string         `json:"version"` // of gVisor
	Platform string         `json:"platform"`
	Init     string         `json:"init"` // names of directories below Data/bin
	Agent    string         `json:"agent"`
	Link     bool           `json:"link"`
	Setuid   bool           `json:"setuid"`
	PIDs     int64          `json:"pids"`
}

// manifest is that of a new sandbox.
func (d *Driver) manifest(f found, spec berm.Spec) manifest {
	base := func(path string) string { return filepath.Base(filepath.Dir(path)) }
	return manifest{
		ID: spec.ID, Version: Version, Platform: f.platform, Init: base(d.init), Agent: base(d.agent),
		Link: spec.Link, Setuid: spec.Setuid, PIDs: spec.Limits.PIDs,
	}
}

// program is the path of an executable in a directory below Data/bin.
func (d *Driver) program(dir, name string) string {
	return filepath.Join(filepath.Dir(filepath.Dir(d.init)), dir, name)
}

// saved reads the manifest of the memory in spec.From, and refuses one with which a sandbox of
// spec, for which made would be it, cannot go on. Kinds: NotFound (there is no memory in it),
// Unsupported.
func (d *Driver) saved(spec berm.Spec, made manifest) (m manifest, err error) {
	raw, err := os.ReadFile(filepath.Join(spec.From, launch.SavedMemory, launch.Manifest))
	if err == nil {
		err = json.Unmarshal(raw, &m)
	}
	if spec.From == "" || err != nil {
		return m, berm.Errorf(berm.NotFound, "no memory of processes is there: %w", err)
	}
	refused := func(what string, was, is any) (manifest, error) {
		return m, berm.Errorf(berm.Unsupported, "the snapshot goes on with %s %v alone, not with %v", what, was, is).
			WithHint("leave it as the snapshot has it, or begin with its files alone")
	}
	switch {
	case m.Version != made.Version:
		return refused("gVisor", m.Version, made.Version)
	case m.Platform != made.Platform:
		return refused("gVisor on", m.Platform, made.Platform)
	case m.Link != made.Link:
		return refused("a network:", m.Link, made.Link)
	case m.Setuid != made.Setuid:
		return refused("set-uid programs:", m.Setuid, made.Setuid)
	case m.PIDs != made.PIDs:
		return refused("a limit of processes of", m.PIDs, made.PIDs)
	}
	for name, dir := range map[string]string{embedded.Init: m.Init, embedded.Guest: m.Agent} {
		if _, err := os.Stat(d.program(dir, name)); err != nil || !filepath.IsLocal(dir) {
			return m, berm.Errorf(berm.Unsupported, "the snapshot goes on with the %s of the berm that made it, which is not there any more", name).
				WithHint("begin with its files alone")
		}
	}
	return m, nil
}
