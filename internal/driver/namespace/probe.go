package namespace

import (
	"cmp"
	"context"
	"os"
	"os/exec"
	"strings"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/kernel/cgroup"
	"github.com/berm-sandbox/berm/internal/kernel/feature"
)

// Probe says what this host offers to the level.
func (d *Driver) Probe(ctx context.Context) berm.Probe { return Probe(ctx, d.config) }

// Probe says what this host offers to the level, for the user of this process. It makes
// no driver and needs no data directory: where it is absent, the directory for temporary
// files is looked at instead.
func Probe(ctx context.Context, config Config) berm.Probe {
	if _, err := os.Stat(config.Data); err != nil {
		config.Data = os.TempDir()
	}
	groups := cgroup.Config{Parent: config.CgroupParent}
	required := []*feature.Test{feature.Kernel, feature.UserNamespaces, feature.AllNamespaces, feature.MountAPI, feature.Overlay, feature.Seccomp, feature.Pidfd}
	optional := []*feature.Test{feature.Landlock, feature.ExecListener, feature.Link}
	if os.Geteuid() == 0 {
		required = append(required, feature.IDMappedMounts(config.Data))
		optional = append(optional, feature.MemfdExec, feature.LoopDevices, feature.Reflink(cmp.Or(config.Images, config.Data)))
	} else {
		required = append(required, feature.UnprivilegedUserNamespaces, feature.MemfdExec)
		optional = append(optional, feature.SubordinateIDs, feature.TmpfsAttributes)
	}
	optional = append(optional, feature.DiskLimit, feature.Cgroups(groups))
	for _, controller := range []string{"memory", "cpu", "pids", "io", "freezer"} {
		optional = append(optional, feature.Limit(groups, controller))
	}
	optional = append(optional, feature.CgroupKill(groups), feature.RaiseLimits)

	p := berm.Probe{Level: berm.Namespace, Usable: true, Unlimited: unlimited(ctx, config), Degraded: newHost().degraded}
	if os.Geteuid() != 0 {
		p.Unsaved = unsaved
	}
	for _, test := range required {
		f := test.Probe(ctx)
		f.Required = true
		p.Usable = p.Usable && f.Found
		p.Features = append(p.Features, f)
	}
	for _, test := range optional {
		p.Features = append(p.Features, test.Probe(ctx))
	}
	if os.Geteuid() == 0 {
		p.Features = append(p.Features, formatter())
	}
	return p
}

// unlimited tells which limits cannot be enforced here, and why.
func unlimited(ctx context.Context, config Config) map[string]string {
	reasons := map[string]string{}
	limits := map[string]berm.Limits{
		"memory": {Memory: 1 << 30}, "cpu": {CPU: 1}, "pids": {PIDs: 1 << 10}, "readBytes": {ReadBytes: 1 << 20}, "writeBytes": {WriteBytes: 1 << 20},
	}
	groups, err := cgroup.New(cgroup.Config{Parent: config.CgroupParent})
	if err == nil {
		err = groups.Try(ctx) // controllers may turn out to be refused only now
		defer func() { _ = groups.Close() }()
	}
	for name, limit := range limits {
		var disks []cgroup.Disk
		why := err
		if why == nil && (limit.ReadBytes > 0 || limit.WriteBytes > 0) {
			var disk cgroup.Disk
			disk, why = cgroup.DiskOf(config.Data)
			disks = append(disks, disk)
		}
		if why == nil {
			why = groups.Check(limit, disks...)
		}
		if why != nil {
			// The caller says which limit.
			text := why.Error()
			if _, after, ok := strings.Cut(text, " limit: "); ok {
				text = after
			}
			reasons[name] = text
		}
	}
	if os.Geteuid() != 0 {
		err = feature.TmpfsAttributes.Check(ctx)
	} else if err = feature.LoopDevices.Check(ctx); err == nil {
		_, err = exec.LookPath(mkfs())
	}
	if err != nil {
		reasons["disk"] = err.Error()
	}
	return reasons
}

// formatter is what makes the images of limited disks.
func formatter() berm.Feature {
	f := berm.Feature{Name: "mkfs.ext4", Fix: "install e2fsprogs"}
	path, err := exec.LookPath(mkfs())
	if f.Found = err == nil; f.Found {
		f.Detail, f.Fix = path, ""
	} else {
		f.Detail = err.Error()
	}
	return f
}
