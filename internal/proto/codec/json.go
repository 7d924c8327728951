// Package codec writes and reads messages of the guest agent's protocol where the output of
// processes, which is nearly all that an agent sends, needs a shorter way than the generated
// code's.
package codec

import (
	"encoding/base64"
	"errors"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	pb "github.com/berm-sandbox/berm/internal/proto/process"
)

// JSON is Connect's codec for JSON with a short way for output: protojson makes a string of the
// base64 and looks at each character of it, and all that is garbage afterwards.
type JSON struct{}

// Name is what the content type calls the codec.
func (JSON) Name() string { return "json" }

// Marshal encodes a message.
func (c JSON) Marshal(message any) ([]byte, error) { return c.MarshalAppend(nil, message) }

// MarshalAppend encodes a message behind dst.
func (JSON) MarshalAppend(dst []byte, message any) ([]byte, error) {
	if stream, data := output(message); stream != "" {
		return AppendOutput(dst, stream, data), nil
	}
	m, ok := message.(proto.Message)
	if !ok {
		return nil, errNoMessage
	}
	return protojson.MarshalOptions{}.MarshalAppend(dst, m)
}

// AppendOutput encodes the message of a piece of output behind dst. stream is Stdout, Stderr or PTY.
func AppendOutput(dst []byte, stream string, data []byte) []byte {
	dst = append(dst, `{"event":{"data":{"`...)
	dst = append(dst, stream...)
	dst = append(dst, `":"`...)
	dst = base64.StdEncoding.AppendEncode(dst, data)
	return append(dst, `"}}}`...)
}

// Unmarshal decodes a message. Unknown fields are left out: clients may be newer.
func (JSON) Unmarshal(data []byte, message any) error {
	m, ok := message.(proto.Message)
	if !ok {
		return errNoMessage
	}
	return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(data, m)
}

var errNoMessage = errors.New("not a message of a protocol")

// output takes the output of a process out of a message. Without any the stream is "".
func output(message any) (stream string, data []byte) {
	var event *pb.ProcessEvent
	switch m := message.(type) {
	case *pb.StartResponse:
		event = m.GetEvent()
	case *pb.ConnectResponse:
		event = m.GetEvent()
	}
	switch o := event.GetData().GetOutput().(type) {
	case *pb.ProcessEvent_DataEvent_Stdout:
		return Stdout, o.Stdout
	case *pb.ProcessEvent_DataEvent_Stderr:
		return Stderr, o.Stderr
	case *pb.ProcessEvent_DataEvent_Pty:
		return PTY, o.Pty
	}
	return "", nil
}
