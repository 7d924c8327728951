package egress

import "time"

// Patience is how long services may be silent in tests.
const Patience = mostMissed * 100 * time.Millisecond

func init() { interval = Patience / mostMissed }
