package main

import (
	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/gvisor"
	"github.com/berm-sandbox/berm/internal/driver/namespace"
)

// drivers makes the drivers of this machine.
func drivers(config namespace.Config, other gvisor.Config) ([]berm.Driver, error) {
	host, err := namespace.New(config)
	if err != nil {
		return nil, err
	}
	second, err := gvisor.New(host, other)
	if err != nil {
		_ = host.Close()
		return nil, err
	}
	return []berm.Driver{host, second}, nil
}
