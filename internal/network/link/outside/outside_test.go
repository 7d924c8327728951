package outside_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/link"
	"github.com/berm-sandbox/berm/internal/network/link/outside"
)

// roleVariable makes the test binary one process of a test, in namespaces of its own.
const roleVariable = "BERM_TEST_ROLE"

func TestMain(m *testing.M) {
	switch os.Getenv(roleVariable) {
	case "":
		os.Exit(m.Run())
	case "inside": // makes the link itself
		fd, err := link.Make(link.Default)
		if err == nil {
			err = look(fd)
		}
		end(err)
	case "bare": // has no right to a packet socket
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		runtime.LockOSThread()
		err := unix.Capget(&header, &data[0])
		if err == nil {
			data[0].Effective &^= 1 << unix.CAP_NET_RAW
			err = unix.Capset(&header, &data[0])
		}
		if err == nil {
			_, err = link.Make(link.Default)
		}
		end(err)
	case "measure": // makes and drops links
		end(measure())
	case "wait": // is what the link is made for; sends one datagram when told
		_, _ = os.Stdin.Read(make([]byte, 1))
		end(send())
	}
}

func end(err error) {
	if err != nil {
		fmt.Println(outside.Explain(err))
		os.Exit(1)
	}
	os.Exit(0)
}

// look checks what a process inside sees and that its packets come out of fd.
func look(fd int) error {
	eth, err := net.InterfaceByName(link.Name)
	if err != nil {
		return err
	}
	addrs, err := eth.Addrs()
	if err != nil {
		return err
	}
	if got := fmt.Sprint(addrs, eth.MTU, eth.Flags&net.FlagUp != 0); got != "[10.0.2.15/24] 65520 true" {
		return fmt.Errorf("the link is %s", got)
	}
	routes, err := os.ReadFile("/proc/self/net/route")
	if err != nil {
		return err
	}
	if !strings.Contains(string(routes), "eth0\t00000000\t0202000A\t0003") {
		return fmt.Errorf("no default route to 10.0.2.2 in\n%s", routes)
	}
	if err := send(); err != nil {
		return err
	}
	return receive(fd)
}

// send sends a datagram to an address of the documentation network.
func send() error {
	conn, err := net.Dial("udp", "192.0.2.1:7")
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = conn.Write([]byte("out"))
	return err
}

func receive(fd int) error {
	packet := make([]byte, 1<<16)
	if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 5000); err != nil {
		return err
	}
	n, err := unix.Read(fd, packet)
	if err != nil {
		return err
	}
	ip := packet[link.HeaderLen:n]
	if link.Frames(fd) {
		ip = ip[14:]
	}
	// The first that comes: nothing of IPv6's before it.
	if ip[0] != 0x45 || !net.IP(ip[12:16]).Equal(net.IPv4(10, 0, 2, 15)) || !net.IP(ip[16:20]).Equal(net.IPv4(192, 0, 2, 1)) ||
		binary.BigEndian.Uint16(ip[22:]) != 7 || !bytes.HasSuffix(ip, []byte("out")) {
		return fmt.Errorf("packet % x", ip)
	}
	return nil
}

// measure makes and drops links, each in a namespace of its own and the kinds in turns, and prints
// what they cost in microseconds: a TUN device and a pair as link makes them, and a pair as container
// engines make it, which is taken away when the container ends.
func measure() error {
	const rounds = 40
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	kinds := [...]string{"tun", "pair", "veth"}
	var took [len(kinds)][]time.Duration
	for range rounds {
		for i, kind := range kinds {
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return err
			}
			if kind != "tun" {
				if err := unix.Mount("tmpfs", "/dev/net", "tmpfs", 0, ""); err != nil {
					return err
				}
			}
			start := time.Now()
			fd, err := link.Make(link.Default)
			if err != nil {
				return err
			}
			if kind == "veth" {
				err = remove()
			}
			_ = unix.Close(fd)
			took[i] = append(took[i], time.Since(start))
			if kind != "tun" {
				_ = unix.Unmount("/dev/net", unix.MNT_DETACH)
			}
			if err != nil {
				return err
			}
		}
	}
	for i, kind := range kinds {
		slices.Sort(took[i])
		fmt.Println(kind, took[i][rounds/2].Microseconds(), took[i][0].Microseconds())
	}
	return nil
}

// remove takes the link's device away: RTM_DELLINK with a struct ifinfomsg and IFLA_IFNAME.
func remove() error {
	s, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	b := binary.NativeEndian.AppendUint32(nil, 44)
	b = binary.NativeEndian.AppendUint16(b, unix.RTM_DELLINK)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST|unix.NLM_F_ACK)
	b = append(b, make([]byte, 8+unix.SizeofIfInfomsg)...)
	b = binary.NativeEndian.AppendUint16(b, 9)
	b = binary.NativeEndian.AppendUint16(b, unix.IFLA_IFNAME)
	b = append(b, link.Name+"\x00\x00\x00\x00"...)
	if err := unix.Sendto(s, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	answer := make([]byte, 1024)
	n, err := unix.Read(s, answer)
	if err == nil && (n < 20 || binary.NativeEndian.Uint32(answer[16:]) != 0) {
		err = fmt.Errorf("the kernel answered % x", answer[:n])
	}
	return err
}

// process starts the test binary in a user and a network namespace, its uid 0 being base
// of the host.
func process(t testing.TB, role string, base int) (*exec.Cmd, io.WriteCloser, *bytes.Buffer) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: base, Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: base, Size: 1}},
		Credential:  &syscall.Credential{NoSetGroups: true},
		Pdeathsig:   unix.SIGKILL,
	}
	output := new(bytes.Buffer)
	cmd.Stdout, cmd.Stderr = output, output
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd, stdin, output
}

func needTun(t testing.TB) {
	t.Helper()
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("missing: /dev/net/tun that this user may open: %v", err)
	}
	_ = unix.Close(fd)
}

func TestTheFirstProcessMakesTheLink(t *testing.T) {
	needTun(t)
	cmd, _, output := process(t, "inside", os.Getuid())
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
}

// A leased id of the host may not open a device of root's: then the link is made outside.
func TestTheLinkOfLeasedIDsIsMadeOutside(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("missing: root's rights, to map ids of others")
	}
	needTun(t)
	cmd, stdin, output := process(t, "wait", 1234567)
	namespace, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	defer namespace.Close()
	fd, err := outside.Make(int(namespace.Fd()), link.Default)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := stdin.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	if err := receive(fd); err != nil {
		t.Error(err)
	}
	if _, err := net.InterfaceByName(link.Name); err == nil {
		if again, err := outside.Make(int(namespace.Fd()), link.Default); err == nil {
			_ = unix.Close(again)
			t.Error("a second link of the same name was made")
		}
	}
}

// Who may not open the device gets one of a pair, which looks the same, and who can have neither
// is told what is missing.
func TestAnOrdinaryUserWithoutTheDevice(t *testing.T) {
	info, err := os.Stat("/dev/net/tun")
	if os.Getuid() != 0 || err == nil && info.Mode().Perm()&0o006 != 0 {
		t.Skip("missing: root's rights to give up, and a /dev/net/tun that is root's alone or absent")
	}
	cmd, _, output := process(t, "inside", 1234567)
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v: %s", err, output)
	}
	cmd, _, output = process(t, "bare", 1234567)
	if err := cmd.Wait(); err == nil {
		t.Error("a link was made without rights")
	}
	if got, want := strings.TrimSpace(output.String()), "no network link: open /dev/net/tun: permission denied; without it open a packet socket: operation not permitted"; err == nil && got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestExplain(t *testing.T) {
	for errno, kind := range map[syscall.Errno]berm.Kind{unix.ENOENT: berm.Unsupported, unix.EACCES: berm.Unsupported, unix.ENOMEM: berm.Internal} {
		err := outside.Explain(&link.Error{Step: "open", Err: errno})
		if berm.KindOf(err) != kind || !errors.Is(err, errno) {
			t.Errorf("%v: %v of kind %v", errno, err, berm.KindOf(err))
		}
		if kind == berm.Unsupported && berm.HintOf(err) == "" {
			t.Errorf("%v: no hint", errno)
		}
	}
	if outside.Explain(nil) != nil {
		t.Error("no error is one")
	}
}

// BenchmarkLink reports what making and dropping a link costs, as a TUN device and as what takes its
// place, beside a pair of virtual devices that is taken away: times and their ratio to the latter's.
func BenchmarkLink(b *testing.B) {
	needTun(b)
	cmd, _, output := process(b, "measure", os.Getuid())
	if err := cmd.Wait(); err != nil {
		b.Fatalf("%v: %s", err, output)
	}
	median := map[string]float64{}
	for line := range strings.Lines(output.String()) {
		var kind string
		var typical, least float64
		if _, err := fmt.Sscan(line, &kind, &typical, &least); err != nil {
			b.Fatalf("%q: %v", line, err)
		}
		median[kind] = typical
		b.ReportMetric(typical, kind+"-µs")
		b.ReportMetric(least, kind+"-least-µs")
	}
	b.ReportMetric(median["tun"]/median["veth"], "tun-ratio")
	b.ReportMetric(median["pair"]/median["veth"], "pair-ratio")
	b.ReportMetric(0, "ns/op")
}
