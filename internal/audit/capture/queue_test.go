package capture

import (
	"bytes"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestQueueKeepsAll puts pieces of all sizes in, faster than they are worked off.
func TestQueueKeepsAll(t *testing.T) {
	var got, want []byte
	q := newQueue(func(p piece) {
		if len(got)%7 == 0 {
			time.Sleep(time.Millisecond)
		}
		got = append(got, p.data...)
	})
	buffer := make([]byte, 64<<10)
	for i := range 300 {
		p := buffer[:i*i%len(buffer)]
		for j := range p {
			p[j] = byte(i + j)
		}
		want = append(want, p...)
		q.put(piece{data: p})
	}
	if !q.close() || q.close() {
		t.Error("close does not tell whether the queue was open")
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%d bytes were put in, %d others came out", len(want), len(got))
	}
	q.put(piece{data: []byte("late")})
	if len(got) != len(want) {
		t.Error("a closed queue takes pieces")
	}
}

// TestQueueIsBounded has work that does not end: who puts in has to wait, however small the
// pieces are, and goes on afterwards.
func TestQueueIsBounded(t *testing.T) {
	for _, size := range []int{1, small, 32 << 10} {
		synctest.Test(t, func(t *testing.T) {
			stuck := make(chan struct{})
			q := newQueue(func(piece) { <-stuck })
			go q.put(piece{data: make([]byte, size)}) // is worked on
			synctest.Wait()
			var taken atomic.Int64
			go func() {
				for range 3 * maxQueued / size {
					q.put(piece{data: make([]byte, size)})
					taken.Add(int64(size))
				}
			}()
			synctest.Wait()
			if n := taken.Load(); n < maxQueued || n > maxQueued+int64(size) {
				t.Errorf("%d bytes wait in pieces of %d", n, size)
			}
			close(stuck)
			synctest.Wait()
			if n := taken.Load(); n != int64(3*maxQueued/size*size) {
				t.Errorf("%d bytes were taken", n)
			}
			q.close()
		})
	}
}
