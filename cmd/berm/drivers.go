package main

import (
	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/namespace"
)

// drivers makes the drivers of this machine, for a server with the data directory and
// the file of claimed ids given.
func drivers(data, claims string) ([]berm.Driver, error) {
	driver, err := namespace.New(namespace.Config{Data: data, Claims: claims})
	if err != nil {
		return nil, err
	}
	return []berm.Driver{driver}, nil
}
