package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/net/publicsuffix"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/local/asking"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/service"
	"github.com/berm-sandbox/berm/internal/terminal"
)

func newNetAskCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ask",
		Short: "Answer what the policies of your berm runs ask",
		Long: `Answer what rules with action: ask leave to you, in the runs of berm on this machine that
are yours, for as long as this command runs. It needs a terminal of its own: the one of a run
is shared with the command inside, which could imitate a question. What nobody answers within
a minute is denied; so is what was asked before anybody came and is too old.

With --json questions are printed as one JSON object a line, and answers are read in the same
way: the "question" of the object with "allow" (true or false) and "for": once, sandbox, or
until with a time in "until":

  {"question": {…as it was printed…}, "allow": true, "for": "until", "until": "2027-01-01T00:00:00Z"}`,
		Example: `  berm run --policy policy.yaml -- claude    # in one terminal
  berm net ask                               # in another`,
		Args: cli.UsageArgs(cobra.NoArgs),
	}
	asJSON := cmd.Flags().Bool("json", false, "print questions and read answers as one JSON object a line")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, cancel := context.WithCancel(cmd.Context())
		defer cancel()
		v := &visitor{messages: make(chan visit), doors: map[string]*service.Wire{}, gone: make(chan string)}
		if *asJSON {
			return v.exchange(ctx, cmd.OutOrStdout(), os.Stdin)
		}
		if !terminal.Is(os.Stdin) || !terminal.Is(os.Stdout) {
			return berm.Errorf(berm.Invalid, "questions are answered on a terminal").WithHint("--json is for programs")
		}
		return quietOnInterrupt(cmd.Context(), v.talk(ctx, cmd.OutOrStdout(), os.Stdin))
	}
	return cmd
}

// visitor hears the questions of all runs.
type visitor struct {
	messages chan visit
	doors    map[string]*service.Wire // by the run's sandbox
	gone     chan string
}

// visit is a message and who sent it.
type visit struct {
	asking.Message
	door *service.Wire
}

// lookAgain is how often runs that began are looked for.
const lookAgain = 300 * time.Millisecond

// look connects to runs that are new.
func (v *visitor) look(ctx context.Context) error {
	found, err := asking.Visit(func(name string) bool { return v.doors[name] != nil })
	for name, door := range found {
		v.doors[name] = door
		go func() {
			for {
				var m asking.Message
				if door.Receive(&m) != nil {
					break
				}
				select {
				case v.messages <- visit{m, door}:
				case <-ctx.Done():
				}
			}
			_ = door.Close()
			select {
			case v.gone <- name:
			case <-ctx.Done():
			}
		}()
	}
	return err
}

// exchange prints questions and reads answers as lines of JSON.
func (v *visitor) exchange(ctx context.Context, out io.Writer, in io.Reader) error {
	type answer struct {
		reply egress.Reply
		err   error
	}
	answers := make(chan answer)
	go func() {
		lines := bufio.NewScanner(in)
		for lines.Scan() {
			var a answer
			if json.Unmarshal(lines.Bytes(), &a.reply) != nil {
				a.err = berm.Errorf(berm.Invalid, "a line is no answer").WithHint(`an answer is one line of JSON: %s`, answerForm)
			}
			select {
			case answers <- a:
			case <-ctx.Done():
				return
			}
		}
		close(answers)
	}()
	asked := map[egress.Question][]*service.Wire{}
	tick := time.NewTicker(lookAgain)
	defer tick.Stop()
	for {
		if err := v.look(ctx); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case name := <-v.gone:
			delete(v.doors, name)
		case m := <-v.messages:
			asked[m.Question] = append(asked[m.Question], m.door)
			if m.Closed != "" {
				delete(asked, m.Question)
			}
			if err := cli.PrintJSONLine(out, m.Message); err != nil {
				return err
			}
		case a, ok := <-answers:
			if !ok {
				return nil
			}
			if a.err != nil {
				return a.err
			}
			for _, door := range asked[a.reply.Question] {
				_ = door.Send(a.reply) // it may be gone
			}
		}
	}
}

// answerForm is what a program answers.
const answerForm = `{"question": {…as it was printed…}, "allow": true, "for": "once"}`

// choices are the answers on a terminal.
var choices = []struct {
	key, text string
	reply     egress.Reply
	hold      time.Duration
}{
	{"y", "yes, once", egress.Reply{Allow: true, Scope: egress.ScopeOnce}, 0},
	{"h", "for an hour", egress.Reply{Allow: true, Scope: egress.ScopeUntil}, time.Hour},
	{"a", "always in this sandbox", egress.Reply{Allow: true, Scope: egress.ScopeSandbox}, 0},
	{"n", "no, once", egress.Reply{Scope: egress.ScopeOnce}, 0},
	{"d", "never in this sandbox", egress.Reply{Scope: egress.ScopeSandbox}, 0},
}

// readTime is how long a question is there before it can be answered: a letter that is on its way to
// the terminal, or to the reader of it, while the question appears was meant for something else.
const readTime = 300 * time.Millisecond

// talk asks a person one question after the other.
func (v *visitor) talk(ctx context.Context, out io.Writer, in *os.File) error {
	style := terminal.StyleFor(out)
	_, _ = fmt.Fprintln(out, style.Dim("Waiting for questions. Ctrl-C ends it; what nobody answers is denied."))
	type typed struct {
		text string
		at   time.Time
	}
	lines := make(chan typed)
	go func() {
		for scanner := bufio.NewScanner(in); scanner.Scan(); {
			select {
			case lines <- typed{scanner.Text(), time.Now()}:
			case <-ctx.Done():
				return
			}
		}
		close(lines)
	}()
	var waiting []visit // the first is the one that is shown
	tick := time.NewTicker(lookAgain)
	defer tick.Stop()
	var shown time.Time       // when the prompt was
	var read <-chan time.Time // tells that the question has been there for long enough
	var asked egress.Question // the one that is shown, whose prompt the cursor is at while prompt is set
	var of *service.Wire
	prompt, told := false, 0
	// next shows the first that waits, unless it is there.
	next := func() {
		if len(waiting) == 0 {
			of, prompt, read = nil, false, nil
			return
		}
		if of != waiting[0].door || asked != waiting[0].Question {
			asked, of, prompt = waiting[0].Question, waiting[0].door, false
			printQuestion(out, style, waiting[0].Message)
			read = time.After(readTime)
		}
	}
	for {
		if err := v.look(ctx); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-read:
			// What was typed before is no answer to it.
			_ = unix.IoctlSetInt(int(in.Fd()), unix.TCFLSH, unix.TCIFLUSH)
			read, shown, prompt, told = nil, time.Now(), true, left(waiting[0].Message)
			_, _ = fmt.Fprintf(out, "%2d s, then no: ", told)
		case <-tick.C:
			if prompt && left(waiting[0].Message) != told {
				told = left(waiting[0].Message)
				_, _ = fmt.Fprintf(out, "\x1b7\r%2d\x1b8", told) // what is being typed stays
			}
		case name := <-v.gone:
			door := v.doors[name]
			delete(v.doors, name)
			waiting = without(out, waiting, func(w visit) bool { return w.door == door }, "the run has ended")
			next()
		case m := <-v.messages:
			if m.Closed == "" {
				waiting = append(waiting, m)
				next()
				continue
			}
			text := "answered elsewhere"
			if m.Closed == asking.ClosedLate {
				text = "nobody answered in time: denied"
			}
			waiting = without(out, waiting, func(w visit) bool { return w.door == m.door && w.Question == m.Question }, text)
			next()
		case line, ok := <-lines:
			if !ok {
				return nil
			}
			if len(waiting) == 0 || read != nil || line.at.Before(shown) {
				continue
			}
			answered := false
			for _, c := range choices {
				if strings.TrimSpace(line.text) == c.key {
					reply := c.reply
					if reply.Question = waiting[0].Question; c.hold > 0 {
						reply.Until = time.Now().Add(c.hold).UTC()
					}
					_ = waiting[0].door.Send(reply) // else the run has ended, as is told
					_, _ = fmt.Fprintln(out, style.Dim(c.text))
					waiting, answered = waiting[1:], true
					break
				}
			}
			if !answered {
				prompt = false
				_, _ = fmt.Fprint(out, "One of the letters: ")
				continue
			}
			next()
		}
	}
}

// left is how many seconds there are to answer.
func left(m asking.Message) int { return max(0, int(time.Until(m.Deadline).Seconds())) }

// without takes questions away that need no answer any more.
func without(out io.Writer, waiting []visit, gone func(visit) bool, why string) []visit {
	var left []visit
	for _, w := range waiting {
		if !gone(w) {
			left = append(left, w)
		}
	}
	if len(waiting) > 0 && gone(waiting[0]) {
		_, _ = fmt.Fprintf(out, "\n%s\n", why)
	}
	return left
}

// printQuestion asks. The sandbox chose the name, the port and when.
func printQuestion(out io.Writer, style terminal.Style, m asking.Message) {
	q := m.Question
	of := ""
	if domain, err := publicsuffix.EffectiveTLDPlusOne(q.Host); err == nil && domain != q.Host {
		of = " (of " + domain + ")"
	}
	protocol := ""
	if q.Protocol == "udp" {
		protocol = " over UDP"
	}
	_, _ = fmt.Fprintf(out, "\n%s\n  in %s wants to reach\n  %s, port %d%s%s\n  %s\n",
		style.Bold(terminal.Clip(terminal.Escape(strings.Join(m.Run.Command, " ")), 200)), terminal.Escape(m.Run.Project),
		style.Bold(terminal.Escape(q.Host)), q.Port, protocol, terminal.Escape(of), style.Dim(terminal.Escape("rule "+q.Rule+noteOf(m.Reason))))
	for _, c := range choices {
		_, _ = fmt.Fprintf(out, "  %s  %s\n", style.Bold(c.key), c.text)
	}
}

func noteOf(reason string) string {
	if reason == "" {
		return ""
	}
	return ": " + reason
}
