package featuretest

import (
	"testing"

	"github.com/berm-sandbox/berm/internal/kernel/feature"
)

func TestNeed(t *testing.T) {
	t.Run("found", func(t *testing.T) {
		Need(t, feature.Pidfd)
		if err := feature.Pidfd.Check(t.Context()); err != nil {
			t.Errorf("not skipped although it is missing: %v", err)
		}
	})
	missing := feature.Subvolumes("/proc") // never btrfs
	done := false
	t.Run("missing", func(t *testing.T) {
		defer func() { done = t.Skipped() }()
		Need(t, missing)
	})
	if !done {
		t.Error("not skipped without the feature")
	}
}
