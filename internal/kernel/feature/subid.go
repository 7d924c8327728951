package feature

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// The tables of subordinate ids.
const (
	SubUIDFile = "/etc/subuid"
	SubGIDFile = "/etc/subgid"
)

// SubordinateRange returns the first run of at least berm.IDsPerSandbox ids that a table
// (SubUIDFile, SubGIDFile) gives to a user. Unsupported when there is none.
func SubordinateRange(file string, u *user.User) (berm.IDRange, error) {
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return berm.IDRange{}, noRange(file, u)
	}
	if err != nil {
		return berm.IDRange{}, failed(err, "read subordinate ids")
	}
	defer f.Close()
	r, ok := findRange(f, u)
	if !ok {
		return berm.IDRange{}, noRange(file, u)
	}
	return r, nil
}

func findRange(table io.Reader, u *user.User) (berm.IDRange, bool) {
	lines := bufio.NewScanner(table)
	for lines.Scan() {
		fields := strings.Split(strings.TrimSpace(lines.Text()), ":")
		if len(fields) != 3 || fields[0] != u.Username && fields[0] != u.Uid {
			continue
		}
		base, err1 := strconv.ParseUint(fields[1], 10, 32)
		count, err2 := strconv.ParseUint(fields[2], 10, 32)
		if err1 == nil && err2 == nil && count >= berm.IDsPerSandbox && base > 0 && base+count <= 1<<32 {
			return berm.IDRange{Base: uint32(base), Count: uint32(count)}, true
		}
	}
	return berm.IDRange{}, false
}

func noRange(file string, u *user.User) error {
	return berm.Errorf(berm.Unsupported, "%s gives user %s no %d ids", file, u.Username, berm.IDsPerSandbox).
		WithHint("as root: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 %s", u.Username)
}

// SubordinateIDs is giving a sandbox of an ordinary user more than one id: the programs
// newuidmap and newgidmap, and a range in the tables.
var SubordinateIDs = &Test{
	Name: "subordinate ids", Fix: "install newuidmap and newgidmap (package uidmap)",
	try: func(ctx context.Context) (string, error) {
		if os.Geteuid() == 0 {
			return "not needed as root", nil
		}
		u, err := user.Current()
		if err != nil { // not in the table of users; an entry can name the number
			u = &user.User{Uid: strconv.Itoa(os.Geteuid()), Username: strconv.Itoa(os.Geteuid())}
		}
		cmd := exec.CommandContext(ctx, "/proc/self/exe")
		cmd.Args = []string{childName, "wait"}
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER}
		gate, err := cmd.StdinPipe()
		if err != nil {
			return "", failed(err, "make a pipe")
		}
		if err := cmd.Start(); err != nil {
			return "", refused(failed(err, "make a user namespace"))
		}
		defer func() {
			gate.Close()
			_ = cmd.Wait() // it only waited for the gate
		}()
		var used []string
		for program, file := range map[string]string{"newuidmap": SubUIDFile, "newgidmap": SubGIDFile} {
			ids, err := SubordinateRange(file, u)
			if err != nil {
				return "", err
			}
			path, err := exec.LookPath(program)
			if err != nil {
				return "", berm.Errorf(berm.Unsupported, "%w", err)
			}
			out, err := exec.CommandContext(ctx, path, strconv.Itoa(cmd.Process.Pid), "0", fmt.Sprint(ids.Base), fmt.Sprint(berm.IDsPerSandbox)).CombinedOutput()
			if err != nil {
				return "", berm.Errorf(berm.Denied, "%s: %w: %s", program, err, strings.TrimSpace(string(out))).
					WithHint("%s must be set-uid root or have the file capability for it", path)
			}
			if program == "newuidmap" {
				used = append(used, fmt.Sprintf("%d ids from %d", ids.Count, ids.Base))
			}
		}
		return strings.Join(used, ""), nil
	},
}
