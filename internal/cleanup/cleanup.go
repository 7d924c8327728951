// Package cleanup undoes the steps of a set-up that failed half-way.
//
//	cu := cleanup.Make(undoFirst)
//	defer cu.Clean()
//	...
//	cu.Add(undoSecond)
//	...
//	cu.Release() // all steps done: keep them
package cleanup

// Cleanup holds undo functions; Clean runs them last first.
type Cleanup struct{ undo []func() }

// Make returns a Cleanup that holds undo.
func Make(undo ...func()) Cleanup { return Cleanup{undo} }

// Add appends an undo function, to be run before those added earlier.
func (c *Cleanup) Add(undo func()) { c.undo = append(c.undo, undo) }

// Clean runs the undo functions, last first, and forgets them.
func (c *Cleanup) Clean() {
	for i := len(c.undo) - 1; i >= 0; i-- {
		c.undo[i]()
	}
	c.undo = nil
}

// Release forgets the undo functions and returns one that runs them, for a caller
// that takes over the duty.
func (c *Cleanup) Release() func() {
	kept := Cleanup{c.undo}
	c.undo = nil
	return kept.Clean
}
