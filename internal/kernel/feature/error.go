package feature

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// failed judges the error of a try: a call or option that the kernel lacks, or a right
// that this user lacks.
func failed(err error, what string) *berm.Error {
	kind := berm.Internal
	switch {
	case errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENODEV), errors.Is(err, unix.EINVAL),
		errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENXIO), errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EAFNOSUPPORT):
		kind = berm.Unsupported
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		kind = berm.Denied
	}
	return berm.Errorf(kind, "%s: %w", what, err)
}
