// Package dockerfile reads Dockerfiles as orders to a server's template builder.
package dockerfile

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
	"github.com/moby/buildkit/frontend/dockerfile/shell"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/client"
)

// maxSize bounds a Dockerfile in bytes.
const maxSize = 1 << 20

// Options are what a caller says beside the Dockerfile.
type Options struct {
	File   string            // its name, for messages
	Args   map[string]string // values for ARG
	Target string            // the stage to build, by name or number; "" is the last
	Arch   string            // of the server's processors, as Go names it
}

// Plan is what a Dockerfile comes to.
type Plan struct {
	Stages []*Stage // those that the last one needs come before it
	// Notes are what was left out, each with its line.
	Notes []string
}

// Stage is one FROM and what follows it.
type Stage struct {
	Name      string
	FromImage string
	FromStage string // in the place of FromImage
	At        string // as of Step
	// Hint is what may be wrong where there is no such image.
	Hint  string
	Steps []Step
}

// Step is one step for the builder.
type Step struct {
	client.BuildStep
	At   string // file, line and name of its instruction, as messages begin
	Text string // of its instruction, on one line; "" of what no instruction says
	// Copy is what of the context it needs. Its first argument and FilesHash wait for that.
	Copy *Copy
}

// Copy is what a COPY or ADD takes from the context.
type Copy struct {
	Sources []string // patterns, as path.Match has them, below the context
	Inline  []Inline
	Unpacks bool // archives are to be unpacked, which is refused
}

// Inline is a file whose content stands in the Dockerfile.
type Inline struct{ Name, Data string }

// Parse reads a Dockerfile. Its errors begin with file and line. Kinds: Invalid, Unsupported (what
// the builder cannot do, with the instruction).
func Parse(from io.Reader, o Options) (*Plan, error) {
	text, err := io.ReadAll(io.LimitReader(from, maxSize+1))
	switch {
	case err != nil:
		return nil, berm.Errorf(berm.Invalid, "%s: %w", o.File, err)
	case len(text) > maxSize:
		return nil, berm.Errorf(berm.Invalid, "%s is larger than %d KiB", o.File, maxSize>>10)
	case bytes.ContainsAny(text, "\x00"+dollar):
		return nil, berm.Errorf(berm.Invalid, "%s holds control characters", o.File)
	}
	parsed, err := parser.Parse(bytes.NewReader(text))
	if err != nil {
		return nil, located(o.File, err)
	}
	stages, meta, err := instructions.Parse(parsed.AST, nil)
	if err != nil {
		return nil, located(o.File, err)
	}
	r := &reader{Options: o, lex: shell.NewLex(parsed.EscapeToken), stages: stages, global: map[string]string{}, unused: maps.Clone(o.Args), made: map[int]*state{}, plan: &Plan{}}
	r.lex.SkipUnsetEnv = true
	return r.read(meta)
}

// located gives an error of the parser file and line.
func located(file string, err error) error {
	if at, ok := errors.AsType[*parser.LocationError](err); ok && len(at.Locations) > 0 && len(at.Locations[0]) > 0 && at.Locations[0][0].Start.Line > 0 {
		file += ":" + strconv.Itoa(at.Locations[0][0].Start.Line)
	}
	return berm.Errorf(berm.Invalid, "%s: %w", file, err)
}

// reader makes a plan.
type reader struct {
	Options
	lex    *shell.Lex
	stages []instructions.Stage
	global map[string]string // ARGs before the first FROM
	unused map[string]string // of Options.Args
	made   map[int]*state    // by the number of the stage
	plan   *Plan
	line   int
	name   string // of the instruction
}

// state is what is known of a stage after some of its instructions.
type state struct {
	stage  *Stage
	args   map[string]string
	env    map[string]string // those whose value is known here
	inside map[string]bool   // those whose value the builder alone knows
	shell  []string
	// workdir is in the builder's form. Whether the Dockerfile says it, and the user.
	workdir               string
	chosenDir, chosenUser bool
}

func (r *reader) read(meta []instructions.ArgCommand) (*Plan, error) {
	for name, value := range platform(r.Arch) {
		r.global[name] = value
	}
	for _, arg := range meta {
		r.at(arg.Location(), "ARG")
		if err := arg.Expand(r.known); err != nil {
			return nil, err
		}
		r.declare(arg, r.global, nil)
	}
	target := len(r.stages) - 1
	if r.Target != "" {
		var ok bool
		if target, ok = instructions.HasStage(r.stages, r.Target); !ok {
			n, err := strconv.Atoi(r.Target)
			if err != nil || n < 0 || n >= len(r.stages) {
				return nil, berm.Errorf(berm.Invalid, "%s has no stage %q", r.File, r.Target)
			}
			target = n
		}
	}
	last, err := r.stage(target)
	if err != nil {
		return nil, err
	}
	// What E2B's SDKs make of a Dockerfile that says nothing of them.
	if !last.chosenUser {
		last.become("user", last.stage.At)
	}
	if !last.chosenDir {
		last.add(Step{At: last.stage.At, BuildStep: client.BuildStep{Type: "WORKDIR", Args: []string{"/home/user"}}})
	}
	for _, name := range slices.Sorted(maps.Keys(r.unused)) {
		r.plan.Notes = append(r.plan.Notes, fmt.Sprintf("%s has no ARG %s in what is built", r.File, name))
	}
	return r.plan, nil
}

// platform are the values of the ARGs that need not be declared in FROM.
func platform(arch string) map[string]string {
	values := map[string]string{}
	for _, of := range []string{"BUILD", "TARGET"} {
		values[of+"PLATFORM"], values[of+"OS"], values[of+"ARCH"], values[of+"VARIANT"] = "linux/"+arch, "linux", arch, ""
	}
	return values
}

func (r *reader) at(location []parser.Range, name string) {
	if len(location) > 0 {
		r.line = location[0].Start.Line
	}
	r.name = strings.ToUpper(name)
}

// where begins a message about the instruction at hand.
func (r *reader) where() string { return r.File + ":" + strconv.Itoa(r.line) + ": " + r.name + ": " }

func (r *reader) invalid(format string, args ...any) *berm.Error {
	return berm.Errorf(berm.Invalid, r.where()+format, args...)
}

func (r *reader) unsupported(format string, args ...any) *berm.Error {
	return berm.Errorf(berm.Unsupported, r.where()+format, args...)
}

func (r *reader) note(format string, args ...any) {
	r.plan.Notes = append(r.plan.Notes, r.where()+fmt.Sprintf(format, args...))
}

// declare takes an ARG into values, from the caller, its default or what an outer scope has.
func (r *reader) declare(arg instructions.ArgCommand, values, outer map[string]string) {
	for _, a := range arg.Args {
		given, ok := r.Args[a.Key]
		outside, known := outer[a.Key]
		switch {
		case ok:
			values[a.Key] = given
			delete(r.unused, a.Key)
		case a.Value != nil:
			values[a.Key] = *a.Value
		case known:
			values[a.Key] = outside
		default:
			values[a.Key] = ""
		}
	}
}

// stage reads a stage with all that it needs, once.
func (r *reader) stage(n int) (*state, error) {
	if s := r.made[n]; s != nil {
		return s, nil
	}
	in := r.stages[n]
	r.at(in.Location, "FROM")
	base, err := r.known(in.BaseName)
	if err != nil {
		return nil, err
	}
	wanted, err := r.known(in.Platform)
	if err != nil {
		return nil, err
	}
	switch here := "linux/" + r.Arch; {
	case base == "":
		return nil, r.invalid("no image is named")
	case wanted != "" && wanted != here:
		return nil, r.unsupported("platform %s: the server builds for its own, %s", wanted, here)
	case base == "scratch":
		return nil, r.unsupported("scratch: steps need a shell to run in").WithHint("begin with an image that has one, such as alpine")
	}
	s := &state{stage: &Stage{Name: strconv.Itoa(n), At: r.where()}, args: map[string]string{}, env: map[string]string{}, inside: map[string]bool{}}
	r.made[n] = s
	if below, ok := instructions.HasStage(r.stages[:n], base); ok {
		from, err := r.stage(below)
		if err != nil {
			return nil, err
		}
		s.stage.FromStage = from.stage.Name
		s.env, s.inside, s.shell = maps.Clone(from.env), maps.Clone(from.inside), from.shell
		s.workdir, s.chosenDir, s.chosenUser = from.workdir, from.chosenDir, from.chosenUser
	} else {
		s.stage.FromImage, s.workdir = base, "/"
		if later, ok := instructions.HasStage(r.stages[n:], base); ok {
			s.stage.Hint = fmt.Sprintf("the stage %s begins later, at line %d: FROM knows only those before it", base, r.stages[n+later].Location[0].Start.Line)
			if later == 0 {
				s.stage.Hint = fmt.Sprintf("%s is the name of this stage itself, too: FROM knows only those before it", base)
			}
		}
		s.become("root", s.stage.At) // whatever the image's is: the builder has a user of its own
	}
	for _, c := range in.Commands {
		if err := r.command(s, n, c); err != nil {
			return nil, err
		}
	}
	r.plan.Stages = append(r.plan.Stages, s.stage)
	return s, nil
}

func (s *state) add(step Step) { s.stage.Steps = append(s.stage.Steps, step) }

// become sets the user. The builder goes to the user's home, where Docker stays.
func (s *state) become(user, at string) {
	s.add(Step{At: at, BuildStep: client.BuildStep{Type: "USER", Args: []string{user}}})
	s.add(Step{At: at, BuildStep: client.BuildStep{Type: "WORKDIR", Args: []string{s.workdir}}})
}

// command reads one instruction.
func (r *reader) command(s *state, n int, c instructions.Command) error {
	r.at(c.Location(), c.Name())
	if e, ok := c.(instructions.SupportsSingleWordExpansion); ok {
		if err := e.Expand(func(word string) (string, error) { return r.expand(word, s) }); err != nil {
			return r.invalid("%w", err)
		}
	}
	step := Step{At: r.where(), Text: oneLine(c)}
	switch c := c.(type) {
	case *instructions.ArgCommand:
		for _, a := range c.Args {
			if err := r.settle(a.Value); err != nil {
				return err
			}
		}
		r.declare(*c, s.args, r.global)
		return nil
	case *instructions.EnvCommand:
		step.Type = "ENV"
		env, inside := map[string]string{}, map[string]bool{}
		for _, pair := range c.Env {
			name := pair.Key
			if err := r.settle(&name); err != nil {
				return err
			}
			if err := r.unknown(pair.Value); err != nil {
				return err
			}
			step.Args = append(step.Args, name, forBuilder(pair.Value))
			if strings.Contains(pair.Value, "$") {
				inside[name] = true
			} else {
				env[name] = literal(pair.Value)
			}
		}
		// What one pair sets, the pairs beside it do not see.
		for name := range inside {
			delete(s.env, name)
			s.inside[name] = true
		}
		for name, value := range env {
			delete(s.inside, name)
			s.env[name] = value
		}
	case *instructions.WorkdirCommand:
		if err := r.unknown(c.Path); err != nil {
			return err
		}
		dir := forBuilder(c.Path)
		if !path.IsAbs(dir) && !strings.HasPrefix(dir, "$") {
			dir = path.Join(s.workdir, dir)
		}
		s.workdir, s.chosenDir = dir, true
		step.Type, step.Args = "WORKDIR", []string{s.workdir}
	case *instructions.UserCommand:
		return r.user(s, c, step)
	case *instructions.ShellCommand:
		s.shell = c.Shell
		return nil
	case *instructions.RunCommand:
		return r.run(s, c, step)
	case *instructions.CopyCommand:
		return r.copy(s, n, c, step)
	case *instructions.AddCommand:
		return r.addFiles(s, c, step)
	case *instructions.CmdCommand, *instructions.EntrypointCommand:
		r.note("is not started in sandboxes; --start COMMAND is")
		return nil
	case *instructions.HealthCheckCommand:
		r.note("is not used; --ready COMMAND says when a sandbox is ready")
		return nil
	case *instructions.VolumeCommand:
		r.note("what is there is a part of the template")
		return nil
	case *instructions.OnbuildCommand:
		return r.unsupported("templates have nothing that builds upon them do first")
	case *instructions.LabelCommand, *instructions.ExposeCommand, *instructions.MaintainerCommand, *instructions.StopSignalCommand:
		return nil // of no effect in a sandbox: every port of it can be reached, and nothing sends signals
	default:
		return r.unsupported("is not known to this version")
	}
	s.add(step)
	return nil
}

var (
	userName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.-]{0,31}$`)
	ownerID  = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?$`)
	octal    = regexp.MustCompile(`^[0-7]{3,4}$`)
)

func (r *reader) user(s *state, c *instructions.UserCommand, step Step) error {
	user := c.User
	if err := r.settle(&user); err != nil {
		return err
	}
	name, group, grouped := strings.Cut(user, ":")
	if name == "0" {
		name = "root"
	}
	switch {
	case grouped && group != name && (name != "root" || group != "0"):
		return r.unsupported("%s: a sandbox's commands have the groups of its user", user).WithHint("RUN usermod -g %s %s, and USER %s", group, name, name)
	case !userName.MatchString(name):
		return r.unsupported("%q: a user has a name here", name).WithHint("RUN useradd -m -u %s app, and USER app", name)
	}
	s.chosenUser = true
	first := len(s.stage.Steps)
	s.become(name, step.At)
	s.stage.Steps[first].Text = step.Text
	return nil
}

func (r *reader) run(s *state, c *instructions.RunCommand, step Step) error {
	var dirs []string
	for _, m := range instructions.GetMounts(c) {
		if m.Type != instructions.MountTypeCache {
			return r.mount(m)
		}
		if err := r.settle(&m.Target); err != nil {
			return err
		}
		r.note("--mount=type=cache: %s is a directory as others are, and stays in the template", m.Target)
		dirs = append(dirs, cacheDir(m))
	}
	if dirs != nil {
		s.add(Step{At: step.At, BuildStep: client.BuildStep{
			Type: "RUN", Args: []string{strings.Join(dirs, " && "), "root"}, Berm: &client.StepAdditions{Shell: []string{"/bin/sh", "-c"}},
		}})
	}
	if mode := instructions.GetNetwork(c); mode != "" && mode != instructions.NetworkDefault {
		return r.unsupported("--network=%s: steps have the network that the server gives sandboxes", mode)
	}
	if len(instructions.GetDevices(c)) > 0 {
		return r.unsupported("--device")
	}
	if len(c.CmdLine) == 0 {
		return r.invalid("no command")
	}
	command, err := r.script(c)
	if err != nil {
		return err
	}
	more := &client.StepAdditions{Shell: []string{"/bin/sh", "-c"}, Env: map[string]string{}}
	if c.PrependShell && s.shell != nil {
		more.Shell = s.shell
	}
	for name, value := range s.args {
		if _, set := s.env[name]; !set && !s.inside[name] {
			more.Env[name] = value
		}
	}
	step.Type, step.Args, step.Berm = "RUN", []string{command}, more
	s.add(step)
	return nil
}

// mount refuses one.
func (r *reader) mount(m *instructions.Mount) error {
	e := r.unsupported("--mount=type=%s", m.Type)
	switch m.Type {
	case instructions.MountTypeBind:
		return e.WithHint("COPY brings what a step is to have")
	case instructions.MountTypeSecret, instructions.MountTypeSSH:
		return e.WithHint("there are no secrets of builds: what COPY, ARG or ENV bring stays in the template, for all of its sandboxes to read")
	}
	return e
}

// cacheDir is a command that makes the directory of a mount, with the owner and the rights that are said.
func cacheDir(m *instructions.Mount) string {
	dir := quoted(m.Target)
	command := "mkdir -p -- " + dir
	if m.UID != nil || m.GID != nil {
		var uid, gid uint64
		if m.UID != nil {
			uid = *m.UID
		}
		if m.GID != nil {
			gid = *m.GID
		}
		command += fmt.Sprintf(" && chown -- %d:%d %s", uid, gid, dir)
	}
	if m.Mode != nil {
		command += fmt.Sprintf(" && chmod -- %o %s", *m.Mode, dir)
	}
	return command
}

// quoted is a word for a shell.
func quoted(word string) string { return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'" }

// script is what the shell runs.
func (r *reader) script(c *instructions.RunCommand) (string, error) {
	if !c.PrependShell {
		words := make([]string, len(c.CmdLine))
		for i, word := range c.CmdLine {
			words[i] = quoted(word)
		}
		return "exec " + strings.Join(words, " "), nil
	}
	command := c.CmdLine[0]
	if len(c.Files) == 1 && strings.TrimSpace(command) == "<<"+c.Files[0].Name {
		if strings.HasPrefix(c.Files[0].Data, "#!") {
			return "", r.unsupported("a script with an interpreter of its own").WithHint("COPY it as a file, and RUN that")
		}
		return c.Files[0].Data, nil
	}
	for _, f := range c.Files {
		command += "\n" + f.Data + f.Name
	}
	return command, nil
}

func (r *reader) copy(s *state, n int, c *instructions.CopyCommand, step Step) error {
	step.Type = "COPY"
	from := ""
	if c.From != "" {
		var err error
		if from, err = r.source(n, c.From); err != nil {
			return err
		}
	}
	return r.place(s, &c.SourcesAndDest, &Copy{}, from, c.Chown, c.Chmod, step)
}

func (r *reader) addFiles(s *state, c *instructions.AddCommand, step Step) error {
	step.Type = "ADD"
	for _, source := range c.SourcePaths {
		if strings.Contains(source, "://") || strings.HasPrefix(source, "git@") {
			return r.unsupported("%s: the builder fetches nothing", source).WithHint("RUN curl or git, which have the network of sandboxes")
		}
	}
	return r.place(s, &c.SourcesAndDest, &Copy{Unpacks: true}, "", c.Chown, c.Chmod, step)
}

// source finds the stage that COPY --from names, before stage n; an image becomes one.
func (r *reader) source(n int, from string) (string, error) {
	defer func(line int, name string) { r.line, r.name = line, name }(r.line, r.name)
	i, ok := instructions.HasStage(r.stages[:n], from)
	if number, err := strconv.Atoi(from); err == nil && !ok {
		if i, ok = number, number >= 0 && number < n; !ok {
			return "", r.invalid("--from=%d: there is no such stage before it", number)
		}
	}
	if ok {
		s, err := r.stage(i)
		if err != nil {
			return "", err
		}
		return s.stage.Name, nil
	}
	for _, s := range r.plan.Stages {
		if s.FromImage == from && s.Name == from {
			return from, nil
		}
	}
	r.plan.Stages = append(r.plan.Stages, &Stage{Name: from, FromImage: from, At: r.where()})
	return from, nil
}

// place adds the steps that bring files to where the instruction says.
func (r *reader) place(s *state, files *instructions.SourcesAndDest, of *Copy, from, owner, mode string, step Step) error {
	r.lex.RawQuotes, r.lex.RawEscapes = true, true
	err := files.ExpandRaw(func(text string) (string, error) { return r.expandRaw(text, s) })
	r.lex.RawQuotes, r.lex.RawEscapes = false, false
	if err != nil {
		return err
	}
	for i := range files.SourcePaths {
		if err := r.settle(&files.SourcePaths[i]); err != nil {
			return err
		}
	}
	if err := errors.Join(r.settle(&owner), r.settle(&mode), r.unknown(files.DestPath)); err != nil {
		return err
	}
	of.Sources = files.SourcePaths
	for _, inline := range files.SourceContents {
		of.Inline = append(of.Inline, Inline{inline.Path, inline.Data})
	}
	dest := forBuilder(files.DestPath)
	toDir := strings.HasSuffix(dest, "/") || dest == "." || dest == ".." || strings.HasSuffix(dest, "/.")
	switch {
	case owner != "" && !ownerID.MatchString(owner):
		return r.invalid("--chown=%s: USER or USER:GROUP", owner)
	case mode != "" && !octal.MatchString(mode):
		return r.unsupported("--chmod=%s: three or four octal digits alone", mode)
	case len(of.Sources)+len(of.Inline) > 1 && !toDir:
		return r.invalid("several sources need a destination that ends with /")
	}
	if toDir && !strings.HasSuffix(dest, "/") {
		dest += "/"
	}
	if from == "" {
		step.Args, step.Copy = []string{"", dest, cmp.Or(owner, "root:root"), mode}, of
		s.add(step)
		return nil
	}
	if len(of.Inline) > 0 {
		return r.unsupported("a file in the Dockerfile with --from")
	}
	for i, source := range of.Sources {
		if strings.ContainsAny(source, "*?[") && !toDir {
			return r.unsupported("a pattern with --from needs a destination that ends with /")
		}
		one := step
		one.Berm = &client.StepAdditions{From: from}
		one.Args = []string{path.Join("/", source), dest, owner, mode}
		if i > 0 {
			one.Text = ""
		}
		s.add(one)
	}
	return nil
}

// dollar stands for a dollar sign that begins no variable, until all variables are in their places.
const dollar = "\x01"

// literal is a text without variables.
func literal(word string) string { return strings.ReplaceAll(word, dollar, "$") }

// forBuilder is a text in which the builder puts the variables that are left.
func forBuilder(word string) string { return strings.ReplaceAll(word, dollar, `\$`) }

var variable = regexp.MustCompile(`\$(\{[^}]*\}?|[A-Za-z0-9_]*)`)

// settle makes a literal of a word of which the builder does not expand variables.
func (r *reader) settle(word *string) error {
	if word == nil {
		return nil
	}
	if at := variable.FindString(*word); at != "" {
		return r.unsupported("%s: its value is not in the Dockerfile", at).WithHint("say it with ARG or ENV above")
	}
	*word = literal(*word)
	return nil
}

// modified is a variable that is used in a way that the builder does not know.
var modified = regexp.MustCompile(`\$\{[A-Za-z0-9_]*[^A-Za-z0-9_}]`)

func (r *reader) unknown(word string) error {
	if at := modified.FindStringIndex(word); at != nil {
		return r.unsupported("%s: what the image sets is not known here", word[at[0]:]).WithHint("say its value with ARG or ENV above")
	}
	return nil
}

// values are variables for the library, which leaves others as they are.
type values []map[string]string

// Get is that of the first map that has it.
func (v values) Get(name string) (string, bool) {
	for _, m := range v {
		if value, ok := m[name]; ok {
			return strings.ReplaceAll(value, "$", dollar), true
		}
	}
	return "", false
}

// Keys are all names.
func (v values) Keys() (names []string) {
	for _, m := range v {
		names = slices.AppendSeq(names, maps.Keys(m))
	}
	return names
}

// known expands what stands outside of stages.
func (r *reader) known(word string) (string, error) {
	out, _, err := r.lex.ProcessWord(mark(word), values{r.global})
	if err != nil {
		return "", r.invalid("%w", err)
	}
	return out, r.settle(&out)
}

// expand puts in what is known.
func (r *reader) expand(word string, s *state) (string, error) {
	out, _, err := r.lex.ProcessWord(mark(word), s.values())
	return out, err
}

func (r *reader) expandRaw(text string, s *state) (string, error) {
	out, _, err := r.lex.ProcessWord(text, s.values())
	if err != nil {
		return "", r.invalid("%w", err)
	}
	if err := r.settle(&out); err != nil {
		return "", err
	}
	return out, nil
}

// values are those of ENV, before those of ARG.
func (s *state) values() values {
	args := maps.Clone(s.args)
	for name := range s.inside {
		delete(args, name)
	}
	return values{s.env, args}
}

// mark replaces the dollar signs that begin no variable: those behind a backslash and in single
// quotes.
func mark(word string) string {
	var out strings.Builder
	quoted := byte(0)
	for i := 0; i < len(word); i++ {
		switch c := word[i]; {
		case c == '\\' && quoted != '\'' && i+1 < len(word):
			i++
			if word[i] == '$' {
				out.WriteString(dollar)
			} else {
				out.WriteString(word[i-1 : i+1])
			}
			continue
		case c == '$' && quoted == '\'':
			out.WriteString(dollar)
			continue
		case quoted == 0 && (c == '\'' || c == '"'):
			quoted = c
		case quoted == c:
			quoted = 0
		}
		out.WriteByte(word[i])
	}
	return out.String()
}

// oneLine is an instruction as it is shown.
func oneLine(c instructions.Command) string {
	text := c.Name()
	if s, ok := c.(fmt.Stringer); ok {
		text = s.String()
	}
	return strings.Join(strings.Fields(strings.ReplaceAll(text, "\\\n", " ")), " ")
}
