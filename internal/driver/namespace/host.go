package namespace

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"strconv"
	"strings"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/namespace/launch"
)

// host is what this process may do on this machine; it does not change while the
// process lives.
type host struct {
	kind     launch.IDKind
	uids     launch.IDs // of an ordinary user; root's are in the spec
	degraded []string
}

// newHost finds out how ids can be mapped.
func newHost() host {
	if os.Geteuid() == 0 {
		return host{kind: launch.Leased}
	}
	// Which limits there are is found out for each sandbox; this is so for all.
	const inMemory = "what sandboxes write with a disk limit lies in memory: only root can limit files on disk"
	uid, gid := os.Geteuid(), os.Getegid()
	names := []string{strconv.Itoa(uid)}
	if me, err := user.LookupId(names[0]); err == nil {
		names = append(names, me.Username)
	}
	uids, gids := subordinate("/etc/subuid", names), subordinate("/etc/subgid", names)
	_, err := exec.LookPath("newuidmap")
	switch {
	case err != nil:
		err = fmt.Errorf("newuidmap is not installed")
	case uids.Count < berm.IDsPerSandbox || gids.Count < berm.IDsPerSandbox:
		err = fmt.Errorf("/etc/subuid and /etc/subgid give this user no %d ids", berm.IDsPerSandbox)
	default:
		return host{kind: launch.Subordinate, degraded: []string{inMemory}, uids: launch.IDs{
			Kind: launch.Subordinate,
			UIDs: []launch.Range{{Inside: 0, Outside: int(uids.Base), Count: berm.IDsPerSandbox}},
			GIDs: []launch.Range{{Inside: 0, Outside: int(gids.Base), Count: berm.IDsPerSandbox}},
		}}
	}
	return host{kind: launch.Single, degraded: []string{"the only user id inside is 0: " + err.Error(), inMemory}, uids: launch.IDs{
		Kind: launch.Single,
		UIDs: []launch.Range{{Inside: 0, Outside: uid, Count: 1}},
		GIDs: []launch.Range{{Inside: 0, Outside: gid, Count: 1}},
	}}
}

// AllIDs is why a sandbox has not all ids here, but one; nil if it has.
func AllIDs() error {
	if h := newHost(); h.kind == launch.Single {
		return berm.Errorf(berm.Unsupported, "%s", h.degraded[0])
	}
	return nil
}

// ids is the map of a sandbox.
func (h host) ids(spec berm.Spec) launch.IDs {
	if h.kind != launch.Leased {
		return h.uids
	}
	leased := []launch.Range{{Inside: 0, Outside: int(spec.IDs.Base), Count: int(spec.IDs.Count)}}
	return launch.IDs{Kind: launch.Leased, UIDs: leased, GIDs: leased}
}

// subordinate returns the first range that a file such as /etc/subuid gives one of
// names.
func subordinate(file string, names []string) berm.IDRange {
	f, err := os.Open(file)
	if err != nil {
		return berm.IDRange{}
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Split(lines.Text(), ":")
		if len(fields) != 3 {
			continue
		}
		base, errBase := strconv.ParseUint(fields[1], 10, 32)
		count, errCount := strconv.ParseUint(fields[2], 10, 32)
		for _, name := range names {
			if fields[0] == name && errBase == nil && errCount == nil {
				return berm.IDRange{Base: uint32(base), Count: uint32(count)}
			}
		}
	}
	return berm.IDRange{}
}
