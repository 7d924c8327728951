package process

import (
	"context"
	"errors"
	"os"
	"time"

	"connectrpc.com/connect"

	"github.com/berm-sandbox/berm/internal/guest/rpc"
	pb "github.com/berm-sandbox/berm/internal/proto/process"
)

// SendInput writes to stdin or the terminal, and returns when all is written.
func (s *Service) SendInput(ctx context.Context, req *connect.Request[pb.SendInputRequest]) (*connect.Response[pb.SendInputResponse], error) {
	p, err := s.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	if err := p.send(ctx, req.Msg.GetInput()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.SendInputResponse{}), nil
}

// StreamInput writes many inputs. The first message names the process.
func (s *Service) StreamInput(ctx context.Context, stream *connect.ClientStream[pb.StreamInputRequest]) (*connect.Response[pb.StreamInputResponse], error) {
	var p *process
	for stream.Receive() {
		var err error
		switch ev := stream.Msg().GetEvent().(type) {
		case *pb.StreamInputRequest_Start:
			p, err = s.find(ev.Start.GetProcess(), false)
		case *pb.StreamInputRequest_Data:
			if p == nil {
				err = connect.NewError(connect.CodeInvalidArgument, errors.New("input before the start message"))
			} else {
				err = p.send(ctx, ev.Data.GetInput())
			}
		case *pb.StreamInputRequest_Keepalive:
		default:
			err = connect.NewError(connect.CodeInvalidArgument, errors.New("message without an event"))
		}
		if err != nil {
			return nil, err
		}
	}
	if err := stream.Err(); err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.StreamInputResponse{}), nil
}

// CloseStdin makes the process read end-of-file. Closing twice is no error.
func (s *Service) CloseStdin(_ context.Context, req *connect.Request[pb.CloseStdinRequest]) (*connect.Response[pb.CloseStdinResponse], error) {
	p, err := s.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	if p.tty != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("a terminal's input cannot be closed: send Ctrl+D (0x04) instead"))
	}
	if p.stdin != nil {
		if err := p.stdin.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
			return nil, connect.NewError(connect.CodeInternal, err)
		}
	}
	return connect.NewResponse(&pb.CloseStdinResponse{}), nil
}

func (p *process) send(ctx context.Context, in *pb.ProcessInput) error {
	var err error
	switch in := in.GetInput().(type) {
	case *pb.ProcessInput_Stdin:
		switch {
		case p.tty != nil:
			err = errTTY
		case p.stdin == nil:
			err = errNoStdin
		default:
			err = p.write(ctx, p.stdin, in.Stdin)
		}
	case *pb.ProcessInput_Pty:
		if p.tty == nil {
			err = errNoTTY
		} else {
			err = p.write(ctx, p.tty, in.Pty)
		}
	default:
		return connect.NewError(connect.CodeInvalidArgument, errors.New("no input"))
	}
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return rpc.Done(ctx)
	case errors.Is(err, os.ErrClosed):
		err = errNoStdin
	}
	return connect.NewError(connect.CodeInternal, err)
}

// write writes all of data, one writer at a time. A process that does not read
// holds up only this call, and only as long as the caller waits.
func (p *process) write(ctx context.Context, f *os.File, data []byte) error {
	select {
	case p.input <- struct{}{}:
		defer func() { <-p.input }()
	case <-ctx.Done():
		return ctx.Err()
	}
	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = f.SetWriteDeadline(time.Unix(1, 0))
		close(interrupted)
	})
	_, err := f.Write(data)
	if !stop() {
		<-interrupted
		_ = f.SetWriteDeadline(time.Time{})
	}
	return err
}
