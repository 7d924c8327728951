// Package arrival serves the layers of an image that has not arrived in full: their files are
// there at once, what they hold is fetched when it is read, and the rest meanwhile.
package arrival

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"strconv"
	"sync"
	"syscall"
	"unsafe"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// The descriptors of a worker: the connection to its keeper, /dev/fuse, and from FirstFD on
// tree, blob and have of each layer.
const (
	ControlFD = 3
	DeviceFD  = 4
	FirstFD   = 5
)

// Order is what a worker is told, as JSON. It is never stored.
type Order struct {
	Place  Place
	Auth   authn.AuthConfig
	Blobs  []Blob
	Mount  []byte // what an earlier worker said in Event.Mount; nil for a mount that is new
	Resend bool   // the kernel can ask again what the earlier worker has not answered
}

// Blob is a compressed layer.
type Blob struct {
	Digest string `json:"digest"`
	Size   int64  `json:"size"`
}

// Event is what a worker tells its keeper, as JSON. It ends with status 0 when the mount is in
// use nowhere any more.
type Event struct {
	Mount   []byte `json:",omitempty"` // it serves; with this another can go on
	Arrived bool   `json:",omitempty"` // all blobs are there
	Waits   string `json:",omitempty"` // why it does not get on; an event without anything: it does again
}

// Work is the worker's process.
func Work() error {
	control, err := controlConn()
	if err != nil {
		return err
	}
	var order Order
	if err := json.NewDecoder(control).Decode(&order); err != nil {
		return err
	}
	source, err := NewSource(order.Place, order.Auth)
	if err != nil {
		return err
	}
	trees := make([]Tree, len(order.Blobs))
	blobs := make([]*blob, len(order.Blobs))
	for i, b := range order.Blobs {
		fd := uintptr(FirstFD + 3*i)
		tree := os.NewFile(fd, "tree")
		trees[i], err = readTree(tree)
		tree.Close()
		if err != nil {
			return err
		}
		if blobs[i], err = newBlob(b.Digest, b.Size, os.NewFile(fd+1, "blob"), os.NewFile(fd+2, "have"), source); err != nil {
			return err
		}
	}
	server, mount, err := adopt(newFiles(trees, newChunks(blobs)), order.Mount)
	if err != nil {
		return err
	}
	if err := confine(); err != nil {
		return err
	}
	events := json.NewEncoder(control)
	if err := events.Encode(Event{Mount: mount}); err != nil {
		return err
	}
	if order.Resend {
		resend()
	}
	ctx, stop := context.WithCancel(context.Background())
	go func() { // without a keeper it serves what it can, and another fetches the rest
		_, _ = control.Read(make([]byte, 1))
		stop()
	}()
	filled := make(chan error, 1)
	var telling sync.Mutex
	var told string
	tell := func(e Event) error {
		telling.Lock()
		defer telling.Unlock()
		if !e.Arrived && e.Waits == told {
			return nil
		}
		told = e.Waits
		return events.Encode(e)
	}
	go func() {
		err := fill(ctx, blobs, func(why string) { _ = tell(Event{Waits: why}) })
		if err == nil {
			err = tell(Event{Arrived: true})
		}
		filled <- err
	}()
	server.Serve()
	stop()
	if err := <-filled; err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

func controlConn() (net.Conn, error) {
	file := os.NewFile(ControlFD, "control")
	defer file.Close()
	conn, err := net.FileConn(file)
	if err != nil {
		return nil, berm.Errorf(berm.Invalid, "this program is started by berm")
	}
	return conn, nil
}

// fetchers is how many pieces are on their way at once when nobody waits for one: enough for a
// registry that is far.
const fetchers = 3

// fill fetches the blobs, the lowest first. report is told what keeps it from that.
func fill(ctx context.Context, blobs []*blob, report func(why string)) error {
	busy := func() <-chan struct{} {
		for _, b := range blobs {
			if wanted := b.wanted(); wanted != nil {
				return wanted
			}
		}
		return nil
	}
	var group errgroup.Group
	for range fetchers {
		group.Go(func() error {
			for _, b := range blobs {
				if err := b.fill(ctx, busy, report); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return group.Wait()
}

// adopt makes a server for the mount of DeviceFD. The kernel greets the first server of a mount
// alone, so one that comes later is greeted with what the kernel had said then.
func adopt(fs fuse.RawFileSystem, mount []byte) (*fuse.Server, []byte, error) {
	if mount != nil {
		device, err := unix.FcntlInt(DeviceFD, unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return nil, nil, err
		}
		defer unix.Close(device)
		defer func() { _ = unix.Dup3(device, DeviceFD, unix.O_CLOEXEC) }()
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return nil, nil, err
		}
		defer unix.Close(pair[1])
		defer unix.Close(pair[0])
		if _, err := unix.Write(pair[1], mount); err != nil {
			return nil, nil, err
		}
		if err := unix.Dup3(pair[0], DeviceFD, unix.O_CLOEXEC); err != nil {
			return nil, nil, err
		}
	}
	server, err := fuse.NewServer(fs, "/dev/fd/"+strconv.Itoa(DeviceFD), &fuse.MountOptions{
		AllowOther: true, IDMappedMount: true, DisableSplice: true, EnableSymlinkCaching: true,
		MaxWrite: MaxRead, MaxBackground: 256,
	})
	if err != nil {
		return nil, nil, err
	}
	said := server.KernelSettings()
	if said.Flags64()&fuse.CAP_ALLOW_IDMAP == 0 {
		return nil, nil, berm.Errorf(berm.Unsupported, "the kernel cannot map ids of a file system of this kind; Linux 6.12 can")
	}
	greeting := *said
	greeting.InHeader = fuse.InHeader{Length: uint32(unsafe.Sizeof(greeting)), Opcode: opInit, Unique: 2}
	var out bytes.Buffer
	if err := binary.Write(&out, binary.NativeEndian, &greeting); err != nil {
		return nil, nil, err
	}
	return server, out.Bytes(), nil
}

// From include/uapi/linux/fuse.h.
const (
	opInit       = 26
	notifyResend = -7 // as an error; Linux 6.9
)

// resend has the kernel ask again what nobody has answered.
func resend() {
	var out bytes.Buffer
	_ = binary.Write(&out, binary.NativeEndian, struct {
		Length uint32
		Error  int32
		Unique uint64
	}{16, -notifyResend, 0})
	_, _ = unix.Write(DeviceFD, out.Bytes())
}

// Device makes a mount of a worker's file system at a directory. The descriptor returned is
// the worker's DeviceFD.
func Device(dir string) (*os.File, error) {
	device, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		return nil, berm.Errorf(berm.Unsupported, "file systems of programs (FUSE): %w", err)
	}
	options := "fd=" + strconv.Itoa(int(device.Fd())) + ",rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions,max_read=" + strconv.Itoa(MaxRead)
	err = unix.Mount("berm", dir, "fuse.berm", unix.MS_RDONLY|unix.MS_NODEV|unix.MS_NOATIME, options)
	if err != nil {
		device.Close()
		return nil, berm.Errorf(berm.Unsupported, "mount a file system of a program (FUSE): %w", err)
	}
	return device, nil
}

// Spawn starts a worker, which goes on serving if the caller dies, as an id that has no rights on this machine if the caller is root. It
// answers on the connection that is returned. name is the one under which this program is a
// worker.
func Spawn(name string, order Order, device *os.File, files []*os.File) (*os.Process, net.Conn, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "worker"), os.NewFile(uintptr(pair[1]), "worker")
	defer ours.Close()
	defer theirs.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, nil, err
	}
	defer null.Close()
	process, err := os.StartProcess("/proc/self/exe", []string{name}, &os.ProcAttr{
		Dir: "/", Env: environment(),
		Files: append([]*os.File{null, null, os.Stderr, theirs, device}, files...),
		Sys: &syscall.SysProcAttr{
			Credential: &syscall.Credential{Uid: workerID, Gid: workerID},
		},
	})
	if err != nil {
		return nil, nil, err
	}
	conn, err := net.FileConn(ours)
	if err == nil {
		err = json.NewEncoder(conn).Encode(order)
	}
	if err != nil {
		_ = process.Kill()
		_, _ = process.Wait()
		return nil, nil, err
	}
	return process, conn, nil
}

// workerID is the user and group of workers: below those of the other services
// (internal/service).
const workerID = 0x70000000 - 4*berm.IDsPerSandbox

// environment is what a worker gets of its owner's: how this machine reaches others, and by
// which authorities they are verified.
func environment() []string {
	env := []string{"PATH=/usr/bin:/bin"}
	for _, name := range []string{
		"SSL_CERT_FILE", "SSL_CERT_DIR", "BERM_FAILPOINTS", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
	} {
		if value, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+value)
		}
	}
	return env
}

// Arrived tells how many bytes of a blob are there, from what was noted of its blocks.
func Arrived(have io.Reader, size int64) int64 {
	noted, _ := io.ReadAll(have)
	n := int64(bytes.Count(noted, []byte{byte(present)})) * BlockSize
	return min(n, size)
}
