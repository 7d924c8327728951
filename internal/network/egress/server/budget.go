package server

import "github.com/berm-sandbox/berm/internal/network/quota"

// flowMemory is what a flow costs this process at most, in bytes of memory.
const flowMemory = 128 << 10

// Flows is for how many flows at a time a process has descriptors and that memory. It is called
// before the process gives its rights away.
func Flows(memory int64) int { return quota.Room(memory, flowMemory, 1) }
