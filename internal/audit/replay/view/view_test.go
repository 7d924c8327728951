package view

import (
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/audittest"
	"github.com/berm-sandbox/berm/internal/audit/replay"
	"github.com/berm-sandbox/berm/internal/audit/replay/screen"
	"github.com/berm-sandbox/berm/internal/audit/trail"
	"github.com/berm-sandbox/berm/internal/terminal"
)

const (
	id   = berm.SandboxID("i0aaaaaaaaaaaaaaaaaaa")
	evil = berm.SandboxID("i0ccccccccccccccccccc")
)

// grid is a canvas that fails the test when something is drawn that a terminal would act on,
// or that is out of place.
type grid struct {
	t     *testing.T
	cells [][]string
}

func (g *grid) put(x, y int, text string, _ screen.Style) {
	g.t.Helper()
	w := terminal.Width(text)
	if y < 0 || y >= len(g.cells) || x < 0 || x+w > len(g.cells[y]) || w < 1 || w > 2 {
		g.t.Fatalf("%q is drawn at %d, %d", text, x, y)
	}
	for _, r := range text {
		if !strconv.IsPrint(r) {
			g.t.Fatalf("%q is drawn", r)
		}
	}
	g.cells[y][x] = text
	if w == 2 {
		g.cells[y][x+1] = ""
	}
}

func shown(t *testing.T, m *model, w, h int) string {
	t.Helper()
	g := &grid{t: t, cells: make([][]string, h)}
	for y := range g.cells {
		g.cells[y] = slices.Repeat([]string{" "}, w)
	}
	m.draw(g, w, h)
	var out strings.Builder
	for _, row := range g.cells {
		out.WriteString(strings.Join(row, "") + "\n")
	}
	return out.String()
}

func view(t *testing.T, id berm.SandboxID, o Options) *model {
	t.Helper()
	l := audittest.New(t, t.TempDir())
	l.Session("i0aaaaaaaaaaaaaaaaaaa")
	l.Hostile(evil)
	tl, err := replay.Load(trail.Dir(l.Dir), id)
	if err != nil {
		t.Fatal(err)
	}
	return newModel(tl, o)
}

func press(m *model, keys ...string) {
	for _, k := range keys {
		m.key(k)
	}
}

func TestPanes(t *testing.T) {
	m := view(t, id, Options{})
	has := func(name string, wants ...string) {
		t.Helper()
		got := shown(t, m, 140, 42)
		for _, want := range wants {
			if !strings.Contains(got, want) {
				t.Errorf("%s: %q is not shown:\n%s", name, want, got)
			}
		}
	}
	has("start", "no command yet", "playing  00:00.000", "created from base")
	m.seek(m.t.Commands[2].Start.Add(700 * time.Millisecond))
	has("while npm runs", "#3 npm install", "⠙ fetching left-pad", "running for 00:00.700", "30 npm install", "modify /workspace/main.go",
		"deny tcp telemetry.evil.test:443", "deny leak registry.test:443")
	press(m, "End", "3", "Down", "Down", "Down", "Enter")
	has("difference", `-    fmt.Println("hello")`, `+    fmt.Println("hello, world")`)
	press(m, "Esc", "4", "Home", "d")
	if at := m.t.Clock(m.now); at != "00:04.246" {
		t.Errorf("the first denial is at %s", at)
	}
	press(m, "Enter")
	has("the network alone", "no rule allows telemetry.evil.test: allow: [telemetry.evil.test]")
	press(m, "Esc", "c", "c")
	has("another command", "#2 go build", "undefined: frobnicate", "exit 1")
	press(m, "C", "C")
	has("that which the clock chooses", "#3 npm install")
	press(m, "2", "Home", "d") // processes tell of none
	if at := m.t.Clock(m.now); at != "00:03.184" || m.pane() != terminalPane {
		t.Errorf("from the processes: %s in %s", at, titles[m.pane()])
	}
	press(m, "3", "d")
	if at := m.t.Clock(m.now); at != "00:04.246" || m.pane() != networkPane {
		t.Errorf("from the files: %s in %s", at, titles[m.pane()])
	}
	press(m, "?")
	has("keys", "next one that was denied")
	if m.key("q") {
		t.Error("q does not quit")
	}
}

// What the last line says fits, whatever the terminal's width and the pane, and the list of keys
// fits on the smallest usual terminal.
func TestHintsFit(t *testing.T) {
	for _, line := range helpText {
		if w := terminal.Width(line); w > 80-4 {
			t.Errorf("%q has %d columns", line, w)
		}
	}
	m := view(t, id, Options{})
	press(m, "End")
	for _, w := range []int{20, 40, 80, 89, 90, 120, 200} {
		for _, keys := range [][]string{{"1"}, {"3"}, {"3", "Enter"}, {"Esc"}, {"4", "Enter"}, {"Esc"}} {
			press(m, keys...)
			lines := strings.Split(strings.TrimRight(shown(t, m, w, 24), "\n"), "\n")
			if last := strings.TrimRight(lines[len(lines)-1], " "); !strings.HasSuffix(last, "? keys  q quit") {
				t.Errorf("%d columns, after %v: %q", w, keys, last)
			}
		}
	}
}

// The clock runs at the speed that was chosen, skips what is idle, and stops at the end.
func TestClock(t *testing.T) {
	m := view(t, id, Options{Speed: 2})
	m.skip = false
	m.tick(time.Second)
	if d := m.now.Sub(m.t.Start); d != 2*time.Second {
		t.Errorf("after a second it is at %s", d)
	}
	m.skip = true
	var hops int
	for ; m.playing && hops < 1000; hops++ {
		m.tick(50 * time.Millisecond)
	}
	if m.now != m.t.End || hops >= 1000 {
		t.Errorf("it is at %s after %d ticks", m.t.Clock(m.now), hops)
	}
	press(m, " ")
	if !m.playing || m.now != m.t.Start {
		t.Error("it does not begin anew")
	}
	press(m, " ", "Left", "-", "-", "-", "-", "-", "-")
	if m.now != m.t.Start || m.speed != speeds[0] || m.playing {
		t.Errorf("at %s with %g", m.t.Clock(m.now), m.speed)
	}
}

func TestOnly(t *testing.T) {
	m := view(t, id, Options{Lanes: []string{replay.Network, replay.Exec}, From: audittest.Begin.Add(6 * time.Second)})
	got := shown(t, m, 140, 42)
	for _, no := range []string{"Processes", "Files", "Credentials", "pid 10 ended", "POST /sandboxes"} {
		if strings.Contains(got, no) {
			t.Errorf("%s is shown", no)
		}
	}
	if !strings.Contains(got, "Terminal") || !strings.Contains(got, "Network") || !strings.Contains(got, "00:05.997") {
		t.Error(got)
	}
}

// Whatever is recorded and whatever keys are pressed, nothing is drawn that acts, or elsewhere.
func TestHostileView(t *testing.T) {
	keys := []string{" ", "Right", "Left", ">", "<", "Home", "End", "n", "N", "d", "D", "+", "-", "i", "c", "C", "Tab", "Backtab", "1", "2", "3", "4", "5", "6",
		"Enter", "Up", "Down", "PgUp", "PgDn", "?", "", "x", "Esc"}
	for _, id := range []berm.SandboxID{id, evil} {
		m := view(t, id, Options{})
		random := rand.New(rand.NewPCG(1, 2))
		for range 250 {
			m.key(keys[random.IntN(len(keys))])
			m.tick(time.Duration(random.IntN(200)) * time.Millisecond)
			_ = shown(t, m, random.IntN(200), random.IntN(60))
		}
	}
}

// Of output that there was none of nothing is said.
func TestNoOutput(t *testing.T) {
	l := audittest.New(t, t.TempDir())
	l.Add(audit.Record{Sandbox: id, Type: audit.SandboxCreate, Src: "control", Data: map[string]any{"template": "base"}})
	l.Run(id, audit.Actor{}, audittest.Command{PID: 7, Argv: []string{"true"}})
	kept := audit.Command{Argv: []string{"false"}, Output: 5} // of which none is there
	l.Add(audit.Record{Sandbox: id, Type: audit.ExecStart, Src: "router", Data: kept, TraceID: "other"})
	l.Add(audit.Record{Sandbox: id, Type: audit.ExecExit, Src: "router", Data: kept, TraceID: "other"})
	tl, err := replay.Load(trail.Dir(l.Dir), id)
	if err != nil {
		t.Fatal(err)
	}
	m := newModel(tl, Options{})
	m.now = tl.End
	for i, lost := range []bool{false, true} {
		m.chosen = tl.Commands[i]
		if got := shown(t, m, 140, 40); strings.Contains(got, "no output was kept") != lost {
			t.Errorf("command %d:\n%s", i+1, got)
		}
	}
}
