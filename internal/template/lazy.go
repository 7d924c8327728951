package template

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/failpoint"
	"github.com/berm-sandbox/berm/internal/kernel/feature"
	"github.com/berm-sandbox/berm/internal/template/arrival"
)

// An image that arrives lazily has its own directory in the store until it is whole:
//
//	arriving/ID/order.json  where it comes from, and its layers
//	arriving/ID/N.tree      layer N without the contents of its files
//	arriving/ID/N.blob, N.have  the compressed layer, and which blocks of it have come
//	arriving/ID/mount/N     the layer, served by a process (see keeper.go)
//	arriving/ID/failed      why it will never be whole
//	arriving/ID/waits       why it does not get on at present
//	arriving/ID/lock        held by that process
//	layers/ID-N             leads to mount/N, later to the whole layer
//
// What its table of contents makes of a layer is not what its diff-id makes of it, unless whoever
// made the image is honest. So no other image is given such a layer: whole layers alone have
// their chain-ids for names.

// Lazy says whether an image may be used before it has arrived.
type Lazy string

// The kinds of laziness.
const (
	Whole  Lazy = ""     // it is unpacked before Import returns
	Auto   Lazy = "auto" // it is used at once if that is possible
	Always Lazy = "yes"  // or refused
)

// allow says how many layers arrive lazily, and why not more, or refuses. There is no reason when
// nothing has to arrive.
func (l Lazy) allow(layers int, reason error, p Progress) error {
	if layers > 0 || reason == nil {
		return nil
	}
	if l == Always {
		return berm.Errorf(berm.Unsupported, "the image cannot be used before it has arrived: %w", reason).WithHint("Without --lazy, or with --lazy=auto, it is imported whole.")
	}
	p.say("it is imported whole: %v", reason)
	return nil
}

// arrivalOrder is the file order.json.
type arrivalOrder struct {
	Place  arrival.Place  `json:"place"`
	Below  []string       `json:"below"`  // chain-ids of the layers that are whole, lowest first
	Layers []arrivalLayer `json:"layers"` // the others
}

type arrivalLayer struct {
	arrival.Blob
	DiffID string `json:"diffID"`
}

// lazily says why this process cannot serve layers that are on their way; nil if it can. A test
// has it say so.
var lazily = func() error {
	if os.Geteuid() != 0 {
		return errors.New("only root can mount what a program serves")
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		return errors.New("there is no /dev/fuse")
	}
	if !feature.KernelSince("6.12") {
		return errors.New("to map ids of what a program serves takes Linux 6.12")
	}
	return nil
}

// mayArrive says from which layer on an image can arrive lazily, with the tables of contents of
// those layers: all from there on must have one. reason is why none can, or why not more; nil
// when all are here.
func (s *Store) mayArrive(ctx context.Context, img *image, opts ImportOptions) (from int, tables [][]arrival.Entry, reason error, err error) {
	from = len(img.layers)
	if err := lazily(); err != nil {
		return from, nil, err, nil
	}
	if img.place == nil {
		return from, nil, errors.New("it is not from a registry"), nil
	}
	if opts.Transport != nil || opts.Login != nil {
		return from, nil, errors.New("it is ordered by a build"), nil
	}
	source, err := s.source(img.place)
	if err != nil {
		return from, nil, nil, err
	}
	stop := 0 // layers that are whole already
	for chain := ""; stop < from; stop++ {
		chain = chainID(chain, img.layers[stop].diffID)
		if _, ok, err := s.haveLayer(chain); err != nil {
			return from, nil, nil, err
		} else if !ok {
			break
		}
	}
	for ; from > stop; from-- {
		l := img.layers[from-1]
		if l.table == "" {
			return from, tables, fmt.Errorf("%s has no table of contents (eStargz)", l), nil
		}
		entries, err := arrival.ReadTOC(arrival.Reader{Ctx: ctx, Source: source, Digest: l.digest}, l.size, l.table)
		if berm.KindOf(err) == berm.Unsupported {
			return from, tables, fmt.Errorf("%s: %w", l, err), nil
		}
		if err != nil {
			return from, nil, nil, fmt.Errorf("%s: %w", l, err)
		}
		tables = append([][]arrival.Entry{entries}, tables...)
	}
	return from, tables, nil, nil
}

// source asks a registry with what Docker's configuration has for it.
func (s *Store) source(place *arrival.Place) (*arrival.Source, error) {
	auth, err := credential(place)
	if err != nil {
		return nil, err
	}
	return arrival.NewSource(*place, auth)
}

func credential(place *arrival.Place) (authn.AuthConfig, error) {
	repo, err := place.Repo()
	if err != nil {
		return authn.AuthConfig{}, err
	}
	known, err := authn.DefaultKeychain.Resolve(repo)
	if err != nil {
		return authn.AuthConfig{}, berm.Errorf(berm.Invalid, "Docker's configuration: %w", err)
	}
	auth, err := known.Authorization()
	if err != nil {
		return authn.AuthConfig{}, berm.Errorf(berm.Invalid, "Docker's configuration: %w", err)
	}
	return *auth, nil
}

// arrive has the layers with the given tables of contents, the uppermost of an image, served
// while they arrive. It returns the layers' names and the id of the arrival. The caller holds the
// shared lock, and closes keep when the template is stored: until then the process that serves
// them ends with this one. It fails with Unsupported when a layer cannot be served without those
// below; skipped is how many of the tables are then of no use.
func (s *Store) arrive(ctx context.Context, img *image, below []string, tables [][]arrival.Entry, made *record) (keep *os.File, useless int, err error) {
	from := len(img.layers) - len(tables)
	id := strings.ToLower(rand.Text())
	tmp := filepath.Join(s.dir, "tmp", "arriving-"+id)
	dir := s.arrivalPath(id)
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return nil, 0, err
	}
	defer func() {
		if err != nil {
			_ = removeTree(tmp)
		}
	}()
	made.Layers, made.Skipped = slices.Clone(made.Layers), slices.Clone(made.Skipped)
	order := arrivalOrder{Place: *img.place, Below: below}
	var lower []*os.Root // highest first
	defer func() {
		for _, root := range lower {
			root.Close()
		}
	}()
	for _, c := range below {
		root, err := os.OpenRoot(s.layerPath(c))
		if err != nil {
			return nil, 0, err
		}
		lower = append([]*os.Root{root}, lower...)
	}
	budget := DefaultBudget
	for i, entries := range tables {
		l := img.layers[from+i]
		root, skipped, err := s.hollowLayer(ctx, filepath.Join(tmp, strconv.Itoa(i)), entries, lower, &budget)
		if err != nil {
			return nil, i + 1, fmt.Errorf("%s: %w", l, err)
		}
		lower = append([]*os.Root{root}, lower...)
		order.Layers = append(order.Layers, arrivalLayer{arrival.Blob{Digest: l.digest, Size: l.size}, l.diffID})
		made.Layers = append(made.Layers, berm.Layer{DiffID: l.diffID, Path: s.layerPath(arrivalName(id, i))})
		made.Size += l.size
		made.Skipped = append(made.Skipped, skipped...)
	}
	for i := range tables {
		if err := removeTree(filepath.Join(tmp, strconv.Itoa(i))); err != nil {
			return nil, 0, err
		}
	}
	b, err := json.MarshalIndent(order, "", "  ")
	if err != nil {
		return nil, 0, err
	}
	if err := os.WriteFile(filepath.Join(tmp, "order.json"), b, 0o600); err != nil {
		return nil, 0, err
	}
	if err := os.Mkdir(filepath.Join(tmp, "mount"), 0o700); err != nil {
		return nil, 0, err
	}
	if err := failpoint.Hit("template.arrival.ordered"); err != nil {
		return nil, 0, err
	}
	if err := os.Rename(tmp, dir); err != nil {
		return nil, 0, err
	}
	defer func() {
		if err != nil {
			_ = s.dropArrival(id)
		}
	}()
	for i := range tables {
		if err := os.Symlink(filepath.Join("..", "arriving", id, "mount", strconv.Itoa(i)), s.layerPath(arrivalName(id, i))); err != nil {
			return nil, 0, err
		}
	}
	if err := failpoint.Hit("template.arrival.named"); err != nil {
		return nil, 0, err
	}
	keep, err = s.startKeeper(ctx, id)
	made.Arriving = &berm.Arriving{ID: id}
	return keep, 0, err
}

// hollowLayer unpacks a layer without contents into a directory and writes its tree beside. It
// returns the directory opened, for the layers above.
func (s *Store) hollowLayer(ctx context.Context, dir string, entries []arrival.Entry, lower []*os.Root, b *Budget) (root *os.Root, skipped []string, err error) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, nil, err
	}
	opened, err := os.OpenRoot(dir)
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			opened.Close()
		}
	}()
	files, skipped, err := unpackHollow(ctx, entries, opened, lower, s.ids, b)
	if err != nil {
		return nil, nil, err
	}
	tree, err := arrival.Walk(dir, func(ino uint64) []arrival.Chunk { return entries[files[ino]].Chunks })
	if err != nil {
		return nil, nil, err
	}
	for _, suffix := range []string{".blob", ".have"} {
		if err := os.WriteFile(dir+suffix, nil, 0o600); err != nil {
			return nil, nil, err
		}
	}
	f, err := os.OpenFile(dir+".tree", os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	return opened, skipped, tree.Write(f)
}

// arrivalName is the name in layers/ of a layer that arrives, in the place of its chain-id.
func arrivalName(id string, layer int) string { return id + "-" + strconv.Itoa(layer) }

// arrivalOf is the arrival that a name in layers/ is of; "" for a layer that was always whole.
func arrivalOf(name string) string {
	id, _, _ := strings.Cut(name, "-")
	if id == name {
		return ""
	}
	return id
}

func (s *Store) arrivalPath(id string) string { return filepath.Join(s.dir, "arriving", id) }

// dropArrival removes what an arrival leaves, when nobody serves it.
func (s *Store) dropArrival(id string) error {
	dir := s.arrivalPath(id)
	if err := unix.Unmount(filepath.Join(dir, "mount"), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EPERM) {
		return err
	}
	hidden := filepath.Join(s.dir, "tmp", "arrived-"+rand.Text())
	if err := os.Rename(dir, hidden); err != nil {
		return ignoreNotExist(err)
	}
	return os.RemoveAll(hidden)
}

// namedArrivals are those that a template, a sandbox or a snapshot has layers of.
func (s *Store) namedArrivals() (map[string]bool, error) {
	records, err := s.records()
	if err != nil {
		return nil, err
	}
	used, err := s.leases()
	if err != nil {
		return nil, err
	}
	named := map[string]bool{}
	for _, r := range records {
		if r.Arriving != nil {
			named[r.Arriving.ID] = true
		}
	}
	for name := range used {
		named[arrivalOf(name)] = true
	}
	return named, nil
}

// collectArrivals removes those that are not named and not served. It needs the exclusive lock.
func (s *Store) collectArrivals() error {
	named, err := s.namedArrivals()
	if err != nil {
		return err
	}
	all, err := os.ReadDir(filepath.Join(s.dir, "arriving"))
	if err != nil {
		return err
	}
	for _, a := range all {
		if named[a.Name()] {
			continue
		}
		unlock, err := s.tryLock(filepath.Join("arriving", a.Name(), "lock"), unix.LOCK_EX)
		if errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		err = s.dropArrival(a.Name())
		unlock()
		if err != nil {
			return err
		}
	}
	return nil
}

// arriving tells how far an image is.
func (s *Store) arriving(id string) *berm.Arriving {
	a := &berm.Arriving{ID: id}
	dir := s.arrivalPath(id)
	var order arrivalOrder
	if readJSON(filepath.Join(dir, "order.json"), &order) != nil {
		return a // it became whole, or went, meanwhile
	}
	for i, l := range order.Layers {
		a.Total += l.Size
		if have, err := os.Open(filepath.Join(dir, strconv.Itoa(i)+".have")); err == nil {
			a.Bytes += arrival.Arrived(have, l.Size)
			have.Close()
		}
	}
	if why, err := os.ReadFile(filepath.Join(dir, "failed")); err == nil {
		a.Failed = string(why)
	} else if why, err := os.ReadFile(filepath.Join(dir, "waits")); err == nil {
		a.Waits = strings.TrimSpace(string(why))
	}
	return a
}

// Serve has the layers of arrivals served again whose process has died, or that were on their
// way when the machine stopped. It does nothing for the others. It fails with Invalid when an
// image turned out not to be what it says.
func (s *Store) Serve(ctx context.Context, layers []berm.Layer) error {
	var seen []string
	for _, l := range layers {
		id := arrivalOf(filepath.Base(l.Path))
		if id == "" || slices.Contains(seen, id) {
			continue
		}
		seen = append(seen, id)
		if why, err := os.ReadFile(filepath.Join(s.arrivalPath(id), "failed")); err == nil {
			return berm.Errorf(berm.Invalid, "the image that is on its way is not what it says: %s", why).WithHint("Import it again, without --lazy: that replaces the template.")
		}
		unlock, err := s.tryLock(filepath.Join("arriving", id, "lock"), unix.LOCK_SH)
		if errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, os.ErrNotExist) {
			continue // served, or whole or gone
		}
		if err != nil {
			return err
		}
		unlock()
		keep, err := s.startKeeper(ctx, id)
		if err != nil {
			return err
		}
		keep.Close()
	}
	return nil
}

// Arrive goes on with all images that were on their way when the machine, or the process that
// fetched them, stopped.
func (s *Store) Arrive(ctx context.Context) error {
	records, err := s.records()
	if err != nil {
		return err
	}
	var failed error
	for _, r := range records {
		if r.Arriving != nil {
			failed = errors.Join(failed, s.Serve(ctx, r.Layers))
		}
	}
	return failed
}

// Whole waits until a template's image has arrived in full, and returns the template as it is
// then: layers that are built on it need its own. It fails with Invalid when that will never be.
func (s *Store) Whole(ctx context.Context, t berm.Template, p Progress) (berm.Template, error) {
	if t.Arriving != nil {
		p.say("waiting for the image, which is still on its way")
	}
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for t.Arriving != nil {
		if err := s.Serve(ctx, t.Layers); err != nil {
			return t, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return t, ctx.Err()
		}
		r, err := s.read(filepath.Join(s.dir, string(t.BuildID)+".json"))
		if errors.Is(err, os.ErrNotExist) {
			return t, berm.Errorf(berm.NotFound, "template '%s' was removed", t.Alias())
		}
		if err != nil {
			return t, err
		}
		t = s.own(r.Template)
	}
	return t, nil
}
