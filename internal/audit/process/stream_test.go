package process

import (
	"encoding/binary"
	"reflect"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	points "gvisor.dev/gvisor/pkg/sentry/seccheck/points/points_go_proto"

	"github.com/berm-sandbox/berm/internal/audit"
)

// told is a message as gVisor sends it.
func told(t testing.TB, kind points.MessageType, dropped uint32, m proto.Message) []byte {
	t.Helper()
	body, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	raw := binary.NativeEndian.AppendUint16(nil, 8)
	raw = binary.NativeEndian.AppendUint16(raw, uint16(kind))
	return append(binary.NativeEndian.AppendUint32(raw, dropped), body...)
}

func TestDecode(t *testing.T) {
	at := time.Unix(1_800_000_000, 5)
	context := &points.ContextData{TimeNs: at.UnixNano(), ThreadGroupId: 7, ParentThreadGroupId: 3, Cwd: "/tmp", Credentials: &points.Credentials{RealUid: 1000, EffectiveUid: 0}}
	code := 3
	for name, c := range map[string]struct {
		raw  []byte
		want event
	}{
		"fork": {
			told(t, points.MessageType_MESSAGE_SENTRY_CLONE, 0, &points.CloneInfo{ContextData: context, CreatedThreadId: 9, CreatedThreadGroupId: 9}),
			event{what: audit.ProcFork, process: audit.Process{PID: 9, PPID: 7, UID: 1000}, at: at},
		},
		"thread": {
			told(t, points.MessageType_MESSAGE_SENTRY_CLONE, 0, &points.CloneInfo{ContextData: context, CreatedThreadId: 9, CreatedThreadGroupId: 7}),
			event{process: audit.Process{PID: 7, PPID: 3, UID: 1000}, at: at},
		},
		"execution": {
			told(t, points.MessageType_MESSAGE_SENTRY_EXEC, 4, &points.ExecveInfo{ContextData: context, BinaryPath: "/bin/sh", Argv: []string{"sh", "-c", ""}, Env: []string{"SECRET=x"}}),
			event{dropped: 4, what: audit.ProcExec, process: audit.Process{PID: 7, PPID: 3, UID: 1000, Exe: "/bin/sh", Cwd: "/tmp"}, argv: []string{"sh", "-c", ""}, at: at},
		},
		"exit": {
			told(t, points.MessageType_MESSAGE_SENTRY_EXIT_NOTIFY_PARENT, 0, &points.ExitNotifyParentInfo{ContextData: context, ExitStatus: 3 << 8}),
			event{what: audit.ProcExit, process: audit.Process{PID: 7, PPID: 3, UID: 1000, Code: &code}, at: at},
		},
		"signal": {
			told(t, points.MessageType_MESSAGE_SENTRY_EXIT_NOTIFY_PARENT, 0, &points.ExitNotifyParentInfo{ContextData: context, ExitStatus: 9}),
			event{what: audit.ProcExit, process: audit.Process{PID: 7, PPID: 3, UID: 1000, Signal: "SIGKILL"}, at: at},
		},
		"another": {told(t, points.MessageType_MESSAGE_SYSCALL_READ, 2, &points.Read{}), event{dropped: 2}},
	} {
		got, err := decode(c.raw)
		if err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, %v, want %+v", name, got, err, c.want)
		}
	}
	whole := told(t, points.MessageType_MESSAGE_SENTRY_EXEC, 0, &points.ExecveInfo{BinaryPath: "/bin/sh"})
	for name, raw := range map[string][]byte{"nothing": nil, "half a header": whole[:7], "half a message": whole[:len(whole)-1], "a header as long as two": append([]byte{200, 0}, whole[2:]...), "no header": append([]byte{0, 0}, whole[2:]...)} {
		if e, err := decode(raw); err == nil {
			t.Errorf("%s: %+v", name, e)
		}
	}
	// What gVisor does not fill in is nothing.
	if _, err := decode(whole); err != nil {
		t.Error(err)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(told(f, points.MessageType_MESSAGE_SENTRY_EXEC, 4, &points.ExecveInfo{BinaryPath: "/bin/sh", Argv: []string{"sh"}}))
	f.Add(told(f, points.MessageType_MESSAGE_SENTRY_CLONE, 4, &points.CloneInfo{CreatedThreadId: 1}))
	f.Add(told(f, points.MessageType_MESSAGE_SENTRY_EXIT_NOTIFY_PARENT, 4, &points.ExitNotifyParentInfo{ExitStatus: -1}))
	f.Fuzz(func(t *testing.T, raw []byte) {
		if e, err := decode(raw); err == nil && len(raw) < 8 {
			t.Errorf("%+v", e)
		}
	})
}
