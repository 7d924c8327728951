package main

import (
	"strings"
	"testing"

	"github.com/berm-sandbox/berm/internal/client"
	"github.com/berm-sandbox/berm/internal/terminal"
)

// A flow that was cut says what passed until then; one that was denied at once has nothing to say.
func TestACutFlowShowsItsBytes(t *testing.T) {
	for _, test := range []struct {
		event client.FlowEvent
		want  bool
	}{
		{client.FlowEvent{Kind: "flow", Action: "deny", Name: "a.example", Port: 80}, false},
		{client.FlowEvent{Kind: "flow", Action: "deny", Name: "a.example", Address: "192.0.2.1", Port: 80, Up: 5, Down: 7}, true},
	} {
		var b strings.Builder
		if err := printFlow(&b, terminal.Style(false), test.event); err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(b.String(), "down=7 B") && strings.Contains(b.String(), "address=192.0.2.1"); got != test.want {
			t.Errorf("%q", b.String())
		}
	}
}
