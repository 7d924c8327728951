package main

import (
	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/namespace"
)

// drivers makes the drivers of this machine, for a server with the data directory
// given.
func drivers(data string) ([]berm.Driver, error) {
	driver, err := namespace.New(namespace.Config{Data: data})
	if err != nil {
		return nil, err
	}
	return []berm.Driver{driver}, nil
}
