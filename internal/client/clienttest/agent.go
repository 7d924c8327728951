package clienttest

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"

	"connectrpc.com/connect"
	"github.com/creack/pty"

	"github.com/berm-sandbox/berm/internal/proto/filesystem"
	"github.com/berm-sandbox/berm/internal/proto/filesystem/filesystemconnect"
	"github.com/berm-sandbox/berm/internal/proto/process"
	"github.com/berm-sandbox/berm/internal/proto/process/processconnect"
)

// agent runs commands on this machine.
type agent struct {
	processconnect.UnimplementedProcessHandler
	filesystemconnect.UnimplementedFilesystemHandler
	server    *Server
	mu        sync.Mutex
	processes map[uint32]*running
}

// running is a process and who listens to it.
type running struct {
	pid   uint32
	ptmx  *os.File
	stdin io.WriteCloser

	mu        sync.Mutex
	listeners map[chan *process.ProcessEvent]context.Context
	end       *process.ProcessEvent
}

// emit hands an event to every listener. Without one, output is lost.
func (r *running) emit(e *process.ProcessEvent) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e.GetEnd() != nil {
		r.end = e
	}
	for ch, ctx := range r.listeners {
		select {
		case ch <- e:
		case <-ctx.Done():
		}
	}
}

// listen calls send for each event up to the end.
func (r *running) listen(ctx context.Context, send func(*process.ProcessEvent) error) error {
	events := make(chan *process.ProcessEvent, 1)
	r.mu.Lock()
	if r.end != nil {
		events <- r.end
	} else {
		r.listeners[events] = ctx
	}
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		delete(r.listeners, events)
		r.mu.Unlock()
	}()
	start := &process.ProcessEvent{Event: &process.ProcessEvent_Start{Start: &process.ProcessEvent_StartEvent{Pid: r.pid}}}
	if err := send(start); err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case e := <-events:
			if err := send(e); err != nil || e.GetEnd() != nil {
				return err
			}
		}
	}
}

func (a *agent) find(s *process.ProcessSelector) (*running, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if r := a.processes[s.GetPid()]; r != nil {
		return r, nil
	}
	return nil, connect.NewError(connect.CodeNotFound, errors.New("process not found"))
}

func (a *agent) killAll() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for pid, r := range a.processes {
		r.mu.Lock()
		if r.end == nil {
			_ = syscall.Kill(-int(pid), syscall.SIGKILL)
		}
		r.mu.Unlock()
	}
}

func (a *agent) Start(ctx context.Context, req *connect.Request[process.StartRequest], s *connect.ServerStream[process.StartResponse]) error {
	a.server.Started.Add(1)
	config := req.Msg.GetProcess()
	cmd := exec.Command(config.GetCmd(), config.GetArgs()...)
	cmd.Dir = a.server.Home
	if config.GetCwd() != "" {
		cmd.Dir = config.GetCwd()
	}
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + a.server.Home}
	for k, v := range config.GetEnvs() {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	r := &running{listeners: map[chan *process.ProcessEvent]context.Context{}}
	var outputs sync.WaitGroup
	read := func(f io.Reader, data func([]byte) *process.ProcessEvent_DataEvent) {
		outputs.Go(func() {
			for {
				buf := make([]byte, 32<<10)
				n, err := f.Read(buf)
				if n > 0 {
					r.emit(&process.ProcessEvent{Event: &process.ProcessEvent_Data{Data: data(buf[:n])}})
				}
				if err != nil {
					return
				}
			}
		})
	}
	var begin func()
	if req.Msg.GetPty() != nil {
		size := req.Msg.GetPty().GetSize()
		ptmx, err := pty.StartWithSize(cmd, &pty.Winsize{Cols: uint16(size.GetCols()), Rows: uint16(size.GetRows())})
		if err != nil {
			return connect.NewError(connect.CodeInvalidArgument, err)
		}
		r.ptmx = ptmx
		begin = func() {
			read(ptmx, func(b []byte) *process.ProcessEvent_DataEvent {
				return &process.ProcessEvent_DataEvent{Output: &process.ProcessEvent_DataEvent_Pty{Pty: b}}
			})
		}
	} else {
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		stdout, err := cmd.StdoutPipe()
		if err != nil {
			return err
		}
		stderr, err := cmd.StderrPipe()
		if err != nil {
			return err
		}
		if req.Msg.GetStdin() {
			if r.stdin, err = cmd.StdinPipe(); err != nil {
				return err
			}
		}
		if err := cmd.Start(); errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
			return missing(s)
		} else if err != nil {
			return connect.NewError(connect.CodeInvalidArgument, err)
		}
		begin = func() {
			read(stdout, func(b []byte) *process.ProcessEvent_DataEvent {
				return &process.ProcessEvent_DataEvent{Output: &process.ProcessEvent_DataEvent_Stdout{Stdout: b}}
			})
			read(stderr, func(b []byte) *process.ProcessEvent_DataEvent {
				return &process.ProcessEvent_DataEvent{Output: &process.ProcessEvent_DataEvent_Stderr{Stderr: b}}
			})
		}
	}
	r.pid = uint32(cmd.Process.Pid)
	a.mu.Lock()
	a.processes[r.pid] = r
	a.mu.Unlock()
	err := r.listen(ctx, func(e *process.ProcessEvent) error {
		if e.GetStart() != nil { // somebody listens: it may begin
			begin()
			go func() {
				outputs.Wait()
				_ = cmd.Wait() // ProcessState has it
				r.emit(ended(cmd.ProcessState))
			}()
		}
		return s.Send(&process.StartResponse{Event: e})
	})
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		_ = syscall.Kill(-int(r.pid), syscall.SIGKILL)
		return connect.NewError(connect.CodeDeadlineExceeded, ctx.Err())
	}
	return err
}

func ended(state *os.ProcessState) *process.ProcessEvent {
	end := &process.ProcessEvent_EndEvent{ExitCode: int32(state.ExitCode()), Exited: state.Exited(), Status: state.String()}
	return &process.ProcessEvent{Event: &process.ProcessEvent_End{End: end}}
}

func missing(s *connect.ServerStream[process.StartResponse]) error {
	for _, e := range []*process.ProcessEvent{
		{Event: &process.ProcessEvent_Start{Start: &process.ProcessEvent_StartEvent{Pid: 1 << 30}}},
		{Event: &process.ProcessEvent_End{End: &process.ProcessEvent_EndEvent{ExitCode: 127, Exited: true, Status: "exit status 127"}}},
	} {
		if err := s.Send(&process.StartResponse{Event: e}); err != nil {
			return err
		}
	}
	return nil
}

func (a *agent) Connect(ctx context.Context, req *connect.Request[process.ConnectRequest], s *connect.ServerStream[process.ConnectResponse]) error {
	r, err := a.find(req.Msg.GetProcess())
	if err != nil {
		return err
	}
	return r.listen(ctx, func(e *process.ProcessEvent) error { return s.Send(&process.ConnectResponse{Event: e}) })
}

func (a *agent) SendInput(_ context.Context, req *connect.Request[process.SendInputRequest]) (*connect.Response[process.SendInputResponse], error) {
	r, err := a.find(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	if r.ptmx != nil {
		_, err = r.ptmx.Write(req.Msg.GetInput().GetPty())
	} else {
		_, err = r.stdin.Write(req.Msg.GetInput().GetStdin())
	}
	return connect.NewResponse(&process.SendInputResponse{}), err
}

func (a *agent) CloseStdin(_ context.Context, req *connect.Request[process.CloseStdinRequest]) (*connect.Response[process.CloseStdinResponse], error) {
	r, err := a.find(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&process.CloseStdinResponse{}), r.stdin.Close()
}

func (a *agent) SendSignal(_ context.Context, req *connect.Request[process.SendSignalRequest]) (*connect.Response[process.SendSignalResponse], error) {
	r, err := a.find(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	if err := syscall.Kill(int(r.pid), syscall.Signal(req.Msg.GetSignal())); err != nil {
		return nil, connect.NewError(connect.CodeNotFound, err)
	}
	return connect.NewResponse(&process.SendSignalResponse{}), nil
}

func (a *agent) Update(_ context.Context, req *connect.Request[process.UpdateRequest]) (*connect.Response[process.UpdateResponse], error) {
	r, err := a.find(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	size := req.Msg.GetPty().GetSize()
	return connect.NewResponse(&process.UpdateResponse{}), pty.Setsize(r.ptmx, &pty.Winsize{Cols: uint16(size.GetCols()), Rows: uint16(size.GetRows())})
}

func (a *agent) path(p string) string {
	if filepath.IsAbs(p) {
		return p
	}
	return filepath.Join(a.server.Home, p)
}

func (a *agent) Stat(_ context.Context, req *connect.Request[filesystem.StatRequest]) (*connect.Response[filesystem.StatResponse], error) {
	name := a.path(req.Msg.GetPath())
	info, err := os.Stat(name)
	if err != nil {
		return nil, connect.NewError(connect.CodeNotFound, err)
	}
	entry := &filesystem.EntryInfo{Name: info.Name(), Path: name, Size: info.Size(), Mode: uint32(info.Mode().Perm()), Type: filesystem.FileType_FILE_TYPE_FILE}
	if info.IsDir() {
		entry.Type = filesystem.FileType_FILE_TYPE_DIRECTORY
	}
	return connect.NewResponse(&filesystem.StatResponse{Entry: entry}), nil
}

func (a *agent) MakeDir(_ context.Context, req *connect.Request[filesystem.MakeDirRequest]) (*connect.Response[filesystem.MakeDirResponse], error) {
	name := a.path(req.Msg.GetPath())
	if info, err := os.Stat(name); err == nil {
		if info.IsDir() {
			return nil, connect.NewError(connect.CodeAlreadyExists, errors.New("directory exists"))
		}
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("it is a file"))
	}
	return connect.NewResponse(&filesystem.MakeDirResponse{}), os.MkdirAll(name, 0o755)
}

func (a *agent) files(w http.ResponseWriter, r *http.Request) {
	name := a.path(r.URL.Query().Get("path"))
	if r.Method == http.MethodGet {
		info, err := os.Stat(name)
		if err != nil {
			refuse(w, 404, "path '"+name+"' does not exist")
			return
		}
		if info.IsDir() {
			refuse(w, 400, "path '"+name+"' is a directory")
			return
		}
		http.ServeFile(w, r, name)
		return
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		refuse(w, 500, err.Error())
		return
	}
	f, err := os.OpenFile(name, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o644)
	if err != nil {
		refuse(w, 500, err.Error())
		return
	}
	defer f.Close()
	if _, err := io.Copy(f, r.Body); err != nil {
		refuse(w, 500, err.Error())
		return
	}
	reply(w, 200, []map[string]string{{"path": name, "name": filepath.Base(name), "type": "file"}})
}
