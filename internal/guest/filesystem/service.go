// Package filesystem looks at, changes and watches files inside the sandbox. It
// has root's rights there; what it makes it gives to the caller's user.
package filesystem

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"connectrpc.com/connect"

	"github.com/berm-sandbox/berm/internal/guest/account"
	"github.com/berm-sandbox/berm/internal/guest/config"
	"github.com/berm-sandbox/berm/internal/guest/rpc"
	pb "github.com/berm-sandbox/berm/internal/proto/filesystem"
)

// maxEntries bounds one listing, which is held in memory.
const maxEntries = 100_000

// Service serves filesystem.Filesystem.
type Service struct {
	config *config.Config

	mu       sync.Mutex
	watchers map[string]*polled // by id
}

// NewService returns a service without watchers.
func NewService(c *config.Config) *Service {
	return &Service{config: c, watchers: map[string]*polled{}}
}

// resolve finds the user of a call and makes a path of its absolute.
func (s *Service) resolve(h http.Header, path string) (*account.Account, string, error) {
	user, err := rpc.Account(s.config, h)
	if err != nil {
		return nil, "", err
	}
	path, err = user.Resolve(path, s.config.Workdir())
	if err != nil {
		return nil, "", connect.NewError(connect.CodeInvalidArgument, err)
	}
	return user, path, nil
}

// fault maps a file system error to a code.
func fault(err error) error {
	code := connect.CodeInternal
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		code = connect.CodeNotFound
	case errors.Is(err, os.ErrPermission):
		code = connect.CodePermissionDenied
	case errors.Is(err, syscall.ELOOP):
		code = connect.CodeFailedPrecondition
	case errors.Is(err, syscall.ENAMETOOLONG):
		code = connect.CodeInvalidArgument
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		code = connect.CodeResourceExhausted
	}
	return connect.NewError(code, err)
}

func entryOf(path string) (*pb.EntryInfo, error) {
	e, err := entryInfo(path, path)
	if err != nil {
		return nil, fault(err)
	}
	return e, nil
}

// Stat describes what is at a path.
func (s *Service) Stat(_ context.Context, req *connect.Request[pb.StatRequest]) (*connect.Response[pb.StatResponse], error) {
	_, path, err := s.resolve(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	e, err := entryOf(path)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.StatResponse{Entry: e}), nil
}

// MakeDir makes a directory with its parents.
func (s *Service) MakeDir(_ context.Context, req *connect.Request[pb.MakeDirRequest]) (*connect.Response[pb.MakeDirResponse], error) {
	user, path, err := s.resolve(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	if fi, err := os.Stat(path); err == nil {
		if fi.IsDir() {
			return nil, connect.NewError(connect.CodeAlreadyExists, fmt.Errorf("directory already exists: %s", path))
		}
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("path already exists but it is not a directory: %s", path))
	}
	if err := user.MakeDirs(path); err != nil {
		if errors.Is(err, syscall.ENOTDIR) {
			return nil, connect.NewError(connect.CodeInvalidArgument, err)
		}
		return nil, fault(err)
	}
	e, err := entryOf(path)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.MakeDirResponse{Entry: e}), nil
}

// Move renames a file or directory, replacing a file that is in the way.
func (s *Service) Move(_ context.Context, req *connect.Request[pb.MoveRequest]) (*connect.Response[pb.MoveResponse], error) {
	user, from, err := s.resolve(req.Header(), req.Msg.GetSource())
	if err != nil {
		return nil, err
	}
	to, err := user.Resolve(req.Msg.GetDestination(), s.config.Workdir())
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	if _, err := os.Lstat(from); err != nil {
		return nil, fault(err) // before directories are made for nothing
	}
	if err := user.MakeDirs(filepath.Dir(to)); err != nil {
		return nil, fault(err)
	}
	if err := os.Rename(from, to); err != nil {
		return nil, fault(err)
	}
	e, err := entryOf(to)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.MoveResponse{Entry: e}), nil
}

// Remove removes whatever is at a path.
func (s *Service) Remove(_ context.Context, req *connect.Request[pb.RemoveRequest]) (*connect.Response[pb.RemoveResponse], error) {
	_, path, err := s.resolve(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	if err := os.RemoveAll(path); err != nil {
		return nil, connect.NewError(connect.CodeInternal, err)
	}
	return connect.NewResponse(&pb.RemoveResponse{}), nil
}

// ListDir lists a directory, in lexical order, each directory before what is in it.
func (s *Service) ListDir(ctx context.Context, req *connect.Request[pb.ListDirRequest]) (*connect.Response[pb.ListDirResponse], error) {
	_, path, err := s.resolve(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	root, err := directory(path)
	if err != nil {
		return nil, err
	}
	l := lister{ctx: ctx}
	if err := l.list(root, path, int(max(1, min(req.Msg.GetDepth(), maxEntries)))); err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.ListDirResponse{Entries: l.entries}), nil
}

// directory follows symbolic links to the directory that path means.
func directory(path string) (string, error) {
	fi, err := os.Stat(path) // the kernel's limit of links gives ELOOP
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			err = fmt.Errorf("path not found: %w", err)
		}
		return "", fault(err)
	}
	if !fi.IsDir() {
		return "", connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("path is not a directory: %s", path))
	}
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return "", fault(err)
	}
	return real, nil
}

type lister struct {
	ctx     context.Context
	entries []*pb.EntryInfo
}

// list adds what is in dir, shown as below shown. What vanishes meanwhile is left out, and so is what
// is in a directory that even the agent may not read, as some of /proc are.
func (l *lister) list(dir, shown string, depth int) error {
	names, err := readDir(dir)
	if err != nil {
		if len(l.entries) > 0 && (unseen(err) || errors.Is(err, os.ErrPermission)) {
			return nil
		}
		return fault(err)
	}
	for _, d := range names {
		if l.ctx.Err() != nil {
			return rpc.Done(l.ctx)
		}
		path, shown := filepath.Join(dir, d.Name()), filepath.Join(shown, d.Name())
		e, err := entryInfo(path, shown)
		if unseen(err) {
			continue
		}
		if err != nil {
			return fault(err)
		}
		if len(l.entries) == maxEntries {
			return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("more than %d entries: list with less depth", maxEntries))
		}
		l.entries = append(l.entries, e)
		if d.IsDir() && depth > 1 {
			if err := l.list(path, shown, depth-1); err != nil {
				return err
			}
		}
	}
	return nil
}

// unseen says whether an error is that something has vanished; of a process, proc(5) says it so.
func unseen(err error) bool { return errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) }

// readDir reads a directory in lexical order, and no more of it than a listing can hold.
func readDir(dir string) ([]os.DirEntry, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	names, err := f.ReadDir(maxEntries + 1)
	if err != nil && err != io.EOF {
		return nil, err
	}
	slices.SortFunc(names, func(a, b os.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	return names, nil
}
