package local

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
)

// screen is a terminal on which a program runs.
type screen struct {
	*person
	master, slave *os.File
	before        *unix.Termios // as it was when the program started
	cmd           *exec.Cmd
	mu            sync.Mutex
	seen          bytes.Buffer // what was printed and not yet expected
	ended         chan struct{}
}

// onTerminal starts a program in the foreground of a terminal of 100 columns and 30 lines.
func (p *person) onTerminal(cmd *exec.Cmd) *screen {
	p.Helper()
	master, slave, err := pty.Open()
	p.must(err)
	// The library leaves it such that a read holds it open.
	fd, err := unix.FcntlInt(master.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	p.must(err)
	p.must(master.Close())
	p.must(unix.SetNonblock(fd, true))
	master = os.NewFile(uintptr(fd), "terminal")
	p.must(slave.Chown(p.uid, p.uid))
	p.must(pty.Setsize(master, &pty.Winsize{Rows: 30, Cols: 100}))
	s := &screen{person: p, master: master, slave: slave, cmd: cmd, ended: make(chan struct{})}
	s.before, err = unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
	p.must(err)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr.Setsid, cmd.SysProcAttr.Setctty = true, true
	p.must(cmd.Start())
	reading := make(chan struct{})
	go func() {
		defer close(reading)
		buffer := make([]byte, 4096)
		for {
			n, err := master.Read(buffer)
			if err != nil {
				return
			}
			s.mu.Lock()
			s.seen.Write(buffer[:n])
			s.mu.Unlock()
		}
	}()
	go func() {
		defer close(s.ended)
		_ = cmd.Wait()
	}()
	p.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-s.ended
		slave.Close()
		master.Close()
		<-reading
	})
	return s
}

// expect waits until text is printed, and forgets what came up to it.
func (s *screen) expect(text string) {
	s.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		s.mu.Lock()
		if i := bytes.Index(s.seen.Bytes(), []byte(text)); i >= 0 {
			s.seen.Next(i + len(text))
			s.mu.Unlock()
			return
		}
		seen := s.seen.String()
		s.mu.Unlock()
		if time.Now().After(end) {
			s.Fatalf("no %q in %q", text, seen)
		}
	}
}

func (s *screen) keys(text string) {
	s.Helper()
	_, err := io.WriteString(s.master, text)
	s.must(err)
}

// end waits for the program and tells its exit code, or 128 and its signal.
func (s *screen) end() int {
	s.Helper()
	select {
	case <-s.ended:
	case <-time.After(10 * time.Second):
		s.Fatalf("it does not end; seen: %q", s.seen.String())
	}
	status := s.cmd.ProcessState.Sys().(syscall.WaitStatus)
	if status.Signaled() {
		return 128 + int(status.Signal())
	}
	return status.ExitStatus()
}

func (s *screen) ends(code int) {
	s.Helper()
	if got := s.end(); got != code {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.Errorf("ended with %d, not %d; seen: %q", got, code, s.seen.String())
	}
}

func TestTerminal(t *testing.T) {
	each(t, func(p *person) {
		p.write("project/look.py", `
import fcntl, os, signal, struct, sys, termios, time
def size(*_):
    rows, columns = struct.unpack('HHHH', fcntl.ioctl(0, termios.TIOCGWINSZ, b' ' * 8))[:2]
    print('size', columns, rows, flush=True)
signal.signal(signal.SIGWINCH, size)
print('tty', [os.isatty(i) for i in range(3)])
name = os.ttyname(0)
print('name', name, flush=True)
for path in ['/dev/tty'] + [name] * (os.getuid() != 0):
    f = os.open(path, os.O_RDWR)
    termios.tcsetattr(f, termios.TCSANOW, termios.tcgetattr(f))
    os.write(f, b'through ' + path.encode() + b'\n')
try:
    fcntl.ioctl(0, termios.TIOCSTI, b'x')
    print('pushed')
except OSError as e:
    print('push', e.errno)
try:
    fcntl.ioctl(0, 0x541c, b'\x03' + bytes(11)) # TIOCLINUX
    print('pasted')
except OSError as e:
    print('paste', e.errno)
size()
print('ready', flush=True)
for line in sys.stdin:
    print('got', line.strip(), flush=True)
    if line.strip() == 'end': sys.exit(5)
`)
		s := p.onTerminal(p.command("run", "--", "python3", "look.py"))
		s.expect("tty [True, True, True]")
		s.expect("name /dev/")
		s.expect("through /dev/tty\r\n")
		if p.uid != 0 { // the terminal is root's, which root in a sandbox is not
			s.expect("through /dev/console\r\n")
		}
		s.expect("push 1\r\n")
		s.expect("paste ")
		s.expect("size 100 30\r\n")
		s.expect("ready\r\n")
		p.must(pty.Setsize(s.master, &pty.Winsize{Rows: 50, Cols: 132}))
		s.expect("size 132 50\r\n")
		s.keys("hello\n")
		s.expect("got hello\r\n")
		s.keys("\x04")
		s.ends(0)
	})
}

// Streams that are no terminal stay so, and the terminal is reached all the same.
func TestTerminalAndPipes(t *testing.T) {
	each(t, func(p *person) {
		s := p.onTerminal(p.program("sh", "-c", `echo x | "$0" run -- sh -c 'test -t 0; a=$?; test -t 1; b=$?; test -t 2; echo $a$b$? >/dev/tty' | cat`, binary))
		s.expect("110\r\n")
		s.ends(0)
	})
}

// The keys that make signals end the command, once.
func TestTerminalKeys(t *testing.T) {
	each(t, func(p *person) {
		s := p.onTerminal(p.command("run", "--", "sh", "-c", "echo ready; exec sleep 60"))
		s.expect("ready\r\n")
		s.keys("\x03")
		s.ends(130)

		s = p.onTerminal(p.command("run", "--", "sh", "-c", "echo ready; exec sleep 60"))
		s.expect("ready\r\n")
		s.keys("\x1c")
		s.ends(131)

		s = p.onTerminal(p.command("run", "--", "bash", "-c", `n=0; trap 'n=$((n+1)); echo caught $n' INT; echo ready; for i in 1 2 3 4 5 6; do sleep 0.1; done; exit $n`))
		s.expect("ready\r\n")
		s.keys("\x03")
		s.expect("caught 1\r\n")
		s.ends(1)
	})
}

// ^Z stops it, fg goes on with it.
func TestTerminalStop(t *testing.T) {
	each(t, func(p *person) {
		s := p.onTerminal(p.program("bash", "--norc", "-i"))
		s.keys("PS1='$ '\n")
		s.keys(binary + " run -- sh -c 'echo rea\"\"dy; read x; echo got $x'\n")
		s.expect("ready\r\n")
		s.keys("\x1a")
		s.expect("Stopped")
		s.keys("echo out\"\"side\n")
		s.expect("outside\r\n")
		s.keys("fg\n")
		s.expect("run -- sh")
		s.keys("hello\n")
		s.expect("got hello\r\n")
		s.keys("exit 0\n")
		s.ends(0)
	})
}

// A shell in a sandbox has jobs, and the shell outside gets its terminal back.
func TestShell(t *testing.T) {
	each(t, func(p *person) {
		p.env = append(p.env, "SHELL=/bin/bash")
		s := p.onTerminal(p.program("bash", "--norc", "-i"))
		s.keys("PS1='out$ '\n")
		s.keys(binary + " shell\n")
		s.keys("PS1='in$ '; set -o | grep monitor; echo $BERM_SANDBOX $PWD\n")
		s.expect("on\r\n")
		s.expect("1 " + p.project + "\r\n")
		s.keys("sh -c 'echo st\"\"arted; exec sleep 60'\n")
		s.expect("started\r\n")
		s.keys("\x1a")
		s.expect("Stopped")
		s.keys("jobs\n")
		s.expect("sleep 60")
		s.keys("fg\n")
		s.expect("fg\r\n")
		s.expect("sleep 60")
		time.Sleep(200 * time.Millisecond)
		s.keys("\x03")
		s.keys("echo after $?\n")
		s.expect("after 130\r\n")
		s.keys("echo change > file; exit 3\n")
		s.expect("session project-1")
		s.keys("echo code $?\n")
		s.expect("code 3\r\n")
		s.keys("cat file\n")
		s.expect("one\r\n")
		s.keys("sh -c 'echo st\"\"arted; exec sleep 60'\n")
		s.expect("started\r\n")
		s.keys("\x03")
		s.keys("echo last $?\n")
		s.expect("last 130\r\n")
		s.keys("exit 0\n")
		s.ends(0)
	})
}

// A command that leaves the terminal in another state does not leave it so to the caller.
func TestTerminalRestored(t *testing.T) {
	each(t, func(p *person) {
		for _, how := range []string{"exit 0", "exit 3", "kill -9 $$", "kill -TERM $$"} {
			s := p.onTerminal(p.command("run", "--", "sh", "-c", "stty raw -echo; "+how))
			s.end()
			after, err := unix.IoctlGetTermios(int(s.slave.Fd()), unix.TCGETS)
			p.must(err)
			if fmt.Sprint(s.before) != fmt.Sprint(after) {
				p.Errorf("%s: %+v became %+v", how, s.before, after)
			}
		}
		// After the timeout as well.
		s := p.onTerminal(p.command("run", "--timeout", "300ms", "--", "sh", "-c", "stty raw -echo; sleep 60"))
		s.ends(124)
		if after, err := unix.IoctlGetTermios(int(s.slave.Fd()), unix.TCGETS); err != nil || after.Lflag&unix.ECHO == 0 {
			p.Errorf("%+v, %v", after, err)
		}
	})
}

// The end of the terminal is the end of the command.
func TestTerminalHangsUp(t *testing.T) {
	each(t, func(p *person) {
		mark := fmt.Sprintf("hangup-%d-%d", os.Getpid(), time.Now().UnixNano())
		s := p.onTerminal(p.command("run", "--", "bash", "-c", "echo ready; exec -a "+mark+" sleep 60"))
		s.expect("ready\r\n")
		s.slave.Close()
		p.must(s.master.SetReadDeadline(time.Now())) // the reader holds it open
		p.must(s.master.Close())
		s.ends(129)
		gone(p.T, mark)
	})
}
