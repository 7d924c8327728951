package session

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/failpoint"
)

// Checkpoint is a copy of what a session had changed at one moment.
type Checkpoint struct {
	N       int           `json:"n"` // from 1 on, never used again
	Time    time.Time     `json:"time"`
	Reason  string        `json:"reason"`
	How     string        `json:"how"` // "cloned" or "copied"
	Took    time.Duration `json:"took"`
	Entries int           `json:"entries"`

	Command []string `json:"-"` // what ran next in the session, of a listed checkpoint
}

// checkpointFile describes a checkpoint, beside its copy of the upper directory.
const checkpointFile = "checkpoint.json"

// unfinished begins the names of checkpoints that are being made or deleted.
const unfinished = "."

// Checkpoint copies what the session changed, and deletes the oldest checkpoints but for
// keep. The session must be locked and no command running in it. A crash leaves all of the
// new checkpoint or nothing to be seen; one of the machine may lose what was copied last.
func (s *Session) Checkpoint(ctx context.Context, reason string, keep int) (Checkpoint, error) {
	dir, err := s.openCheckpoints()
	if err != nil {
		return Checkpoint{}, err
	}
	defer dir.Close()
	upper, err := s.OpenUpper()
	if err != nil {
		return Checkpoint{}, err
	}
	defer upper.Close()
	numbers, err := sweepCheckpoints(ctx, dir)
	if err != nil {
		return Checkpoint{}, err
	}
	c, err := makeCheckpoint(ctx, dir, upper, next(numbers), reason)
	if err != nil {
		return Checkpoint{}, err
	}
	return c, trim(ctx, dir, append(numbers, c.N), keep)
}

// Checkpoints lists the session's checkpoints, oldest first.
func (s *Session) Checkpoints() ([]Checkpoint, error) {
	dir, err := s.store.root.OpenRoot(filepath.Join(s.Name, checkpoints))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, stateError(err, "list the checkpoints of session "+s.Name)
	}
	defer dir.Close()
	numbers, _, err := listCheckpoints(dir)
	if err != nil {
		return nil, err
	}
	list := make([]Checkpoint, 0, len(numbers))
	for _, n := range numbers {
		c := Checkpoint{N: n}
		data, err := readDescription(dir, n)
		if err == nil {
			err = json.Unmarshal(data, &c)
		}
		if err == nil && c.N != n {
			err = errors.New("it is of another number")
		}
		if err != nil {
			return nil, berm.Errorf(berm.Internal, "checkpoint %d of session %s cannot be read: %w", n, s.Name, err).
				WithHint("delete %s", filepath.Join(s.Dir(), checkpoints, strconv.Itoa(n)))
		}
		list = append(list, c)
	}
	for i := range list {
		for _, run := range s.Runs {
			if run.Started.Before(list[i].Time) {
				continue
			}
			if i+1 == len(list) || run.Started.Before(list[i+1].Time) {
				list[i].Command = run.Argv
			}
			break
		}
	}
	return list, nil
}

// Restore makes the session's changes those of checkpoint n, and returns the checkpoint that
// now holds what they were before. The session must be locked and no command running in it.
// A crash leaves one or the other; at worst with one more checkpoint, a second copy of n.
func (s *Session) Restore(ctx context.Context, n, keep int) (Checkpoint, error) {
	dir, err := s.openCheckpoints()
	if err != nil {
		return Checkpoint{}, err
	}
	defer dir.Close()
	numbers, err := sweepCheckpoints(ctx, dir)
	if err != nil {
		return Checkpoint{}, err
	}
	if !slices.Contains(numbers, n) {
		return Checkpoint{}, berm.Errorf(berm.NotFound, "session %s has no checkpoint %d", s.Name, n).
			WithHint("it has %v", numbers)
	}
	source, err := dir.OpenRoot(filepath.Join(strconv.Itoa(n), upperDir))
	if err != nil {
		return Checkpoint{}, stateError(err, "open the checkpoint")
	}
	defer source.Close()
	// A second copy of n takes the place of the changes, and they its place: in one step,
	// and only once the copy has its name, so that nothing is ever without one.
	c, err := makeCheckpoint(ctx, dir, source, next(numbers), "before going back to checkpoint "+strconv.Itoa(n))
	if err != nil {
		return Checkpoint{}, err
	}
	if err := failpoint.Hit("session.restore.copied"); err != nil {
		return Checkpoint{}, err
	}
	all, err := dir.Open(".")
	if err != nil {
		return Checkpoint{}, stateError(err, "open the checkpoints")
	}
	defer all.Close()
	if err := s.exchange(upperDir, int(all.Fd()), filepath.Join(strconv.Itoa(c.N), upperDir)); err != nil {
		return Checkpoint{}, stateError(err, "exchange the changes of session "+s.Name)
	}
	if err := failpoint.Hit("session.restore.exchanged"); err != nil {
		return Checkpoint{}, err
	}
	// n is what one might want again, so it does not count.
	return c, trim(ctx, dir, slices.DeleteFunc(append(numbers, c.N), func(i int) bool { return i == n }), keep)
}

// RemoveCheckpoints deletes checkpoints, of which some may be gone. The session must be locked.
func (s *Session) RemoveCheckpoints(ctx context.Context, numbers ...int) error {
	dir, err := s.openCheckpoints()
	if err != nil {
		return err
	}
	defer dir.Close()
	for _, n := range numbers {
		name := strconv.Itoa(n)
		if err := dir.Rename(name, unfinished+name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return stateError(err, "delete a checkpoint")
		}
	}
	_, err = sweepCheckpoints(ctx, dir)
	return err
}

// exchange makes the directory at a path below dir one of the session's, and that one the
// other.
func (s *Session) exchange(own string, dir int, path string) error {
	session, err := s.store.root.Open(s.Name)
	if err != nil {
		return err
	}
	defer session.Close()
	ends := [2]struct {
		dir  int
		path string
		mode uint32
	}{{dir: int(session.Fd()), path: own}, {dir: dir, path: path}}
	for i := range ends {
		e := &ends[i]
		var st unix.Stat_t
		if err := unix.Fstatat(e.dir, e.path, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
		// A directory must be writable to get another parent.
		if e.mode = st.Mode & 0o7777; e.mode&0o200 == 0 {
			if err := unix.Fchmodat(e.dir, e.path, e.mode|0o200, 0); err != nil {
				return err
			}
		}
	}
	if err := unix.Renameat2(ends[0].dir, own, dir, path, unix.RENAME_EXCHANGE); err != nil {
		return err
	}
	for i, e := range ends {
		if now := ends[1-i]; e.mode&0o200 == 0 {
			if err := unix.Fchmodat(now.dir, now.path, e.mode, 0); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *Session) openCheckpoints() (*os.Root, error) {
	name := filepath.Join(s.Name, checkpoints)
	dir, err := s.store.root.OpenRoot(name)
	if errors.Is(err, fs.ErrNotExist) {
		if err = s.store.root.Mkdir(name, 0o700); err == nil {
			dir, err = s.store.root.OpenRoot(name)
		}
	}
	if err != nil {
		return nil, stateError(err, "open the checkpoints of session "+s.Name)
	}
	return dir, nil
}

// makeCheckpoint copies a tree into a new checkpoint.
func makeCheckpoint(ctx context.Context, dir, tree *os.Root, n int, reason string) (Checkpoint, error) {
	c := Checkpoint{N: n, Time: time.Now(), Reason: reason}
	name := strconv.Itoa(n)
	fail := func(err error) (Checkpoint, error) {
		_, _ = sweepCheckpoints(context.WithoutCancel(ctx), dir)
		return Checkpoint{}, err
	}
	if err := dir.Mkdir(unfinished+name, 0o700); err != nil {
		return fail(stateError(err, "make a checkpoint"))
	}
	if err := dir.Mkdir(filepath.Join(unfinished+name, upperDir), 0o700); err != nil {
		return fail(stateError(err, "make a checkpoint"))
	}
	to, err := dir.OpenRoot(filepath.Join(unfinished+name, upperDir))
	if err != nil {
		return fail(stateError(err, "make a checkpoint"))
	}
	defer to.Close()
	copied, err := copyTree(ctx, tree, to, true)
	if err != nil {
		return fail(berm.Errorf(berm.KindOf(err), "make a checkpoint: %w", err))
	}
	if err := failpoint.Hit("session.checkpoint.copied"); err != nil {
		return fail(err)
	}
	c.How, c.Took, c.Entries = copied.How(), time.Since(c.Time), copied.Entries
	data, err := json.Marshal(c)
	if err == nil {
		err = dir.WriteFile(filepath.Join(unfinished+name, checkpointFile), data, 0o600)
	}
	if err == nil {
		err = failpoint.Hit("session.checkpoint.described")
	}
	if err == nil {
		err = dir.Rename(unfinished+name, name)
	}
	if err != nil {
		return fail(stateError(err, "make a checkpoint"))
	}
	return c, failpoint.Hit("session.checkpoint.named")
}

// trim deletes the oldest checkpoints but for keep.
func trim(ctx context.Context, dir *os.Root, numbers []int, keep int) error {
	for _, n := range numbers[:max(0, len(numbers)-max(keep, 1))] {
		name := strconv.Itoa(n)
		if err := dir.Rename(name, unfinished+name); err != nil {
			return stateError(err, "delete an old checkpoint")
		}
		if err := failpoint.Hit("session.trim.renamed"); err != nil {
			return err
		}
	}
	_, err := sweepCheckpoints(ctx, dir)
	return err
}

// next returns the number of a new checkpoint.
func next(numbers []int) int {
	if len(numbers) == 0 {
		return 1
	}
	return numbers[len(numbers)-1] + 1
}

// sweepCheckpoints deletes what a crash left, and returns the numbers of the rest, sorted.
func sweepCheckpoints(ctx context.Context, dir *os.Root) ([]int, error) {
	numbers, left, err := listCheckpoints(dir)
	if err != nil || len(left) == 0 {
		return numbers, err
	}
	d, err := dir.Open(".")
	if err != nil {
		return nil, err
	}
	defer d.Close()
	for _, name := range left {
		if err := removeTree(ctx, int(d.Fd()), name); err != nil {
			return nil, berm.Errorf(berm.KindOf(err), "delete an old checkpoint: %w", err)
		}
	}
	return numbers, nil
}

func listCheckpoints(dir *os.Root) (numbers []int, left []string, err error) {
	d, err := dir.Open(".")
	if err != nil {
		return nil, nil, stateError(err, "list the checkpoints")
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		return nil, nil, stateError(err, "list the checkpoints")
	}
	for _, name := range names {
		if strings.HasPrefix(name, unfinished) {
			left = append(left, name)
		} else if n, err := strconv.Atoi(name); err == nil && n > 0 {
			numbers = append(numbers, n)
		}
	}
	slices.Sort(numbers)
	return numbers, left, nil
}

func readDescription(dir *os.Root, n int) ([]byte, error) {
	f, err := dir.Open(filepath.Join(strconv.Itoa(n), checkpointFile))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxDescription))
}
