package stack

import (
	"bytes"
	"testing"
)

// Packets of every size come out as they were read, take at most twice their length beyond the first piece,
// and leave what they did not need for the next.
func TestPieces(t *testing.T) {
	content := make([]byte, 65535)
	for i := range content {
		content[i] = byte(i * 31 >> 3)
	}
	var p pieces
	defer p.release()
	for _, n := range []int{1, 40, 1500, 2047, 2048, 2049, 3000, 9000, 34815, 34816, 34817, 40000, 65534, 65535} {
		p.fill(0)
		left := content[:n]
		for _, piece := range p.vec[1:] {
			left = left[copy(piece, left):]
		}
		if len(left) > 0 {
			t.Fatalf("a packet of %d bytes has no room", n)
		}
		packet := p.take(n)
		room := 0
		views := packet.AsViewList()
		for v := views.Front(); v != nil; v = v.Next() {
			room += v.Capacity()
		}
		if got := packet.Flatten(); !bytes.Equal(got, content[:n]) {
			t.Errorf("a packet of %d bytes has %d, or others", n, len(got))
		}
		if most := 2<<10 + 2*n; room > most {
			t.Errorf("a packet of %d bytes takes %d", n, room)
		}
		packet.Release()
	}
}
