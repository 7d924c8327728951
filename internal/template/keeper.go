package template

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/failpoint"
	"github.com/berm-sandbox/berm/internal/kernel/feature"
	"github.com/berm-sandbox/berm/internal/template/arrival"
)

// The names under which this program keeps an arrival, and fetches it. The keeper is root: it
// mounts, unpacks what has arrived as an import does, and takes the mount away. It does not
// talk to the registry: the fetcher does, without rights. If that one dies, the keeper, which has
// the same descriptor of the mount, starts another, and whoever waits for a read goes on
// waiting.
const (
	argKeeper  = "berm-arrival"
	argFetcher = "berm-fetch"
)

// How long the keeper waits for a fetcher to serve, and before it starts another. One that ends
// again and again does not end in a loop of starts.
const (
	fetcherStart = 30 * time.Second
	fetcherPause = time.Second
)

// keeperOrder is what a keeper is told on its standard input. Credentials are nowhere else.
type keeperOrder struct {
	Dir  string
	ID   string
	Auth authn.AuthConfig
}

// startKeeper starts the process that serves an arrival, in a session of its own, and returns
// when the layers are there. It goes on when keep is closed, if a template names the arrival
// then. If another process serves it already, that is as well.
func (s *Store) startKeeper(ctx context.Context, id string) (keep *os.File, err error) {
	var order arrivalOrder
	if err := readJSON(filepath.Join(s.arrivalPath(id), "order.json"), &order); err != nil {
		return nil, err
	}
	auth, err := credential(&order.Place)
	if err != nil {
		return nil, err
	}
	theirIn, ourIn, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer theirIn.Close()
	ourOut, theirOut, err := os.Pipe()
	if err != nil {
		ourIn.Close()
		return nil, err
	}
	defer ourOut.Close()
	log, err := os.OpenFile(filepath.Join(s.arrivalPath(id), "log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		ourIn.Close()
		theirOut.Close()
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{argKeeper}
	cmd.Dir, cmd.Stdin, cmd.Stdout, cmd.Stderr = "/", theirIn, theirOut, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	theirOut.Close()
	if err != nil {
		ourIn.Close()
		return nil, berm.Errorf(berm.Internal, "start the process that serves an image: %w", err)
	}
	go func() { _ = cmd.Wait() }()
	stop := context.AfterFunc(ctx, func() { ourOut.Close() })
	defer stop()
	err = json.NewEncoder(ourIn).Encode(keeperOrder{s.dir, id, auth})
	var r reply
	if err == nil {
		err = json.NewDecoder(ourOut).Decode(&r)
	}
	switch {
	case ctx.Err() != nil:
		err = ctx.Err()
	case err != nil:
		err = berm.Errorf(berm.Unavailable, "the process that serves an image ended early: %w", err)
	case r.Err != "":
		err = &berm.Error{Kind: r.Kind, Msg: r.Err, Hint: r.Hint}
	}
	if err != nil {
		ourIn.Close()
		return nil, err
	}
	return ourIn, nil
}

// noteSize is the size of the note why an image does not get on. It always has it, so that it can
// be written on a disk that is full.
const noteSize = 1024

// keeper serves one arrival.
type keeper struct {
	s      *Store
	id     string
	dir    string
	order  arrivalOrder
	auth   authn.AuthConfig
	device *os.File
	files  []*os.File // of the fetcher
	mount  []byte     // what the first fetcher said
	resend bool
	note   *os.File // see waits

	process *os.Process
	control net.Conn
	events  *json.Decoder // of control: it may have read the next one with the first
	exited  chan error
	over    bool // all is whole
}

// runKeeper is the keeper's process.
func runKeeper() error {
	var o keeperOrder
	if err := json.NewDecoder(os.Stdin).Decode(&o); err != nil {
		return err
	}
	_ = os.WriteFile("/proc/self/comm", []byte(argKeeper), 0)
	k := &keeper{s: &Store{dir: o.Dir, ids: hostIDs()}, id: o.ID, auth: o.Auth, resend: feature.KernelSince("6.9")}
	k.dir = k.s.arrivalPath(o.ID)
	unlock, err := k.s.tryLock(filepath.Join("arriving", k.id, "lock"), unix.LOCK_EX)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return answer(k.wait())
	}
	if err != nil {
		return answer(err)
	}
	defer unlock()
	if err := k.start(); err != nil {
		k.end()
		return answer(err)
	}
	if err := answer(nil); err != nil {
		return err
	}
	// The order ends when a template names the arrival, or its maker has died.
	_, _ = os.Stdin.Read(make([]byte, 1))
	return k.run()
}

// answer tells who has started the keeper that the layers are there, or why not.
func answer(err error) error {
	r := reply{}
	if err != nil {
		r = reply{Kind: berm.KindOf(err), Err: err.Error(), Hint: berm.HintOf(err)}
	}
	failed := json.NewEncoder(os.Stdout).Encode(r)
	os.Stdout.Close()
	return errors.Join(err, failed)
}

// wait returns when another keeper serves the layers.
func (k *keeper) wait() error {
	for range int(fetcherStart / (20 * time.Millisecond)) {
		if _, err := os.Stat(filepath.Join(k.dir, "mount", "0")); err == nil {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return berm.Errorf(berm.Unavailable, "the process that serves the image does not answer")
}

// start mounts and has the layers served.
func (k *keeper) start() error {
	if err := readJSON(filepath.Join(k.dir, "order.json"), &k.order); err != nil {
		return err
	}
	for i := range k.order.Layers {
		base := filepath.Join(k.dir, strconv.Itoa(i))
		for _, suffix := range []string{".tree", ".blob", ".have"} {
			f, err := os.OpenFile(base+suffix, os.O_RDWR, 0)
			if err != nil {
				return err
			}
			k.files = append(k.files, f)
		}
	}
	var err error
	if k.note, err = os.OpenFile(filepath.Join(k.dir, "waits"), os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return err
	}
	k.waits("")
	if err := k.distrust(); err != nil {
		return err
	}
	mount := filepath.Join(k.dir, "mount")
	// What an earlier process left answers with ENOTCONN.
	for unix.Unmount(mount, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW) == nil {
	}
	if err := os.MkdirAll(mount, 0o700); err != nil {
		return err
	}
	if k.device, err = arrival.Device(mount); err != nil {
		return err
	}
	if err := failpoint.Hit("template.arrival.mounted"); err != nil {
		return err
	}
	if err := k.fetcher(); err != nil {
		return err
	}
	return failpoint.Hit("template.arrival.served")
}

// distrust forgets what had come before the machine was started: it may not have reached the disk.
func (k *keeper) distrust() error {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return err
	}
	note := filepath.Join(k.dir, "boot")
	if known, err := os.ReadFile(note); err == nil && bytes.Equal(known, boot) {
		return nil
	}
	for i := range k.order.Layers {
		if err := k.files[3*i+2].Truncate(0); err != nil {
			return err
		}
	}
	return os.WriteFile(note, boot, 0o600)
}

// fetcher starts one, and returns when it serves.
func (k *keeper) fetcher() error {
	o := arrival.Order{Place: k.order.Place, Auth: k.auth, Mount: k.mount, Resend: k.mount != nil}
	for _, l := range k.order.Layers {
		o.Blobs = append(o.Blobs, l.Blob)
	}
	for _, f := range k.files {
		if _, err := f.Seek(0, 0); err != nil {
			return err
		}
	}
	var err error
	if k.process, k.control, err = arrival.Spawn(argFetcher, o, k.device, k.files); err != nil {
		return err
	}
	exited := make(chan error, 1)
	k.exited = exited
	go func(p *os.Process) {
		state, err := p.Wait()
		if err == nil && !state.Success() {
			err = errors.New(state.String())
		}
		exited <- err
	}(k.process)
	k.events = json.NewDecoder(k.control)
	_ = k.control.SetReadDeadline(time.Now().Add(fetcherStart))
	var e arrival.Event
	if err := k.events.Decode(&e); err != nil || e.Mount == nil {
		_ = k.process.Kill()
		if died := <-k.exited; died != nil {
			err = died
		}
		return berm.Errorf(berm.Unsupported, "the image's files are not served: %w", err)
	}
	_ = k.control.SetReadDeadline(time.Time{})
	k.mount = e.Mount
	return nil
}

// run keeps the layers served until they are whole, or no template names them, and no sandbox
// has them any more.
func (k *keeper) run() error {
	defer k.end()
	arrived := make(chan struct{}, 1)
	listen := func(events *json.Decoder) {
		k.waits("")
		for {
			var e arrival.Event
			if err := events.Decode(&e); err != nil {
				return
			}
			k.waits(e.Waits)
			if e.Arrived {
				arrived <- struct{}{}
				return
			}
		}
	}
	go listen(k.events)
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	leaving := false
	leave := func() {
		if !leaving {
			leaving = true
			k.detach()
		}
	}
	if !k.named() {
		leave()
	}
	for {
		select {
		case err := <-k.exited:
			if err == nil { // nobody has the mount any more
				return nil
			}
			fmt.Fprintln(os.Stderr, "the fetcher ended:", err)
			if !k.resend {
				return err // who waits would wait for ever: the end of the mount ends it
			}
			time.Sleep(fetcherPause)
			if err := k.fetcher(); err != nil {
				return err
			}
			go listen(k.events)
		case <-arrived:
			if err := k.complete(); err != nil {
				if berm.KindOf(err) == berm.Invalid || berm.KindOf(err) == berm.Unsupported {
					fmt.Fprintln(os.Stderr, "complete:", err)
					if err := os.WriteFile(filepath.Join(k.dir, "failed"), []byte(err.Error()), 0o600); err != nil {
						return err
					}
					continue
				}
				k.waits(err.Error()) // the disk is full, perhaps
				time.AfterFunc(10*time.Second, func() { arrived <- struct{}{} })
				continue
			}
			k.over = true
			leave()
		case <-tick.C:
			if !leaving && !k.named() {
				leave()
			}
			// Who else has the mount, some namespace that was made meanwhile, has it for no
			// sandbox.
			if leaving && !k.used() {
				return nil
			}
		}
	}
}

// waits notes why the image does not get on; "" is that it does.
func (k *keeper) waits(why string) {
	if why != "" {
		fmt.Fprintln(os.Stderr, time.Now().Format(time.DateTime), "it waits:", why)
	}
	if k.note != nil {
		_, _ = fmt.Fprintf(io.NewOffsetWriter(k.note, 0), "%-*.*s", noteSize, noteSize, why)
	}
}

// named says whether a template is made of the arrival, or a sandbox or a snapshot has its
// layers.
func (k *keeper) named() bool {
	named, err := k.s.namedArrivals()
	return err != nil || named[k.id]
}

// used says whether a sandbox or a snapshot has the arrival's layers.
func (k *keeper) used() bool {
	used, err := k.s.leases()
	if err != nil {
		return true
	}
	for name := range used {
		if arrivalOf(name) == k.id {
			return true
		}
	}
	return false
}

// detach takes the mount out of the store. Sandboxes that have it keep it; with the last one
// the fetcher ends.
func (k *keeper) detach() {
	_ = unix.Unmount(filepath.Join(k.dir, "mount"), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
}

// end removes what nobody needs any more. If the arrival is not over, its files stay for the
// next process.
func (k *keeper) end() {
	k.detach()
	if k.device != nil {
		k.device.Close()
	}
	if k.process != nil {
		_ = k.process.Kill()
	}
	// Who collects garbage would stumble over what goes meanwhile.
	unlock, err := k.s.lock(context.Background(), "lock", unix.LOCK_SH)
	if err != nil || !k.over && k.named() {
		return
	}
	defer unlock()
	for i := range k.order.Layers {
		name := k.s.layerPath(arrivalName(k.id, i))
		// It leads to a whole layer while snapshots or sandboxes know it by this name.
		if to, err := os.Readlink(name); err == nil && filepath.Dir(to) != "." {
			_ = os.Remove(name)
		}
	}
	if err := k.s.dropArrival(k.id); err != nil {
		fmt.Fprintln(os.Stderr, "remove:", err)
	}
}

// complete unpacks what has arrived as Import would have done, checks it against the image, and
// has the template and all who know a layer's name find it.
func (k *keeper) complete() error {
	ctx := context.Background()
	unlock, err := k.s.lock(ctx, "lock", unix.LOCK_SH)
	if err != nil {
		return err
	}
	defer unlock()
	if !k.named() {
		return nil
	}
	if err := failpoint.Hit("template.arrival.arrived"); err != nil {
		return err
	}
	budget := DefaultBudget
	chains := slices.Clone(k.order.Below)
	var layers []layerInfo
	for i, l := range k.order.Layers {
		info, chain, err := k.whole(ctx, chains, i, l, &budget)
		if err != nil {
			return fmt.Errorf("layer %.19s: %w", l.DiffID, err)
		}
		chains, layers = append(chains, chain), append(layers, info)
	}
	if err := failpoint.Hit("template.arrival.unpacked"); err != nil {
		return err
	}
	own := chains[len(k.order.Below):]
	for i, chain := range own {
		// One step: the name leads to the mount, or to the whole layer.
		tmp := filepath.Join(k.s.dir, "tmp", arrivalName(k.id, i))
		if err := os.Remove(tmp); ignoreNotExist(err) != nil {
			return err
		}
		if err := os.Symlink(filepath.Base(k.s.layerPath(chain)), tmp); err != nil {
			return err
		}
		if err := os.Rename(tmp, k.s.layerPath(arrivalName(k.id, i))); err != nil {
			return err
		}
		if err := failpoint.Hit("template.arrival.switched"); err != nil {
			return err
		}
	}
	return k.recorded(ctx, own, layers)
}

// whole unpacks one layer.
func (k *keeper) whole(ctx context.Context, below []string, i int, l arrivalLayer, b *Budget) (layerInfo, string, error) {
	parent := ""
	if len(below) > 0 {
		parent = below[len(below)-1]
	}
	chain := chainID(parent, l.DiffID)
	if info, ok, err := k.s.haveLayer(chain); ok || err != nil {
		return info, chain, err
	}
	f, err := os.Open(filepath.Join(k.dir, strconv.Itoa(i)+".blob"))
	if err != nil {
		return layerInfo{}, "", err
	}
	defer f.Close()
	return k.s.addLayer(ctx, below, l.DiffID, f, b)
}

// recorded has the templates made of the arrival name the whole layers.
func (k *keeper) recorded(ctx context.Context, chains []string, layers []layerInfo) error {
	unlock, err := k.s.lock(ctx, "names.lock", unix.LOCK_EX)
	if err != nil {
		return err
	}
	defer unlock()
	records, err := k.s.records()
	if err != nil {
		return err
	}
	for _, r := range records {
		if r.Arriving == nil || r.Arriving.ID != k.id {
			continue
		}
		r.Arriving = nil
		r.Layers = slices.Clone(r.Layers)
		for i, chain := range chains {
			at := len(r.Layers) - len(chains) + i
			r.Layers[at].Path = k.s.layerPath(chain)
			r.Size += layers[i].Size - k.order.Layers[i].Size
		}
		if err := k.s.write(r); err != nil {
			return err
		}
	}
	return failpoint.Hit("template.arrival.recorded")
}
