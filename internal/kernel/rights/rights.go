// Package rights takes descriptors out of the control messages of Unix sockets (SCM_RIGHTS, unix(7)).
package rights

import (
	"os"

	"golang.org/x/sys/unix"
)

// Space is room for the control message that brings up to n descriptors.
func Space(n int) []byte { return make([]byte, unix.CmsgSpace(4*n)) }

// Files returns the descriptors of a control message, which are the caller's to close, under a name for
// errors. None come where the receiver has no numbers left: the kernel drops them. They are closed on
// execution if the message was read with MSG_CMSG_CLOEXEC, as Go does.
func Files(control []byte, name string) []*os.File {
	var files []*os.File
	messages, _ := unix.ParseSocketControlMessage(control)
	for i := range messages {
		fds, _ := unix.ParseUnixRights(&messages[i])
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), name))
		}
	}
	return files
}

// File returns the descriptor of a control message that is to bring one, as Files does; nil when there is
// none, or more, which are closed.
func File(control []byte, name string) *os.File {
	files := Files(control, name)
	if len(files) == 1 {
		return files[0]
	}
	for _, f := range files {
		f.Close()
	}
	return nil
}
