package feature

import (
	"time"

	"github.com/berm-sandbox/berm"
)

// runGuest has no guest for this architecture yet, and an untimed KVM is not believed.
func runGuest() (time.Duration, error) {
	return 0, berm.Errorf(berm.Unsupported, "the speed of KVM cannot be measured on arm64")
}
