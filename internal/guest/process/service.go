package process

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"github.com/creack/pty"

	"github.com/berm-sandbox/berm/internal/guest/config"
	"github.com/berm-sandbox/berm/internal/guest/rpc"
	pb "github.com/berm-sandbox/berm/internal/proto/process"
)

// retention is how long the end of a process can still be asked for.
const retention = 30 * time.Second

// killWait is how long a KILL waits for the process to be reaped before it is
// answered: callers then find no zombie.
const killWait = 500 * time.Millisecond

// Service serves process.Process.
type Service struct {
	config *config.Config

	mu    sync.Mutex
	live  map[uint32]*process // by pid
	ended map[uint32]*process // for the time of retention
}

// NewService returns a service without processes.
func NewService(c *config.Config) *Service {
	return &Service{config: c, live: map[uint32]*process{}, ended: map[uint32]*process{}}
}

// Start starts a process and streams its output and its end.
func (s *Service) Start(ctx context.Context, req *connect.Request[pb.StartRequest], stream *connect.ServerStream[pb.StartResponse]) error {
	user, err := rpc.Account(s.config, req.Header())
	if err != nil {
		return err
	}
	c, err := s.newCommand(req.Msg, user)
	if err != nil {
		return err
	}
	var p *process
	send := func(ev *pb.ProcessEvent) error {
		if ev.GetEnd() != nil && p != nil && p.timedOut.Load() {
			// Process and stream have one deadline; the process came first.
			return connect.NewError(connect.CodeDeadlineExceeded, context.DeadlineExceeded)
		}
		return stream.Send(&pb.StartResponse{Event: ev})
	}
	reserveThreads()
	p, err = c.start()
	if missing, ok := errors.AsType[*missingError](err); ok {
		return sendMissing(send, missing)
	}
	if err != nil {
		return startError(err, c)
	}
	p.config, p.tag = req.Msg.GetProcess(), req.Msg.Tag
	w := p.out.join()
	defer p.out.leave(w)
	s.run(ctx, p)
	err = feed(ctx, req.Header(), p, w, send)
	select {
	case <-p.ended: // its caller knows
	default:
		if req.Header().Get(KeepHeader) != "" {
			go s.keep(c, req.Msg.GetProcess(), p)
		}
	}
	return err
}

// KeepHeader is a field of a call that starts a process: if it has a value, and the process is killed by
// a signal when the caller has left, other than one of SendSignal, it is started again, as it was.
const KeepHeader = "Berm-Keep"

const (
	keepAfter = time.Second      // how long a killed process waits to be started again
	keepMost  = time.Minute      // the same after many deaths, one soon after the other
	keepLong  = 10 * time.Second // who lived as long did not die of its start
)

// keep starts a process anew, whose command is c, whenever it is killed.
func (s *Service) keep(c *command, config *pb.ProcessConfig, p *process) {
	for wait := keepAfter; ; {
		began, tag := time.Now(), p.tag
		<-p.ended
		if p.end.Exited || p.signalled.Load() {
			return
		}
		if time.Since(began) > keepLong {
			wait = keepAfter
		}
		for again := false; !again; wait = min(2*wait, keepMost) {
			time.Sleep(wait)
			next, err := c.start()
			if again = err == nil; again { // else the sandbox may be short of something
				p = next
			}
		}
		p.config, p.tag = config, tag
		s.run(context.Background(), p)
	}
}

func startError(err error, c *command) error {
	if _, ok := errors.AsType[*connect.Error](err); ok {
		return err
	}
	code := connect.CodeInternal
	switch {
	case errors.Is(err, syscall.EAGAIN), errors.Is(err, syscall.ENOMEM), errors.Is(err, syscall.EMFILE):
		code = connect.CodeResourceExhausted
	case errors.Is(err, syscall.E2BIG), errors.Is(err, syscall.ENAMETOOLONG), c.tty != nil:
		code = connect.CodeInvalidArgument
	}
	return connect.NewError(code, fmt.Errorf("start '%s': %w", c.argv[0], err))
}

// sendMissing plays the end of a command that is missing where no shell can.
func sendMissing(send func(*pb.ProcessEvent) error, e *missingError) error {
	status := fmt.Sprintf("exit status %d", e.code())
	for _, ev := range []*pb.ProcessEvent{
		{Event: &pb.ProcessEvent_Start{Start: &pb.ProcessEvent_StartEvent{}}},
		{Event: &pb.ProcessEvent_Data{Data: &pb.ProcessEvent_DataEvent{
			Output: &pb.ProcessEvent_DataEvent_Stderr{Stderr: []byte(e.Error() + "\n")}}}},
		{Event: &pb.ProcessEvent_End{End: &pb.ProcessEvent_EndEvent{
			ExitCode: e.code(), Exited: true, Status: status, Error: &status}}},
	} {
		if err := send(ev); err != nil {
			return err
		}
	}
	return nil
}

// run lets the process be found, reaps it, and ends it at the deadline of ctx. It
// does not end it when ctx is cancelled: a client may leave.
func (s *Service) run(ctx context.Context, p *process) {
	s.mu.Lock()
	delete(s.ended, p.pid) // the pid is in use again
	if p.tag != nil {
		for pid, old := range s.ended {
			if old.tag != nil && *old.tag == *p.tag {
				delete(s.ended, pid)
			}
		}
	}
	s.live[p.pid] = p
	s.mu.Unlock()

	var timer *time.Timer
	if deadline, ok := ctx.Deadline(); ok {
		timer = time.AfterFunc(time.Until(deadline), p.expire)
	}
	go func() {
		p.supervise(func() {
			if timer != nil {
				timer.Stop()
			}
			s.mu.Lock()
			delete(s.live, p.pid)
			s.ended[p.pid] = p
			p.config = nil // may be large, and is not asked for any more
			s.mu.Unlock()
		})
		time.AfterFunc(retention, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.ended[p.pid] == p {
				delete(s.ended, p.pid)
			}
		})
	}()
}

// feed sends the events of one process to one client.
func feed(ctx context.Context, h http.Header, p *process, w *follower, send func(*pb.ProcessEvent) error) error {
	err := send(&pb.ProcessEvent{Event: &pb.ProcessEvent_Start{Start: &pb.ProcessEvent_StartEvent{Pid: p.pid}}})
	if err != nil {
		return err
	}
	interval := rpc.KeepAlive(h)
	alive := time.NewTicker(interval)
	defer alive.Stop()
	for {
		select {
		case ev := <-w.events:
			err = send(ev)
			alive.Reset(interval)
		case <-alive.C:
			err = send(&pb.ProcessEvent{Event: &pb.ProcessEvent_Keepalive{Keepalive: &pb.ProcessEvent_KeepAlive{}}})
		case <-ctx.Done():
			return rpc.Done(ctx)
		case <-p.ended:
			for len(w.events) > 0 {
				if err := send(<-w.events); err != nil {
					return err
				}
			}
			return send(&pb.ProcessEvent{Event: &pb.ProcessEvent_End{End: p.end}})
		}
		if err != nil {
			return err
		}
	}
}

// Connect streams the output of a process from now on. The end of one that ended
// a moment ago can still be had.
func (s *Service) Connect(ctx context.Context, req *connect.Request[pb.ConnectRequest], stream *connect.ServerStream[pb.ConnectResponse]) error {
	p, err := s.find(req.Msg.GetProcess(), true)
	if err != nil {
		return err
	}
	w := p.out.join()
	defer p.out.leave(w)
	return feed(ctx, req.Header(), p, w, func(ev *pb.ProcessEvent) error {
		return stream.Send(&pb.ConnectResponse{Event: ev})
	})
}

// find returns the process that a selector names; one that has ended only if ended
// is set.
func (s *Service) find(sel *pb.ProcessSelector, ended bool) (*process, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	tables := []map[uint32]*process{s.live}
	if ended {
		tables = append(tables, s.ended)
	}
	for _, table := range tables {
		switch by := sel.GetSelector().(type) {
		case *pb.ProcessSelector_Pid:
			if p := table[by.Pid]; p != nil {
				return p, nil
			}
		case *pb.ProcessSelector_Tag:
			for _, p := range table {
				if p.tag != nil && *p.tag == by.Tag {
					return p, nil
				}
			}
		default:
			return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("no process selected"))
		}
	}
	if tag, ok := sel.GetSelector().(*pb.ProcessSelector_Tag); ok {
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("process with tag %q not found", tag.Tag))
	}
	return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("process with pid %d not found", sel.GetPid()))
}

// List names the processes that run.
func (s *Service) List(context.Context, *connect.Request[pb.ListRequest]) (*connect.Response[pb.ListResponse], error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	resp := new(pb.ListResponse)
	for _, p := range s.live {
		resp.Processes = append(resp.Processes, &pb.ProcessInfo{Config: p.config, Pid: p.pid, Tag: p.tag})
	}
	return connect.NewResponse(resp), nil
}

// Update resizes the terminal of a process.
func (s *Service) Update(_ context.Context, req *connect.Request[pb.UpdateRequest]) (*connect.Response[pb.UpdateResponse], error) {
	p, err := s.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	if req.Msg.Pty != nil {
		if p.tty == nil {
			return nil, connect.NewError(connect.CodeInvalidArgument, errNoTTY)
		}
		if err := pty.Setsize(p.tty, winsize(req.Msg.GetPty().GetSize())); err != nil {
			return nil, connect.NewError(connect.CodeInternal, err)
		}
	}
	return connect.NewResponse(&pb.UpdateResponse{}), nil
}

// SendSignal sends TERM or KILL to the process alone.
func (s *Service) SendSignal(ctx context.Context, req *connect.Request[pb.SendSignalRequest]) (*connect.Response[pb.SendSignalResponse], error) {
	p, err := s.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	var sig syscall.Signal
	switch req.Msg.GetSignal() {
	case pb.Signal_SIGNAL_SIGKILL:
		sig = syscall.SIGKILL
	case pb.Signal_SIGNAL_SIGTERM:
		sig = syscall.SIGTERM
	default:
		return nil, connect.NewError(connect.CodeUnimplemented, fmt.Errorf("signal %s cannot be sent", req.Msg.GetSignal()))
	}
	if err := p.signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return nil, connect.NewError(connect.CodeInternal, err)
	}
	if sig == syscall.SIGKILL {
		select {
		case <-p.exited:
		case <-time.After(killWait):
		case <-ctx.Done():
		}
	}
	return connect.NewResponse(&pb.SendSignalResponse{}), nil
}
