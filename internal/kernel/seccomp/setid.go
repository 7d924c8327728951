package seccomp

import (
	"maps"

	"golang.org/x/sys/unix"
)

// WithoutSetID is the profile for programs that write into directories of the host: no file
// can be given set-user-ID or set-group-ID bits. Inside they count nowhere; but outside, a
// set-uid program of whoever the files belong to is that user for everybody on the machine.
func (p Profile) WithoutSetID() Profile {
	without := Profile{p.name + ", without set-id bits", maps.Clone(p.policies), p.unlisted}
	for c, policy := range map[string]partial{
		"chmod":     withoutSetID(1),
		"fchmod":    withoutSetID(1),
		"fchmodat":  withoutSetID(2),
		"fchmodat2": withoutSetID(2),
		"creat":     withoutSetID(1),
		"open":      createWithoutSetID(1),
		"openat":    createWithoutSetID(2),
		// Its mode is in memory, out of a filter's sight; callers fall back to openat.
		"openat2": {fail(unix.ENOSYS), "never: ENOSYS, so that the caller falls back to openat"},
		"mknod":   nodeWithoutSetID("mknod", 1),
		"mknodat": nodeWithoutSetID("mknodat", 2),
	} {
		without.policies[c] = policy
	}
	return without
}

const setID = unix.S_ISUID | unix.S_ISGID

// createWithoutSetID looks at the mode after the argument flags, which is one only where a
// file may be made.
func createWithoutSetID(flags int) partial {
	const makes = unix.O_CREAT | unix.O_TMPFILE&^unix.O_DIRECTORY
	return partial{
		byArg{arg: flags, mask: makes, cases: []oneOf{{[]uint32{0}, allow}}, rest: withoutSetID(flags + 1).policy},
		"without set-user-ID and set-group-ID, else EPERM",
	}
}

func nodeWithoutSetID(call string, mode int) partial {
	return partial{
		byArg{arg: mode, mask: setID, cases: []oneOf{{[]uint32{0}, partials[call].policy}}, rest: fail(unix.EPERM)},
		"files, pipes and sockets without set-user-ID and set-group-ID, else EPERM",
	}
}
