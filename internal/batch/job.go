// Package batch runs many jobs, each in a sandbox of its own, and keeps what became of them.
package batch

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
)

// defaultTimeout is the time of a command that names none.
const defaultTimeout = 10 * time.Minute

// Job is a command in a fresh sandbox, and what must hold when it has ended.
type Job struct {
	ID string `json:"id"`

	// The sandbox, as `berm create` makes one.
	Template    string            `json:"template,omitempty"`
	Level       berm.Level        `json:"level,omitempty"`
	Limits      Limits            `json:"limits,omitzero"`
	Allow       []string          `json:"allow,omitempty"`
	Policy      string            `json:"policy,omitempty"` // a file's path
	Credentials []string          `json:"credentials,omitempty"`
	Metadata    map[string]string `json:"metadata,omitempty"`

	Put     []Put             `json:"put,omitempty"`
	Command Command           `json:"command"`
	Env     map[string]string `json:"env,omitempty"`
	User    string            `json:"user,omitempty"` // also of what is put and got
	Dir     string            `json:"cwd,omitempty"`
	Timeout Duration          `json:"timeout,omitempty"`
	Checks  []Check           `json:"checks,omitempty"`
	Get     []string          `json:"get,omitempty"` // paths in the sandbox

	// At is the place of the job in its file, for errors.
	At string `json:"-"`
	// digest tells one version of the job from another.
	digest string
	// Create is what its sandbox is made of. Whoever runs the job sets it.
	Create client.CreateOptions `json:"-"`
}

// Limits are limits of a sandbox that are not its template's.
type Limits struct {
	Memory Size    `json:"memory,omitempty"`
	CPU    float64 `json:"cpus,omitempty"`
	PIDs   int64   `json:"pids,omitempty"`
	Disk   Size    `json:"disk,omitempty"`
}

// Put is a file or directory that is copied into the sandbox, or a file of the content given.
type Put struct {
	From    string  `json:"from,omitempty"`
	Content *string `json:"content,omitempty"`
	// To is the name of the copy. Without one it is From's; with "/" at the end it is the
	// directory that gets the copy.
	To string `json:"to,omitempty"`
}

// target is the name of the copy.
func (p Put) target() string {
	if p.To == "" || strings.HasSuffix(p.To, "/") {
		return path.Join(p.To, path.Base(p.From))
	}
	return p.To
}

// Check is one thing that must hold for a job to pass: one of Exit, Stdout, Stderr, File and
// Command. Where none is about the exit code, it must be 0.
type Check struct {
	Exit   *Exit `json:"exit,omitempty"`
	Stdout *Text `json:"stdout,omitempty"`
	Stderr *Text `json:"stderr,omitempty"`
	File   *File `json:"file,omitempty"`

	// A command that must end with 0. What is put for it comes after the job's command has ended,
	// which therefore cannot see it.
	Command Command           `json:"command,omitempty"`
	Put     []Put             `json:"put,omitempty"`
	Env     map[string]string `json:"env,omitempty"`
	User    string            `json:"user,omitempty"` // "" is the job's
	Dir     string            `json:"cwd,omitempty"`
	Timeout Duration          `json:"timeout,omitempty"`
}

// Text is what must hold of an output or of a file, of all its bytes.
type Text struct {
	Contains string  `json:"contains,omitempty"`
	Matches  string  `json:"matches,omitempty"` // a regular expression of RE2
	Equals   *string `json:"equals,omitempty"`
}

// File is what must hold of a path in the sandbox: that it is there, unless Exists is false.
type File struct {
	Path     string  `json:"path"`
	Exists   *bool   `json:"exists,omitempty"`
	Contains string  `json:"contains,omitempty"`
	Matches  string  `json:"matches,omitempty"`
	Equals   *string `json:"equals,omitempty"`
}

func (f *File) text() Text { return Text{f.Contains, f.Matches, f.Equals} }

// name tells which check it is.
func (c Check) name() string {
	switch {
	case c.Exit != nil:
		return "exit"
	case c.Stdout != nil:
		return "stdout"
	case c.Stderr != nil:
		return "stderr"
	case c.File != nil:
		return "file " + c.File.Path
	}
	return "command " + c.Command.String()
}

// Exit is the exit code that a command must end with.
type Exit struct {
	Any  bool
	Code int
}

// UnmarshalYAML reads a code, or "any".
func (e *Exit) UnmarshalYAML(node *yaml.Node) error {
	code, err := strconv.ParseUint(node.Value, 10, 8)
	if node.Kind != yaml.ScalarNode || err != nil && node.Value != "any" {
		return errors.New("it must be an exit code from 0 to 255, or any")
	}
	*e = Exit{node.Value == "any", int(code)}
	return nil
}

// MarshalText is for the digest of a job.
func (e Exit) MarshalText() ([]byte, error) {
	if e.Any {
		return []byte("any"), nil
	}
	return strconv.AppendInt(nil, int64(e.Code), 10), nil
}

// Command is a program with its arguments.
type Command []string

// UnmarshalYAML reads a list, or a text for the shell of the sandbox.
func (c *Command) UnmarshalYAML(node *yaml.Node) error {
	switch {
	case node.Kind == yaml.ScalarNode && node.ShortTag() != "!!null" && node.Value != "":
		*c = Command{"/bin/sh", "-c", node.Value}
		return nil
	case node.Kind == yaml.SequenceNode && len(node.Content) > 0:
		*c = make(Command, len(node.Content))
		for i, arg := range node.Content {
			if arg.Kind != yaml.ScalarNode || arg.ShortTag() == "!!null" {
				return errors.New("it must be a list of texts")
			}
			(*c)[i] = arg.Value
		}
		return nil
	}
	return errors.New("it must be a text for the shell, or a list of a program and its arguments")
}

// String is the command as it was written.
func (c Command) String() string {
	if len(c) == 3 && c[0] == "/bin/sh" && c[1] == "-c" {
		return c[2]
	}
	return strings.Join(c, " ")
}

// Duration is a time, written as flags take it.
type Duration time.Duration

// UnmarshalYAML reads "90s", "5m" or a number of seconds.
func (d *Duration) UnmarshalYAML(node *yaml.Node) error {
	return (*cli.DurationFlag)(d).Set(node.Value)
}

// limit is the time that a command has.
func (d Duration) limit() time.Duration {
	if d == 0 {
		return defaultTimeout
	}
	return time.Duration(d)
}

// Size is a number of bytes, written as flags take it.
type Size int64

// UnmarshalYAML reads "512MiB" or a number of bytes.
func (s *Size) UnmarshalYAML(node *yaml.Node) error { return (*cli.SizeFlag)(s).Set(node.Value) }

// maxID bounds a job's id in bytes.
const maxID = 128

// check says what is wrong with a job.
func (j *Job) check() error {
	switch {
	case j.ID == "":
		return errors.New("the job has no id")
	case len(j.ID) > maxID || j.ID[0] == '.' || strings.ContainsFunc(j.ID, func(r rune) bool { return r <= ' ' || r == 0x7f }):
		return fmt.Errorf("the id %q: it must have 1 to %d bytes, no blanks, and no dot at the start", j.ID[:min(len(j.ID), maxID)], maxID)
	case len(j.Command) == 0:
		return fmt.Errorf("job %s has no command", j.ID)
	}
	if err := checkPuts(j.Put); err != nil {
		return fmt.Errorf("job %s: %w", j.ID, err)
	}
	for i, c := range j.Checks {
		if err := c.check(); err != nil {
			return fmt.Errorf("job %s, check %d: %w", j.ID, i+1, err)
		}
	}
	got := map[string]bool{}
	for _, from := range j.Get {
		name := path.Base(from)
		if name == "/" || name == "." || name == ".." {
			return fmt.Errorf("job %s: get %q has no name for the copy", j.ID, from)
		}
		if got[name] {
			return fmt.Errorf("job %s: get has two paths that end in %s, and copies have the last part of the path for a name", j.ID, name)
		}
		got[name] = true
	}
	return nil
}

func checkPuts(puts []Put) error {
	for _, p := range puts {
		switch {
		case (p.From == "") == (p.Content == nil):
			return errors.New("an entry of put has one of from and content")
		case p.Content != nil && (p.To == "" || strings.HasSuffix(p.To, "/")):
			return errors.New("an entry of put with content has the name of a file in to")
		}
	}
	return nil
}

func (c Check) check() error {
	kinds := 0
	for _, is := range []bool{c.Exit != nil, c.Stdout != nil, c.Stderr != nil, c.File != nil, len(c.Command) > 0} {
		if is {
			kinds++
		}
	}
	if kinds != 1 {
		return errors.New("it has one of exit, stdout, stderr, file and command")
	}
	if len(c.Command) == 0 && (len(c.Put) > 0 || len(c.Env) > 0 || c.User != "" || c.Dir != "" || c.Timeout != 0) {
		return errors.New("put, env, user, cwd and timeout belong to a command")
	}
	if err := checkPuts(c.Put); err != nil {
		return err
	}
	for _, t := range []*Text{c.Stdout, c.Stderr} {
		if t == nil {
			continue
		}
		if *t == (Text{}) {
			return errors.New("it says neither contains, matches nor equals")
		}
		if err := t.check(); err != nil {
			return err
		}
	}
	if f := c.File; f != nil {
		if f.Path == "" {
			return errors.New("file has no path")
		}
		t := f.text()
		if f.Exists != nil && !*f.Exists && t != (Text{}) {
			return errors.New("a file that must not exist has no content")
		}
		return t.check()
	}
	return nil
}

func (t Text) check() error {
	_, err := regexp.Compile(t.Matches)
	return err
}

// Resolve has the paths of this machine begin at dir, and says what is missing, or cannot be read to
// an end.
func (j *Job) Resolve(dir string) error {
	resolve := func(path *string, mayBeDir bool) error {
		if *path == "" {
			return nil
		}
		if !filepath.IsAbs(*path) {
			*path = filepath.Join(dir, *path)
		}
		switch info, err := os.Stat(*path); {
		case err != nil:
			return berm.Errorf(berm.Invalid, "%s: job %s: %w", j.At, j.ID, err)
		case !info.Mode().IsRegular() && (!mayBeDir || !info.IsDir()):
			return berm.Errorf(berm.Invalid, "%s: job %s: %s is no regular file", j.At, j.ID, *path)
		}
		return nil
	}
	puts := func(list []Put) ([]Put, error) {
		list = slices.Clone(list) // which jobs share
		for i := range list {
			if err := resolve(&list[i].From, true); err != nil {
				return nil, err
			}
		}
		return list, nil
	}
	err := resolve(&j.Policy, false)
	if err == nil {
		j.Put, err = puts(j.Put)
	}
	j.Checks = slices.Clone(j.Checks)
	for i := range j.Checks {
		if err == nil {
			j.Checks[i].Put, err = puts(j.Checks[i].Put)
		}
	}
	return err
}

// life is how long the sandbox of a job must live at most: its commands may take their time, and
// what is copied and asked in between as well.
func (j *Job) life() time.Duration {
	const rest = 15 * time.Minute
	d := j.Timeout.limit() + rest
	for _, c := range j.Checks {
		if len(c.Command) > 0 {
			d += c.Timeout.limit()
		}
	}
	return d
}
