// Package namespace is the namespace level: user, pid, mount, network, ipc, uts and
// cgroup namespaces, overlayfs over read-only layers, a seccomp allowlist, Landlock
// and few capabilities, on the host's own kernel.
//
// This package is the server's side. The monitor's is in launch, init's in inside, and
// what they are told in plan.
package namespace

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cleanup"
	"github.com/berm-sandbox/berm/internal/driver/namespace/launch"
	"github.com/berm-sandbox/berm/internal/driver/namespace/plan"
	"github.com/berm-sandbox/berm/internal/driver/namespace/wall"
	"github.com/berm-sandbox/berm/internal/embedded"
	"github.com/berm-sandbox/berm/internal/failpoint"
	"github.com/berm-sandbox/berm/internal/kernel/capability"
	"github.com/berm-sandbox/berm/internal/kernel/cgroup"
	"github.com/berm-sandbox/berm/internal/kernel/feature"
	"github.com/berm-sandbox/berm/internal/monitor"
)

// Config says where a driver keeps its things.
type Config struct {
	// Data is the server's data directory; the driver uses bin, images and sandboxes
	// below it. It must lie on a file system that can map ids when this process is root.
	Data string
	// Images is the directory of empty disks, beside which those of sandboxes are made; "" is
	// images below Data.
	Images string
	// CgroupParent is the group below which sandboxes get theirs, the same path in every
	// hierarchy; "" is "berm" below the caller's own.
	CgroupParent string
	// Claims is the file in which monitors claim the ids that root's sandboxes lease; ""
	// is none. See package claim.
	Claims string
	// Spares is how many monitors wait in advance, with an empty disk mounted, for each of
	// the sizes of disks asked for last: a creation that finds one does not wait for these
	// steps. They end with this process. 0 is none.
	Spares int
	// Watch has monitors listen for what is executed inside: see berm.First.
	Watch bool
}

// Driver makes sandboxes of the namespace level. It is a berm.Driver.
type Driver struct {
	config  Config
	host    host
	groups  *cgroup.Manager
	monitor string // path of the monitor's executable
	init    *os.File
	guest   *os.File

	images sync.Mutex // held while an image is formatted
	spares spares
}

var _ berm.Driver = (*Driver)(nil)

// New unpacks the helpers and returns a driver. Kinds: Unsupported (no helpers in this
// build), Internal.
func New(config Config) (_ *Driver, err error) {
	if config.Data, err = filepath.Abs(config.Data); err != nil {
		return nil, berm.Errorf(berm.Internal, "find the data directory: %w", err)
	}
	if config.Images == "" {
		config.Images = filepath.Join(config.Data, "images")
	}
	d := &Driver{config: config, host: newHost()}
	d.spares.start(config.Spares, d.spare)
	if d.groups, err = cgroup.New(cgroup.Config{Parent: config.CgroupParent}); err != nil {
		return nil, err
	}
	// A v2 group that hands controllers down may have no processes: this one goes out of
	// the way before the first monitor, which could not move it. What cannot be had is
	// told when a sandbox needs it.
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = d.groups.Try(ctx)
	for _, dir := range []string{filepath.Join(config.Data, "sandboxes"), config.Images} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, berm.Errorf(berm.Internal, "make the data directory: %w", err)
		}
	}
	if err := d.sweep(); err != nil {
		return nil, err
	}
	cu := cleanup.Make(func() { _ = d.Close() })
	defer cu.Clean()
	if d.monitor, err = unpack(config.Data, embedded.Monitor); err != nil {
		return nil, err
	}
	if d.init, err = sealed(config.Data, embedded.Init); err != nil {
		return nil, err
	}
	if d.guest, err = sealed(config.Data, embedded.Guest); err != nil {
		return nil, err
	}
	cu.Release()
	return d, nil
}

// sweep removes what an earlier process left in the middle of making an image.
func (d *Driver) sweep() error {
	for _, pattern := range []string{"content-*", "*.new"} {
		left, err := filepath.Glob(filepath.Join(d.config.Images, pattern))
		if err != nil {
			return berm.Errorf(berm.Internal, "look for unfinished images: %w", err)
		}
		for _, path := range left {
			if err := os.RemoveAll(path); err != nil {
				return berm.Errorf(berm.Internal, "remove an unfinished image: %w", err)
			}
		}
	}
	return nil
}

// Close lets go of the helpers and of the monitors that have no sandbox yet. Sandboxes
// live on.
func (d *Driver) Close() error {
	d.Dismiss()
	for _, f := range []*os.File{d.init, d.guest} {
		if f != nil {
			f.Close()
		}
	}
	return d.groups.Close()
}

// Dismiss ends the monitors that have no sandbox yet, and makes no more of them in advance.
func (d *Driver) Dismiss() { d.spares.close() }

// unpack writes an embedded executable to its place in the data directory, unless it is
// there, and returns the path.
func unpack(data, name string) (string, error) {
	// The ids of a sandbox are not this user's, who alone gets to the directory.
	const unpacked = 0o555
	content, err := embedded.Binary(name)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(content)
	dir := filepath.Join(data, "bin", hex.EncodeToString(sum[:]))
	path := filepath.Join(dir, name)
	if info, err := os.Stat(path); err == nil && info.Mode().Perm() == unpacked {
		return path, nil
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", berm.Errorf(berm.Internal, "unpack %s: %w", name, err)
	}
	temporary := path + "." + strconv.Itoa(os.Getpid())
	err = os.WriteFile(temporary, content, unpacked)
	if err == nil {
		err = os.Chmod(temporary, unpacked) // whatever the umask is
	}
	if err == nil {
		err = os.Rename(temporary, path)
	}
	if err != nil {
		os.Remove(temporary)
		return "", berm.Errorf(berm.Internal, "unpack %s: %w", name, err)
	}
	return path, nil
}

// sealed returns an executable that nobody can change, in memory that all sandboxes of
// this process share: what runs inside could otherwise overwrite it through /proc
// (CVE-2019-5736). Where the host forbids execution of memory files, root's sandboxes
// get a plain file, which belongs to an id that is not mapped inside.
func sealed(data, name string) (*os.File, error) {
	content, err := embedded.Binary(name)
	if err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3 they are executable
		fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if errors.Is(err, unix.EACCES) && os.Geteuid() == 0 {
		path, err := unpack(data, name)
		if err != nil {
			return nil, err
		}
		return os.Open(path)
	}
	if errors.Is(err, unix.EACCES) {
		return nil, berm.Errorf(berm.Unsupported, "this host forbids executable memory files").WithHint("sysctl vm.memfd_noexec=1")
	}
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "keep %s in memory: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err = f.Write(content); err == nil {
		// Executable and not readable: the kernel then lets nobody inside look into the
		// process, whatever capabilities they have there.
		if err = f.Chmod(0o111); err == nil {
			_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
		}
	}
	if err != nil {
		f.Close()
		return nil, berm.Errorf(berm.Internal, "keep %s in memory: %w", name, err)
	}
	return f, nil
}

// Level is berm.Namespace.
func (d *Driver) Level() berm.Level { return berm.Namespace }

// path is the directory of a sandbox.
func (d *Driver) path(id berm.SandboxID) string {
	return filepath.Join(d.config.Data, "sandboxes", string(id))
}

// disk is the writable layer of a sandbox whose disk is not limited.
func (d *Driver) disk(id berm.SandboxID) string { return filepath.Join(d.path(id), "disk") }

// The kinds of writable layers.
type upper int

const (
	upperImage     upper = iota // a file system of its own, over a loop device
	upperDirectory              // a directory, whose size is not limited
	upperMemory                 // tmpfs: all that an ordinary user can limit
)

func (d *Driver) upper(spec berm.Spec) upper {
	switch {
	case spec.Limits.Disk == 0:
		return upperDirectory
	case d.host.kind == launch.Leased:
		return upperImage
	}
	return upperMemory
}

var (
	idShape   = regexp.MustCompile(`^[a-z0-9]{1,64}$`)
	hostShape = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?$`)
)

// leastDisk is the smallest file system that ext4 makes sense for.
const leastDisk = 8 << 20

// reserve is what must be free, in bytes, where the disks of sandboxes lie. They are
// sparse files: what is written inside once nothing is left is lost without an error.
const reserve = 256 << 20

// room refuses when the host's disk is nearly full.
func (d *Driver) room() error {
	for _, dir := range []string{d.config.Data, d.config.Images} { // a file system in the other may be sparse too
		var disk unix.Statfs_t
		if err := unix.Statfs(dir, &disk); err != nil {
			return berm.Errorf(berm.Internal, "free space of the data directory: %w", err)
		}
		if free := disk.Bavail * uint64(disk.Bsize); free < reserve {
			return berm.Errorf(berm.Unavailable, "only %d MiB are free for the disks of sandboxes in %s, less than %d MiB", free>>20, dir, reserve>>20).
				WithHint("kill sandboxes, delete snapshots, or make room where the server's data directory is")
		}
	}
	return nil
}

// check refuses specs that are wrong or cannot be enforced.
func (d *Driver) check(spec berm.Spec) error {
	invalid := func(format string, args ...any) error { return berm.Errorf(berm.Invalid, format, args...) }
	switch l := spec.Limits; {
	case !idShape.MatchString(string(spec.ID)):
		return invalid("sandbox id %q is not 1 to 64 characters of a-z and 0-9", spec.ID)
	case !hostShape.MatchString(spec.Hostname):
		return invalid("host name %q is not a DNS label", spec.Hostname)
	case len(spec.Layers) == 0:
		return invalid("a sandbox needs a layer")
	case len(spec.Layers) > plan.MaxFDs-plan.FDCount-1:
		return invalid("%d layers are more than the kernel passes at once, %d", len(spec.Layers), plan.MaxFDs-plan.FDCount-1)
	case l.Memory < 0 || l.CPU < 0 || l.PIDs < 0 || l.Disk < 0 || l.ReadBytes < 0 || l.WriteBytes < 0:
		return invalid("a limit is negative")
	case l.Disk > 0 && l.Disk < leastDisk:
		return invalid("a disk of %d bytes is smaller than %d", l.Disk, leastDisk)
	case spec.OnDeadline != "" && spec.OnDeadline != berm.KillAtDeadline && spec.OnDeadline != berm.PauseAtDeadline:
		return invalid("unknown action at the deadline: %q", spec.OnDeadline)
	case !spec.Deadline.IsZero() && !spec.Deadline.After(time.Now()):
		return invalid("the deadline has passed")
	case d.host.kind == launch.Leased && (spec.IDs.Count != berm.IDsPerSandbox || spec.IDs.Base < berm.IDsPerSandbox || spec.IDs.Base > 1<<32-1-berm.IDsPerSandbox):
		return invalid("the id range %d+%d is not one of %d unprivileged ids", spec.IDs.Base, spec.IDs.Count, berm.IDsPerSandbox)
	case d.host.kind == launch.Single && spec.Setuid:
		return berm.Errorf(berm.Unsupported, "the template has set-uid programs, and this user can map no second id").
			WithHint("give the user %d ids in /etc/subuid and /etc/subgid, or run berm serve as root", berm.IDsPerSandbox)
	}
	if err := d.checkFrom(spec); err != nil {
		return err
	}
	for _, layer := range spec.Layers {
		if !filepath.IsAbs(layer.Path) {
			return invalid("layer path %q is not absolute", layer.Path)
		}
		if info, err := os.Stat(layer.Path); err != nil || !info.IsDir() {
			return berm.Errorf(berm.NotFound, "layer %s is not unpacked on this host", layer.DiffID)
		}
	}
	return nil
}

// checkFrom refuses a snapshot that no sandbox of the spec can begin with.
func (d *Driver) checkFrom(spec berm.Spec) error {
	if spec.From == "" {
		return nil
	}
	if d.upper(spec) != upperImage {
		return berm.Errorf(berm.Unsupported, "%s", unsaved).WithHint("run berm serve as root, and give the sandbox a limit of its disk")
	}
	info, err := os.Stat(filepath.Join(spec.From, launch.SavedDisk))
	switch {
	case err != nil:
		return berm.Errorf(berm.NotFound, "the snapshot is not there: %w", err)
	case info.Size() != spec.Limits.Disk:
		return berm.Errorf(berm.Unsupported, "the snapshot is of a disk of %d bytes, which cannot become one of %d", info.Size(), spec.Limits.Disk).
			WithHint("leave the limit of the disk as the snapshot has it")
	}
	return nil
}

// unsaved is why a disk has no snapshots.
const unsaved = "snapshots need a server of root and a limit of the disk: other disks are no file systems of their own"

// Create makes a sandbox and returns when its agent answers.
func (d *Driver) Create(ctx context.Context, spec berm.Spec) (berm.Sandbox, error) {
	if spec.Level != berm.Namespace && spec.Level != berm.Auto {
		return nil, berm.Errorf(berm.Unsupported, "this driver makes no sandboxes of level %q", spec.Level)
	}
	return d.Make(ctx, spec, d.wall)
}

// A Wall decides what a level does for a sandbox: it fills in Plan, Policy, Trees, and what
// else is the level's own. The rest of the order does not depend on the level.
type Wall func(spec berm.Spec, upper launch.Upper) (launch.Order, error)

// Make makes a sandbox behind a wall: this driver's, or one of a level that shares the rest
// with it, from the monitor to the agent.
func (d *Driver) Make(ctx context.Context, spec berm.Spec, wall Wall) (berm.Sandbox, error) {
	monitor.Trace("create")
	if err := d.check(spec); err != nil {
		return nil, err
	}
	if d.upper(spec) != upperMemory {
		if err := d.room(); err != nil {
			return nil, err
		}
	} else if err := feature.TmpfsAttributes.Check(ctx); err != nil {
		return nil, berm.Errorf(berm.Unsupported, "no disk limit for an ordinary user: %w", err).WithHint("use Linux 6.6, run berm serve as root, or ask for no limit")
	}
	order, err := d.order(spec, wall)
	if err != nil {
		return nil, err
	}
	monitor.Trace("planned")
	dir := d.path(spec.ID)
	if err := os.Mkdir(dir, 0o700); errors.Is(err, fs.ErrExist) {
		return nil, berm.Errorf(berm.AlreadyExists, "sandbox %s exists", spec.ID)
	} else if err != nil {
		return nil, berm.Errorf(berm.Internal, "make the sandbox's directory: %w", err)
	}
	cu := cleanup.Make(func() { _ = d.removeFiles(spec.ID) })
	defer cu.Clean()
	if d.upper(spec) == upperDirectory {
		disk := d.disk(spec.ID)
		err := os.Mkdir(disk, 0o755)
		if err == nil && d.host.kind == launch.Subordinate {
			// Root inside is none of this user's ids, and only this user gets here.
			err = os.Chmod(disk, 0o777)
		}
		if err != nil {
			return nil, berm.Errorf(berm.Internal, "make the sandbox's directory: %w", err)
		}
	}
	if err := failpoint.Hit("driver.directory"); err != nil {
		return nil, err
	}
	s := &sandbox{driver: d, id: spec.ID}
	if spec.From == "" { // what others begin with is no reason to have some in advance
		s.keeper = d.spares.take(order.Upper)
	}
	if s.keeper == nil {
		if s.keeper, err = d.spawn(ctx); err != nil {
			return nil, err
		}
	}
	cu.Add(s.abandon)
	defer d.spares.fill()
	monitor.Trace("monitor answers")
	if err := failpoint.Hit("driver.spawn"); err != nil {
		return nil, err
	}
	if err := s.client.Create(ctx, order); err != nil {
		return nil, err
	}
	monitor.Trace("created")
	if err := failpoint.Hit("driver.create"); err != nil {
		return nil, err
	}
	if err := s.health(ctx); err != nil {
		return nil, err
	}
	monitor.Trace("healthy")
	if err := failpoint.Hit("driver.health"); err != nil {
		return nil, err
	}
	if err := s.client.Commit(ctx); err != nil {
		return nil, err
	}
	monitor.Trace("committed")
	cu.Release()
	return s, nil
}

// order is what the monitor is told.
func (d *Driver) order(spec berm.Spec, wall Wall) (launch.Order, error) {
	spec.Guest.SandboxID = spec.ID
	if spec.OnDeadline == "" {
		spec.OnDeadline = berm.KillAtDeadline
	}
	var upper launch.Upper
	var err error
	switch d.upper(spec) {
	case upperImage:
		if spec.From != "" {
			upper.Image, upper.Used = filepath.Join(spec.From, launch.SavedDisk), true
		} else {
			upper.Image, err = d.image(spec.Limits.Disk)
		}
	case upperDirectory:
		upper.Directory = d.disk(spec.ID)
	}
	if err != nil {
		return launch.Order{}, err
	}
	order, err := wall(spec, upper)
	if err != nil {
		return launch.Order{}, err
	}
	if order.Config, err = json.Marshal(spec.Guest); err != nil {
		return launch.Order{}, berm.Errorf(berm.Invalid, "guest configuration: %w", err)
	}
	order.ID, order.Directory, order.Deadline, order.OnDeadline = spec.ID, d.path(spec.ID), spec.Deadline, spec.OnDeadline
	order.IDs, order.Link, order.Upper, order.CgroupParent = d.host.ids(spec), spec.Link, upper, d.config.CgroupParent
	if d.host.kind == launch.Leased {
		order.Claims = d.config.Claims
	}
	return order, nil
}

// wall is that of the namespace level.
func (d *Driver) wall(spec berm.Spec, upper launch.Upper) (launch.Order, error) {
	if spec.Memory {
		return launch.Order{}, berm.Errorf(berm.Unsupported, "processes cannot go on from memory that was saved at this level").
			WithHint("begin with the files alone")
	}
	if why := d.Missing()["freezer"]; why != "" && spec.OnDeadline == berm.PauseAtDeadline {
		return launch.Order{}, berm.Errorf(berm.Unsupported, "no pause at the deadline: no freezer: %s", why).
			WithHint("berm doctor --fix-hints, on that host, says how to get one")
	}
	set, err := wall.Plan(wall.Config{
		IDs: d.host.ids(spec), Limits: spec.Limits, Profile: spec.Profile, Hostname: spec.Hostname, Setuid: spec.Setuid,
		Capabilities: capability.Inside,
		Root:         wall.Layers{Layers: spec.Layers, Upper: upper}, Link: spec.Link, Watch: d.config.Watch, Cgroup: d.groups.String(), Degraded: slices.Concat(d.host.degraded, spec.Degraded),
	})
	if err != nil {
		return launch.Order{}, err
	}
	policy, err := json.Marshal(set.Policy())
	if err != nil {
		return launch.Order{}, berm.Errorf(berm.Internal, "policy: %w", err)
	}
	return launch.Order{Limits: spec.Limits, Plan: plan.Encode(set.Steps), Policy: policy, Trees: set.Trees, Watch: d.config.Watch}, nil
}

// Layout is how control groups are laid out here, for a policy.
func (d *Driver) Layout() string { return d.groups.String() }

// IDs is the map of a sandbox's ids.
func (d *Driver) IDs(spec berm.Spec) launch.IDs { return d.host.ids(spec) }

// Missing are the controllers of control groups that this host lacks, and why.
func (d *Driver) Missing() map[string]string { return d.groups.Missing() }

// Degraded is what sandboxes of this host lack, for a policy.
func (d *Driver) Degraded() []string { return d.host.degraded }

// Program unpacks an embedded executable and returns its path.
func (d *Driver) Program(name string) (string, error) { return unpack(d.config.Data, name) }

// image returns the path of a formatted file system of a size, of which every sandbox
// gets a sparse copy. It is made once.
func (d *Driver) image(size int64) (string, error) {
	path := filepath.Join(d.config.Images, fmt.Sprintf("ext4-r-%d", size))
	d.images.Lock()
	defer d.images.Unlock()
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	failed := func(err error) error {
		return berm.Errorf(berm.Internal, "make a disk image of %d bytes: %w", size, err)
	}
	// What every copy starts with: the two directories that overlayfs wants, and the reserve.
	content, err := os.MkdirTemp(filepath.Dir(path), "content-")
	if err != nil {
		return "", failed(err)
	}
	defer os.RemoveAll(content)
	temporary := path + ".new"
	defer os.Remove(temporary)
	err = errors.Join(os.Chmod(content, 0o755), os.Mkdir(filepath.Join(content, "upper"), 0o755), os.Mkdir(filepath.Join(content, "work"), 0o700),
		fillReserve(content), os.WriteFile(temporary, nil, 0o600), os.Truncate(temporary, size))
	if err != nil {
		return "", failed(err)
	}
	// No journal, since no copy is mounted twice; tables are left unwritten, so that a
	// copy is a few blocks; an inode for every 16 KiB, as mkfs has it by itself: the kernel takes as long
	// to forget them as a kill takes that finds them all in use.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, mkfs(), "-q", "-F", "-O", "^has_journal,^resize_inode", "-m", "0", "-i", "16384",
		"-E", "lazy_itable_init=1,nodiscard,root_owner=0:0", "-d", content, temporary).CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
		return "", berm.Errorf(berm.Unsupported, "no disk limit: mkfs.ext4 is not installed").WithHint("install e2fsprogs")
	}
	if err != nil {
		return "", berm.Errorf(berm.Internal, "format a disk image: %w: %s", err, out)
	}
	if err := os.Rename(temporary, path); err != nil {
		return "", failed(err)
	}
	return path, nil
}

func fillReserve(dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	return launch.FillReserve(root)
}

// mkfs finds mkfs.ext4 also where the directories for root are not searched.
func mkfs() string {
	if path, err := exec.LookPath("mkfs.ext4"); err == nil {
		return path
	}
	return "/sbin/mkfs.ext4"
}

// Open finds a living sandbox again.
func (d *Driver) Open(ctx context.Context, id berm.SandboxID) (berm.Sandbox, error) {
	if !idShape.MatchString(string(id)) {
		return nil, berm.Errorf(berm.NotFound, "no sandbox %q", id)
	}
	conn, err := d.dial(ctx, id, monitor.SocketFile)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) {
		return nil, berm.Errorf(berm.NotFound, "no living sandbox %s: %w", id, err)
	} else if err != nil {
		return nil, berm.Errorf(berm.Unavailable, "reach the monitor of sandbox %s: %w", id, err)
	}
	pid, err := peer(conn)
	if err != nil {
		_ = conn.Close()
		return nil, berm.Errorf(berm.Internal, "find the monitor of sandbox %s: %w", id, err)
	}
	client, err := monitor.NewClient(ctx, conn)
	if err != nil {
		return nil, err
	}
	if client.ID() != id {
		_ = client.Close()
		return nil, berm.Errorf(berm.Internal, "the monitor of sandbox %s says that it keeps %q", id, client.ID())
	}
	return &sandbox{driver: d, id: id, keeper: &keeper{client: client, pid: pid}}, nil
}

// List names the sandboxes that have a directory: it is the first thing that is made
// and the last that goes.
func (d *Driver) List(context.Context) ([]berm.SandboxID, error) {
	entries, err := os.ReadDir(filepath.Join(d.config.Data, "sandboxes"))
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "list sandboxes: %w", err)
	}
	var ids []berm.SandboxID
	for _, e := range entries {
		ids = append(ids, berm.SandboxID(e.Name()))
	}
	return ids, nil
}

// Remove takes away what is left of a sandbox, and its monitor if it does not answer.
// Conflict when the sandbox is well.
func (d *Driver) Remove(ctx context.Context, id berm.SandboxID) (berm.Exit, error) {
	if !idShape.MatchString(string(id)) {
		return berm.Exit{}, nil
	}
	if s, err := d.Open(ctx, id); err == nil {
		_ = s.Close()
		return berm.Exit{}, berm.Errorf(berm.Conflict, "sandbox %s lives", id)
	}
	return d.remove(ctx, id)
}

// remove takes away what is left of a sandbox. A monitor that holds the directory is
// ended; the kernel ends its sandbox with it.
func (d *Driver) remove(ctx context.Context, id berm.SandboxID) (berm.Exit, error) {
	if err := d.endMonitor(ctx, id); err != nil {
		return berm.Exit{}, err
	}
	group, err := d.groups.Open(string(id))
	if err == nil {
		if err := group.Kill(ctx); err != nil {
			return berm.Exit{}, err
		}
		if err := group.Remove(ctx); err != nil {
			return berm.Exit{}, err
		}
	} else if berm.KindOf(err) != berm.NotFound {
		return berm.Exit{}, err
	}
	exit := d.exit(id)
	return exit, d.removeFiles(id)
}

// exit reads how a sandbox ended; the zero Exit when that was not recorded and nothing
// of it is left.
func (d *Driver) exit(id berm.SandboxID) berm.Exit {
	raw, err := os.ReadFile(filepath.Join(d.path(id), monitor.ExitFile))
	var exit berm.Exit
	if err == nil && json.Unmarshal(raw, &exit) == nil {
		return exit
	}
	if _, err := os.Stat(d.path(id)); err != nil {
		return berm.Exit{}
	}
	return berm.Exit{Reason: berm.ReasonCrash, Code: -1, Detail: "its monitor was lost", At: time.Now().UTC()}
}

// removeFiles takes a sandbox's directory away. A writable layer in it is the work of
// the sandbox: os.Root follows no link out of it.
func (d *Driver) removeFiles(id berm.SandboxID) error {
	if _, err := os.Stat(d.disk(id)); err == nil && d.host.kind != launch.Leased {
		if err := launch.Remove(d.init, d.host.ids(berm.Spec{}), d.disk(id)); err != nil {
			return err
		}
	}
	root, err := os.OpenRoot(filepath.Join(d.config.Data, "sandboxes"))
	if err != nil {
		return berm.Errorf(berm.Internal, "remove the files of sandbox %s: %w", id, err)
	}
	defer func() { _ = root.Close() }()
	if err := root.RemoveAll(string(id)); err != nil {
		return berm.Errorf(berm.Internal, "remove the files of sandbox %s: %w", id, err)
	}
	return nil
}

// endMonitor kills the monitor that holds a sandbox's directory, if there is one.
func (d *Driver) endMonitor(ctx context.Context, id berm.SandboxID) error {
	dir, err := os.Open(d.path(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return berm.Errorf(berm.Internal, "open the directory of sandbox %s: %w", id, err)
	}
	defer dir.Close()
	held := func() bool { return unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil }
	if !held() {
		return nil
	}
	// The kernel accepts the connection also when the monitor hangs.
	if conn, err := d.dial(ctx, id, monitor.SocketFile); err == nil {
		pid, err := peer(conn)
		_ = conn.Close()
		if err == nil {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	}
	for deadline := time.Now().Add(2 * time.Second); held(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) || ctx.Err() != nil {
			return berm.Errorf(berm.Unavailable, "the monitor of sandbox %s does not end", id)
		}
	}
	return nil
}

// dial connects to a socket of a sandbox.
func (d *Driver) dial(ctx context.Context, id berm.SandboxID, name string) (*net.UnixConn, error) {
	path := filepath.Join(d.path(id), name)
	if len(path) >= len(unix.RawSockaddrUnix{}.Path) {
		// Too long for a socket's address: reach it through the directory.
		dir, err := os.OpenFile(d.path(id), unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			return nil, err
		}
		defer dir.Close()
		path = fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), name)
	}
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	return conn.(*net.UnixConn), nil
}

// peer is the process that listens at the other end.
func peer(conn *net.UnixConn) (pid int, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	err = errors.Join(raw.Control(func(fd uintptr) {
		var cred *unix.Ucred
		if cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			pid = int(cred.Pid)
		}
	}), err)
	return pid, err
}

// environment of a monitor. It waits for the kernel more than it does, and collects garbage
// only once the sandbox runs.
func environment() []string {
	env := []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "GOMAXPROCS=1", "GOGC=off"}
	for _, name := range []string{"BERM_FAILPOINTS", "BERM_TRACE"} {
		if v, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+v)
		}
	}
	return slices.Clip(env)
}

// session keeps a monitor out of the reach of the server's terminal.
var session = &syscall.SysProcAttr{Setsid: true}
