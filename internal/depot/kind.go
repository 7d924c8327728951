package depot

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/kernel/mount"
)

// programLimit bounds a program that makes or grows a file system.
const programLimit = 2 * time.Minute

// kind is a file system that clones files.
type kind struct {
	name         string
	magic        string // at offset
	offset       int64
	mkfs, resize []string // their arguments; the last is the file, or the place
	packaged     string   // the package that has these programs
	options      []mount.Option
}

// kinds are those that there are, the better one first. XFS changes what is not shared in place, and
// refuses to mount what is mounted from another device; btrfs has that only without its checksums.
// Both give what is deleted back to the file below them.
var kinds = []kind{
	{
		name: "xfs", magic: "XFSB",
		mkfs: []string{"mkfs.xfs", "-q", "-f", "-m", "reflink=1"}, resize: []string{"xfs_growfs", "-d"}, packaged: "xfsprogs",
		options: []mount.Option{mount.Flag("discard")},
	},
	{
		name: "btrfs", magic: "_BHRfS_M", offset: 0x10040,
		mkfs: []string{"mkfs.btrfs", "-q", "-f", "-m", "single"}, resize: []string{"btrfs", "filesystem", "resize", "max"}, packaged: "btrfs-progs",
		options: []mount.Option{mount.Value("discard", "async"), mount.Flag("nodatacow")},
	},
}

// choose takes the first that this host can make and mount.
func choose() (kind, error) {
	var packages []string
	for _, k := range kinds {
		if !mount.Known(k.name) {
			continue
		}
		if _, err := exec.LookPath(program(k.mkfs[0])); err == nil {
			return k, nil
		}
		packages = append(packages, k.packaged)
	}
	if len(packages) == 0 {
		return kind{}, berm.Errorf(berm.Unsupported, "no depot: the kernel has neither XFS nor btrfs")
	}
	return kind{}, berm.Errorf(berm.Unsupported, "no depot: what makes its file system is not installed").WithHint("install %s", packages[0])
}

// kindOf finds out which file system is in a file.
func kindOf(f *os.File) (kind, error) {
	for _, k := range kinds {
		magic := make([]byte, len(k.magic))
		if _, err := f.ReadAt(magic, k.offset); err == nil && bytes.Equal(magic, []byte(k.magic)) {
			return k, nil
		}
	}
	return kind{}, berm.Errorf(berm.Internal, "%s holds no file system that a depot can be", f.Name()).
		WithHint("put it back from a copy; without it, what is saved in it is lost: remove it and what in snapshots/ leads into it")
}

func (k kind) make(ctx context.Context, file string) error { return k.run(ctx, k.mkfs, file) }

// grow lets the file system fill its device.
func (k kind) grow(ctx context.Context, place string) error { return k.run(ctx, k.resize, place) }

func (k kind) run(ctx context.Context, argv []string, last string) error {
	path, err := exec.LookPath(program(argv[0]))
	if err != nil {
		return berm.Errorf(berm.Unsupported, "the depot needs %s, which is not installed", argv[0]).WithHint("install %s", k.packaged)
	}
	ctx, cancel := context.WithTimeout(ctx, programLimit)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, append(argv[1:len(argv):len(argv)], last)...).CombinedOutput()
	if err != nil {
		return berm.Errorf(berm.Internal, "%s: %w: %s", argv[0], err, bytes.TrimSpace(out))
	}
	return nil
}

// program finds a program also where the directories for root are not searched.
func program(name string) string {
	if path, err := exec.LookPath(name); err == nil {
		return path
	}
	return "/sbin/" + name
}
