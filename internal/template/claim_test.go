package template

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/kernel/claim"
)

// Two builds on one machine do not run packages' scripts under the same ids at once.
func TestBuildsTakeTurns(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ids")
	var claims [2]*claim.File
	for i := range claims {
		var err error
		if claims[i], err = claim.Open(path); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = claims[i].Close() })
	}
	if err := claimBuilder(t.Context(), claims[0], nil); err != nil {
		t.Fatal(err)
	}
	impatient, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := claimBuilder(impatient, claims[1], nil); err == nil || berm.KindOf(err) != berm.Unavailable {
		t.Errorf("the second build began: %v", err)
	}
	said := 0
	turn := make(chan error, 1)
	go func() { turn <- claimBuilder(t.Context(), claims[1], func(Step) { said++ }) }()
	time.Sleep(250 * time.Millisecond)
	_ = claims[0].Close() // as the end of the first build does
	select {
	case err := <-turn:
		if err != nil || said != 1 {
			t.Errorf("%v, said %d times", err, said)
		}
	case <-time.After(5 * time.Second):
		t.Error("the second build never begins")
	}
}
