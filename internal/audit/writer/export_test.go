package writer

import "time"

// SetPatience has records wait for so long. It returns what undoes it.
func SetPatience(d time.Duration) (undo func()) {
	before := patience
	patience = d
	return func() { patience = before }
}
