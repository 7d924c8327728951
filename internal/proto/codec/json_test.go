package codec

import (
	"bytes"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	pb "github.com/berm-sandbox/berm/internal/proto/process"
)

// Whatever the way, the message that arrives is the same.
func FuzzJSON(f *testing.F) {
	f.Add([]byte("text\n"), uint32(7))
	f.Add([]byte{}, uint32(0))
	f.Add([]byte{0, 0xff, '"', '\\', 0xe2, 0x80, 0xa8}, uint32(1<<31))
	f.Fuzz(func(t *testing.T, data []byte, pid uint32) {
		start := func(e *pb.ProcessEvent) proto.Message { return &pb.StartResponse{Event: e} }
		connected := func(e *pb.ProcessEvent) proto.Message { return &pb.ConnectResponse{Event: e} }
		out := func(e *pb.ProcessEvent_DataEvent) *pb.ProcessEvent {
			return &pb.ProcessEvent{Event: &pb.ProcessEvent_Data{Data: e}}
		}
		for _, message := range []proto.Message{
			start(out(&pb.ProcessEvent_DataEvent{Output: &pb.ProcessEvent_DataEvent_Stdout{Stdout: data}})),
			start(out(&pb.ProcessEvent_DataEvent{Output: &pb.ProcessEvent_DataEvent_Stderr{Stderr: data}})),
			connected(out(&pb.ProcessEvent_DataEvent{Output: &pb.ProcessEvent_DataEvent_Pty{Pty: data}})),
			start(out(&pb.ProcessEvent_DataEvent{})),
			start(out(nil)),
			start(nil),
			connected(&pb.ProcessEvent{Event: &pb.ProcessEvent_Start{Start: &pb.ProcessEvent_StartEvent{Pid: pid}}}),
			&pb.StreamInputResponse{},
		} {
			text, err := JSON{}.MarshalAppend([]byte("before"), message)
			if err != nil {
				t.Fatal(err)
			}
			text, found := bytes.CutPrefix(text, []byte("before"))
			if !found {
				t.Fatalf("what was there is lost: %s", text)
			}
			got := message.ProtoReflect().New().Interface()
			if err := protojson.Unmarshal(text, got); err != nil || !proto.Equal(message, got) {
				t.Errorf("%s: %v, want %v", text, err, message)
			}
			again := message.ProtoReflect().New().Interface()
			if err := (JSON{}).Unmarshal(text, again); err != nil || !proto.Equal(message, again) {
				t.Errorf("%s: %v, want %v", text, err, message)
			}
		}
	})
}
