package main

import (
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/local/asking"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

// Questions are asked one after the other, and only a letter that was typed after a question
// was there answers it.
func TestNetAsk(t *testing.T) {
	s := newSetup(t)
	state := t.TempDir() + strings.Repeat("/a-long-path", 10)
	t.Setenv("XDG_STATE_HOME", state)
	s.env = append(s.env, "XDG_STATE_HOME="+state)
	replies := make(chan egress.Reply, 10)
	door, err := asking.Open(asking.Run{Sandbox: berm.NewSandboxID(), Command: []string{"npm", hostile}, Project: "/home/" + hostile}, func(r egress.Reply) error {
		replies <- r
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	sc := s.screen("net", "ask")
	quiet := func() {
		t.Helper()
		select {
		case r := <-replies:
			t.Fatalf("an answer that nobody gave: %+v", r)
		case <-time.After(100 * time.Millisecond):
		}
	}
	sc.waitForNth("Waiting", 1)
	sc.key("y\ny")
	question := egress.Event{Kind: egress.Asks, Name: "api.evil-example.co.uk", Port: 443, Protocol: "tcp", Rule: "rest", Detail: "all else", Duration: 60}
	door.Ask(question)
	sc.waitForNth("then no:", 1) // each is told by a goroutine of its own
	second := question
	second.Name = "second.example.com"
	door.Ask(second)
	door.Ask(question) // the same
	sc.key("\n")
	sc.waitForNth("One of the letters", 1)
	quiet()
	sc.key("h\na\n")
	r := <-replies
	if r.Question != question.Question() || !r.Allow || r.Scope != egress.ScopeUntil || time.Until(r.Until) < 59*time.Minute || time.Until(r.Until) > time.Hour {
		t.Errorf("%+v", r)
	}
	sc.waitForNth("then no:", 2)
	quiet()
	sc.key("d\n")
	if r := <-replies; r.Question != second.Question() || r.Allow || r.Scope != egress.ScopeSandbox {
		t.Errorf("%+v", r)
	}
	third := question
	third.Name, third.Duration = "third.example.com", 1
	door.Ask(third)
	sc.waitForNth("then no:", 3)
	sc.waitForNth("nobody answered in time", 1)
	time.Sleep(50 * time.Millisecond)
	if n := strings.Count(sc.String(), "third.example.com"); n != 1 {
		t.Errorf("the question that is over was asked %d times", n)
	}
	sc.key("y\n")
	quiet()
	third.Name, third.Duration = "fourth.example.com", 60
	door.Ask(third)
	sc.waitForNth("then no:", 4)
	door.Close()
	sc.waitForNth("the run has ended", 1)
	sc.key("\x03")
	if code := sc.exitCode(); code != 130 && code != 0 {
		t.Errorf("code %d", code)
	}
	text := strings.NewReplacer("\r\n", "\n", "^C", "").Replace(sc.String())
	inert(t, text)
	for _, want := range []string{"api.evil-example.co.uk", "(of evil-example.co.uk)", "port 443", "rule rest: all else", "npm \\x1b]52"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in %q", want, text)
		}
	}
}
