package process

import (
	"context"
	"strconv"
	"testing"

	"connectrpc.com/connect"

	pb "github.com/berm-sandbox/berm/internal/proto/process"
)

// BenchmarkTrue is one command from request to end event.
func BenchmarkTrue(b *testing.B) {
	for name, options := range map[string][]connect.ClientOption{"proto": nil, "json": {connect.WithProtoJSON()}} {
		b.Run(name, func(b *testing.B) {
			s := serve(b, "", options...)
			no := false
			req := &pb.StartRequest{Process: &pb.ProcessConfig{Cmd: "/bin/true"}, Stdin: &no}
			for b.Loop() {
				if r := s.run(b, req); r.end.GetExitCode() != 0 {
					b.Fatal(r)
				}
			}
		})
	}
}

// BenchmarkOutput is the output of a command that only writes.
func BenchmarkOutput(b *testing.B) {
	const size = 64 << 20
	for name, options := range map[string][]connect.ClientOption{"proto": nil, "json": {connect.WithProtoJSON()}} {
		b.Run(name, func(b *testing.B) {
			s := serve(b, "", options...)
			b.SetBytes(size)
			for b.Loop() {
				stream, err := s.client.Start(context.Background(), connect.NewRequest(sh("head -c "+strconv.Itoa(size)+" /dev/zero")))
				if err != nil {
					b.Fatal(err)
				}
				n := 0
				for stream.Receive() {
					n += len(stream.Msg().GetEvent().GetData().GetStdout())
				}
				if n != size {
					b.Fatalf("%d bytes, %v", n, stream.Err())
				}
			}
		})
	}
}
