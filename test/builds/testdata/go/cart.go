// Package cart adds prices.
package cart

import "github.com/google/go-cmp/cmp"

// Same says whether two carts hold the same.
func Same(a, b []int) bool { return cmp.Equal(a, b) }
