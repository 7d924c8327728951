package trail

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/audit"
)

// ran is a record of the kind of which a busy sandbox makes most: 324 bytes in the log.
var ran = audit.Record{
	Type: audit.ProcExec, Sandbox: "i0aaaaaaaaaaaaaaaaaaa", Actor: audit.Actor{Type: "system"}, Src: "kernel", Trust: audit.TrustHost, Outcome: audit.OK,
	Data: audit.Process{PID: 7, PPID: 6, Host: 4711, Exe: "/usr/bin/true", Argv: []string{"true"}, Cwd: "/workspace"},
}

// perRecord reports what records cost: the processor time of the whole process, of which the
// machine's other load takes nothing.
func perRecord(b *testing.B, before time.Duration, records uint64) {
	spent := processorTime(b) - before
	b.ReportMetric(float64(spent.Nanoseconds())/float64(records), "cpu-ns/record")
	b.ReportMetric(float64(records)/spent.Seconds(), "records/cpu-s")
}

func processorTime(b *testing.B) time.Duration {
	var use unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &use); err != nil {
		b.Fatal(err)
	}
	return time.Duration(use.Utime.Nano() + use.Stime.Nano())
}

// BenchmarkAppend is a flood: what the reader of the kernel's events hands over at once, with
// checkpoints signed beside.
func BenchmarkAppend(b *testing.B) {
	l := open(b, b.TempDir())
	defer l.Close()
	batch := make([]audit.Record, 64)
	for i := range batch {
		batch[i] = ran
	}
	before, records := processorTime(b), uint64(0)
	for b.Loop() {
		if err := l.EmitAll(batch); err != nil {
			b.Fatal(err)
		}
		records += uint64(len(batch))
	}
	perRecord(b, before, records)
}

// BenchmarkAppendOne is records that come one at a time.
func BenchmarkAppendOne(b *testing.B) {
	l := open(b, b.TempDir())
	defer l.Close()
	before, records := processorTime(b), uint64(0)
	for b.Loop() {
		if err := l.Emit(ran); err != nil {
			b.Fatal(err)
		}
		records++
	}
	perRecord(b, before, records)
}

func BenchmarkVerify(b *testing.B) {
	dir := b.TempDir()
	l := open(b, dir)
	const n = 200_000
	emit(b, l, n/100) // of which a tenth has content
	batch := make([]audit.Record, 1000)
	for i := range batch {
		batch[i] = ran
	}
	for range n / len(batch) {
		if err := l.EmitAll(batch); err != nil {
			b.Fatal(err)
		}
	}
	closeLog(b, l)
	b.ResetTimer()
	before, records := processorTime(b), uint64(0)
	for b.Loop() {
		r := verify(b, dir, Trust{})
		if len(r.Problems) > 0 {
			b.Fatal(r.Problems)
		}
		records += r.Records
	}
	perRecord(b, before, records)
}
