package namespace

import (
	"context"
	"os"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/drivertest"
)

func benchDriver(b *testing.B) (*Driver, func() berm.Spec) {
	spares, _ := strconv.Atoi(os.Getenv("BERM_BENCH_SPARES"))
	d := newDriver(b, Config{Data: dataDir(b), Spares: spares})
	root := drivertest.Root(b, b.TempDir(), os.Geteuid())
	return d, func() berm.Spec {
		spec := berm.Spec{ID: berm.NewSandboxID(), Level: berm.Namespace, Hostname: "box", Layers: []berm.Layer{{Path: root}}}
		if os.Geteuid() == 0 {
			spec.IDs = lease()
			spec.Limits = berm.Limits{Memory: 256 << 20, CPU: 2, PIDs: 256, Disk: 1 << 30}
		}
		return spec
	}
}

// BenchmarkLife makes and kills sandboxes one after the other. BERM_TRACE=1 shows the
// steps.
func BenchmarkLife(b *testing.B) {
	d, spec := benchDriver(b)
	ctx := context.Background()
	pause, _ := time.ParseDuration(os.Getenv("BERM_BENCH_PAUSE"))
	var create, kill time.Duration
	for b.Loop() {
		start := time.Now()
		s, err := d.Create(ctx, spec())
		if err != nil {
			b.Fatal(err)
		}
		alive := time.Now()
		if _, err := s.Kill(ctx, berm.ReasonKilled); err != nil {
			b.Fatal(err)
		}
		create += alive.Sub(start)
		kill += time.Since(alive)
		time.Sleep(pause)
	}
	b.ReportMetric(float64(create.Microseconds())/float64(b.N), "µs/create")
	reportCPU(b)
	b.ReportMetric(float64(kill.Microseconds())/float64(b.N), "µs/kill")
}

// BenchmarkLifeAtOnce does the same with eight at once.
func BenchmarkLifeAtOnce(b *testing.B) {
	d, spec := benchDriver(b)
	ctx := context.Background()
	b.SetParallelism(4) // of 2 processors
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			s, err := d.Create(ctx, spec())
			if err != nil {
				b.Error(err)
				return
			}
			if _, err := s.Kill(ctx, berm.ReasonKilled); err != nil {
				b.Error(err)
			}
		}
	})
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "lives/s")
	reportCPU(b)
}

// reportCPU tells the processor time of this process and of all monitors, which have
// waited for what ran inside: on a shared machine it says more than the time that passed.
func reportCPU(b *testing.B) {
	var total time.Duration
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var r unix.Rusage
		if err := unix.Getrusage(who, &r); err != nil {
			b.Fatal(err)
		}
		total += time.Duration(r.Utime.Nano() + r.Stime.Nano())
	}
	b.ReportMetric(float64(total.Microseconds())/float64(b.N), "cpu-µs/life")
}
