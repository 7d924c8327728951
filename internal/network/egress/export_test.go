package egress

import (
	"time"

	"github.com/berm-sandbox/berm/internal/service"
)

// Patience is how long services may be silent in tests.
const Patience = service.MostMissed * 100 * time.Millisecond

func init() { service.Interval = Patience / service.MostMissed }
