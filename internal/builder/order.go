package builder

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"path"
	"regexp"
	"strconv"
	"strings"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/template"
)

// Order is what a template is made of.
type Order struct {
	// One of both.
	FromImage, FromTemplate string
	Login                   template.Login // to the registry of FromImage; nil is Docker's configuration of this machine
	Steps                   []Step
	Start, Ready            string // see berm.Template
	Force                   bool   // nothing is taken from earlier builds
}

// Step is one instruction.
type Step struct {
	Type      string   `json:"type"`
	Args      []string `json:"args"`
	FilesHash string   `json:"filesHash"` // of COPY and ADD: what was uploaded
	Force     bool     `json:"force"`     // neither it nor what follows is taken from earlier builds
}

// Bounds of an order.
const (
	maxSteps    = 500
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
	switch {
	case (o.FromImage == "") == (o.FromTemplate == ""):
		return invalid("one of fromImage and fromTemplate is needed, and not both")
	case len(o.Steps) > maxSteps:
		return invalid("a build is limited to %d steps", maxSteps)
	case len(o.Start)+len(o.Ready) > maxStepSize:
		return invalid("startCmd and readyCmd are limited to %d bytes", maxStepSize)
	}
	for i := range o.Steps {
		if err := o.Steps[i].check(); err != nil {
			return invalid("step %d: %w", i+1, err)
		}
	}
	return nil
}

func (s *Step) check() error {
	s.Type = strings.ToUpper(s.Type)
	n, known := arguments[s.Type]
	size := 0
	for _, a := range s.Args {
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
	}
	switch s.Type {
	case "COPY", "ADD":
		switch {
		case !filesHash.MatchString(s.FilesHash):
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
	return s.Type + " " + strings.Join(s.Args, " ")
}

// key names what a step comes to, after all that came before it.
func (s *Step) key(before string) string { return key(before, s.Type, s.Args, s.FilesHash) }

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
