package inspect

import (
	"crypto/tls"
	"sync"
)

// Sessions lets the flows of one sandbox resume TLS on both sides, each name what was agreed on
// with it: full handshakes are a quarter of what a flow with one request costs. No connection is shared.
// Whoever
// verifies by other roots needs other Sessions.
type Sessions struct {
	mu    sync.Mutex
	sites map[siteKey]*session
}

// session is what the flows to one name and port share.
type session struct {
	tls, tls2 *tls.Config // as of a site
	cache     tls.ClientSessionCache
}

// of returns what is shared for a site, made when it is not there.
func (s *Sessions) of(key siteKey, made func() *session) *session {
	if s == nil {
		return made()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if found := s.sites[key]; found != nil {
		return found
	}
	if s.sites == nil || len(s.sites) >= siteLimit { // its connections in use live on
		s.sites = map[siteKey]*session{}
	}
	s.sites[key] = made()
	return s.sites[key]
}
