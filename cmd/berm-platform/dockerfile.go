package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
	"github.com/berm-sandbox/berm/internal/dockerfile"
	"github.com/berm-sandbox/berm/internal/template"
	"github.com/berm-sandbox/berm/internal/terminal"
)

// dockerfileBuild is what is said of the build of a Dockerfile.
type dockerfileBuild struct {
	file, name, target string
	args               []string
	start, ready       string
	cpus               int64
	memory, disk       cli.SizeFlag
}

// flags adds the flags that are for a Dockerfile alone, and returns their names.
func (d *dockerfileBuild) flags(cmd *cobra.Command) []string {
	flags := cmd.Flags()
	flags.StringVarP(&d.file, "file", "f", "", "the Dockerfile (default: Dockerfile in the directory)")
	flags.StringVar(&d.name, "name", "", "name of the template, `NAME[:TAG]` (default: the directory's)")
	flags.StringVar(&d.target, "target", "", "stage to make the template of (default: the last)")
	flags.StringArrayVar(&d.args, "build-arg", nil, "value of an ARG, KEY=VALUE; KEY alone takes the value from here")
	flags.StringVar(&d.start, "start", "", "shell `COMMAND` that begins to run in each sandbox when it is made")
	flags.StringVar(&d.ready, "ready", "", "shell `COMMAND` that is tried until it succeeds, before the sandbox is handed out")
	flags.Int64Var(&d.cpus, "cpus", 0, "processor cores of its sandboxes, 1 or an even number (default: the server's)")
	flags.Var(&d.memory, "memory", "memory of its sandboxes, such as 512MiB (default: the server's)")
	flags.Var(&d.disk, "disk", "bytes that they may write, such as 10GiB (default: the server's)")
	_ = cmd.MarkFlagFilename("file")
	return []string{"file", "name", "target", "build-arg", "start", "ready", "cpus", "memory", "disk", "context"}
}

const (
	// buildPoll is how often a build is asked for news.
	buildPoll = 200 * time.Millisecond
	// cancelTime is how long a server has to end a build that the user gave up.
	cancelTime = 10 * time.Second
)

// run builds the Dockerfile of a directory on a server.
func (d *dockerfileBuild) run(cmd *cobra.Command, dir string, force, asJSON bool) error {
	name, err := d.templateName(cmd, dir)
	if err != nil {
		return err
	}
	plan, files, err := d.plan(dir)
	if err != nil {
		return err
	}
	defer func() { _ = files.Close() }()
	packed := map[*dockerfile.Step]*dockerfile.Files{}
	for _, stage := range plan.Stages {
		for i := range stage.Steps {
			step := &stage.Steps[i]
			if step.Copy == nil {
				continue
			}
			if packed[step], err = files.Pack(step); err != nil {
				return err
			}
		}
	}
	c, err := server(cmd)
	if err != nil {
		return err
	}
	for _, note := range plan.Notes {
		cli.Notice(cmd, "%s", note)
	}
	ctx := cmd.Context()
	b, err := c.NewBuild(ctx, client.BuildOptions{Name: name, CPUCount: d.cpus, MemoryMB: int64(d.memory) >> 20, DiskMB: int64(d.disk) >> 20})
	if err != nil {
		return err
	}
	if err := d.build(ctx, c, b, plan, packed, force, newBuildProgress(cmd.ErrOrStderr(), plan)); err != nil {
		late, done := context.WithTimeout(context.WithoutCancel(ctx), cancelTime)
		defer done()
		switch cancelled := c.CancelBuild(late, b); { // a Conflict where it is over
		case ctx.Err() == nil:
		case cancelled != nil:
			cli.Notice(cmd, "the build may go on: %s", cancelled)
		default:
			cli.Notice(cmd, "the build was cancelled")
		}
		return err
	}
	if asJSON {
		return cli.PrintJSON(cmd.OutOrStdout(), b)
	}
	_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s %s\n", terminal.Escape(name), terminal.Escape(string(b.TemplateID)))
	return err
}

// plan reads the Dockerfile, and finds what it copies.
func (d *dockerfileBuild) plan(dir string) (*dockerfile.Plan, *dockerfile.Context, error) {
	name := cmp.Or(d.file, filepath.Join(dir, "Dockerfile"))
	file, err := dockerfile.OpenFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, berm.Errorf(berm.NotFound, "there is no %s", name).WithHint("-f FILE names another")
	}
	if err != nil {
		return nil, nil, berm.Errorf(berm.Invalid, "%w", err)
	}
	defer file.Close()
	args, err := cli.Pairs("build-arg", d.args, os.LookupEnv)
	if err != nil {
		return nil, nil, err
	}
	plan, err := dockerfile.Parse(file, dockerfile.Options{File: name, Args: args, Target: d.target, Arch: runtime.GOARCH})
	if err != nil {
		return nil, nil, err
	}
	files, err := dockerfile.Open(dir, name)
	return plan, files, err
}

// notInNames are characters that no name of a template has.
var notInNames = regexp.MustCompile(`[^a-z0-9_-]+`)

// templateName is what was asked for, or the directory's name as far as a template can have it. The
// names of recipes are not for Dockerfiles: sandboxes of nobody's template are made of base.
func (d *dockerfileBuild) templateName(cmd *cobra.Command, dir string) (string, error) {
	name := d.name
	if !cmd.Flags().Changed("name") {
		dir, err := filepath.Abs(dir)
		if err != nil {
			return "", err
		}
		name = strings.Trim(notInNames.ReplaceAllString(strings.ToLower(filepath.Base(dir)), "-"), "-_")
		if name == "" {
			return "", cli.UsageError{Err: fmt.Errorf("%s is no name for a template; --name gives one", dir)}
		}
	}
	if err := template.CheckName(name); err != nil {
		return "", cli.UsageError{Err: err}
	}
	return name, template.NotRecipe(name)
}

// build uploads what is copied, gives the order and shows what becomes of it.
func (d *dockerfileBuild) build(ctx context.Context, c *client.Client, b client.Build, plan *dockerfile.Plan, packed map[*dockerfile.Step]*dockerfile.Files, force bool, progress *buildProgress) error {
	order := client.BuildOrder{StartCmd: d.start, ReadyCmd: d.ready, Force: force, Berm: &client.OrderAdditions{}}
	for i, stage := range plan.Stages {
		steps := []client.BuildStep{}
		for j := range stage.Steps {
			step := &stage.Steps[j]
			if files := packed[step]; files != nil {
				if err := c.UploadFiles(ctx, b, files.Hash, files.Write); err != nil {
					return fmt.Errorf("%s%w", step.At, err)
				}
			}
			steps = append(steps, step.BuildStep)
		}
		if i == len(plan.Stages)-1 {
			order.FromImage, order.Berm.FromStage, order.Steps = stage.FromImage, stage.FromStage, steps
			break
		}
		order.Berm.Stages = append(order.Berm.Stages, client.BuildStage{Name: stage.Name, FromImage: stage.FromImage, FromStage: stage.FromStage, Steps: steps})
	}
	if err := c.StartBuild(ctx, b, order); err != nil {
		return err
	}
	return progress.follow(ctx, c, b)
}

// buildProgress shows a build: its steps, and what they write. On a terminal what they write is
// written over, and shown when the step fails.
type buildProgress struct {
	w      io.Writer
	style  terminal.Style
	live   bool
	begin  time.Time
	stages []*dockerfile.Stage
	steps  []*dockerfile.Step // of all stages, as the server counts them
	shown  map[string]string  // titles, by the number of the step
	open   bool               // the last line is to be written over
	tail   []string           // of what the step at hand wrote, where it was written over
}

// maxTail is how many lines of a failed step are shown.
const maxTail = 30

func newBuildProgress(w io.Writer, plan *dockerfile.Plan) *buildProgress {
	p := &buildProgress{w: w, style: terminal.StyleFor(w), live: terminal.Is(w), begin: time.Now(), stages: plan.Stages, shown: map[string]string{}}
	titled := 0
	for _, stage := range plan.Stages {
		for i := range stage.Steps {
			p.steps = append(p.steps, &stage.Steps[i])
			if stage.Steps[i].Text != "" {
				titled++
			}
		}
	}
	n := 0
	for i, step := range p.steps {
		if step.Text != "" {
			n++
			p.shown[strconv.Itoa(i+1)] = fmt.Sprintf("[%d/%d] %s", n, titled, step.Text)
		}
	}
	return p
}

// follow shows the build until it is over. Its error is why the build failed.
func (p *buildProgress) follow(ctx context.Context, c *client.Client, b client.Build) error {
	defer p.closeLine()
	for offset := 0; ; {
		s, err := c.BuildStatus(ctx, b, offset)
		if err != nil {
			return err
		}
		for _, line := range s.Log {
			p.line(line)
		}
		offset += len(s.Log)
		switch {
		case len(s.Log) > 0:
			continue // there may be more
		case s.Status == "ready":
			return nil
		case s.Status == "error":
			return p.failure(s)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(buildPoll):
		}
	}
}

var (
	outputLine = regexp.MustCompile(`^\[(builder \d+/\d+|base)\] \[(stdout|stderr)\]: `)
	titleLine  = regexp.MustCompile(`^(CACHED )?\[builder \d+/\d+\] `)
)

// line shows a line of the log.
func (p *buildProgress) line(l client.BuildLog) {
	if prefix := outputLine.FindString(l.Message); prefix != "" {
		p.output(strings.TrimPrefix(l.Message, prefix))
		return
	}
	if l.Level == "error" {
		return // told when the build has failed
	}
	p.tail = nil
	if titleLine.MatchString(l.Message) {
		title, ok := p.shown[l.Step]
		if !ok {
			return
		}
		if strings.HasPrefix(l.Message, "CACHED ") {
			title += " (cached)"
		}
		p.say("", title)
		return
	}
	p.say("", l.Message)
}

// say shows a line that stays.
func (p *buildProgress) say(indent, text string) {
	p.closeLine()
	_, _ = fmt.Fprintf(p.w, "%s %s%s\n", p.clock(), indent, p.fit(text))
}

func (p *buildProgress) clock() string {
	return p.style.Dim(fmt.Sprintf("%6.1fs", time.Since(p.begin).Seconds()))
}

// fit makes a text safe to show, on one line of a terminal.
func (p *buildProgress) fit(text string) string {
	text = terminal.Escape(text)
	f, ok := p.w.(*os.File)
	if !p.live || !ok {
		return text
	}
	return terminal.Clip(text, max(20, terminal.SizeOf(f).Cols-10))
}

func (p *buildProgress) output(text string) {
	if !p.live {
		p.say("  ", text)
		return
	}
	if p.tail = append(p.tail, text); len(p.tail) > maxTail {
		p.tail = p.tail[1:]
	}
	_, _ = fmt.Fprintf(p.w, "\r%s   %s\x1b[K", p.clock(), p.style.Dim(p.fit(text)))
	p.open = true
}

func (p *buildProgress) closeLine() {
	if p.open {
		_, _ = fmt.Fprint(p.w, "\r\x1b[K")
		p.open = false
	}
}

// failure is why a build failed, with the line of the Dockerfile.
func (p *buildProgress) failure(s client.BuildStatus) error {
	p.closeLine()
	for _, text := range p.tail {
		_, _ = fmt.Fprintf(p.w, "          %s\n", p.style.Dim(terminal.Escape(text)))
	}
	if s.Reason == nil {
		return berm.Errorf(berm.Invalid, "the build failed")
	}
	at, hint := "", ""
	if n, err := strconv.Atoi(s.Reason.Step); err == nil && n > 0 && n <= len(p.steps) {
		at = p.steps[n-1].At
	} else if s.Reason.Step == "base" {
		of := p.stages[len(p.stages)-1]
		for _, stage := range p.stages {
			if stage.Name == s.Reason.Stage {
				of = stage
			}
		}
		at, hint = of.At, of.Hint
	}
	e := berm.Errorf(berm.Invalid, "%s%s", at, s.Reason.Message)
	e.Hint = hint
	return e
}
