package view

import (
	"context"
	"time"

	"github.com/gdamore/tcell/v3"
	"github.com/gdamore/tcell/v3/color"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit/replay"
	"github.com/berm-sandbox/berm/internal/audit/replay/screen"
)

// frameTime is how often the view moves.
const frameTime = 50 * time.Millisecond

// Run shows a timeline on the user's terminal until the user leaves. Kind Unsupported when the
// terminal cannot be used.
func Run(ctx context.Context, t *replay.Timeline, o Options) error {
	s, err := tcell.NewScreen()
	if err == nil {
		err = s.Init()
	}
	if err != nil {
		return berm.Errorf(berm.Unsupported, "this terminal cannot show a replay: %w", err).
			WithHint("`berm replay SANDBOX | less` prints an account of it")
	}
	defer s.Fini()
	m := newModel(t, o)
	tick := time.NewTicker(frameTime)
	defer tick.Stop()
	last := time.Now()
	for {
		s.Clear()
		w, h := s.Size()
		m.draw(display{s}, w, h)
		s.Show()
		for drawn := true; drawn; {
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
				now := time.Now()
				drawn = !m.playing
				m.tick(min(now.Sub(last), time.Second)) // not what a stopped terminal slept
				last = now
			case e, ok := <-s.EventQ():
				if !ok {
					return nil
				}
				drawn = false
				switch e := e.(type) {
				case *tcell.EventKey:
					if !m.key(keyName(e)) {
						return nil
					}
				case *tcell.EventResize:
					s.Sync()
				}
			}
		}
	}
}

var keyNames = map[tcell.Key]string{
	tcell.KeyRight: "Right", tcell.KeyLeft: "Left", tcell.KeyUp: "Up", tcell.KeyDown: "Down", tcell.KeyHome: "Home",
	tcell.KeyEnd: "End", tcell.KeyPgUp: "PgUp", tcell.KeyPgDn: "PgDn", tcell.KeyTab: "Tab", tcell.KeyBacktab: "Backtab",
	tcell.KeyEnter: "Enter", tcell.KeyEsc: "Esc", tcell.KeyCtrlC: "Ctrl-C",
}

func keyName(e *tcell.EventKey) string {
	if name := keyNames[e.Key()]; name != "" {
		if name == "Tab" && e.Modifiers()&tcell.ModShift != 0 {
			return "Backtab"
		}
		return name
	}
	if e.Key() == tcell.KeyRune {
		return e.Str()
	}
	return ""
}

// display draws on the user's terminal.
type display struct{ tcell.Screen }

func (d display) put(x, y int, text string, style screen.Style) {
	_, _ = d.Put(x, y, text, toStyle(style))
}

func toStyle(s screen.Style) tcell.Style {
	style := tcell.StyleDefault.Foreground(toColor(s.Fg)).Background(toColor(s.Bg))
	style = style.Bold(s.Attr&screen.Bold != 0).Dim(s.Attr&screen.Dim != 0).Italic(s.Attr&screen.Italic != 0).
		Reverse(s.Attr&screen.Reverse != 0).StrikeThrough(s.Attr&screen.Strike != 0)
	if s.Attr&screen.Underline != 0 {
		style = style.Underline(true)
	}
	return style
}

func toColor(c screen.Color) color.Color {
	if n, ok := c.Palette(); ok {
		return color.PaletteColor(n)
	}
	if rgb, ok := c.RGB(); ok {
		return color.NewHexColor(int32(rgb))
	}
	return color.Default
}
