package launch

import (
	"encoding/json"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/monitor"
)

// What gVisor is told to tell of the processes inside, and where: paths of the stage.
const (
	stageEvents       = "run/events.sock"
	stageEventsConfig = stageBundle + "/events.json"
)

// eventsConfig is runsc's --pod-init-config (runsc/boot.InitConfig): names of
// pkg/sentry/seccheck/metadata.go.
func eventsConfig() ([]byte, error) {
	point := func(name string, context ...string) any {
		return map[string]any{"name": name, "context_fields": append(context, "time", "group_id")}
	}
	return json.Marshal(map[string]any{"trace_session": map[string]any{
		"name": "Default", // there can be no other
		"points": []any{
			point("sentry/clone", "credentials"),
			point("sentry/execve", "credentials", "cwd", "parent_thread_group_id"),
			point("sentry/exit_notify_parent", "credentials", "parent_thread_group_id"),
		},
		// Who finds no room drops the event and counts it: nothing inside waits for a reader.
		"sinks": []any{map[string]any{"name": "remote", "config": map[string]any{"endpoint": "/" + stageEvents}}},
	}})
}

// handshakeTime bounds gVisor's first message on the socket of events.
const handshakeTime = 10 * time.Second

// takeEvents lets gVisor connect to a socket, which it does before it starts.
func (s *Sandbox) takeEvents(name string) error {
	listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: name, Net: "unixpacket"})
	if err != nil {
		return fault("listen for gVisor's events", err)
	}
	listener.SetUnlinkOnClose(false) // its name may be of this thread's working directory
	s.events = make(chan *net.UnixConn, 1)
	go func() {
		defer close(s.events)
		defer listener.Close()
		_ = listener.SetDeadline(time.Now().Add(initUnready))
		conn, err := listener.AcceptUnix()
		if err != nil {
			return
		}
		// Both sides say which version of the protocol they speak: a protobuf message whose
		// first field is 1 (pkg/sentry/seccheck/points/common.proto, Handshake).
		_ = conn.SetDeadline(time.Now().Add(handshakeTime))
		_, err = conn.Read(make([]byte, 1024))
		if err == nil {
			_, err = conn.Write([]byte{1 << 3, 1})
		}
		if err != nil {
			conn.Close()
			return
		}
		_ = conn.SetDeadline(time.Time{})
		s.events <- conn
	}()
	return nil
}

// serveEvents hands the stream of events to whoever connects.
func (s *Sandbox) serveEvents() (err error) {
	stream, ok := <-s.events
	if !ok {
		return s.explain(fault("hear of gVisor's events", net.ErrClosed))
	}
	s.stream = stream
	raw, err := stream.SyscallConn()
	if err != nil {
		return fault("hear of gVisor's events", err)
	}
	s.watchSocket, err = listenOn("unixpacket", monitor.WatchFile, func(conn *net.UnixConn) {
		defer conn.Close()
		_ = raw.Control(func(fd uintptr) {
			_, _, _ = conn.WriteMsgUnix([]byte{0}, unix.UnixRights(int(fd)), nil)
		})
	})
	return err
}
