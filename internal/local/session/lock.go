package session

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// Lock makes the session the caller's alone until Unlock or the end of the process, and reads
// its description again. The error is Conflict when somebody has it.
func (s *Session) Lock() error {
	if err := s.flockPatiently(); err != nil {
		return err
	}
	if err := s.load(); err != nil {
		s.Unlock()
		return err
	}
	return nil
}

// Unlock lets others use the session.
func (s *Session) Unlock() {
	if s.lock != nil {
		s.lock.Close()
		s.lock = nil
	}
}

// Running says whether somebody has the session locked.
func (s *Session) Running() bool {
	if s.lock != nil {
		return true
	}
	probe := &Session{Name: s.Name, store: s.store}
	defer probe.Unlock()
	return berm.KindOf(probe.flock()) == berm.Conflict
}

// flockPatiently waits out those who only look whether the session is locked, on a busy machine too.
func (s *Session) flockPatiently() error {
	for until := time.Now().Add(200 * time.Millisecond); ; time.Sleep(time.Millisecond) {
		err := s.flock()
		if berm.KindOf(err) != berm.Conflict || time.Now().After(until) {
			return err
		}
	}
}

// flock locks the session's directory itself: the kernel drops the lock with its holder, and
// no file has to be made.
func (s *Session) flock() error {
	if s.lock != nil {
		return nil
	}
	dir, err := s.store.root.Open(s.Name)
	if err != nil {
		return s.missing(err)
	}
	for err = unix.EINTR; errors.Is(err, unix.EINTR); {
		err = unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		err = berm.Errorf(berm.Conflict, "session %s is running%s", s.Name, holder(dir)).
			WithHint("wait for it to end, or start another session")
	case err != nil:
		// NFS makes of it a lock that a directory cannot have.
		err = berm.Errorf(berm.Unsupported, "lock the session %s: %w", s.Name, err).
			WithHint("set XDG_STATE_HOME to a directory on a local file system")
	default:
		// It may have been removed, and its name used again, since it was opened.
		var now os.FileInfo
		mine, statErr := dir.Stat()
		if now, err = s.store.root.Lstat(s.Name); err == nil && statErr == nil && os.SameFile(mine, now) {
			s.lock = dir
			return nil
		}
		err = s.missing(os.ErrNotExist)
	}
	dir.Close()
	return err
}

// holder returns ": pid N" of the process that holds a lock on dir, and "" when the kernel
// does not tell (proc_locks(5): other pid namespaces are not shown).
func holder(dir *os.File) string {
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return ""
	}
	locks, err := os.Open("/proc/locks")
	if err != nil {
		return ""
	}
	defer locks.Close()
	file := fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	for lines := bufio.NewScanner(locks); lines.Scan(); {
		// 1: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF
		if f := strings.Fields(lines.Text()); len(f) >= 6 && f[1] == "FLOCK" && f[5] == file {
			return ": pid " + f[4]
		}
	}
	return ""
}
