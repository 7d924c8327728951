// Package feature finds out, by trying, what this host can do for isolation.
package feature

import (
	"context"
	"sync"

	"github.com/berm-sandbox/berm"
)

// A Test tries one thing on this host.
type Test struct {
	Name       string
	MinVersion string // first kernel that has it, such as "5.12"; "" when the kernel is not the question
	Fix        string // what to do when it is missing
	try        func(ctx context.Context) (detail string, err error)

	once   sync.Mutex
	result *berm.Feature
}

// Probe tries it and remembers the answer for the life of the process, unless ctx ended
// first. What is found may be less than what was hoped for: Detail tells.
func (t *Test) Probe(ctx context.Context) berm.Feature {
	t.once.Lock()
	defer t.once.Unlock()
	if t.result != nil {
		return *t.result
	}
	f := berm.Feature{Name: t.Name, MinVersion: t.MinVersion}
	detail, err := t.try(ctx)
	f.Found, f.Detail = err == nil, detail
	if err != nil {
		f.Detail = err.Error()
		f.Fix = t.Fix
		if hint := berm.HintOf(err); hint != "" {
			f.Fix = hint
		}
	}
	if ctx.Err() == nil {
		t.result = &f
	}
	return f
}
