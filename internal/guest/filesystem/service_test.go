package filesystem

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"os/user"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/guest/config"
	pb "github.com/berm-sandbox/berm/internal/proto/filesystem"
	"github.com/berm-sandbox/berm/internal/proto/filesystem/filesystemconnect"
)

// serve runs a service whose default user is the one that runs the test and whose
// working directory is a new one.
func serve(t *testing.T, options ...connect.ClientOption) (filesystemconnect.FilesystemClient, string) {
	t.Helper()
	syscall.Umask(0o022)
	me, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	c, _ := config.Open(nil, "")
	if err := c.Init([]byte(`{"defaultUser":"` + me.Username + `","defaultWorkdir":"` + dir + `"}`)); err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle(filesystemconnect.NewFilesystemHandler(NewService(c)))
	srv := httptest.NewServer(mux)
	t.Cleanup(func() { srv.CloseClientConnections(); srv.Close() })
	return filesystemconnect.NewFilesystemClient(srv.Client(), srv.URL, options...), dir
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func stat(t *testing.T, c filesystemconnect.FilesystemClient, path string) (*pb.EntryInfo, error) {
	t.Helper()
	resp, err := c.Stat(t.Context(), connect.NewRequest(&pb.StatRequest{Path: path}))
	if err != nil {
		return nil, err
	}
	return resp.Msg.GetEntry(), nil
}

func TestStat(t *testing.T) {
	for name, options := range map[string][]connect.ClientOption{"proto": nil, "json": {connect.WithProtoJSON()}} {
		t.Run(name, func(t *testing.T) {
			c, dir := serve(t, options...)
			write(t, dir+"/f", "four")
			me, _ := user.Current()
			group, _ := user.LookupGroupId(me.Gid)
			e, err := stat(t, c, dir+"/f")
			if err != nil {
				t.Fatal(err)
			}
			if e.GetName() != "f" || e.GetPath() != dir+"/f" || e.GetType() != pb.FileType_FILE_TYPE_FILE || e.GetSize() != 4 || e.GetMode() != 0o644 ||
				e.GetPermissions() != "-rw-r--r--" || e.GetOwner() != me.Username || e.GetGroup() != group.Name || e.SymlinkTarget != nil ||
				e.Metadata != nil || time.Since(e.GetModifiedTime().AsTime()) > time.Minute {
				t.Errorf("file: %v", e)
			}
			os.Symlink("f", dir+"/link")
			e, err = stat(t, c, dir+"/link")
			if err != nil || e.GetType() != pb.FileType_FILE_TYPE_FILE || e.GetSymlinkTarget() != dir+"/f" || e.GetMode() != 0o644 || e.GetPermissions()[0] != 'L' {
				t.Errorf("link: %v, %v", e, err)
			}
			os.Symlink("nowhere", dir+"/dangling")
			e, err = stat(t, c, dir+"/dangling")
			if err != nil || e.GetType() != pb.FileType_FILE_TYPE_UNSPECIFIED || e.GetSymlinkTarget() == "" {
				t.Errorf("dangling: %v, %v", e, err)
			}
			if err := unix.Setxattr(dir+"/f", "user.e2b.author", []byte("x"), 0); err == nil {
				unix.Setxattr(dir+"/f", "user.e2b.bad", []byte{0xff}, 0)
				unix.Setxattr(dir+"/f", "user.other", []byte("x"), 0)
				if e, err = stat(t, c, dir+"/f"); err != nil || len(e.GetMetadata()) != 1 || e.GetMetadata()["author"] != "x" {
					t.Errorf("metadata: %v, %v", e, err)
				}
			} else if !errors.Is(err, syscall.EOPNOTSUPP) {
				t.Error(err)
			}
			for _, missing := range []string{dir + "/none", dir + "/f/below"} {
				if _, err = stat(t, c, missing); connect.CodeOf(err) != connect.CodeNotFound {
					t.Errorf("%s: %v", missing, err)
				}
			}
			if e, err = stat(t, c, ""); err != nil || e.GetPath() != dir {
				t.Errorf("empty path: %v, %v", e, err)
			}
			unix.Mkfifo(dir+"/fifo", 0o600)
			if e, err = stat(t, c, dir+"/fifo"); err != nil || e.GetType() != pb.FileType_FILE_TYPE_UNSPECIFIED {
				t.Errorf("FIFO: %v, %v", e, err)
			}
		})
	}
}

func TestListDir(t *testing.T) {
	c, dir := serve(t)
	write(t, dir+"/b/x/deep", "")
	write(t, dir+"/b/y", "")
	write(t, dir+"/a", "")
	write(t, dir+"/b.txt", "")
	write(t, dir+"/bad\xffname", "") // would fail the message if it were passed on
	os.Symlink("b", dir+"/link")
	os.Symlink("loop", dir+"/loop")
	list := func(path string, depth uint32) (string, error) {
		resp, err := c.ListDir(t.Context(), connect.NewRequest(&pb.ListDirRequest{Path: path, Depth: depth}))
		if err != nil {
			return "", err
		}
		var names []string
		for _, e := range resp.Msg.GetEntries() {
			names = append(names, strings.TrimPrefix(e.GetPath(), dir+"/"))
		}
		return strings.Join(names, " "), nil
	}
	for _, tc := range []struct {
		path  string
		depth uint32
		want  string
	}{
		{dir, 0, "a b b.txt bad\uFFFDname link loop"},
		{dir, 1, "a b b.txt bad\uFFFDname link loop"},
		{dir, 2, "a b b/x b/y b.txt bad\uFFFDname link loop"},
		{dir, 9, "a b b/x b/x/deep b/y b.txt bad\uFFFDname link loop"},
		{dir + "/link", 1, "link/x link/y"},
	} {
		if got, err := list(tc.path, tc.depth); err != nil || got != tc.want {
			t.Errorf("%s at depth %d: %q, %v; want %q", tc.path, tc.depth, got, err, tc.want)
		}
	}
	for path, want := range map[string]connect.Code{
		dir + "/none": connect.CodeNotFound,
		dir + "/a":    connect.CodeInvalidArgument,
		dir + "/loop": connect.CodeFailedPrecondition,
	} {
		if _, err := list(path, 1); connect.CodeOf(err) != want {
			t.Errorf("%s: %v, want %v", path, err, want)
		}
	}
}

func TestMakeMoveRemove(t *testing.T) {
	c, dir := serve(t)
	mk := func(path string) (*pb.EntryInfo, error) {
		resp, err := c.MakeDir(t.Context(), connect.NewRequest(&pb.MakeDirRequest{Path: path}))
		if err != nil {
			return nil, err
		}
		return resp.Msg.GetEntry(), nil
	}
	if e, err := mk(dir + "/a/b/c"); err != nil || e.GetPermissions() != "drwxr-xr-x" || e.GetType() != pb.FileType_FILE_TYPE_DIRECTORY {
		t.Errorf("%v, %v", e, err)
	}
	if _, err := mk(dir + "/a/b/c"); connect.CodeOf(err) != connect.CodeAlreadyExists {
		t.Errorf("again: %v", err)
	}
	write(t, dir+"/f", "x")
	for _, path := range []string{dir + "/f", dir + "/f/below"} {
		if _, err := mk(path); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%s: %v", path, err)
		}
	}
	mv := func(from, to string) error {
		resp, err := c.Move(t.Context(), connect.NewRequest(&pb.MoveRequest{Source: from, Destination: to}))
		if err == nil && resp.Msg.GetEntry().GetPath() != to {
			t.Errorf("moved to %v, want %s", resp.Msg.GetEntry(), to)
		}
		return err
	}
	if err := mv(dir+"/f", dir+"/new/place/g"); err != nil {
		t.Error(err)
	}
	if err := mv(dir+"/f", dir+"/other/g"); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("missing source: %v", err)
	}
	if _, err := os.Stat(dir + "/other"); err == nil {
		t.Error("a failed move made directories")
	}
	for range 2 {
		if _, err := c.Remove(t.Context(), connect.NewRequest(&pb.RemoveRequest{Path: dir + "/new"})); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(dir + "/new"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("still there: %v", err)
	}
}

// events reads changes from a stream until all wanted ones were seen.
func expect(t *testing.T, stream *connect.ServerStreamForClient[pb.WatchDirResponse], wanted ...string) []*pb.FilesystemEvent {
	t.Helper()
	left := map[string]bool{}
	for _, w := range wanted {
		left[w] = true
	}
	var seen []*pb.FilesystemEvent
	timer := time.AfterFunc(5*time.Second, func() { stream.Close() })
	defer timer.Stop()
	for len(left) > 0 && stream.Receive() {
		ev := stream.Msg().GetFilesystem()
		if ev == nil {
			continue
		}
		seen = append(seen, ev)
		delete(left, strings.TrimPrefix(ev.GetType().String(), "EVENT_TYPE_")+" "+ev.GetName())
	}
	if len(left) > 0 {
		t.Errorf("not seen: %v; seen: %v; %v", left, seen, stream.Err())
	}
	return seen
}

func watch(t *testing.T, c filesystemconnect.FilesystemClient, req *pb.WatchDirRequest) *connect.ServerStreamForClient[pb.WatchDirResponse] {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	stream, err := c.WatchDir(ctx, connect.NewRequest(req))
	if err != nil {
		t.Fatal(err)
	}
	if !stream.Receive() || stream.Msg().GetStart() == nil {
		t.Fatalf("first message %v, %v", stream.Msg(), stream.Err())
	}
	return stream
}

func TestWatchDir(t *testing.T) {
	c, dir := serve(t, connect.WithProtoJSON())
	write(t, dir+"/f", "x")
	os.Mkdir(dir+"/sub", 0o755)
	stream := watch(t, c, &pb.WatchDirRequest{Path: dir, IncludeEntry: true})
	write(t, dir+"/f", "y")
	os.Chmod(dir+"/f", 0o600)
	write(t, dir+"/sub/unseen", "x")
	os.Rename(dir+"/f", dir+"/g")
	os.Remove(dir + "/g")
	seen := expect(t, stream, "WRITE f", "CHMOD f", "RENAME f", "CREATE g", "REMOVE g")
	for _, ev := range seen {
		if strings.Contains(ev.GetName(), "unseen") {
			t.Error("a watch that is not recursive saw into a directory")
		}
		if gone := ev.GetType() == pb.EventType_EVENT_TYPE_REMOVE || ev.GetType() == pb.EventType_EVENT_TYPE_RENAME; gone && ev.Entry != nil {
			t.Errorf("entry of what is gone: %v", ev)
		}
	}
	write(t, dir+"/h", "y")
	for _, ev := range expect(t, stream, "WRITE h") {
		if ev.GetName() == "h" && ev.GetEntry().GetPath() != dir+"/h" {
			t.Errorf("entry of %v", ev)
		}
	}
	os.RemoveAll(dir)
	expect(t, stream, "REMOVE .")
}

func TestWatchRecursive(t *testing.T) {
	c, dir := serve(t)
	os.MkdirAll(dir+"/old/nested", 0o755)
	stream := watch(t, c, &pb.WatchDirRequest{Path: dir, Recursive: true})
	write(t, dir+"/old/nested/f", "x")
	expect(t, stream, "WRITE old/nested/f")

	os.Mkdir(dir+"/new", 0o755)
	expect(t, stream, "CREATE new")
	write(t, dir+"/new/f", "x")
	expect(t, stream, "CREATE new/f", "WRITE new/f")

	// Made faster than any watch can be set.
	write(t, dir+"/a/b/c/d/f", "x")
	seen := expect(t, stream, "CREATE a", "CREATE a/b", "CREATE a/b/c", "CREATE a/b/c/d", "CREATE a/b/c/d/f", "WRITE a/b/c/d/f")
	created := map[string]int{}
	for _, ev := range seen {
		if ev.GetType() == pb.EventType_EVENT_TYPE_CREATE {
			created[ev.GetName()]++
		}
	}
	for name, n := range created {
		if n != 1 {
			t.Errorf("%d times CREATE %s", n, name)
		}
	}

	// A directory that moves keeps being watched, under its new name.
	os.Rename(dir+"/a/b", dir+"/moved")
	expect(t, stream, "RENAME a/b", "CREATE moved")
	write(t, dir+"/moved/c/d/f", "y")
	expect(t, stream, "WRITE moved/c/d/f")

	// One that leaves the tree does not.
	out := t.TempDir()
	os.Rename(dir+"/moved", out+"/gone")
	expect(t, stream, "RENAME moved")
	write(t, out+"/gone/c/d/f", "z")
	write(t, dir+"/last", "")
	for _, ev := range expect(t, stream, "CREATE last") {
		if strings.Contains(ev.GetName(), "c/d") {
			t.Errorf("seen outside the tree: %v", ev)
		}
	}
}

func TestWatchErrors(t *testing.T) {
	c, dir := serve(t)
	write(t, dir+"/f", "")
	for path, want := range map[string]connect.Code{dir + "/none": connect.CodeNotFound, dir + "/f": connect.CodeInvalidArgument} {
		stream, err := c.WatchDir(t.Context(), connect.NewRequest(&pb.WatchDirRequest{Path: path}))
		if err == nil {
			stream.Receive()
			err = stream.Err()
		}
		if connect.CodeOf(err) != want {
			t.Errorf("%s: %v, want %v", path, err, want)
		}
		if _, err := c.CreateWatcher(t.Context(), connect.NewRequest(&pb.CreateWatcherRequest{Path: path})); connect.CodeOf(err) != want {
			t.Errorf("polled, %s: %v, want %v", path, err, want)
		}
	}
}

func TestPolledWatcher(t *testing.T) {
	c, dir := serve(t)
	resp, err := c.CreateWatcher(t.Context(), connect.NewRequest(&pb.CreateWatcherRequest{Path: dir, Recursive: true}))
	if err != nil {
		t.Fatal(err)
	}
	id := resp.Msg.GetWatcherId()
	poll := func() ([]*pb.FilesystemEvent, error) {
		resp, err := c.GetWatcherEvents(t.Context(), connect.NewRequest(&pb.GetWatcherEventsRequest{WatcherId: id}))
		if err != nil {
			return nil, err
		}
		return resp.Msg.GetEvents(), nil
	}
	write(t, dir+"/d/f", "x")
	var names []string
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline) && len(names) < 3; time.Sleep(10 * time.Millisecond) {
		evs, err := poll()
		if err != nil {
			t.Fatal(err)
		}
		for _, ev := range evs {
			names = append(names, ev.GetName())
		}
	}
	if got := strings.Join(names, " "); !strings.HasPrefix(got, "d d/f d/f") {
		t.Errorf("got %s", got)
	}
	if _, err := c.RemoveWatcher(t.Context(), connect.NewRequest(&pb.RemoveWatcherRequest{WatcherId: id})); err != nil {
		t.Fatal(err)
	}
	if _, err := poll(); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("after removal: %v", err)
	}
	if _, err := c.RemoveWatcher(t.Context(), connect.NewRequest(&pb.RemoveWatcherRequest{WatcherId: id})); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("removed twice: %v", err)
	}
}

// A client that polls too seldom is told that it lost events, and memory is bounded.
func TestPolledWatcherOverflows(t *testing.T) {
	if os.Getenv("BERM_TEST_ALL") == "" {
		t.Skip("slow: set BERM_TEST_ALL=1")
	}
	c, dir := serve(t)
	resp, err := c.CreateWatcher(t.Context(), connect.NewRequest(&pb.CreateWatcherRequest{Path: dir}))
	if err != nil {
		t.Fatal(err)
	}
	req := connect.NewRequest(&pb.GetWatcherEventsRequest{WatcherId: resp.Msg.GetWatcherId()})
	for range maxPolled {
		os.Mkdir(dir+"/x", 0o755)
		os.Remove(dir + "/x")
	}
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if _, err := c.GetWatcherEvents(t.Context(), req); err != nil {
			if connect.CodeOf(err) != connect.CodeInternal || !strings.Contains(err.Error(), "lost") {
				t.Errorf("got %v", err)
			}
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("nothing was lost, or nobody said so")
		}
		os.Mkdir(dir+"/x", 0o755)
	}
}
