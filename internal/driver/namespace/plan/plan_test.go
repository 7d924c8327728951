package plan

import (
	"reflect"
	"testing"
)

func TestEncodeDecode(t *testing.T) {
	steps := []Step{
		{Op: Stage, Data: "size=1m"},
		{Op: Mount, Target: "root", Source: "overlay", Data: "lowerdir=1:0", Flags: 1<<63 | 2},
		{Op: Move, FD: 200, Target: "0"},
		{Op: Seccomp, Data: string([]byte{0, 255, 10})},
	}
	got, err := Decode(Encode(steps))
	if err != nil || !reflect.DeepEqual(got, steps) {
		t.Fatalf("got %+v, %v", got, err)
	}
	if s := Capabilities.String(); s != "capabilities" {
		t.Errorf("last name is %q", s)
	}
}

func TestDecodeCut(t *testing.T) {
	whole := Encode([]Step{{Op: File, Target: "etc/hosts", Data: "x", Flags: 0o644}})
	for n := 1; n < len(whole); n++ {
		if steps, err := Decode(whole[:n]); err == nil {
			t.Errorf("cut at %d: %+v", n, steps)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(Encode([]Step{{Op: Mount, Target: "proc", Source: "proc", Flags: 14}}))
	f.Add([]byte{1, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		steps, err := Decode(b)
		if err != nil {
			return
		}
		again, err := Decode(Encode(steps))
		if err != nil || !reflect.DeepEqual(again, steps) {
			t.Fatalf("%+v became %+v, %v", steps, again, err)
		}
	})
}
