package server

import (
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestReleaseWhenIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var released atomic.Int32
		h := whenIdle(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/long" {
				time.Sleep(10 * idleAfter)
			}
		}), func() { released.Add(1) })
		call := func(path string) { h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", path, nil)) }
		expect := func(n int32, when string) {
			t.Helper()
			synctest.Wait()
			if got := released.Load(); got != n {
				t.Errorf("%d releases %s, want %d", got, when, n)
			}
		}
		call("/health")
		time.Sleep(10 * idleAfter)
		expect(0, "of an agent that did nothing")
		for range 10 {
			call("/")
			time.Sleep(idleAfter / 2)
		}
		expect(0, "while requests came")
		time.Sleep(10 * idleAfter)
		expect(1, "after the requests")
		call("/long")
		expect(2, "while a request lasted")
		time.Sleep(2 * idleAfter)
		expect(3, "in the end")
	})
}
