package server

import (
	"net/http"
	"runtime/debug"
	"time"
)

// idleAfter is how long no request may begin or end until memory is given back. A
// sandbox waits for its user most of the time, and many wait at once.
const idleAfter = 3 * time.Second

// releaseWhenIdle gives memory back to the kernel in pauses between requests. One
// that lasts does not prevent it: it may be a command that waits, too.
func releaseWhenIdle(next http.Handler) http.Handler { return whenIdle(next, debug.FreeOSMemory) }

func whenIdle(next http.Handler, release func()) http.Handler {
	timer := time.AfterFunc(idleAfter, release)
	timer.Stop()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// An agent that was only asked for its health has nothing to give back, and
		// the first collection takes 300 KB for its workers.
		if r.URL.Path != "/health" {
			timer.Reset(idleAfter)
			defer timer.Reset(idleAfter)
		}
		next.ServeHTTP(w, r)
	})
}
