//go:build !failpoint

// Package failpoint lets tests break a multi-step change between two steps.
//
// A build with the tag "failpoint" reads BERM_FAILPOINTS, a comma-separated list
// of NAME=ACTION, where ACTION is "crash" (the process kills itself with SIGKILL,
// so that no deferred undo runs), "error" (Hit returns an error) or "sleep:1s".
// Without the tag Hit compiles to nothing.
package failpoint

// Hit does what BERM_FAILPOINTS asks for at the point called name.
func Hit(name string) error { return nil }

// Environment is what a process that is started anew has to have for the same points.
func Environment() []string { return nil }
