package local

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/namespace/launch"
	"github.com/berm-sandbox/berm/internal/kernel/claim"
	"github.com/berm-sandbox/berm/internal/local/preset"
)

// leasable are the host ids of which a sandbox of root gets a range, the same as those
// that berm serve leases unless it is told otherwise: the claims keep both apart.
var leasable = berm.IDRange{Base: 0x70000000, Count: 16384 * berm.IDsPerSandbox}

// own maps the caller's user and group alone, to themselves: files have the same owner
// inside and outside, and whoever is not root outside is not root inside.
func own() launch.IDs {
	one := func(id int) []launch.Range { return []launch.Range{{Inside: id, Outside: id, Count: 1}} }
	return launch.IDs{Kind: launch.Single, UIDs: one(os.Geteuid()), GIDs: one(os.Getegid())}
}

// lease maps a range of unprivileged host ids that nobody else on this machine uses, until
// the claim is closed.
func lease() (launch.IDs, *claim.File, error) {
	claims, err := claim.Open(claim.Path)
	if err != nil {
		return launch.IDs{}, nil, err
	}
	slots := leasable.Count / berm.IDsPerSandbox
	first := rand.Uint32N(slots)
	for i := range slots {
		ids := berm.IDRange{Base: leasable.Base + (first+i)%slots*berm.IDsPerSandbox, Count: berm.IDsPerSandbox}
		mine, err := claims.Take(ids)
		if err != nil {
			claims.Close()
			return launch.IDs{}, nil, err
		}
		if mine {
			ranges := []launch.Range{{Inside: 0, Outside: int(ids.Base), Count: int(ids.Count)}}
			return launch.IDs{Kind: launch.Leased, UIDs: ranges, GIDs: ranges}, claims, nil
		}
	}
	claims.Close()
	return launch.IDs{}, nil, berm.Errorf(berm.Exhausted, "all %d host id ranges are in use", slots)
}

// mayLease says whether this process is root with the rights to map other ids and to make
// mounts: not so in a user namespace or a container without capabilities.
func mayLease() bool {
	if os.Geteuid() != 0 {
		return false
	}
	uids, err := os.ReadFile("/proc/self/uid_map")
	if err != nil || strings.Join(strings.Fields(string(uids)), " ") != "0 0 4294967295" {
		return false
	}
	const needed = 1<<unix.CAP_SYS_ADMIN | 1<<unix.CAP_SETUID | 1<<unix.CAP_SETGID
	return effective()&needed == needed
}

// foreign tells what the command will not be able to change in a workspace, or "": the
// kernel lets nobody write as ids that are not mapped, and overlayfs copies nothing of them.
func foreign(workspace string, access preset.Workspace) string {
	var st unix.Stat_t
	if access == preset.WorkspaceReadOnly || unix.Stat(workspace, &st) != nil || int(st.Uid) == os.Geteuid() && int(st.Gid) == os.Getegid() {
		return ""
	}
	switch {
	case mayLease():
		if st.Uid < berm.IDsPerSandbox && st.Gid < berm.IDsPerSandbox {
			return ""
		}
		return fmt.Sprintf("the project belongs to user %d and group %d: root's sandboxes have only ids below %d, so the command cannot write there; run it as that user", st.Uid, st.Gid, berm.IDsPerSandbox)
	case access != preset.WorkspaceCopyOnWrite:
		return ""
	case int(st.Uid) != os.Geteuid():
		return fmt.Sprintf("the project belongs to user %d: its files cannot be changed beside it, only new ones made in its top directory", st.Uid)
	}
	return fmt.Sprintf("the project belongs to group %d, not to yours (%d): its files cannot be changed beside it; use newgrp or chgrp, or --rw . to write into the project", st.Gid, os.Getegid())
}

// effective is the set of this process' capabilities.
func effective() uint64 {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if unix.Capget(&header, &data[0]) != nil {
		return 0
	}
	return uint64(data[0].Effective) | uint64(data[1].Effective)<<32
}

// blocked explains why no sandbox could be made, when the reason is that the kernel lets
// this process make no user namespaces, gives it no rights in them, or has a file system
// that cannot take part.
func blocked(err error, workspace string) error {
	var refusal *launch.Refusal
	if berm.KindOf(err) == berm.Unsupported && errors.Is(err, unix.EINVAL) {
		return berm.Errorf(berm.Unsupported, "the project, the sessions or what else may be written lies where root's sandboxes cannot use it, such as the overlayfs of a container: %w", err).
			WithHint("move the project, or the sessions with XDG_STATE_HOME, to ext4, xfs, btrfs or tmpfs; ordinary users need no mapping of ids")
	}
	if !errors.As(err, &refusal) {
		return err
	}
	cause, hint := "", ""
	inside := !strings.HasPrefix(refusal.Step, "start ")
	switch {
	case inside && strings.HasPrefix(refusal.Step, "clone ") && refusal.Errno == unix.EACCES:
		return berm.Errorf(berm.Denied, "%w", err).WithHint("give yourself access to that directory")
	case refusal.Step == "mount r"+workspace && refusal.Errno == unix.EINVAL:
		return berm.Errorf(berm.Unsupported, "overlayfs does not take the file system of the project: %w", err).
			WithHint("--rw . lets the command write into the project, --ro . only look at it")
	case inside && refusal.Errno != unix.EPERM && refusal.Errno != unix.EACCES:
		return err
	case inside && strings.Contains(refusal.Step, " /dev/net/tun"):
		return berm.Errorf(berm.Denied, "the sandbox's network needs /dev/net/tun, or a pair of virtual devices: %w", err).
			WithHint("let every user open it, as distributions do: chmod 666 /dev/net/tun")
	case refusal.Step == "mount r/proc":
		cause = "parts of /proc are covered here, as container engines do it, and then the kernel refuses a new one"
		hint = "give the container an uncovered /proc (docker run --security-opt systempaths=unconfined), or use --allow-weaker: Landlock and seccomp alone"
	case os.Getenv("BERM_SANDBOX") != "":
		return berm.Errorf(berm.Denied, "this is inside a sandbox of Berm already, where no other can be made: %w", err).WithHint("start it outside, or run the command as it is")
	case apparmor():
		cause = "AppArmor forbids user namespaces to programs without a profile (sysctl kernel.apparmor_restrict_unprivileged_userns=1)"
	case inside:
		cause = "user namespaces give no rights here: a security module such as AppArmor, or a seccomp filter, takes them"
	case refusal.Errno == unix.ENOSPC || refusal.Errno == unix.EUSERS:
		cause = "no more namespaces are allowed here: see the sysctls user.max_*_namespaces, and user namespaces in each other end at 32"
	case isZero("/proc/sys/user/max_user_namespaces"):
		cause = "sysctl user.max_user_namespaces=0 forbids user namespaces"
	case isZero("/proc/sys/kernel/unprivileged_userns_clone") && os.Geteuid() != 0:
		cause = "sysctl kernel.unprivileged_userns_clone=0 forbids user namespaces to ordinary users"
	case os.Geteuid() == 0 && effective()&(1<<unix.CAP_SETFCAP) == 0:
		cause = "root without the capability CAP_SETFCAP may not take itself into a user namespace"
	case refusal.Errno == unix.EINVAL:
		cause = "the kernel lacks namespaces"
	default:
		cause = "this process may not make user namespaces: a container without that right, or a seccomp filter, holds it"
	}
	if hint == "" {
		hint = "`berm doctor` tells what is missing; --allow-weaker runs the command under Landlock and seccomp alone"
	}
	return berm.Errorf(berm.Unsupported, "%s (%w)", cause, err).WithHint("%s", hint)
}

func apparmor() bool {
	value, err := os.ReadFile("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
	return err == nil && len(bytes.TrimSpace(value)) == 1 && value[0] == '1' && os.Geteuid() != 0
}

func isZero(sysctl string) bool {
	value, err := os.ReadFile(sysctl)
	return err == nil && string(bytes.TrimSpace(value)) == "0" && !errors.Is(err, fs.ErrNotExist)
}
