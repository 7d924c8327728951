package filesystem

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berm-sandbox/berm/internal/guest/account"
	"github.com/berm-sandbox/berm/internal/guest/metadata"
	pb "github.com/berm-sandbox/berm/internal/proto/filesystem"
)

// entryInfo describes what is at path, shown under the name shown. A symbolic link is
// described itself, but type and mode are its target's.
func entryInfo(path, shown string) (*pb.EntryInfo, error) {
	fi, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	st := fi.Sys().(*syscall.Stat_t)
	e := &pb.EntryInfo{
		Name:         text(filepath.Base(shown)),
		Path:         text(shown),
		Type:         fileType(fi.Mode()),
		Size:         fi.Size(),
		Mode:         uint32(fi.Mode().Perm()),
		Permissions:  fi.Mode().String(),
		Owner:        text(account.UserName(st.Uid)),
		Group:        text(account.GroupName(st.Gid)),
		ModifiedTime: timestamppb.New(fi.ModTime()),
		Metadata:     metadata.Read(path),
	}
	if fi.Mode()&os.ModeSymlink == 0 {
		return e, nil
	}
	target, err := filepath.EvalSymlinks(path)
	if err != nil {
		target = path // it leads nowhere
	}
	target = text(target)
	e.SymlinkTarget = &target
	e.Type, e.Mode = pb.FileType_FILE_TYPE_UNSPECIFIED, 0
	if fi, err := os.Stat(path); err == nil {
		e.Type, e.Mode = fileType(fi.Mode()), uint32(fi.Mode().Perm())
	}
	return e, nil
}

func fileType(m os.FileMode) pb.FileType {
	switch {
	case m.IsRegular():
		return pb.FileType_FILE_TYPE_FILE
	case m.IsDir():
		return pb.FileType_FILE_TYPE_DIRECTORY
	case m&os.ModeSymlink != 0:
		return pb.FileType_FILE_TYPE_SYMLINK
	}
	return pb.FileType_FILE_TYPE_UNSPECIFIED
}

// text makes a file name fit a protobuf string: one name that is not UTF-8 would
// fail the whole message.
func text(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }
