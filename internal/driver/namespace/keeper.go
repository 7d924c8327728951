package namespace

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/namespace/launch"
	"github.com/berm-sandbox/berm/internal/monitor"
)

// keeper is a handle on a monitor, which may have no sandbox yet.
type keeper struct {
	client *monitor.Client
	pid    int
	ended  <-chan struct{} // closed when the monitor was reaped; nil when it is not our child
}

// spawn starts a monitor in a session of its own, so that it outlives this process.
func (d *Driver) spawn(ctx context.Context) (*keeper, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, berm.Errorf(berm.Internal, "socket pair: %w", err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "monitor")
	ours := os.NewFile(uintptr(pair[0]), "monitor")
	conn, err := net.FileConn(ours)
	ours.Close()
	if err != nil {
		theirs.Close()
		return nil, berm.Errorf(berm.Internal, "socket pair: %w", err)
	}
	cmd := exec.Command(d.monitor)
	cmd.Args = []string{"berm-monitor"}
	cmd.Dir, cmd.Env = filepath.Join(d.config.Data, "sandboxes"), environment()
	cmd.Stdin = theirs
	cmd.ExtraFiles = []*os.File{d.init, d.guest}
	cmd.SysProcAttr = session
	if os.Getenv("BERM_TRACE") != "" {
		cmd.Stderr = os.Stderr
	}
	err = cmd.Start()
	// Now, not at the end: while it is open here, the death of a monitor that has not yet
	// said anything would not end the connection.
	theirs.Close()
	if err != nil {
		conn.Close()
		return nil, berm.Errorf(berm.Internal, "start the monitor: %w", err)
	}
	monitor.Trace("monitor started")
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	k := &keeper{pid: cmd.Process.Pid, ended: ended}
	if k.client, err = monitor.NewClient(ctx, conn); err != nil {
		k.dismiss()
		return nil, err
	}
	return k, nil
}

// spare starts a monitor that waits for the order of a sandbox with a certain writable
// layer.
func (d *Driver) spare(ctx context.Context, upper launch.Upper) (*keeper, error) {
	k, err := d.spawn(ctx)
	if err != nil {
		return nil, err
	}
	if err := k.client.Prepare(ctx, launch.Spare{Upper: upper}); err != nil {
		k.dismiss()
		return nil, err
	}
	return k, nil
}

// lost says whether the monitor has ended.
func (k *keeper) lost() bool {
	select {
	case <-k.ended:
		return true
	default:
		return false
	}
}

// dismiss lets a monitor go that has no sandbox, or none that was committed, and returns
// when it is gone. Without a creator it ends by itself.
func (k *keeper) dismiss() {
	if k.client != nil {
		_ = k.client.Close()
	}
	select {
	case <-k.ended:
	case <-time.After(killLimit):
	}
	k.end()
}

// end makes sure that the monitor is gone. The kernel ends the sandbox with it.
func (k *keeper) end() {
	if k.ended == nil || k.lost() {
		return // not ours: Driver.remove finds it by the lock on the directory
	}
	_ = unix.Kill(k.pid, unix.SIGKILL) // ours, and not reaped: the id is still its own
	select {
	case <-k.ended:
	case <-time.After(killLimit): // Driver.remove reports it
	}
}
