// Command berm-monitor keeps one sandbox. `berm` starts it with the connection to talk
// over as standard input; it takes no arguments. It may wait for long until it is told
// which sandbox.
package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/signal"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/driver/namespace/launch"
	"github.com/berm-sandbox/berm/internal/monitor"
)

// The main goroutine stays on the main thread: the kernel ends a sandbox's init
// with the thread that started it.
func init() { runtime.LockOSThread() }

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "berm-monitor:", err)
		os.Exit(1)
	}
}

func run() error {
	monitor.Trace("monitor runs")
	// The end of a server or a terminal is no reason to stop keeping a sandbox. The
	// signals are taken, not ignored: what is ignored stays so in every process inside.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM, syscall.SIGPIPE)
	stdin := os.NewFile(0, "creator")
	conn, err := net.FileConn(stdin)
	if err != nil {
		return fmt.Errorf("this program is started by berm: %w", err)
	}
	// Descriptor 0 must not keep the connection open, nor be free for others.
	null, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	if err := syscall.Dup3(int(null.Fd()), 0, 0); err != nil {
		return err
	}
	null.Close()
	// What the server inherited by accident came here too, and must not get into the sandbox.
	if err := unix.CloseRange(launch.FDInit, 1<<31-1, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return fmt.Errorf("keep descriptors out of the sandbox: %w", err)
	}
	c, err := monitor.Accept(conn, "")
	if err != nil {
		return err
	}
	var spare launch.Spare
	var order launch.Order
	if err := c.Create(spare.Make, &order); err != nil {
		return err
	}
	monitor.Trace("order read")
	dir, err := launch.Enter(order.Directory)
	if err != nil {
		_ = c.Created(err)
		return err
	}
	defer dir.Close()
	return monitor.Keep(c, func(ctx context.Context) (*monitor.Life, error) {
		s, err := launch.Start(ctx, order, &spare)
		if err != nil {
			return nil, err
		}
		return &monitor.Life{
			ID: order.ID, Deadline: order.Deadline, OnDeadline: order.OnDeadline,
			Wall: s, First: s.First(), OnAgent: s.OnAgent, Wait: s.Wait,
		}, nil
	})
}
