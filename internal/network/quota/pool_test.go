package quota

import (
	"math/rand/v2"
	"testing"
)

// However many take what they get, who comes later gets its share.
func TestPool(t *testing.T) {
	for _, hogs := range []int{1, 3, 10} {
		p := NewPool[int](1000, 0)
		for i := range hogs + 1 {
			p.Join(i)
		}
		late, taken := hogs, map[int]int{}
		for range 2000 {
			if x := rand.IntN(hogs); p.Take(x) {
				taken[x]++
			}
		}
		got, share := 0, 1000/2/(hogs+1)
		for p.Take(late) {
			got++
		}
		if got < share {
			t.Errorf("beside %d: %d, want %d", hogs, got, share)
		}
		for x, n := range taken {
			for range n {
				p.Give(x)
			}
			p.Leave(x)
		}
		for range got {
			p.Give(late)
		}
		if p.Used() != 0 || len(p.each) != 1 || p.each[late] != 0 {
			t.Errorf("%d are left, %v", p.used, p.each)
		}
	}
}

// One alone has no more than is for one.
func TestPoolOfOne(t *testing.T) {
	p := NewPool[int](1000, 7)
	p.Join(0)
	n := 0
	for p.Take(0) {
		n++
	}
	if n != 7 {
		t.Errorf("it gets %d, want 7", n)
	}
	p.Leave(0)
	if p.Take(0) {
		t.Error("one that has left gets one")
	}
	for range n {
		p.Give(0)
	}
	if p.Used() != 0 || len(p.each) != 0 {
		t.Errorf("%d are left, %v", p.used, p.each)
	}
}
