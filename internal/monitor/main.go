package monitor

import (
	"context"
	"encoding/json"
	"net"
	"os"
	"runtime/debug"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/failpoint"
)

// The files of a sandbox's directory.
const (
	SocketFile = "monitor.sock" // the protocol
	AgentFile  = "agent.sock"   // byte streams to ports inside
	LinkFile   = "link.sock"    // hands the other end of the sandbox's link to whoever connects
	// KeepFile takes a descriptor that comes with the byte KeepPut, and hands it out, if there
	// is one, to whoever sends KeepGet.
	KeepFile = "keep.sock"
	ExitFile = "exit.json" // how the sandbox ended
	// LayerFile serves one look at the writable layer: each byte LayerNow that is sent is
	// answered, and at the end of the sandbox, without being asked, comes one more answer with
	// the byte LayerLast. An answer has the descriptors of the upper directory and of the
	// layers below, the lowest first, or none. What the layer lies on is kept until the
	// connection is closed, at the longest for LayerPatience.
	LayerFile = "layer.sock"
	// WatchFile tells whoever connected last what is executed inside: see notify.Relay. It is there
	// where the sandbox has a listener.
	WatchFile = "watch.sock"
)

// The requests on KeepFile, of one byte each, as is the answer.
const (
	KeepPut = 'p'
	KeepGet = 'g'
)

// The bytes on LayerFile.
const (
	LayerNow  = 'n'
	LayerLast = 'l'
)

// LayerPatience is how long the end of a sandbox waits for whoever looks at its layer: it has
// to be over within two seconds.
const LayerPatience = 1200 * time.Millisecond

// Life is one sandbox from the view of a monitor's main function.
type Life struct {
	ID         berm.SandboxID
	Deadline   time.Time
	OnDeadline berm.OnDeadline
	Wall       Wall
	First      *berm.First // nil when it is no process of this host
	// OnAgent has a function called for each later start of the guest agent.
	OnAgent func(func())
	// Wait returns when the sandbox is dead and everything of it is gone but its
	// directory. It calls asked for the reason that somebody gave, and keep before it
	// takes anything away.
	Wait func(asked func() berm.Reason, keep func(berm.Exit)) berm.Exit
}

// Keep runs the life of a sandbox that start makes, in the current directory, which
// is the sandbox's own. It returns when the sandbox is dead. Without a commit on c
// the sandbox dies with its creator.
func Keep(c *Conn, start func(ctx context.Context) (*Life, error)) error {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	committed := make(chan struct{})
	go func() {
		if err := c.Committed(); err != nil {
			cancel(berm.Errorf(berm.Unavailable, "the creator is gone: %w", err))
			return
		}
		close(committed)
	}()
	// The socket is made while the sandbox starts: files can be slow.
	type listening struct {
		l   *net.UnixListener
		err error
	}
	socket := make(chan listening, 1)
	go func() {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: SocketFile, Net: "unix"})
		socket <- listening{l, err}
	}()
	life, err := start(ctx)
	if err != nil {
		_ = c.Created(err)
		return err
	}
	machine := NewMachine(life.Wall, life.OnDeadline)
	machine.status.First = life.First
	_ = machine.SetDeadline(life.Deadline)
	life.OnAgent(machine.AgentStarted)
	server := NewServer(life.ID, machine)

	s := <-socket
	if err = s.err; err == nil {
		err = failpoint.Hit("monitor.listen")
	}
	if err == nil {
		go server.Listen(s.l)
	} else {
		cancel(err)
	}
	_ = c.Created(err)
	go func() {
		select {
		case <-committed:
			server.Serve(c)
		case <-ctx.Done():
			machine.Kill(berm.ReasonCrash)
		}
	}()

	// What the creation needed is most of this process's memory, and many sandboxes live
	// long: give it back when it is clear that this one does.
	time.AfterFunc(5*time.Second, func() {
		debug.SetGCPercent(20) // off until now
		debug.FreeOSMemory()
	})

	exit := life.Wait(machine.Reason, keepExit)
	machine.Died(exit)
	// Whoever waits for the death has the time to hear of it.
	server.Drain(2 * time.Second)
	return err
}

// keepExit writes how the sandbox ended for those who ask when the monitor is gone.
func keepExit(exit berm.Exit) {
	raw, err := json.Marshal(exit)
	if err != nil {
		return
	}
	if os.WriteFile(ExitFile+".new", raw, 0o600) == nil {
		_ = os.Rename(ExitFile+".new", ExitFile)
	}
}
