package filesystem

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/guest/rpc"
	pb "github.com/berm-sandbox/berm/internal/proto/filesystem"
)

// maxPolled bounds what waits for a client that polls: as much as the kernel queues.
const maxPolled = 16384

// watchRequest is what the two kinds of watches are asked with.
type watchRequest interface {
	GetPath() string
	GetRecursive() bool
	GetIncludeEntry() bool
	GetAllowNetworkMounts() bool
}

// watch starts watching.
func (s *Service) watch(h http.Header, req watchRequest) (*inotify, error) {
	_, path, err := s.resolve(h, req.GetPath())
	if err != nil {
		return nil, err
	}
	if _, err := directory(path); err != nil {
		return nil, err
	}
	if !req.GetAllowNetworkMounts() && remote(path) {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("cannot watch path on network filesystem: %s", path))
	}
	w, err := newInotify(path, req.GetRecursive())
	if err != nil {
		return nil, watchFault(err)
	}
	return w, nil
}

// watchFault maps an error of a watch. The kernel's limits of instances and watches
// are EMFILE and ENOSPC.
func watchFault(err error) error {
	if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENOSPC) || errors.Is(err, errTooLarge) {
		return connect.NewError(connect.CodeResourceExhausted, err)
	}
	return fault(err)
}

// remote says whether path is on a file system where inotify does not see what
// other machines do. That of the root never is: gVisor's kernel calls it a 9p one, and has it
// for itself.
func remote(path string) bool {
	var st unix.Statfs_t
	var own, root unix.Stat_t
	if unix.Statfs(path, &st) != nil || unix.Stat(path, &own) != nil || unix.Stat("/", &root) != nil || own.Dev == root.Dev {
		return false
	}
	switch uint32(st.Type) {
	case unix.NFS_SUPER_MAGIC, unix.CIFS_SUPER_MAGIC, unix.SMB_SUPER_MAGIC, unix.SMB2_SUPER_MAGIC, unix.FUSE_SUPER_MAGIC, unix.V9FS_MAGIC:
		return true
	}
	return false
}

// event makes the event of a change. The entry is left out where the name is free
// again: something else may have taken it.
func event(root string, c change, withEntry bool) *pb.FilesystemEvent {
	ev := &pb.FilesystemEvent{Name: text(c.name), Type: c.typ}
	switch c.typ {
	case pb.EventType_EVENT_TYPE_CREATE, pb.EventType_EVENT_TYPE_WRITE, pb.EventType_EVENT_TYPE_CHMOD:
		if withEntry {
			path := filepath.Join(root, c.name)
			ev.Entry, _ = entryInfo(path, path)
		}
	}
	return ev
}

// WatchDir streams changes until the client leaves.
func (s *Service) WatchDir(ctx context.Context, req *connect.Request[pb.WatchDirRequest], stream *connect.ServerStream[pb.WatchDirResponse]) error {
	w, err := s.watch(req.Header(), req.Msg)
	if err != nil {
		return err
	}
	defer w.close()
	if err := stream.Send(&pb.WatchDirResponse{Event: &pb.WatchDirResponse_Start{Start: &pb.WatchDirResponse_StartEvent{}}}); err != nil {
		return err
	}
	changes := make(chan change)
	broken := make(chan error, 1)
	go func() {
		broken <- w.run(func(c change) bool {
			select {
			case changes <- c:
				return true
			case <-ctx.Done():
				return false
			}
		})
	}()
	interval := rpc.KeepAlive(req.Header())
	alive := time.NewTicker(interval)
	defer alive.Stop()
	for {
		var resp *pb.WatchDirResponse
		select {
		case c := <-changes:
			resp = &pb.WatchDirResponse{Event: &pb.WatchDirResponse_Filesystem{Filesystem: event(w.root, c, req.Msg.GetIncludeEntry())}}
			alive.Reset(interval)
		case <-alive.C:
			resp = &pb.WatchDirResponse{Event: &pb.WatchDirResponse_Keepalive{Keepalive: &pb.WatchDirResponse_KeepAlive{}}}
		case <-ctx.Done():
			return rpc.Done(ctx)
		case err := <-broken:
			if ctx.Err() != nil {
				return rpc.Done(ctx)
			}
			return watchFault(err)
		}
		if err := stream.Send(resp); err != nil {
			return err
		}
	}
}

// polled is a watch whose events wait to be fetched.
type polled struct {
	w *inotify

	mu     sync.Mutex
	events []*pb.FilesystemEvent
	err    error // the watch is broken
}

// CreateWatcher starts a watch whose events are fetched later.
func (s *Service) CreateWatcher(_ context.Context, req *connect.Request[pb.CreateWatcherRequest]) (*connect.Response[pb.CreateWatcherResponse], error) {
	w, err := s.watch(req.Header(), req.Msg)
	if err != nil {
		return nil, err
	}
	p := &polled{w: w}
	withEntry := req.Msg.GetIncludeEntry()
	go func() {
		err := w.run(func(c change) bool {
			ev := event(w.root, c, withEntry)
			p.mu.Lock()
			defer p.mu.Unlock()
			if len(p.events) == maxPolled {
				p.events = nil
				return false
			}
			p.events = append(p.events, ev)
			return true
		})
		if err == nil {
			err = errLost
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.err = err
		w.close()
	}()
	id := "w" + rand.Text()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watchers[id] = p
	return connect.NewResponse(&pb.CreateWatcherResponse{WatcherId: id}), nil
}

func (s *Service) watcher(id string) (*polled, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.watchers[id]; p != nil {
		return p, nil
	}
	return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("watcher with id %.64q not found", id))
}

// GetWatcherEvents returns the events since the last call.
func (s *Service) GetWatcherEvents(_ context.Context, req *connect.Request[pb.GetWatcherEventsRequest]) (*connect.Response[pb.GetWatcherEventsResponse], error) {
	p, err := s.watcher(req.Msg.GetWatcherId())
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil && len(p.events) == 0 {
		return nil, watchFault(p.err)
	}
	resp := &pb.GetWatcherEventsResponse{Events: p.events}
	p.events = nil
	return connect.NewResponse(resp), nil
}

// RemoveWatcher ends a watch.
func (s *Service) RemoveWatcher(_ context.Context, req *connect.Request[pb.RemoveWatcherRequest]) (*connect.Response[pb.RemoveWatcherResponse], error) {
	p, err := s.watcher(req.Msg.GetWatcherId())
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	delete(s.watchers, req.Msg.GetWatcherId())
	s.mu.Unlock()
	p.w.close()
	return connect.NewResponse(&pb.RemoveWatcherResponse{}), nil
}
