package session

import (
	"errors"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// copyXattrs copies the attributes that a sandbox can set and that have a meaning in a
// workspace: those of users, overlayfs's among them, and access lists.
func copyXattrs(from, to int) error {
	size, err := unix.Flistxattr(from, nil)
	if errors.Is(err, unix.EOPNOTSUPP) || err == nil && size == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	list := make([]byte, maxXattrs) // the kernel's own limit (XATTR_LIST_MAX)
	if size, err = unix.Flistxattr(from, list); err != nil {
		return err
	}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(list[:size]), "\x00"), "\x00") {
		if !strings.HasPrefix(name, "user.") && !strings.HasPrefix(name, "system.posix_acl_") {
			continue
		}
		value := make([]byte, maxXattrs) // XATTR_SIZE_MAX
		n, err := unix.Fgetxattr(from, name, value)
		if errors.Is(err, unix.ENODATA) {
			continue
		}
		if err != nil {
			return err
		}
		if err := unix.Fsetxattr(to, name, value[:n], 0); err != nil {
			return berm.Errorf(berm.Internal, "set the attribute %q: %w", name, err)
		}
	}
	return nil
}
