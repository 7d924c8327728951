package builder

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/failpoint"
	"github.com/berm-sandbox/berm/internal/template"
)

// The steps that are no instruction of the order.
const (
	stepBase  = "base"
	stepFinal = "finalize"
)

// baseImage is what E2B's SDKs name for a template from no image of the user's.
const baseImage = "e2bdev/base"

// running is a build under way.
type running struct {
	b     *Builder
	build *build
	order Order
	actor audit.Actor
	step  string // what it is at, as in template.Failure
	name  string // of the stage that it is at
	stage template.Stage
	fresh bool                      // nothing of earlier builds is taken from here on
	made  map[string]template.Stage // what the stages of the order came to
	steps int                       // of all stages
}

// run makes the template and closes the books of the build.
func (b *Builder) run(ctx context.Context, s *build, o Order, actor audit.Actor) {
	r := &running{b: b, build: s, order: o, actor: actor, fresh: o.Force, made: map[string]template.Stage{}, steps: len(o.Steps)}
	for _, stage := range o.Stages {
		r.steps += len(stage.Steps)
	}
	t, err := r.all(ctx)
	if err != nil && ctx.Err() != nil && b.ctx.Err() == nil {
		err = context.Cause(ctx)
	}
	now := time.Now().UTC()
	outcome, reason := audit.OK, ""
	if err != nil {
		outcome, reason = audit.Failed, err.Error()
		r.say("error", "Build failed: "+reason)
	} else {
		r.step = ""
		r.say("info", fmt.Sprintf("Build finished in %s, %d layers, %d MiB", now.Sub(s.CreatedAt).Round(100*time.Millisecond), len(t.Layers), t.Size>>20))
	}
	b.mu.Lock()
	s.FinishedAt, s.State, s.cancel = now, template.Ready, nil
	if err != nil {
		message := reason
		if berm.KindOf(err) == berm.Internal && !errors.As(err, new(*stepError)) {
			b.Log.Error("a build failed", "template", s.TemplateID, "build", s.ID, "step", r.step, "error", err)
			message = "Internal error, see the server's log for build " + string(s.ID)
		}
		s.State, s.Failure = template.Failed, &template.Failure{Message: message, Step: r.step, Stage: r.name}
	}
	copied := s.Build
	b.mu.Unlock()
	if err := b.Store.SaveBuild(copied); err != nil {
		b.Log.Error("saving a build failed", "build", s.ID, "error", err)
	}
	if err := b.Audit.Emit(audit.Record{
		Team: s.Team, Type: audit.TemplateBuild, Src: "builder", Trust: audit.TrustHost, Outcome: outcome, Reason: reason, Actor: actor,
		Data: map[string]any{"template": s.TemplateID, "build": s.ID, "names": s.Names, "steps": r.steps, "ms": now.Sub(s.CreatedAt).Milliseconds()},
	}); err != nil {
		b.Log.Error("audit record lost", "type", audit.TemplateBuild, "build", s.ID, "error", err)
	}
	b.forgetOld(s.Team, s.TemplateID)
	b.sweep()
	b.Sessions.PruneBegun(context.WithoutCancel(ctx)) // of a build that failed, or that this one replaced
	if err := b.Store.Collect(context.WithoutCancel(ctx)); err != nil {
		b.Log.Error("layers that nobody needs are left", "error", err)
	}
}

// stepError is the fault of what the order says, whose text its client is told.
type stepError struct{ err error }

func (e *stepError) Error() string { return e.err.Error() }
func (e *stepError) Unwrap() error { return e.err }

// say adds a line to the build's log.
func (r *running) say(level, message string) {
	r.b.mu.Lock()
	defer r.b.mu.Unlock()
	s := r.build
	line := template.LogLine{Time: time.Now().UTC(), Level: level, Message: message, Step: r.step}
	if len(s.Log) >= maxLog {
		s.more++
		line.Level, line.Message = "warn", fmt.Sprintf("%d lines before this one are not kept", s.more)
		if level == "error" {
			line.Message += "; " + message
		}
		s.Log[maxLog-1] = line
		return
	}
	s.Log = append(s.Log, line)
}

func (r *running) all(ctx context.Context) (berm.Template, error) {
	turn := r.b.turn(r.build.Team)
	select {
	case turn <- struct{}{}:
	default:
		r.say("info", "Waiting for other builds")
		select {
		case turn <- struct{}{}:
		case <-ctx.Done():
			return berm.Template{}, context.Cause(ctx)
		}
	}
	defer func() { <-turn }()
	n := 0
	for _, s := range r.order.Stages {
		r.name = s.Name
		if err := r.follow(ctx, &s.From, s.Steps, &n); err != nil {
			return berm.Template{}, err
		}
		r.made[s.Name] = r.stage
	}
	r.name = ""
	if err := r.follow(ctx, &r.order.From, r.order.Steps, &n); err != nil {
		return berm.Template{}, err
	}
	r.step = stepFinal
	return r.finish(ctx)
}

// follow does the steps of one stage, after n others.
func (r *running) follow(ctx context.Context, from *From, steps []Step, n *int) error {
	r.step, r.fresh = stepBase, r.order.Force
	if err := r.base(ctx, from, len(steps) > 0 || from == &r.order.From); err != nil {
		return err
	}
	for i := range steps {
		*n++
		r.step = strconv.Itoa(*n)
		if err := r.instruction(ctx, &steps[i]); err != nil {
			return err
		}
	}
	return nil
}

// finish makes the template of the last stage, when what it starts in each sandbox was seen to work.
func (r *running) finish(ctx context.Context) (berm.Template, error) {
	if r.order.Start != "" || r.order.Ready != "" {
		r.say("info", "[finalize] starting it as in a sandbox: "+cmp.Or(r.order.Start, r.order.Ready))
		done, err := r.b.Sessions.Begin(ctx, r.template(), r.actor)
		defer done()
		if err != nil {
			return berm.Template{}, &stepError{err}
		}
	}
	release, err := r.b.Store.Hold(ctx)
	if err != nil {
		return berm.Template{}, err
	}
	defer release()
	if err := failpoint.Hit("builder.finish"); err != nil {
		return berm.Template{}, err
	}
	t, err := r.b.Store.Publish(ctx, r.build.Build, r.template())
	if err != nil {
		return t, err
	}
	return t, failpoint.Hit("builder.published")
}

// template is what the build has come to.
func (r *running) template() berm.Template {
	g := r.stage
	return berm.Template{
		ID: r.build.TemplateID, BuildID: r.build.ID, Team: r.build.Team, Names: r.build.Names,
		Layers: g.Layers, Limits: r.build.Limits, User: g.User, Workdir: g.Workdir, Env: g.Env, Setuid: g.Setuid, Size: g.Size,
		Start: r.order.Start, Ready: r.order.Ready,
	}
}

// cached finds what an earlier build of the team came to with the same steps. Another team's is not
// taken: who has a build can change what its steps come to, from within the sandboxes in which they
// run, and by files that are not what their hash says.
func (r *running) cached(key string) (template.Stage, bool) {
	if r.fresh {
		return template.Stage{}, false
	}
	return r.earlier(func(g template.Stage) bool { return g.Key == key })
}

// earlier finds a stage of the newest of the team's builds that has one, of which all layers are there.
func (r *running) earlier(is func(template.Stage) bool) (template.Stage, bool) {
	r.b.mu.Lock()
	defer r.b.mu.Unlock()
	var found template.Stage
	var of *build
	for _, s := range r.b.builds {
		if s.Team != r.build.Team || of != nil && s.CreatedAt.Before(of.CreatedAt) {
			continue
		}
		for _, g := range s.Stages {
			if is(g) && r.b.Store.Holds(g.Layers) {
				found, of = g, s
			}
		}
	}
	return found, of != nil
}

// reach takes note of what a step came to. The caller holds the store, so that the layers are
// there until the build's file names them.
func (r *running) reach(g template.Stage) error {
	r.b.mu.Lock()
	r.build.Stages = append(slices.Clone(r.build.Stages), g)
	copied := r.build.Build
	r.b.mu.Unlock()
	r.stage = g
	return r.b.Store.SaveBuild(copied)
}

// take does a step, which reaches its stage itself, or takes what an earlier build came to with it.
func (r *running) take(ctx context.Context, key, title string, do func(template.Stage) error) error {
	release, err := r.b.Store.Hold(ctx)
	if err != nil {
		return err
	}
	if g, ok := r.cached(key); ok {
		defer release()
		r.say("info", "CACHED "+title)
		return r.reach(g)
	}
	release() // a step may take an hour, in which others may remove templates
	r.say("info", title)
	begin := r.stage
	begin.Image, begin.Key, begin.Layers, begin.Env = "", key, slices.Clone(begin.Layers), maps.Clone(begin.Env)
	return do(begin)
}

// base finds the image, the template or the stage to begin with. A stage that has no steps is taken
// as it is.
func (r *running) base(ctx context.Context, from *From, steps bool) error {
	if from.Stage != "" {
		release, err := r.b.Store.Hold(ctx)
		if err != nil {
			return err
		}
		defer release()
		return r.reach(r.made[from.Stage])
	}
	if from.Template != "" {
		t, err := r.b.Store.Resolve(ctx, r.build.Team, from.Template)
		if err != nil {
			return &stepError{err}
		}
		return r.from(ctx, "FROM template "+from.Template, t, false)
	}
	if image, _, _ := strings.Cut(strings.TrimPrefix(from.Image, "docker.io/"), ":"); image == baseImage {
		t, err := r.b.Store.Ensure(ctx, template.Base, r.progress())
		if err != nil {
			return &stepError{err}
		}
		return r.from(ctx, "FROM "+from.Image, t, false)
	}
	if from.Login == nil {
		t, ok, err := r.b.Store.Image(ctx, r.build.Team, from.Image)
		if err != nil {
			return &stepError{err}
		}
		if ok {
			return r.from(ctx, "FROM "+from.Image, t, steps)
		}
	}
	return r.fetch(ctx, from, steps)
}

// fetch begins with an image of a registry. One that was fetched for an earlier build of the team is
// not asked for again, unless a log-in came with the order or nothing of earlier builds is wanted.
func (r *running) fetch(ctx context.Context, from *From, provided bool) error {
	release, err := r.b.Store.Hold(ctx)
	if err != nil {
		return err
	}
	defer func() { release() }()
	g, ok := template.Stage{}, false
	if from.Login == nil && !r.order.Force {
		g, ok = r.earlier(func(g template.Stage) bool { return g.Image == from.Image })
	}
	if !ok {
		r.say("info", "Looking for image "+from.Image)
		opts := template.ImportOptions{Setuid: true, Login: from.Login, Registries: r.b.Registries, Transport: r.b.outside}
		if opts.Login == nil && r.build.Team != "" {
			opts.Login = template.Anonymous // Docker's configuration is that of who runs the server
		}
		fetching, cancel := context.WithTimeoutCause(ctx, fetchTime, fmt.Errorf("image %s did not come within %s", from.Image, fetchTime))
		defer cancel()
		t, err := r.b.Store.Fetch(fetching, r.build.Team, from.Image, opts, r.progress())
		if err != nil && fetching.Err() != nil {
			err = context.Cause(fetching)
		}
		if err != nil {
			return &stepError{err}
		}
		g = stageOf(t)
		g.Image = from.Image
	}
	if err := r.reach(g); err != nil {
		return err
	}
	release()
	release = func() {} // what follows may take an hour
	return r.begun(ctx, "FROM "+from.Image, provided)
}

// progress tells of an import in the build's log, without the counts of bytes.
func (r *running) progress() template.Progress {
	return func(s template.Step) {
		if s.Total == 0 {
			r.say("info", s.Message)
		}
	}
}

// from begins with a template.
func (r *running) from(ctx context.Context, title string, t berm.Template, provided bool) error {
	t, err := r.b.Store.Whole(ctx, t, r.progress())
	if err != nil {
		return &stepError{err}
	}
	release, err := r.b.Store.Hold(ctx)
	if err != nil {
		return err
	}
	err = r.reach(stageOf(t))
	release()
	if err != nil {
		return err
	}
	return r.begun(ctx, title, provided)
}

func stageOf(t berm.Template) template.Stage {
	return template.Stage{Key: key(t.Layers, t.User, t.Workdir, t.Env), Layers: t.Layers, Size: t.Size, User: t.User, Workdir: t.Workdir, Env: t.Env, Setuid: t.Setuid}
}

// begun goes on from what steps begin with. provided gives an image what E2B's templates have: a user
// `user` with a home, who may use sudo where that is installed.
func (r *running) begun(ctx context.Context, title string, provided bool) error {
	r.say("info", fmt.Sprintf("[base] %s: %d layers, %d MiB", title, len(r.stage.Layers), r.stage.Size>>20))
	if !provided {
		return nil
	}
	return r.take(ctx, key(r.stage.Key, provision), "[base] adding the user and the directories that sandboxes have", func(g template.Stage) error {
		g.User = "root"
		return r.inside(ctx, g, func(s *sandbox) error {
			return s.run(ctx, command{user: "root", workdir: "/", env: g.Env, argv: []string{"/bin/sh", "-c", provision}, line: r.output("base")})
		}, func(g *template.Stage) { g.User, g.Workdir = "user", "/home/user" })
	})
}

// newUser has a function of the shell that makes a user $1 unless there is one, with Debian's and
// its like's tools or with busybox's.
const newUser = `set -e
new_user() {
	if id "$1" >/dev/null 2>&1; then return; fi
	shell=/bin/sh
	if [ -x /bin/bash ]; then shell=/bin/bash; fi
	if command -v useradd >/dev/null; then
		useradd --create-home --user-group --shell "$shell" "$1"
	else
		adduser -D -s "$shell" "$1"
	fi
}
`

// provision gives an image what E2B's templates have.
const provision = newUser + `
new_user user
mkdir -p /home/user /usr/local /code
chown "$(id -u user):$(id -g user)" /home/user
chmod 777 /usr/local /code
if [ -d /etc/sudoers.d ]; then
	echo 'user ALL=(ALL:ALL) NOPASSWD: ALL' >/etc/sudoers.d/user
	chmod 440 /etc/sudoers.d/user
fi
`

// instruction does one step of the order.
func (r *running) instruction(ctx context.Context, s *Step) error {
	r.fresh = r.fresh || s.Force
	number := fmt.Sprintf("[builder %s/%d] ", r.step, r.steps)
	return r.take(ctx, s.key(r.stage.Key, r.made[s.Berm.From].Key), number+s.String(), func(g template.Stage) error {
		ctx, cancel := context.WithTimeoutCause(ctx, stepTime, &stepError{fmt.Errorf("step %s took longer than %s", r.step, stepTime)})
		defer cancel()
		err := r.do(ctx, s, g)
		if err != nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return err
	})
}

func (r *running) do(ctx context.Context, s *Step, g template.Stage) error {
	line := r.output("builder " + r.step + "/" + strconv.Itoa(r.steps))
	// What the builder does itself does not depend on the template's variables.
	own := func(script string, args ...string) func(*sandbox) error {
		return func(sb *sandbox) error {
			return sb.run(ctx, command{user: "root", workdir: "/", argv: append([]string{"/bin/sh", "-c", script, "sh"}, args...), line: line})
		}
	}
	switch s.Type {
	case "ENV", "ARG":
		// What one pair sets, the pairs beside it do not see: as in a Dockerfile.
		before := map[string]string{"PATH": defaultPath}
		maps.Copy(before, g.Env)
		if g.Env == nil {
			g.Env = map[string]string{}
		}
		for i := 0; i < len(s.Args); i += 2 {
			g.Env[s.Args[i]] = expand(s.Args[i+1], before)
		}
		return r.reach(g)
	case "WORKDIR":
		dir := absolute(g.Workdir, expand(s.Args[0], g.Env))
		err := r.inside(ctx, g, own(makeDirs, dir, g.User), func(g *template.Stage) { g.Workdir = dir })
		return describe(err, "set the working directory '%s'", dir)
	case "USER":
		home := "/"
		output := line
		line = func(stderr bool, text string) {
			if dir, ok := strings.CutPrefix(text, "home:"); ok && path.IsAbs(dir) {
				home = path.Clean(dir)
				return
			}
			output(stderr, text)
		}
		err := r.inside(ctx, g, own(makeUser, s.Args[0], s.arg(1)), func(g *template.Stage) { g.User, g.Workdir = s.Args[0], home })
		return describe(err, "set the user '%s'", s.Args[0])
	case "RUN":
		shell := s.Berm.Shell
		if shell == nil {
			shell = []string{"/bin/bash", "-l", "-c"}
		}
		env := maps.Clone(s.Berm.Env)
		if env == nil {
			env = map[string]string{}
		}
		maps.Copy(env, g.Env)
		err := r.inside(ctx, g, func(sb *sandbox) error {
			return sb.run(ctx, command{user: cmp.Or(s.arg(1), g.User), workdir: g.Workdir, env: env, argv: append(slices.Clone(shell), s.Args[0]), line: line})
		}, nil)
		return describe(err, "run command '%s'", s.Args[0])
	}
	err := r.inside(ctx, g, func(sb *sandbox) error { return r.copy(ctx, s, g, sb, line) }, nil)
	return describe(err, "copy '%s' to '%s'", s.Args[0], s.Args[1])
}

// describe names what failed in what a command inside told.
func describe(err error, format string, args ...any) error {
	if err == nil || berm.KindOf(err) == berm.Internal && !errors.As(err, new(*insideError)) {
		return err
	}
	return &stepError{fmt.Errorf("failed to "+format+": %w", append(args, err)...)}
}

// insideError is what a command inside ended with, or the guest agent said.
type insideError struct{ err error }

func (e *insideError) Error() string { return e.err.Error() }
func (e *insideError) Unwrap() error { return e.err }

// defaultPath is what the guest agent gives commands for which nobody says another.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

func absolute(workdir, dir string) string {
	if path.IsAbs(dir) {
		return path.Clean(dir)
	}
	return path.Join("/", workdir, dir)
}

// newDirs has a function of the shell that makes a directory $1 with its parents; those that are
// new belong to $2.
const newDirs = `set -e
new_dirs() {
	dir=$1 new=
	while [ ! -d "$dir" ]; do
		new=$dir
		dir=$(dirname "$dir")
	done
	mkdir -p "$1"
	if [ -n "$new" ]; then chown -R "$2" "$new"; fi
}
`

const makeDirs = newDirs + `new_dirs "$1" "$2:$(id -gn "$2")"`

// makeUser makes a user $1 unless there is one; $2 "true" lets it use sudo.
const makeUser = newUser + `
new_user "$1"
if [ "$2" = true ] && [ -d /etc/sudoers.d ]; then
	echo "$1 ALL=(ALL:ALL) NOPASSWD: ALL" >"/etc/sudoers.d/$1"
	chmod 440 "/etc/sudoers.d/$1"
fi
eval "home=~$1"
echo "home:$home"
`

// output tells what a step writes in the build's log.
func (r *running) output(step string) func(bool, string) {
	return func(stderr bool, text string) {
		stream := "stdout"
		if stderr {
			stream = "stderr"
		}
		r.say("info", fmt.Sprintf("[%s] [%s]: %s", step, stream, text))
	}
}

// inside does something in a sandbox made of a stage, makes a layer of what it writes, and reaches
// that stage after then changed it (nil: it does not).
func (r *running) inside(ctx context.Context, g template.Stage, do func(*sandbox) error, then func(*template.Stage)) error {
	s, err := r.b.newSandbox(ctx, r.build, &g, r.actor)
	if err != nil {
		return err
	}
	defer func() {
		if killed := s.kill(); killed != nil {
			r.b.Log.Error("a sandbox of a build is left until its deadline", "sandbox", s.id, "build", r.build.ID, "error", killed)
		}
	}()
	if err := do(s); err != nil {
		return &insideError{err}
	}
	if err := failpoint.Hit("builder.done"); err != nil {
		return err
	}
	if err := s.still(ctx); err != nil {
		return err
	}
	held, err := r.b.Sessions.Policy(ctx, s.id)
	if err != nil {
		return err
	}
	written, err := r.b.Sessions.Written(ctx, s.id)
	if err != nil {
		return err
	}
	defer written.Close()
	release, err := r.b.Store.Hold(ctx)
	if err != nil {
		return err
	}
	defer release()
	layer, size, entries, err := r.b.Store.AddWritten(ctx, g.Layers, written, held.IDBase)
	if err != nil {
		return err
	}
	if entries > 0 {
		g.Layers, g.Size = append(g.Layers, layer), g.Size+size
	}
	if err := failpoint.Hit("builder.layer"); err != nil {
		return err
	}
	if then != nil {
		then(&g)
	}
	return r.reach(g)
}
