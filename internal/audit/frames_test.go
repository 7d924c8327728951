package audit

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"time"
)

func TestFramesComeBack(t *testing.T) {
	var b bytes.Buffer
	w := NewFrameWriter(&b)
	big := bytes.Repeat([]byte("x"), 2*MaxFrame+5)
	for _, f := range []Frame{{0, Stdout, []byte("a\x00b")}, {time.Millisecond, Stderr, nil}, {time.Second, Stdout, big}} {
		if err := w.Write(f); err != nil {
			t.Fatal(err)
		}
	}
	r := NewFrameReader(&b)
	var got []byte
	var last Frame
	n := 0
	for {
		f, err := r.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		got, last = append(got, f.Data...), f
		n++
	}
	if want := append([]byte("a\x00b"), big...); n != 5 || !bytes.Equal(got, want) || last.At != time.Second || last.Stream != Stdout {
		t.Errorf("%d frames, %d bytes, the last at %v", n, len(got), last.At)
	}
}

func FuzzFrames(f *testing.F) {
	f.Add([]byte{0, 'o', 1, 'x', 200, 1, 'e', 0})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f, 'o', 1, 'x'})
	f.Fuzz(func(t *testing.T, data []byte) {
		r := NewFrameReader(bytes.NewReader(data))
		last := time.Duration(0)
		for {
			f, err := r.Read()
			if err != nil {
				return
			}
			if f.At < last || len(f.Data) > MaxFrame {
				t.Fatalf("frame at %v after %v with %d bytes", f.At, last, len(f.Data))
			}
			last = f.At
		}
	})
}
