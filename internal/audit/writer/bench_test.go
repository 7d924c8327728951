package writer_test

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/writer"
)

// ran is a record of the kind of which a busy sandbox makes most: 324 bytes in the log.
var ran = audit.Record{
	Type: audit.ProcExec, Sandbox: "i0aaaaaaaaaaaaaaaaaaa", Actor: audit.Actor{Type: "system"}, Src: "kernel", Trust: audit.TrustHost, Outcome: audit.OK,
	Data: audit.Process{PID: 7, PPID: 6, Host: 4711, Exe: "/usr/bin/true", Argv: []string{"true"}, Cwd: "/workspace"},
}

// spent is the processor time of this process, and of the writer, of which the machine's other load
// takes nothing.
func spent(b *testing.B, l *writer.Log) (server, its time.Duration) {
	var use unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &use); err != nil {
		b.Fatal(err)
	}
	threads, err := os.ReadDir("/proc/" + strconv.Itoa(l.PID()) + "/task")
	if err != nil {
		b.Fatal(err)
	}
	for _, thread := range threads {
		text, err := os.ReadFile("/proc/" + strconv.Itoa(l.PID()) + "/task/" + thread.Name() + "/schedstat")
		if err != nil {
			continue
		}
		ns, err := strconv.ParseInt(strings.Fields(string(text))[0], 10, 64)
		if err != nil {
			b.Fatal(err)
		}
		its += time.Duration(ns)
	}
	return time.Duration(use.Utime.Nano() + use.Stime.Nano()), its
}

func bench(b *testing.B, emit func(l *writer.Log)) {
	l := open(b, b.TempDir())
	defer l.Close()
	server, its := spent(b, l)
	first := l.Seq()
	emit(l)
	records := float64(l.Seq() - first)
	b.StopTimer()
	serverAfter, itsAfter := spent(b, l)
	b.ReportMetric(float64((serverAfter-server).Nanoseconds())/records, "server-ns/record")
	b.ReportMetric(float64((itsAfter-its).Nanoseconds())/records, "writer-ns/record")
	b.ReportMetric(records/(itsAfter-its).Seconds(), "records/writer-cpu-s")
	b.ReportMetric(records/(itsAfter-its+serverAfter-server).Seconds(), "records/cpu-s")
}

// BenchmarkAppend is many at once.
func BenchmarkAppend(b *testing.B) {
	b.SetParallelism(64)
	bench(b, func(l *writer.Log) {
		b.RunParallel(func(p *testing.PB) {
			for p.Next() {
				if err := l.Emit(ran); err != nil {
					b.Error(err)
					return
				}
			}
		})
	})
}

// BenchmarkAppendOne is records that come one at a time.
func BenchmarkAppendOne(b *testing.B) {
	bench(b, func(l *writer.Log) {
		for b.Loop() {
			if err := l.Emit(ran); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkAppendSeldom is records that come one at a time with pauses between them, as those of one
// action do: both processes sleep meanwhile.
func BenchmarkAppendSeldom(b *testing.B) {
	bench(b, func(l *writer.Log) {
		var took []time.Duration
		for b.Loop() {
			time.Sleep(time.Millisecond)
			begin := time.Now()
			if err := l.Emit(ran); err != nil {
				b.Fatal(err)
			}
			took = append(took, time.Since(begin))
		}
		slices.Sort(took)
		b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "median-ns")
		b.ReportMetric(float64(took[len(took)*9/10].Nanoseconds()), "p90-ns")
	})
}

// BenchmarkAppendSeveral is records that one caller has many of, as those of processes are.
func BenchmarkAppendSeveral(b *testing.B) {
	several := make([]audit.Record, 100)
	for i := range several {
		several[i] = ran
	}
	bench(b, func(l *writer.Log) {
		for b.Loop() {
			if err := l.EmitAll(several); err != nil {
				b.Fatal(err)
			}
		}
	})
}
