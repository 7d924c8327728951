// Package account finds users in /etc/passwd and /etc/group and resolves paths on
// their behalf.
//
// The files are parsed here: os/user without cgo does not know supplementary
// groups by name service, and with cgo the agent could not be static. Whatever a
// sandbox writes into the two files is only read under limits.
package account

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

const (
	passwdFile = "/etc/passwd"
	groupFile  = "/etc/group"

	maxFile  = 4 << 20 // bytes read of either file
	maxLine  = 64 << 10
	maxGroup = 65536 // NGROUPS_MAX: setgroups takes no more
)

// Account is one user.
type Account struct {
	Name   string
	UID    uint32
	GID    uint32
	Home   string
	Groups []uint32 // every group of the user, GID included
}

// ErrUnknown is returned by Lookup for a name that /etc/passwd lacks.
var ErrUnknown = errors.New("unknown user")

// Lookup finds a user by name.
func Lookup(name string) (*Account, error) {
	var found *Account
	err := scan(passwdFile, func(line string) bool {
		a, ok := parsePasswd(line)
		if ok && a.Name == name {
			found = a
		}
		return found == nil
	})
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	if found == nil {
		if name == "root" && errors.Is(err, os.ErrNotExist) {
			found = &Account{Name: "root", Home: "/root"} // an image with no /etc at all
		} else {
			return nil, fmt.Errorf("%w %q", ErrUnknown, name)
		}
	}
	found.Groups = []uint32{found.GID}
	err = scan(groupFile, func(line string) bool {
		g, ok := parseGroup(line)
		if ok && g.gid != found.GID && slices.Contains(g.members, name) {
			found.Groups = append(found.Groups, g.gid)
		}
		return len(found.Groups) < maxGroup
	})
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	return found, nil
}

// parsePasswd reads one line of /etc/passwd, name:password:uid:gid:comment:home:shell.
func parsePasswd(line string) (*Account, bool) {
	f := strings.Split(line, ":")
	if len(f) < 6 || f[0] == "" || f[0][0] == '#' {
		return nil, false
	}
	uid, ok1 := parseID(f[2])
	gid, ok2 := parseID(f[3])
	if !ok1 || !ok2 {
		return nil, false
	}
	home := f[5]
	if !strings.HasPrefix(home, "/") {
		home = "/"
	}
	return &Account{Name: f[0], UID: uid, GID: gid, Home: home}, true
}

type group struct {
	name    string
	gid     uint32
	members []string
}

// parseGroup reads one line of /etc/group, name:password:gid:member,member.
func parseGroup(line string) (group, bool) {
	f := strings.Split(line, ":")
	if len(f) < 4 || f[0] == "" || f[0][0] == '#' {
		return group{}, false
	}
	gid, ok := parseID(f[2])
	return group{f[0], gid, strings.Split(f[3], ",")}, ok
}

// parseID refuses 2³²-1, which chown and setuid read as "leave it".
func parseID(s string) (uint32, bool) {
	id, err := strconv.ParseUint(s, 10, 32)
	return uint32(id), err == nil && id != 1<<32-1
}

// scan calls line for each line of a file until it returns false. Lines that are
// too long are passed over.
func scan(file string, line func(string) bool) error {
	// Never block on what somebody put there in place of the file.
	f, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	r := bufio.NewReaderSize(io.LimitReader(f, maxFile), 4096)
	var long []byte // a line that does not fit r's buffer
	for {
		part, err := r.ReadSlice('\n')
		if err == bufio.ErrBufferFull {
			if len(long) <= maxLine {
				long = append(long, part...)
			}
			continue
		}
		if len(long) > 0 {
			part = append(long, part...)
			long = long[:0]
		}
		if len(part) <= maxLine && !line(strings.TrimRight(string(part), "\r\n")) {
			return nil
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// names maps ids to names, read again when the file has changed.
type names struct {
	file  string
	parse func(line string) (id uint32, name string, ok bool)

	mu    sync.Mutex
	stamp stamp
	byID  map[uint32]string
}

// stamp tells one state of a file from another.
type stamp struct {
	ino   uint64
	size  int64
	ctime syscall.Timespec
}

var (
	users = names{file: passwdFile, parse: func(line string) (uint32, string, bool) {
		a, ok := parsePasswd(line)
		if !ok {
			return 0, "", false
		}
		return a.UID, a.Name, true
	}}
	groups = names{file: groupFile, parse: func(line string) (uint32, string, bool) {
		g, ok := parseGroup(line)
		return g.gid, g.name, ok
	}}
)

// UserName returns the name of a user id, or the id in digits.
func UserName(uid uint32) string { return users.name(uid) }

// GroupName returns the name of a group id, or the id in digits.
func GroupName(gid uint32) string { return groups.name(gid) }

func (n *names) name(id uint32) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var st syscall.Stat_t
	if syscall.Stat(n.file, &st) != nil {
		n.byID = nil
	} else if now := (stamp{st.Ino, st.Size, st.Ctim}); n.byID == nil || n.stamp != now {
		n.byID, n.stamp = map[uint32]string{}, now
		_ = scan(n.file, func(line string) bool {
			if id, name, ok := n.parse(line); ok {
				if _, dup := n.byID[id]; !dup {
					n.byID[id] = name
				}
			}
			return true
		})
	}
	if name, ok := n.byID[id]; ok {
		return name
	}
	return strconv.FormatUint(uint64(id), 10)
}
