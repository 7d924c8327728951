package namespace

import (
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// TestRandomKills kills monitors and inits at random moments of creation and life:
// after Remove nothing is left.
func TestRandomKills(t *testing.T) {
	t.Run("monitors started when needed", func(t *testing.T) { randomKills(t, 0) })
	t.Run("monitors started in advance", func(t *testing.T) { randomKills(t, 2) })
}

func randomKills(t *testing.T, spares int) {
	rounds := 10
	if os.Getenv("BERM_TEST_ALL") != "" {
		rounds = 150
	}
	h, d := sparing(t, spares)
	lost := 0
	for range rounds {
		spec := h.Spec()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		done := make(chan berm.Sandbox)
		go func() {
			s, _ := d.Create(ctx, spec)
			done <- s
		}()
		time.Sleep(rand.N(60 * time.Millisecond))
		for _, pid := range victims(spec.ID) {
			if rand.N(2) == 0 {
				unix.Kill(pid, unix.SIGKILL)
			}
		}
		s := <-done
		if s != nil {
			if _, err := s.Kill(ctx, berm.ReasonKilled); err != nil {
				t.Error(err)
			}
		} else {
			lost++
		}
		if _, err := d.Remove(ctx, spec.ID); err != nil {
			t.Error(err)
		}
		cancel()
	}
	t.Logf("%d of %d creations were broken", lost, rounds)
	if ids, err := d.List(t.Context()); err != nil || len(ids) != 0 {
		t.Errorf("%v, %v", ids, err)
	}
}

// victims are the monitor of a sandbox and its init, as far as there are such yet.
func victims(id berm.SandboxID) []int {
	dirs, _ := filepath.Glob("/proc/[0-9]*/cwd")
	for _, dir := range dirs {
		if cwd, err := os.Readlink(dir); err == nil && filepath.Base(cwd) == string(id) {
			pid := strings.Split(dir, "/")[2]
			children, _ := os.ReadFile("/proc/" + pid + "/task/" + pid + "/children")
			var all []int
			for _, field := range append(strings.Fields(string(children)), pid) {
				if n, err := strconv.Atoi(field); err == nil {
					all = append(all, n)
				}
			}
			return all
		}
	}
	return nil
}
