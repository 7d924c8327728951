// Package featuretest lets a test say which features of the host it needs.
package featuretest

import (
	"testing"

	"github.com/berm-sandbox/berm/internal/kernel/feature"
)

// Need skips the test when the host lacks a feature for a stated reason: its kernel is
// older than the feature, cannot do it, or does not let this user. It fails the test when
// the feature is missing and nobody knows why.
func Need(t testing.TB, tests ...*feature.Test) {
	t.Helper()
	for _, test := range tests {
		err := test.Check(t.Context())
		switch {
		case err == nil:
		case test.Excused(err):
			t.Skipf("needs %s (Linux %s): %v", test.Name, test.MinVersion, err)
		default:
			t.Fatalf("%s: %v", test.Name, err)
		}
	}
}
