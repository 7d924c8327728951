//go:build cgo

package arrival

// confine does nothing: Go cannot change all threads of a program with C in it, and the race
// detector makes calls of its own. Berm is built without.
func confine() error { return nil }
