package template

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/failpoint"
)

// chainID is the OCI chain-id of a layer with a diff-id over a chain of others,
// both "sha256:…". A layer is kept under it and not under its diff-id, since what
// it unpacks to depends on what lies below: links that its paths cross, files that
// its hard links name.
func chainID(below, diffID string) string {
	if below == "" {
		return diffID
	}
	sum := sha256.Sum256([]byte(below + " " + diffID))
	return "sha256:" + hex.EncodeToString(sum[:])
}

// layerInfo is the file beside a layer.
type layerInfo struct {
	DiffID  string   `json:"diffID"`
	Size    int64    `json:"size"` // bytes on disk
	Skipped []string `json:"skipped,omitempty"`
}

// haveLayer returns what is known of a layer of the store; ok is false when there
// is none.
func (s *Store) haveLayer(chain string) (info layerInfo, ok bool, err error) {
	path := s.layerPath(chain)
	if _, err := os.Lstat(path); err != nil {
		return info, false, ignoreNotExist(err)
	}
	b, err := os.ReadFile(path + ".json")
	if err != nil {
		return info, false, ignoreNotExist(err)
	}
	return info, true, json.Unmarshal(b, &info)
}

func ignoreNotExist(err error) error {
	if os.IsNotExist(err) {
		return nil
	}
	return err
}

func (s *Store) layerPath(chain string) string {
	return filepath.Join(s.dir, "layers", strings.TrimPrefix(chain, "sha256:"))
}

// addition is what addLayer is told; the layer itself comes as a stream.
type addition struct {
	Dir    string   // of the store
	Below  []string // chain-ids of the layers below, lowest first
	DiffID string   // what the stream must hash to; "" takes any
	Own    bool     // see ids
	UIDs   berm.IDRange
	GIDs   berm.IDRange
	Budget Budget
}

// added is what comes back.
type added struct {
	Info   layerInfo
	Chain  string
	Budget Budget // what is left
}

// addLayer unpacks a layer into the store. The caller holds the shared lock. The
// layer appears in one step, whole.
func (s *Store) addLayer(ctx context.Context, below []string, diffID string, r io.Reader, b *Budget) (layerInfo, string, error) {
	a := addition{Dir: s.dir, Below: below, DiffID: diffID, Own: s.ids.own, UIDs: s.ids.uids, GIDs: s.ids.gids, Budget: *b}
	var done added
	var err error
	if s.ids.shifted() {
		// To give files to subordinate ids takes a user namespace that has them.
		err = inNamespace(ctx, s.ids.storageMap(), "layer", a, &done, s.dir, r, nil, os.Stderr)
	} else {
		done, err = a.run(ctx, r)
	}
	*b = done.Budget
	return done.Info, done.Chain, err
}

// runAddLayer is addLayer in the helper process.
func runAddLayer(ctx context.Context, args []byte) (any, error) {
	var a addition
	if err := json.Unmarshal(args, &a); err != nil {
		return nil, err
	}
	return a.run(ctx, os.Stdin)
}

func (a addition) run(ctx context.Context, r io.Reader) (done added, err error) {
	s := &Store{dir: a.Dir, ids: ids{own: a.Own, uids: a.UIDs, gids: a.GIDs}}
	tmp := filepath.Join(s.dir, "tmp", "layer-"+rand.Text())
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return done, err
	}
	defer func() {
		if err != nil {
			_ = removeTree(tmp)
		}
	}()
	top, err := os.OpenRoot(tmp)
	if err != nil {
		return done, err
	}
	defer top.Close()
	var lower []*os.Root
	chain := ""
	for _, c := range a.Below {
		root, err := os.OpenRoot(s.layerPath(c))
		if err != nil {
			return done, err
		}
		defer root.Close()
		lower = append([]*os.Root{root}, lower...)
		chain = c
	}
	plain, err := decompress(r, &a.Budget)
	if err != nil {
		return done, err
	}
	hash := sha256.New()
	done.Info.Size, done.Info.Skipped, err = unpack(ctx, io.TeeReader(plain, hash), top, lower, s.ids, &a.Budget)
	if err != nil {
		return done, err
	}
	done.Info.DiffID = "sha256:" + hex.EncodeToString(hash.Sum(nil))
	if a.DiffID != "" && done.Info.DiffID != a.DiffID {
		return done, berm.Errorf(berm.Invalid, "the layer is %s and not %s as the image says", done.Info.DiffID, a.DiffID)
	}
	done.Chain, done.Budget = chainID(chain, done.Info.DiffID), a.Budget
	return done, s.keepLayer(tmp, done)
}

// keepLayer moves an unpacked layer to its place. A machine that stops at any
// moment leaves the whole layer there, or none.
func (s *Store) keepLayer(tmp string, done added) error {
	dir, err := os.Open(tmp)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := unix.Syncfs(int(dir.Fd())); err != nil {
		return fmt.Errorf("write the layer to disk: %w", err)
	}
	if err := failpoint.Hit("template.layer.unpacked"); err != nil {
		return err
	}
	path := s.layerPath(done.Chain)
	if err := s.writeJSON(filepath.Join("layers", filepath.Base(path)+".json"), done.Info); err != nil {
		return err
	}
	if err := failpoint.Hit("template.layer.described"); err != nil {
		return err
	}
	err = os.Rename(tmp, path)
	if os.IsExist(err) { // another process was faster
		return removeTree(tmp)
	}
	return err
}

// removeAll removes trees of the store, given relative to it.
func (s *Store) removeAll(ctx context.Context, names []string) error {
	if len(names) == 0 {
		return nil
	}
	if s.ids.shifted() {
		return inNamespace(ctx, s.ids.storageMap(), "remove", removal{s.dir, names}, nil, s.dir, nil, nil, os.Stderr)
	}
	return removal{s.dir, names}.run()
}

type removal struct {
	Dir   string
	Names []string
}

func runRemove(args []byte) error {
	var r removal
	if err := json.Unmarshal(args, &r); err != nil {
		return err
	}
	return r.run()
}

// run moves each tree out of sight before it takes it apart, so that no half of a
// layer is ever found under its name.
func (r removal) run() error {
	for _, name := range r.Names {
		path := filepath.Join(r.Dir, name)
		hidden := filepath.Join(r.Dir, "tmp", "removed-"+rand.Text())
		if err := os.Rename(path, hidden); err != nil {
			return err
		}
		if err := failpoint.Hit("template.remove"); err != nil {
			return err
		}
		if err := removeTree(hidden); err != nil {
			return err
		}
	}
	return nil
}

// removeTree removes a tree that may hold directories which their owner cannot
// enter.
func removeTree(path string) error {
	if os.RemoveAll(path) == nil {
		return nil
	}
	if err := os.Chmod(path, 0o700); err != nil {
		return err
	}
	root, err := os.OpenRoot(path)
	if err != nil {
		return err
	}
	defer root.Close()
	err = fs.WalkDir(root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if d != nil && d.IsDir() && err == nil {
			return root.Chmod(name, 0o700)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return os.RemoveAll(path)
}
