package main

import (
	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/namespace"
)

// drivers makes the drivers of this machine.
func drivers(config namespace.Config) ([]berm.Driver, error) {
	driver, err := namespace.New(config)
	if err != nil {
		return nil, err
	}
	return []berm.Driver{driver}, nil
}
