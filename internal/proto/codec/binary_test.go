package codec

import (
	"bytes"
	"testing"

	"google.golang.org/protobuf/proto"

	pb "github.com/berm-sandbox/berm/internal/proto/process"
)

// Output says of any message what the generated code says, or nothing.
func FuzzOutput(f *testing.F) {
	for _, data := range []*pb.ProcessEvent_DataEvent{
		{Output: &pb.ProcessEvent_DataEvent_Stdout{Stdout: []byte("text\n")}},
		{Output: &pb.ProcessEvent_DataEvent_Stderr{}},
		{Output: &pb.ProcessEvent_DataEvent_Pty{Pty: make([]byte, 300)}},
	} {
		message, err := proto.Marshal(&pb.StartResponse{Event: &pb.ProcessEvent{Event: &pb.ProcessEvent_Data{Data: data}}})
		if err != nil {
			f.Fatal(err)
		}
		if stream, _ := Output(message); stream == "" {
			f.Fatalf("%v is not found", data)
		}
		f.Add(message)
		f.Add(append(message, message...))
		f.Add(append(message, 0x12, 0))
	}
	f.Add([]byte{0x0a, 0x04, 0x12, 0x02, 0x22, 0x00})
	f.Add([]byte{0x0a, 0x04, 0x12, 0x02, 0x0a, 0x05})
	f.Fuzz(func(t *testing.T, message []byte) {
		stream, data := Output(message)
		if stream == "" {
			return
		}
		var response pb.StartResponse
		if err := proto.Unmarshal(message, &response); err != nil {
			t.Fatalf("%s of what is no message: %v", stream, err)
		}
		if want, output := output(&response); stream != want || !bytes.Equal(data, output) {
			t.Fatalf("%s %q, want %s %q", stream, data, want, output)
		}
		if again, err := proto.Marshal(&response); err != nil || len(again) > len(message) {
			t.Fatalf("%d bytes, %v: there is more in it than output", len(again), err)
		}
		if len(response.ProtoReflect().GetUnknown()) > 0 {
			t.Fatal("there is more in it than output")
		}
	})
}
