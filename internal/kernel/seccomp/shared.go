package seccomp

import (
	"maps"

	"golang.org/x/sys/unix"
)

// Shared is the profile for programs that live in the host's namespaces, held by Landlock:
// it closes what Landlock does not see and a namespace would have kept apart, which is
// every socket, System V and POSIX IPC, and the scheduling and limits of other processes.
// The calls named in refuse fail as well.
func (p Profile) Shared(refuse ...string) Profile {
	shared := Profile{p.name + ", shared namespaces", maps.Clone(p.policies), p.unlisted}
	maps.Copy(shared.policies, sharedPartials())
	for _, c := range append(refuse, sharedDenied...) {
		shared.policies[c] = fail(eperm)
	}
	return shared
}

// sharedDenied are refused without a look. Sockets that a program got as a standard stream
// must not be connected anew, so all that names an address is among them. A watch of
// inotify tells what happens in directories that cannot be opened.
var sharedDenied = []string{
	"socket", "bind", "connect", "listen", "accept", "accept4", "inotify_add_watch",
	"mq_getsetattr", "mq_notify", "mq_open", "mq_timedreceive", "mq_timedsend", "mq_unlink",
	"msgctl", "msgget", "msgrcv", "msgsnd", "semctl", "semget", "semop", "semtimedop",
	"shmat", "shmctl", "shmdt", "shmget",
}

// own allows a call when the argument that names a process or thread is 0, the caller.
// By number it would reach every process of the same user.
func own(arg int) partial {
	return partial{byArg{arg: arg, cases: []oneOf{{[]uint32{0}, allow}}, rest: fail(eperm)}, "for the caller, named 0, else EPERM"}
}

// ownOf is own where an argument before it says what the number names.
func ownOf(process uint32) partial {
	return partial{
		byArg{arg: 0, cases: []oneOf{{[]uint32{process}, own(1).policy}}, rest: fail(eperm)},
		"for the caller, named 0, else EPERM",
	}
}

// withoutSetID refuses the set-user-ID and set-group-ID bits: Landlock does not hold back
// chmod, and a set-uid program of the user's is the user for everybody on the machine.
func withoutSetID(arg int) partial {
	return partial{
		byArg{arg: arg, mask: setID, cases: []oneOf{{[]uint32{0}, allow}}, rest: fail(eperm)},
		"without set-user-ID and set-group-ID, else EPERM",
	}
}

// noAttributes is what a file system without extended attributes answers, which programs
// that copy files live with.
var noAttributes = partial{fail(unix.EOPNOTSUPP), "never by path: EOPNOTSUPP"}

// Calls of the console's keyboard that make keys type what a program chose.
const (
	kdskbent  = 0x4b47
	kdskbsent = 0x4b49
)

const ioprioWhoProcess = 1

func sharedPartials() map[string]policy {
	return map[string]policy{
		"chmod":     withoutSetID(1),
		"fchmod":    withoutSetID(1),
		"fchmodat":  withoutSetID(2),
		"fchmodat2": withoutSetID(2),
		"ioctl": partial{
			byArg{arg: 1, cases: []oneOf{{[]uint32{unix.TIOCSTI, tioclinux, unix.TIOCSETD, kdskbent, kdskbsent}, fail(eperm)}}, rest: allow},
			"except TIOCSTI, TIOCLINUX, TIOCSETD, KDSKBENT and KDSKBSENT: EPERM",
		},
		"ioprio_set": ownOf(ioprioWhoProcess),
		// Every process of the user at once.
		"kill": partial{
			byArg{arg: 0, cases: []oneOf{{[]uint32{0xffffffff}, fail(eperm)}}, rest: allow},
			"except all processes at once (-1): EPERM",
		},
		"lremovexattr": noAttributes,
		"lsetxattr":    noAttributes,
		"prlimit64": partial{
			byArg{arg: 0, cases: []oneOf{{[]uint32{0}, partials["prlimit64"].policy}}, rest: fail(eperm)},
			"for the caller, named 0, else EPERM; setting the core file size does nothing and succeeds",
		},
		"removexattr":        noAttributes,
		"sched_setaffinity":  own(0),
		"sched_setattr":      own(0),
		"sched_setparam":     own(0),
		"sched_setscheduler": own(0),
		"setpriority":        ownOf(unix.PRIO_PROCESS),
		"setxattr":           noAttributes,
		// A pair of datagram sockets is not bound to each other: one can send to any address.
		"socketpair": partial{
			byArg{arg: 0, cases: []oneOf{{[]uint32{unix.AF_UNIX}, byArg{
				arg: 1, mask: 0xf, cases: []oneOf{{[]uint32{unix.SOCK_STREAM, unix.SOCK_SEQPACKET}, allow}}, rest: fail(unix.ESOCKTNOSUPPORT),
			}}}, rest: fail(unix.EAFNOSUPPORT)},
			"AF_UNIX streams and packets, else EAFNOSUPPORT or ESOCKTNOSUPPORT",
		},
	}
}
