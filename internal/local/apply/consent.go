package apply

import (
	"context"
	"crypto/sha256"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/local/change"
)

// fewDeletions are seen at a glance, and are no reason to ask.
const fewDeletions = 1

// takes says whether the step, with consent, is to take away what is there now.
func (s *step) takes() bool {
	return s.deletes() && (s.planned() || s.Outcome == Flagged)
}

// holdRepositories makes a repository wait as a whole for consent when something in it does,
// or when it would be lost: git obeys some of its files and half of one is none.
func (p *Plan) holdRepositories() {
	units := map[string][]*step{}
	for _, s := range p.steps {
		if s.repo != "" {
			units[s.repo] = append(units[s.repo], s)
		}
	}
	for unit, steps := range units {
		reason, lost := lostHistory(unit, steps)
		for _, s := range steps {
			if reason == "" && s.Outcome == Flagged {
				reason = fmt.Sprintf("the repository is applied as a whole, with %q: %s", string(s.Path), s.Reason)
			}
		}
		if reason == "" {
			continue
		}
		for _, s := range steps {
			if s.planned() || lost && s.Outcome == Flagged {
				s.refuse(Flagged, "%s", reason)
				s.unit = unit
			}
		}
	}
}

// lostHistory says how the session would take a repository or its history away.
func lostHistory(unit string, steps []*step) (reason string, lost bool) {
	objects, packed := 0, false
	for _, s := range steps {
		rest := string(s.Path)
		if unit != "." {
			rest = strings.TrimPrefix(rest[len(unit):], "/")
		}
		dir, object, inObjects := strings.Cut(strings.TrimPrefix(rest, "objects/"), "/")
		inObjects = inObjects && strings.HasPrefix(rest, "objects/") && (len(dir) == 2 || dir == "pack" && strings.HasSuffix(object, ".pack"))
		switch {
		case !s.planned() && s.Outcome != Flagged:
		case s.deletes():
			switch rest {
			case "", "HEAD", "objects", "refs":
				return "the session deleted this repository", true
			}
			if inObjects && !s.wasDir() {
				objects++
			}
		case inObjects && dir == "pack":
			packed = true
		}
	}
	// "git gc" deletes objects too, which are in a new pack then.
	if objects > 0 && !packed {
		return fmt.Sprintf("the session deleted %d objects of this repository and packed none: commits may be lost", objects), true
	}
	return "", false
}

// namedDeletions bounds how many files a reason names, and renameTotal the bytes that are read to
// find those that only moved: files of any size cost a sandbox nothing.
const (
	namedDeletions = 3
	renameTotal    = 1 << 30
)

// holdDeletions makes deletions wait for consent that leave less than half of the project's
// files, or of those that git has of it. What only moved is not deleted.
func (p *Plan) holdDeletions(ctx context.Context) error {
	deleted := map[string]bool{}
	for _, s := range p.steps {
		if s.repo == "" && s.takes() && !s.wasDir() {
			deleted[string(s.Path)] = true
		}
	}
	if p.mostOf(deleted) == "" {
		return nil
	}
	moved, err := p.renamed(ctx)
	if err != nil {
		return err
	}
	for s := range moved {
		delete(deleted, string(s.Path))
	}
	most := p.mostOf(deleted)
	if most == "" {
		return nil
	}
	names := slices.Sorted(maps.Keys(deleted))
	more := max(0, len(names)-namedDeletions)
	names = names[:len(names)-more]
	for i, name := range names {
		names[i] = change.Quote(name)
	}
	list := strings.Join(names, ", ")
	if more > 0 {
		list += fmt.Sprintf(" and %d more", more)
	}
	for _, s := range p.steps {
		if s.repo == "" && s.deletes() && s.planned() && !moved[s] {
			s.refuse(Flagged, "the session deleted %s: %s", most, list)
			s.unit = "."
		}
	}
	return nil
}

// mostOf says of what the files that are deleted are more than half, or "".
func (p *Plan) mostOf(deleted map[string]bool) string {
	if len(deleted) <= fewDeletions {
		return ""
	}
	gone, all := p.tracked(deleted)
	what := "files that git has of the project"
	if gone <= fewDeletions || 2*gone <= all {
		gone, all = len(deleted), p.files(2*len(deleted))
		what = "files of the project"
	}
	if 2*gone <= all {
		return ""
	}
	return fmt.Sprintf("%d of %d %s", gone, all, what)
}

// renamed finds the deletions of files whose content the plan brings elsewhere, each under a new
// name of its own.
func (p *Plan) renamed(ctx context.Context) (map[*step]bool, error) {
	left := int64(renameTotal)
	digest := func(t *tree, s *step, size int64) (sum [sha256.Size]byte, ok bool) {
		if size > left {
			return sum, false
		}
		left -= size
		sum, err := t.digest(ctx, string(s.Path), size)
		return sum, err == nil // else running the plan tells
	}
	deletions := map[int64][]*step{} // by size
	for _, s := range p.steps {
		if s.repo == "" && s.deletes() && s.planned() && s.Was.kind() == unix.S_IFREG {
			deletions[s.Was.Size] = append(deletions[s.Was.Size], s)
		}
	}
	sums := map[[sha256.Size]byte]int{} // how often the plan brings a content
	sizes := map[int64]bool{}
	for _, s := range p.steps {
		if s.repo != "" || s.Kind != change.Added || !s.planned() || !s.Mode.IsRegular() || deletions[s.Size] == nil {
			continue
		}
		if sum, ok := digest(p.upper, s, s.Size); ok {
			sums[sum]++
			sizes[s.Size] = true
		}
	}
	moved := map[*step]bool{}
	for _, size := range slices.Sorted(maps.Keys(sizes)) {
		for _, s := range deletions[size] {
			if sum, ok := digest(p.project, s, size); ok && sums[sum] > 0 {
				sums[sum]--
				moved[s] = true
			}
		}
	}
	return moved, ctx.Err()
}

// tracked counts the files in the index of the project's repository, and those of them that
// are deleted.
func (p *Plan) tracked(deleted map[string]bool) (gone, all int) {
	b, err := p.project.content(".git/index", indexLimit)
	if err != nil {
		return 0, 0
	}
	indexEntries(b, func(_, _ []byte, _ uint16, _, name []byte) {
		all++
		if deleted[string(name)] {
			gone++
		}
	})
	return gone, all
}

// files counts the files of the project that are of no repository, up to a limit.
func (p *Plan) files(limit int) int {
	n := 0
	for pending := []string{"."}; len(pending) > 0 && n < limit; {
		dir := pending[len(pending)-1]
		pending = pending[:len(pending)-1]
		f, err := p.project.open(dir, unix.O_RDONLY|unix.O_DIRECTORY)
		if err != nil {
			continue
		}
		names, _ := readNames(f)
		for _, name := range names {
			st, err := place{f, name}.stat()
			switch {
			case err != nil || st == nil || name == ".git":
			case st.Mode&unix.S_IFMT == unix.S_IFDIR:
				pending = append(pending, path.Join(dir, name))
			default:
				n++
			}
		}
		f.Close()
	}
	return n
}
