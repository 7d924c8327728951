package control

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/berm-sandbox/berm"
)

// maxSamples is how many samples of one sandbox are kept, in memory: an hour's worth
// at one in 5 s. They end with the server.
const maxSamples = 720

// sampleTime bounds one measurement, so that a sandbox that hangs holds up nobody.
const sampleTime = 2 * time.Second

// Sample is what a sandbox used at one moment.
type Sample struct {
	berm.Usage
	CPUPercent float64 // of all the CPU that it may use, since the sample before
}

func (m *Manager) sampleLoop() {
	for tick := time.NewTicker(m.SampleEvery); ; {
		select {
		case <-m.ctx.Done():
			tick.Stop()
			return
		case <-tick.C:
		}
		m.mu.Lock()
		sessions := m.all()
		m.mu.Unlock()
		var group errgroup.Group
		group.SetLimit(8)
		for _, s := range sessions {
			if s.state() == berm.Running {
				group.Go(func() error { s.sample(); return nil })
			}
		}
		_ = group.Wait() // none fails
	}
}

// sample measures the sandbox. A sandbox that cannot be measured has no sample.
func (s *session) sample() {
	ctx, cancel := context.WithTimeout(s.m.ctx, sampleTime)
	defer cancel()
	usage, err := s.current().Usage(ctx)
	if err != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	since, spent := s.info.CreatedAt, usage.CPUTime
	if n := len(s.samples); n > 0 {
		last := s.samples[n-1]
		since, spent = last.At, usage.CPUTime-last.CPUTime
	}
	sample := Sample{Usage: usage}
	if wall := usage.At.Sub(since); wall > 0 && usage.CPUs > 0 && spent > 0 {
		sample.CPUPercent = 100 * spent.Seconds() / wall.Seconds() / usage.CPUs
	}
	if len(s.samples) == maxSamples {
		s.samples = append(s.samples[:0], s.samples[1:]...)
	}
	s.samples = append(s.samples, sample)
}

// Metrics returns the samples of a living sandbox between two moments, oldest
// first. Zero moments do not bound. One that runs and has no sample yet is measured now: to measure each
// at its start takes a twentieth of what it takes to make it, and holds up its first command.
func (m *Manager) Metrics(id berm.SandboxID, from, to time.Time) ([]Sample, error) {
	s, err := m.session(id)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	unmeasured := len(s.samples) == 0 && s.info.State == berm.Running
	s.mu.Unlock()
	if unmeasured {
		s.sample()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	chosen := []Sample{}
	for _, sample := range s.samples {
		if !sample.At.Before(from) && (to.IsZero() || !sample.At.After(to)) {
			chosen = append(chosen, sample)
		}
	}
	return chosen, nil
}

// LatestMetrics returns the newest sample of each sandbox named that has one.
func (m *Manager) LatestMetrics(ids []berm.SandboxID) map[berm.SandboxID]Sample {
	var mu sync.Mutex
	latest := map[berm.SandboxID]Sample{}
	var group errgroup.Group
	group.SetLimit(8)
	for _, id := range ids {
		group.Go(func() error {
			if samples, err := m.Metrics(id, time.Time{}, time.Time{}); err == nil && len(samples) > 0 {
				mu.Lock()
				defer mu.Unlock()
				latest[id] = samples[len(samples)-1]
			}
			return nil
		})
	}
	_ = group.Wait() // none fails
	return latest
}
