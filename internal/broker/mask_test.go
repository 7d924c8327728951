package broker

import (
	"context"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/berm-sandbox/berm/internal/credential"
	"github.com/berm-sandbox/berm/internal/network/inspect"
)

type source string

func (s source) Value(context.Context, string) ([]byte, error) { return []byte(s), nil }

// What comes through a filter comes at the same time whether or not it is the start of a secret,
// and soon.
func TestMaskTime(t *testing.T) {
	const secret = "tok_live-0123456789abcdefghij"
	type arrival struct {
		at    time.Duration
		bytes int
	}
	// seen is what a reader sees of pieces that come at intervals.
	seen := func(every time.Duration, pieces ...string) (all []arrival, text string) {
		synctest.Test(t, func(t *testing.T) {
			b := &credential.Broker{Sources: credential.Sources{"secret": source(secret)}}
			s, err := b.Open(t.Context(), "i0", 1, []credential.Binding{{ID: "api", Kind: credential.Bearer, Secret: "secret:x", Hosts: []string{"api.test"}}})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			in, feed := io.Pipe()
			start := time.Now()
			go func() {
				for _, piece := range pieces {
					io.WriteString(feed, piece)
					time.Sleep(every)
				}
				time.Sleep(time.Second)
				feed.Close()
			}()
			out := inspect.Filtered(in, s.Filter())
			defer out.Close()
			p := make([]byte, 4096)
			for {
				n, err := out.Read(p)
				text += string(p[:n])
				if all = append(all, arrival{time.Since(start), n}); err != nil {
					return
				}
			}
		})
		return all, text
	}
	for i := 1; i < len(secret)/2; i++ {
		for _, every := range []time.Duration{time.Millisecond, 20 * time.Millisecond, 100 * time.Millisecond} {
			right, _ := seen(every, "data: ", secret[:i-1], secret[i-1:i])
			wrong, _ := seen(every, "data: ", secret[:i-1], "!")
			if !slices.Equal(right, wrong) {
				t.Fatalf("the first %d characters come at %v, wrong ones at %v", i, right, wrong)
			}
		}
	}
	const most = 60 * time.Millisecond
	if got, _ := seen(100*time.Millisecond, "one", "two", "three"); len(got) != 4 || got[0].at > most || got[1].at > 100*time.Millisecond+most || got[2].at > 200*time.Millisecond+most {
		t.Errorf("pieces come at %v", got)
	}
	// More that comes does not make what came before later.
	got, _ := seen(10*time.Millisecond, slices.Repeat([]string{"x"}, 30)...)
	for n, i := 0, 0; i < len(got); i++ {
		if n < 30 && got[i].at > time.Duration(n*10)*time.Millisecond+most {
			t.Errorf("byte %d comes at %v", n, got[i].at)
		}
		n += got[i].bytes
	}
	// Split within the time it is masked, wherever; split later it shows less than half of it.
	for i := 1; i < len(secret); i++ {
		if _, text := seen(29*time.Millisecond, "a", secret[:i], secret[i:], "z"); text != "a"+strings.Repeat("*", len(secret))+"z" {
			t.Errorf("split after %d bytes: %q", i, text)
		}
		_, text := seen(time.Second, secret[:i], secret[i:])
		if shown := len(text) - strings.Count(text, "*"); shown != 0 && (shown != i || i > len(secret)/2) {
			t.Errorf("split after %d bytes, slowly: %q", i, text)
		}
	}
}
