package codec

import "google.golang.org/protobuf/encoding/protowire"

// What output is of, as its field is called.
const (
	Stdout = "stdout"
	Stderr = "stderr"
	PTY    = "pty"
)

// Numbers of fields in process.proto: of StartResponse and ConnectResponse, and of ProcessEvent.
const (
	fieldEvent = 1
	fieldData  = 2
)

// streams are the fields of ProcessEvent.DataEvent by number.
var streams = [...]string{1: Stdout, 2: Stderr, 3: PTY}

// Output takes the output of a process out of an encoded StartResponse or ConnectResponse without a
// copy, where the message holds it and nothing else. Else the stream is "": of such messages the generated
// code knows more.
func Output(message []byte) (stream string, data []byte) {
	field, event := only(message)
	if field != fieldEvent {
		return "", nil
	}
	field, output := only(event)
	if field != fieldData {
		return "", nil
	}
	if field, data = only(output); int(field) >= len(streams) {
		return "", nil
	}
	return streams[field], data
}

// only returns the one field that a message consists of, which is of bytes, or 0.
func only(message []byte) (protowire.Number, []byte) {
	field, kind, head := protowire.ConsumeTag(message)
	if head < 0 || kind != protowire.BytesType {
		return 0, nil
	}
	content, n := protowire.ConsumeBytes(message[head:])
	if n < 0 || head+n != len(message) {
		return 0, nil
	}
	return field, content
}
