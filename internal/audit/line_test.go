package audit

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
)

// A line is what encoding/json makes of the record.
func FuzzLine(f *testing.F) {
	f.Add("host", "i0", "key", "net.flow", "<&>\u2028\x7f", "exe", int64(1), uint64(7), true)
	f.Add("", "", "", "", "", "", int64(-1), uint64(1<<63), false)
	f.Add("\xff", "\\", "\"", "\n", "ü", "\u202e", int64(1e18), uint64(0), true)
	f.Fuzz(func(t *testing.T, host, sandbox, id, kind, reason, exe string, at int64, seq uint64, more bool) {
		r := Record{
			V: Version, Seq: seq, Time: time.Unix(0, at).UTC(), Host: host, Sandbox: berm.SandboxID(sandbox), Actor: Actor{Type: kind, ID: id},
			Type: Type(kind), Src: id, Trust: Trust(sandbox), Outcome: Outcome(kind), Reason: reason, TraceID: exe,
		}
		if more {
			code := int(at % 300)
			p := Process{PID: code, PPID: int(seq % 5), Host: int(seq % 3), UID: code, Ago: at % 7, Exe: exe, SHA256: id, Cwd: host, Cut: seq%2 == 0, Asked: seq%3 == 0, Signal: kind, Call: exe, Error: id}
			if p.PPID > 1 {
				p.Argv, p.Code = []string{reason, exe, ""}[:p.PPID-1], &code
			}
			r.PolicyID, r.Data, r.Blobs = host, p, []Blob{{SHA256: exe, Size: at, Kind: kind}}
		}
		want, err := json.Marshal(r)
		if err != nil {
			t.Skip()
		}
		got, err := appendRecord(nil, &r)
		if err != nil {
			t.Fatal(err)
		}
		if got = append(got, `,"prev":""}`...); string(got) != string(want) {
			t.Fatalf("the line is\n%s\nand encoding/json makes\n%s", got, want)
		}
	})
}

// What a terminal may act on is found in each place.
func TestPlain(t *testing.T) {
	for c := range 256 {
		for _, at := range []int{0, 5, 8, 9} {
			text := []byte("0123456789")
			text[at] = byte(c)
			if got := plain(text); got != (c < 0x7f) {
				t.Errorf("%#x: %v", c, got)
			}
		}
	}
}
