package builder

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/template"
)

// Order is what a template is made of.
type Order struct {
	From
	Stages       []Stage // before the template's own, in the order in which they are made
	Steps        []Step
	Start, Ready string // see berm.Template
	Force        bool   // nothing is taken from earlier builds
}

// From is what steps begin with: one of Image, Template and Stage.
type From struct {
	Image, Template string
	Login           template.Login // to the registry of Image; nil is Docker's configuration of this machine
	Stage           string         // the name of one before it
}

// Stage is made for a template that begins with it or copies from it. Steps are counted over all
// stages, and those of the template come last.
type Stage struct {
	Name string
	From
	Steps []Step
}

// Step is one instruction.
type Step struct {
	Type      string   `json:"type"`
	Args      []string `json:"args"`
	FilesHash string   `json:"filesHash"` // of COPY and ADD: what was uploaded
	Force     bool     `json:"force"`     // neither it nor what follows is taken from earlier builds
	Berm      struct {
		Shell []string          `json:"shell"` // of RUN: what runs it, as the last argument; nil is bash as at a login
		Env   map[string]string `json:"env"`   // of RUN: for it alone, where ENV says nothing
		From  string            `json:"from"`  // of COPY: the stage that has its source, in the place of FilesHash
	} `json:"berm"`
}

// Bounds of an order.
const (
	maxSteps    = 500
	maxStages   = 50
	maxStepSize = 256 << 10 // bytes of all arguments of one step
)

// arguments are how many a step may have, by its type; -1 is any number.
var arguments = map[string][2]int{"RUN": {1, 2}, "COPY": {2, 4}, "ADD": {2, 4}, "WORKDIR": {1, 1}, "USER": {1, 2}, "ENV": {2, -1}, "ARG": {2, -1}}

var (
	filesHash = regexp.MustCompile(`^[0-9a-f]{64}$`)
	octal     = regexp.MustCompile(`^[0-7]{3,4}$`)
	owner     = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?$`)
	userName  = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}$`)
	variable  = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
)

func invalid(format string, args ...any) error { return berm.Errorf(berm.Invalid, format, args...) }

// Check refuses what no build could do.
func (o *Order) Check() error {
	if len(o.Start)+len(o.Ready) > maxStepSize {
		return invalid("startCmd and readyCmd are limited to %d bytes", maxStepSize)
	}
	if len(o.Stages) > maxStages {
		return invalid("a build is limited to %d stages", maxStages)
	}
	before, steps := map[string]bool{}, 0
	for _, s := range o.Stages {
		if s.Name == "" || before[s.Name] {
			return invalid("stage %q: each has a name of its own", s.Name)
		}
		if err := s.check(s.Steps, before, &steps); err != nil {
			return invalid("stage %q: %w", s.Name, err)
		}
		before[s.Name] = true
	}
	return o.check(o.Steps, before, &steps)
}

// check refuses a stage. before are the names of those before it, which had so many steps.
func (f *From) check(steps []Step, before map[string]bool, counted *int) error {
	n := 0
	for _, given := range []string{f.Image, f.Template, f.Stage} {
		if given != "" {
			n++
		}
	}
	switch {
	case n != 1:
		return invalid("one of fromImage, fromTemplate and berm.fromStage is needed, and not more")
	case f.Stage != "" && !before[f.Stage]:
		return invalid("there is no stage %q before it", f.Stage)
	}
	for i := range steps {
		*counted++
		s := &steps[i]
		err := s.check()
		if err == nil && s.Berm.From != "" && !before[s.Berm.From] {
			err = invalid("there is no stage %q before it", s.Berm.From)
		}
		if err != nil {
			return invalid("step %d: %w", *counted, err)
		}
	}
	if *counted > maxSteps {
		return invalid("a build is limited to %d steps", maxSteps)
	}
	return nil
}

func (s *Step) check() error {
	s.Type = strings.ToUpper(s.Type)
	n, known := arguments[s.Type]
	size := 0
	more := slices.Collect(maps.Values(s.Berm.Env))
	for name := range s.Berm.Env {
		if !variable.MatchString(name) {
			return invalid("%q is no name of a variable", name)
		}
	}
	for _, a := range slices.Concat(s.Args, s.Berm.Shell, more) {
		size += len(a)
		if strings.ContainsRune(a, 0) {
			return invalid("an argument holds a NUL byte")
		}
	}
	switch {
	case !known:
		return berm.Errorf(berm.Invalid, "%q is no type of a step", s.Type).WithHint("COPY, ADD, RUN, WORKDIR, USER, ENV and ARG are.")
	case len(s.Args) < n[0] || n[1] >= 0 && len(s.Args) > n[1]:
		return invalid("%s with %d arguments", s.Type, len(s.Args))
	case size > maxStepSize:
		return invalid("the arguments are limited to %d bytes", maxStepSize)
	case s.Args[0] == "":
		return invalid("the first argument of %s is empty", s.Type)
	case s.Type != "RUN" && (s.Berm.Shell != nil || s.Berm.Env != nil):
		return invalid("%s has no shell", s.Type)
	case s.Type != "COPY" && s.Berm.From != "":
		return invalid("%s copies from no stage", s.Type)
	}
	switch s.Type {
	case "COPY", "ADD":
		switch {
		case s.Berm.From == "" && !filesHash.MatchString(s.FilesHash):
			return invalid("filesHash is no SHA-256 in hexadecimal digits")
		case s.arg(1) == "":
			return invalid("%s has no destination", s.Type)
		case s.arg(2) != "" && !owner.MatchString(s.arg(2)):
			return invalid("%q is no owner: USER or USER:GROUP", s.arg(2))
		case s.arg(3) != "" && !octal.MatchString(s.arg(3)):
			return invalid("%q is no mode: three or four octal digits", s.arg(3))
		}
	case "USER":
		if !userName.MatchString(s.Args[0]) {
			return invalid("%q is no name of a user", s.Args[0])
		}
	case "ENV", "ARG":
		if len(s.Args)%2 != 0 {
			return invalid("%s needs pairs of a name and a value", s.Type)
		}
		for i := 0; i < len(s.Args); i += 2 {
			if !variable.MatchString(s.Args[i]) {
				return invalid("%q is no name of a variable", s.Args[i])
			}
		}
	}
	return nil
}

// arg is an argument, or "".
func (s *Step) arg(i int) string {
	if i < len(s.Args) {
		return s.Args[i]
	}
	return ""
}

func (s *Step) String() string {
	switch s.Type {
	case "RUN":
		return "RUN " + s.Args[0]
	case "ENV", "ARG":
		var pairs []string
		for i := 0; i < len(s.Args); i += 2 {
			pairs = append(pairs, s.Args[i]+"="+strconv.Quote(s.Args[i+1]))
		}
		return s.Type + " " + strings.Join(pairs, " ")
	}
	if s.Berm.From != "" {
		return s.Type + " --from=" + s.Berm.From + " " + strings.Join(s.Args, " ")
	}
	return s.Type + " " + strings.Join(s.Args, " ")
}

// key names what a step comes to, after all that came before it; from is the key of the stage of
// which it copies.
func (s *Step) key(before, from string) string {
	values := []any{before, s.Type, s.Args, s.FilesHash}
	if s.Berm.Shell != nil || len(s.Berm.Env) > 0 {
		values = append(values, s.Berm.Shell, s.Berm.Env)
	}
	if from != "" {
		values = append(values, from)
	}
	return key(values...)
}

// key is a hash over values that no two sequences of values share.
func key(values ...any) string {
	sum := sha256.New()
	for _, v := range values {
		text, _ := json.Marshal(v) // strings and lists of them always marshal
		_, _ = sum.Write(append(text, '\n'))
	}
	return hex.EncodeToString(sum.Sum(nil))
}

// source is the part of a COPY's source before the first part that has a pattern in it: the SDK
// packs what a pattern matches below its own place.
func source(src string) string {
	var parts []string
	for part := range strings.SplitSeq(path.Clean("/" + src)[1:], "/") {
		if strings.ContainsAny(part, "*?[{") {
			break
		}
		parts = append(parts, part)
	}
	return path.Join(append([]string{"."}, parts...)...)
}

// expand puts variables into a value as a shell does with $NAME and ${NAME}; nothing is run. A
// backslash keeps a dollar sign.
func expand(value string, env map[string]string) string {
	var out strings.Builder
	for i := 0; i < len(value); {
		rest := value[i:]
		switch {
		case strings.HasPrefix(rest, `\$`):
			out.WriteByte('$')
			i += 2
		case rest[0] == '$':
			if m := reference.FindStringSubmatch(rest); m != nil {
				out.WriteString(env[m[1]+m[2]])
				i += len(m[0])
				continue
			}
			fallthrough
		default:
			out.WriteByte(rest[0])
			i++
		}
	}
	return out.String()
}

var reference = regexp.MustCompile(`^\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})`)

// bounded fails when more comes than fits.
type bounded struct {
	io.Reader
	left int64
}

func (b *bounded) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	if b.left -= int64(n); b.left < 0 {
		return n, invalid("more than %d bytes", int64(maxUpload))
	}
	return n, err
}
