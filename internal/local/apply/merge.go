package apply

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	mergeTime  = 30 * time.Second
	mergeLimit = 8 << 20   // bytes of one side of one file
	mergeTotal = 128 << 20 // bytes of all merged files of a plan, which are held in memory
)

// merger merges with the host's git, so that people get what "git merge" would give them.
type merger struct {
	dir  string // the session's directory
	left int64
}

func isText(b []byte) bool { return bytes.IndexByte(b, 0) < 0 }

// merge decides a regular file that both sides changed.
func (m *merger) merge(ctx context.Context, p *Plan, s *step, was Stamp, state State) error {
	const both = "changed outside since the session began"
	name := string(s.Path)
	if state != Present || p.base.Base == nil {
		s.refuse(Conflict, both+", and what it was before is not known")
		return nil
	}
	base, err := p.base.Content(name, mergeLimit)
	if err != nil {
		s.refuse(Conflict, both+", and what it was before is not known")
		return nil
	}
	ours, err := p.project.content(name, mergeLimit)
	if err != nil {
		s.refuse(Conflict, both+", and it cannot be merged: %v", err)
		return nil
	}
	theirs, err := p.upper.content(name, mergeLimit)
	if err != nil {
		s.refuse(Conflict, both+", and it cannot be merged: %v", err)
		return nil
	}
	mode := entryBits(s.Mode)
	switch mine := bits(s.Was.Mode); {
	case mode == bits(was.Mode):
		mode = mine
	case mine != bits(was.Mode) && mine != mode:
		s.refuse(Conflict, "its mode was changed on both sides")
		return nil
	}
	var merged []byte
	switch {
	case bytes.Equal(ours, theirs), bytes.Equal(base, ours):
		merged = theirs
	case bytes.Equal(base, theirs):
		merged = ours
	case !isText(base) || !isText(ours) || !isText(theirs):
		s.refuse(Conflict, both+", and it is not text")
		return nil
	default:
		var reason string
		if merged, reason, err = m.git(ctx, base, ours, theirs); err != nil || reason != "" {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err != nil {
				reason = "git cannot merge it: " + err.Error()
			}
			s.refuse(Conflict, both+", and %s", reason)
			return nil
		}
	}
	if bytes.Equal(merged, ours) && mode == bits(s.Was.Mode) {
		s.refuse(Same, "the project has these lines already")
		return nil
	}
	if bytes.Equal(merged, theirs) && mode == entryBits(s.Mode) {
		return nil
	}
	if m.left -= int64(len(merged)); m.left < 0 {
		s.refuse(Conflict, both+", and too many files have to be merged at once; apply fewer paths")
		return nil
	}
	sum := sha256.Sum256(merged)
	s.Outcome, s.merged, s.Sum = Merge, merged, sum[:]
	s.Mode, s.Size = modeOf(unix.S_IFREG|mode), int64(len(merged))
	return nil
}

// git runs "git merge-file". reason tells of lines that both sides changed.
func (m *merger) git(ctx context.Context, base, ours, theirs []byte) (merged []byte, reason string, err error) {
	program, err := exec.LookPath("git")
	if err != nil {
		return nil, "git, which would merge it, is not installed", nil
	}
	dir, err := os.MkdirTemp(m.dir, "merge-")
	if err != nil {
		return nil, "", err
	}
	defer os.RemoveAll(dir)
	for name, content := range map[string][]byte{"project": ours, "base": base, "session": theirs} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			return nil, "", err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, mergeTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, "merge-file", "-p", "project", "base", "session")
	cmd.Dir = dir
	// No configuration of a user, a machine or a repository above has a say.
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C", "GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null",
		"GIT_CEILING_DIRECTORIES=" + m.dir, "HOME=" + dir, "XDG_CONFIG_HOME=" + dir}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	merged, err = cmd.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		// 1 to 127 is the number of conflicts, more is a failure.
		if code := exit.ExitCode(); code > 0 && code < 128 {
			return nil, overlap(merged), nil
		}
		return nil, "", fmt.Errorf("%w: %s", err, strings.TrimSpace(stderr.String()))
	}
	return merged, "", err
}

// overlap names the hunks of a merge with markers, by about the lines of the project's file.
func overlap(merged []byte) string {
	var lines []string
	n, session := 0, false
	for line := range bytes.Lines(merged) {
		switch {
		case bytes.HasPrefix(line, []byte("<<<<<<< project")):
			lines = append(lines, fmt.Sprint(n+1))
		case bytes.HasPrefix(line, []byte("=======")):
			session = true
		case bytes.HasPrefix(line, []byte(">>>>>>> session")):
			session = false
		case !session:
			n++
		}
	}
	const most = 5
	more := ""
	if len(lines) > most {
		lines, more = lines[:most], " and more"
	}
	return "both sides changed the same lines (near line " + strings.Join(lines, ", ") + more + ")"
}
