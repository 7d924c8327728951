package seccomp

import (
	"maps"

	"golang.org/x/sys/unix"
)

// WithoutGroup is the profile for programs that are in a process group of the host. A call
// that means "my group" reaches its other members whatever the pid namespace: their
// priorities stay as they are, and unless something else holds the signals, none is sent.
func (p Profile) WithoutGroup(signals bool) Profile {
	const pgrp = 2 // IOPRIO_WHO_PGRP
	without := Profile{p.name + ", without the caller's group", maps.Clone(p.policies), p.unlisted}
	except := func(call string, arg int, value uint32, text string) {
		without.policies[call] = partial{
			byArg{arg: arg, cases: []oneOf{{[]uint32{value}, fail(unix.EPERM)}}, rest: allow},
			"except " + text + ": EPERM",
		}
	}
	except("setpriority", 0, unix.PRIO_PGRP, "of a process group")
	except("ioprio_set", 0, pgrp, "of a process group")
	if signals {
		except("kill", 0, 0, "the caller's own process group")
		except("pidfd_send_signal", 3, unix.PIDFD_SIGNAL_PROCESS_GROUP, "process groups")
	}
	return without
}
