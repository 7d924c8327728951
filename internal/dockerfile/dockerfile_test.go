package dockerfile

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/client"
)

func parse(text string, o Options) (*Plan, error) {
	o.File, o.Arch = "Dockerfile", "amd64"
	return Parse(strings.NewReader(text), o)
}

// shown is a stage in one line for each step.
func shown(s *Stage) string {
	var out strings.Builder
	fmt.Fprintf(&out, "%s: %s%s\n", s.Name, s.FromImage, s.FromStage)
	for _, step := range s.Steps {
		fmt.Fprintf(&out, "%s %q", step.Type, step.Args)
		if step.Copy != nil {
			fmt.Fprintf(&out, " of %q %q", step.Copy.Sources, step.Copy.Inline)
		}
		if b := step.Berm; b != nil {
			fmt.Fprintf(&out, " %q %v %s", b.Shell, b.Env, b.From)
		}
		out.WriteByte('\n')
	}
	return out.String()
}

// with is a stage of an image whose steps between the user root and E2B's defaults are steps.
func with(steps string) string {
	return "0: i\nUSER [\"root\"]\nWORKDIR [\"/\"]\n" + steps + "USER [\"user\"]\nWORKDIR [\"/\"]\nWORKDIR [\"/home/user\"]\n"
}

func TestSteps(t *testing.T) {
	const sh = ` ["/bin/sh" "-c"] map[] `
	for name, c := range map[string]struct{ text, want string }{
		"run":               {"RUN a && \\\n b", with("RUN [\"a &&  b\"]" + sh + "\n")},
		"run without shell": {`RUN ["a", "it's"]`, with(`RUN ["exec 'a' 'it'\\''s'"]` + sh + "\n")},
		"run with a script": {"RUN <<E\na\nb\nE", with(`RUN ["a\nb\n"]` + sh + "\n")},
		"run with input":    {"RUN cat <<E >x\na\nE", with(`RUN ["cat <<E >x\na\nE"]` + sh + "\n")},
		"shell":             {"SHELL [\"/bin/bash\", \"-c\"]\nRUN a\nRUN [\"b\"]", with("RUN [\"a\"] [\"/bin/bash\" \"-c\"] map[] \nRUN [\"exec 'b'\"]" + sh + "\n")},
		"arguments":         {"ARG A=1 B\nARG C=${A}2\nENV B=3\nRUN x", with("ENV [\"B\" \"3\"]\nRUN [\"x\"] [\"/bin/sh\" \"-c\"] map[A:1 C:12] \n")},
		"what the image has": {"ENV P=/x:$PATH Q='$5' R=\\$6 S=\"a b\"\nENV T=$P:$S U=${S#a}\nWORKDIR $P/d",
			"0: i\nUSER [\"root\"]\nWORKDIR [\"/\"]\n" +
				`ENV ["P" "/x:$PATH" "Q" "\\$5" "R" "\\$6" "S" "a b"]` + "\n" + `ENV ["T" "$P:a b" "U" " b"]` + "\n" + `WORKDIR ["$P/d"]` + "\n" +
				"USER [\"user\"]\nWORKDIR [\"$P/d\"]\n"},
		"a value twice":      {"ENV A='$x'\nENV B=$A", with(`ENV ["A" "\\$x"]` + "\n" + `ENV ["B" "\\$x"]` + "\n")},
		"user and directory": {"WORKDIR /a\nUSER app\nWORKDIR b", "0: i\nUSER [\"root\"]\nWORKDIR [\"/\"]\nWORKDIR [\"/a\"]\nUSER [\"app\"]\nWORKDIR [\"/a\"]\nWORKDIR [\"/a/b\"]\n"},
		"user 0":             {"USER 0:0\nWORKDIR /", "0: i\nUSER [\"root\"]\nWORKDIR [\"/\"]\nUSER [\"root\"]\nWORKDIR [\"/\"]\nWORKDIR [\"/\"]\n"},
		"copy":               {"ENV D=dir\nCOPY --chown=a --chmod=700 $D/*.go x /to/$D/", with(`ENV ["D" "dir"]` + "\n" + `COPY ["" "/to/dir/" "a" "700"] of ["dir/*.go" "x"] []` + "\n")},
		"copy here":          {"COPY a .", with(`COPY ["" "./" "root:root" ""] of ["a"] []` + "\n")},
		"copy of text":       {"ENV V=1\nCOPY <<A <<'B' /d/\nv $V\nA\nv $V\nB", with(`ENV ["V" "1"]` + "\n" + `COPY ["" "/d/" "root:root" ""] of [] [{"A" "v 1\n"} {"B" "v $V\n"}]` + "\n")},
		"a cache": {"USER app\nRUN --mount=type=cache,target=/c --mount=type=cache,target=d,uid=7,mode=0700 x", "0: i\nUSER [\"root\"]\nWORKDIR [\"/\"]\nUSER [\"app\"]\nWORKDIR [\"/\"]\n" +
			`RUN ["mkdir -p -- '/c' && mkdir -p -- 'd' && chown -- 7:0 'd' && chmod -- 700 'd'" "root"]` + sh + "\nRUN [\"x\"]" + sh + "\nWORKDIR [\"/home/user\"]\n"},
		"without effect": {"LABEL a=b\nEXPOSE 80\nSTOPSIGNAL 9\nMAINTAINER x\nCMD [\"a\"]\nENTRYPOINT b\nVOLUME /v\nHEALTHCHECK CMD x", with("")},
	} {
		t.Run(name, func(t *testing.T) {
			plan, err := parse("FROM i\n"+c.text, Options{})
			if err != nil {
				t.Fatal(err)
			}
			if got := shown(plan.Stages[0]); got != c.want || len(plan.Stages) != 1 {
				t.Errorf("got\n%swant\n%s", got, c.want)
			}
		})
	}
}

func TestStages(t *testing.T) {
	const text = `ARG TAG=1
FROM --platform=$BUILDPLATFORM go:$TAG AS build
ENV A=1
USER app
RUN x
FROM build AS test
RUN $A
FROM unused
RUN false
FROM run
COPY --from=build --chown=a /b/* /c/
COPY --from=0 b /c
COPY --from=tools:2 /t /u /v/
`
	plan, err := parse(text, Options{Args: map[string]string{"TAG": "2", "NONE": "x"}})
	if err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	for _, s := range plan.Stages {
		got.WriteString(shown(s))
	}
	want := `0: go:2
USER ["root"]
WORKDIR ["/"]
ENV ["A" "1"]
USER ["app"]
WORKDIR ["/"]
RUN ["x"] ["/bin/sh" "-c"] map[] 
tools:2: tools:2
3: run
USER ["root"]
WORKDIR ["/"]
COPY ["/b/*" "/c/" "a" ""] [] map[] 0
COPY ["/b" "/c" "" ""] [] map[] 0
COPY ["/t" "/v/" "" ""] [] map[] tools:2
COPY ["/u" "/v/" "" ""] [] map[] tools:2
USER ["user"]
WORKDIR ["/"]
WORKDIR ["/home/user"]
`
	if got.String() != want {
		t.Errorf("got\n%swant\n%s", got.String(), want)
	}
	if len(plan.Notes) != 1 || !strings.Contains(plan.Notes[0], "no ARG NONE") {
		t.Errorf("notes %q", plan.Notes)
	}
	for _, target := range []string{"test", "1"} {
		plan, err := parse(text, Options{Target: target})
		if err != nil {
			t.Fatal(err)
		}
		if got, want := shown(plan.Stages[1]), "1: 0\nRUN [\"$A\"] [\"/bin/sh\" \"-c\"] map[] \nWORKDIR [\"/home/user\"]\n"; got != want || len(plan.Stages) != 2 {
			t.Errorf("got\n%swant\n%s", got, want)
		}
	}
}

// What cannot be done is refused with the line and the instruction.
func TestRefused(t *testing.T) {
	for text, want := range map[string]struct {
		kind berm.Kind
		says string
	}{
		"":               {berm.Invalid, "Dockerfile: "},
		"RUN x":          {berm.Invalid, "Dockerfile:1: "},
		"FROM i\nNONE x": {berm.Invalid, "Dockerfile:2: "},
		"FROM i\n\nRUN --mount=type=secret,id=a x":   {berm.Unsupported, "Dockerfile:3: RUN: --mount=type=secret"},
		"FROM i\nRUN --mount=type=cache,target=$A x": {berm.Unsupported, "Dockerfile:2: RUN: $A"},
		"FROM i\nRUN --network=none x":               {berm.Unsupported, "Dockerfile:2: RUN: --network=none"},
		"FROM i\nRUN --security=insecure x":          {berm.Invalid, "Dockerfile:2: "},
		"FROM scratch":                               {berm.Unsupported, "Dockerfile:1: FROM: scratch"},
		"FROM --platform=linux/riscv64 i":            {berm.Unsupported, "linux/riscv64"},
		"FROM $A":                                    {berm.Unsupported, "Dockerfile:1: FROM: $A"},
		"FROM i\nADD https://x/y /z":                 {berm.Unsupported, "Dockerfile:2: ADD: https://x/y"},
		"FROM i\nADD git@x:y.git /z":                 {berm.Unsupported, "Dockerfile:2: ADD: "},
		"FROM i\nONBUILD RUN x":                      {berm.Unsupported, "Dockerfile:2: ONBUILD: "},
		"FROM i\nUSER 1000":                          {berm.Unsupported, "Dockerfile:2: USER: "},
		"FROM i\nUSER a:b":                           {berm.Unsupported, "Dockerfile:2: USER: "},
		"FROM i\nUSER $A":                            {berm.Unsupported, "Dockerfile:2: USER: $A: "},
		"FROM i\nWORKDIR ${A:-b}":                    {berm.Unsupported, "Dockerfile:2: WORKDIR: ${A:-b}: "},
		"FROM i\nCOPY $A /x":                         {berm.Unsupported, "Dockerfile:2: COPY: $A: "},
		"FROM i\nCOPY a b /x":                        {berm.Invalid, "Dockerfile:2: "},
		"FROM i\nCOPY --chmod=u+x a /x":              {berm.Unsupported, "--chmod=u+x"},
		"FROM i\nCOPY --chown=a:b:c a /x":            {berm.Invalid, "--chown"},
		"FROM i\nCOPY --from=3 a /x":                 {berm.Invalid, "--from=3"},
		"FROM i\nCOPY --from=0 a /x":                 {berm.Invalid, "--from=0"},
		"FROM i\nCOPY --from=x a* /x":                {berm.Unsupported, "Dockerfile:2: COPY: a pattern"},
		"FROM i\nCOPY --parents a /x":                {berm.Invalid, "Dockerfile:2: "},
		"FROM i\nRUN <<E\n#!/usr/bin/python\nE":      {berm.Unsupported, "Dockerfile:2: RUN: "},
		"FROM i\nRUN a\x01":                          {berm.Invalid, "control characters"},
		"FROM i\n" + strings.Repeat("#", maxSize):    {berm.Invalid, "larger than"},
	} {
		_, err := parse(text, Options{})
		if err == nil || berm.KindOf(err) != want.kind || !strings.Contains(err.Error(), want.says) {
			t.Errorf("%.60q: %v, want %s: %s", text, err, want.kind, want.says)
		}
	}
	if _, err := parse("FROM i", Options{Target: "x"}); err == nil || berm.KindOf(err) != berm.Invalid {
		t.Errorf("no such stage: %v", err)
	}
}

// No hint leads a secret into a template.
func TestNoSecrets(t *testing.T) {
	for _, kind := range []string{"secret,id=a", "ssh"} {
		_, err := parse("FROM i\nRUN --mount=type="+kind+" x", Options{})
		if hint := berm.HintOf(err); !strings.Contains(hint, "no secrets of builds") || !strings.Contains(hint, "stays in the template") {
			t.Errorf("%s: %q", kind, hint)
		}
	}
}

// An image that may have been meant as a stage.
func TestLaterStage(t *testing.T) {
	plan, err := parse("FROM b AS a\nRUN x\nFROM c AS c\nFROM a AS b\nCOPY --from=c x /\nCOPY --from=a x /", Options{})
	if err != nil {
		t.Fatal(err)
	}
	hints := map[string]string{}
	for _, s := range plan.Stages {
		hints[s.Name] = s.Hint
	}
	if !strings.Contains(hints["0"], "b begins later, at line 4") || !strings.Contains(hints["1"], "this stage itself") || hints["2"] != "" {
		t.Errorf("%q", hints)
	}
}

func FuzzParse(f *testing.F) {
	f.Add("ARG A=1\nFROM i:$A AS b\nENV X=${A:-y} P=\"a $PATH\" Q='$1'\nCOPY <<E /x\n$A\nE\nFROM b\nCOPY --from=b --chown=a:b a* /c/\nRUN --mount=type=cache,target=/c <<E\nx\nE\nUSER u\nWORKDIR ${X}\\$\nCMD a")
	f.Fuzz(func(t *testing.T, text string) {
		plan, err := parse(text, Options{})
		if err != nil {
			if kind := berm.KindOf(err); kind != berm.Invalid && kind != berm.Unsupported {
				t.Errorf("kind %s: %v", kind, err)
			}
			return
		}
		for _, s := range plan.Stages {
			if (s.FromImage == "") == (s.FromStage == "") {
				t.Errorf("stage %q begins with %q and %q", s.Name, s.FromImage, s.FromStage)
			}
			for _, step := range s.Steps {
				if strings.Contains(strings.Join(step.Args, ""), dollar) {
					t.Errorf("a mark is left in %q", step.Args)
				}
			}
		}
	})
}

// files is what a step packs, by name: content, or what it is.
func files(t *testing.T, c *Context, step *Step) map[string]string {
	t.Helper()
	packed, err := c.Pack(step)
	if err != nil {
		t.Fatal(err)
	}
	from, to := io.Pipe()
	go func() { to.CloseWithError(packed.Write(to)) }()
	plain, err := gzip.NewReader(from)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for archive := tar.NewReader(plain); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return found
		}
		if err != nil {
			t.Fatal(err)
		}
		switch h.Typeflag {
		case tar.TypeDir:
			found[h.Name] = "directory"
		case tar.TypeSymlink:
			found[h.Name] = "to " + h.Linkname
		default:
			content, err := io.ReadAll(archive)
			if err != nil {
				t.Fatal(err)
			}
			found[h.Name] = string(content)
		}
	}
}

func write(t *testing.T, dir string, content map[string]string) {
	t.Helper()
	for name, text := range content {
		name = filepath.Join(dir, name)
		err := os.MkdirAll(filepath.Dir(name), 0o755)
		if target, ok := strings.CutPrefix(text, "to "); ok {
			err = errors.Join(err, os.Symlink(target, name))
		} else {
			err = errors.Join(err, os.WriteFile(name, []byte(text), 0o644))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestContext(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{
		"a.txt": "a", "b.txt": "b", "d/x": "x", "d/e/y": "y", "d/link": "to x", "d/out": "to /etc/passwd", "to-d": "to d", "escape": "to ../..", "loop": "to loop",
		".git/config": "git", "d/skip.log": "log", "kept/keep": "k", "kept/drop": "d", "big.tgz": "\x1f\x8bxx", "w*": "star",
		".dockerignore": "# what the image does not need\n.git\n**/*.log\nkept\n!kept/keep\n",
	})
	step := func(text string) *Step {
		t.Helper()
		plan, err := parse("FROM i\n"+text, Options{})
		if err != nil {
			t.Fatal(err)
		}
		return &plan.Stages[0].Steps[2]
	}
	c, err := Open(dir, filepath.Join(dir, "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	d := map[string]string{"x": "x", "e/": "directory", "e/y": "y", "link": "to x", "out": "to /etc/passwd"}
	for text, want := range map[string]struct {
		source string
		files  map[string]string
	}{
		"COPY a.txt /x":                {"a.txt", map[string]string{"a.txt": "a"}},
		"COPY /a.txt /x/":              {".", map[string]string{"a.txt": "a"}},
		"COPY ../a.txt /x/":            {".", map[string]string{"a.txt": "a"}}, // as Docker: nothing is above the context
		"COPY *.txt /x/":               {".", map[string]string{"a.txt": "a", "b.txt": "b"}},
		"COPY d /x":                    {".", d},
		"COPY to-d /x":                 {".", d},
		"COPY d/link /x":               {"x", map[string]string{"x": "x"}},
		"COPY kept /x":                 {".", map[string]string{"keep": "k"}},
		"COPY <<E d/x a.txt /x/\n1\nE": {".", map[string]string{"E": "1\n", "x": "x", "a.txt": "a"}},
		"COPY big.tgz /x":              {"big.tgz", map[string]string{"big.tgz": "\x1f\x8bxx"}},
		"ADD a.txt /x":                 {"a.txt", map[string]string{"a.txt": "a"}},
	} {
		s := step(text)
		got := files(t, c, s)
		if s.Args[0] != want.source || fmt.Sprint(got) != fmt.Sprint(want.files) || len(s.FilesHash) != 64 {
			t.Errorf("%s: %q of %v, want %q of %v", text, s.Args[0], got, want.source, want.files)
		}
	}
	all := files(t, c, step("COPY . /x"))
	for _, name := range []string{".git/", ".git/config", "d/skip.log", "kept/drop"} {
		if _, ok := all[name]; ok {
			t.Errorf("%s is not left out", name)
		}
	}
	if all["d/e/y"] != "y" || all["kept/keep"] != "k" {
		t.Errorf("%v", all)
	}
	for text, want := range map[string]berm.Kind{
		"COPY none /x": berm.NotFound, "COPY n*.txt /x/": berm.NotFound, "COPY .git /x": berm.NotFound, "COPY escape /x": berm.Invalid,
		"COPY loop /x": berm.Invalid, "COPY d/out /x": berm.NotFound, "COPY *.txt /x": berm.Invalid, "ADD big.tgz /x": berm.Unsupported, "COPY w* /x": berm.Unsupported,
	} {
		_, err := c.Pack(step(text))
		if err == nil || berm.KindOf(err) != want || !strings.HasPrefix(err.Error(), "Dockerfile:2: ") {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}

// What is no regular file is neither waited for nor read, be it the .dockerignore or what became
// of a file since it was found.
func TestFIFO(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, ".dockerignore")
	if err := unix.Mkfifo(pipe, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{pipe, dir, "/dev/null"} {
		if _, err := OpenFile(name); err == nil || berm.KindOf(err) != berm.Invalid || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Open(dir, filepath.Join(dir, "Dockerfile")); err == nil || berm.KindOf(err) != berm.Invalid {
		t.Errorf("a FIFO for .dockerignore: %v", err)
	}
	if err := os.Remove(pipe); err != nil {
		t.Fatal(err)
	}
	write(t, dir, map[string]string{"f": "1"})
	c, err := Open(dir, filepath.Join(dir, "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	f, _, err := c.files(&Copy{Sources: []string{"f"}}, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Remove(filepath.Join(dir, "f")), unix.Mkfifo(filepath.Join(dir, "f"), 0o644)); err != nil {
		t.Fatal(err)
	}
	if err := f.hash(); err == nil || berm.KindOf(err) != berm.Invalid {
		t.Errorf("a file that became a FIFO: %v", err)
	}
}

// A pattern that is none is told with its line.
func TestIgnored(t *testing.T) {
	dir := t.TempDir()
	for text, want := range map[string]string{
		"a\n\n[b\nc": `:3: "[b" is no pattern`, "# x\r\n!\r\n": `:2: "!" is no pattern`, strings.Repeat("a", 1<<17): `:1: "aaa`,
		strings.Repeat("#\n", maxSize): "larger than",
	} {
		write(t, dir, map[string]string{"Dockerfile.dockerignore": text})
		_, err := Open(dir, filepath.Join(dir, "Dockerfile"))
		if err == nil || berm.KindOf(err) != berm.Invalid || !strings.Contains(err.Error(), filepath.Join(dir, "Dockerfile.dockerignore")) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.20q: %v, want %s", text, err, want)
		}
	}
}

// What is too much for a server is told before it is read.
func TestTooMuch(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a", "b"} {
		f, err := os.Create(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(f.Truncate(client.MaxUpload/2+1), f.Close()); err != nil { // without content
			t.Fatal(err)
		}
	}
	c, err := Open(dir, filepath.Join(dir, "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	plan, err := parse("FROM i\nCOPY a b /x/", Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Pack(&plan.Stages[0].Steps[2]); err == nil || berm.KindOf(err) != berm.Invalid || !strings.HasPrefix(err.Error(), "Dockerfile:2: COPY: 4.0 GiB of files") || berm.HintOf(err) == "" {
		t.Errorf("%v", err)
	}
}

// The name of what is packed changes with what it is, and with nothing else.
func TestHash(t *testing.T) {
	hash := func(change func(dir string)) string {
		t.Helper()
		dir := t.TempDir()
		write(t, dir, map[string]string{"d/a": "1", "d/l": "to a"})
		if change != nil {
			change(dir)
		}
		c, err := Open(dir, filepath.Join(dir, "Dockerfile"))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		plan, err := parse("FROM i\nCOPY d /x", Options{})
		if err != nil {
			t.Fatal(err)
		}
		f, err := c.Pack(&plan.Stages[0].Steps[2])
		if err != nil {
			t.Fatal(err)
		}
		return f.Hash
	}
	same := hash(nil)
	seen := []string{same}
	try := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	if got := hash(func(dir string) { try(os.Chtimes(filepath.Join(dir, "d/a"), time.Unix(1, 0), time.Unix(1, 0))) }); got != same {
		t.Error("the time of a file changes it")
	}
	for _, change := range []func(dir string){
		func(dir string) { try(os.WriteFile(filepath.Join(dir, "d/a"), []byte("2"), 0o644)) },
		func(dir string) { try(os.Chmod(filepath.Join(dir, "d/a"), 0o755)) },
		func(dir string) { try(os.Rename(filepath.Join(dir, "d/a"), filepath.Join(dir, "d/b"))) },
		func(dir string) {
			try(errors.Join(os.Remove(filepath.Join(dir, "d/l")), os.Symlink("b", filepath.Join(dir, "d/l"))))
		},
		func(dir string) { try(os.Mkdir(filepath.Join(dir, "d/n"), 0o755)) },
	} {
		got := hash(change)
		if slices.Contains(seen, got) {
			t.Error("a change changes nothing")
		}
		seen = append(seen, got)
	}
}
