package namespace

import (
	"context"

	"github.com/berm-sandbox/berm"
)

// Probe says what this host offers to the level.
func (d *Driver) Probe(ctx context.Context) berm.Probe {
	return berm.Probe{Level: berm.Namespace, Usable: true}
}
