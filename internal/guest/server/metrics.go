package server

import (
	"bufio"
	"bytes"
	"math"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/guest/rest"
)

// metrics is what the sandbox can see of its own use. The control plane measures
// from outside and does not believe it.
type metrics struct {
	At        int64   `json:"ts"` // Unix seconds
	CPUs      int     `json:"cpu_count"`
	CPUUsed   float64 `json:"cpu_used_pct"` // of all cores, since the last call
	MemTotal  uint64  `json:"mem_total"`
	MemUsed   uint64  `json:"mem_used"`
	MemCache  uint64  `json:"mem_cache"`
	TotalMiB  uint64  `json:"mem_total_mib"`
	UsedMiB   uint64  `json:"mem_used_mib"`
	DiskUsed  uint64  `json:"disk_used"`
	DiskTotal uint64  `json:"disk_total"`
}

// meter remembers the last reading of the CPU clock.
type meter struct {
	mu   sync.Mutex
	at   time.Time
	busy time.Duration
	pct  float64
}

func (s *Server) metrics(w http.ResponseWriter, _ *http.Request) {
	m := metrics{At: time.Now().Unix(), CPUs: runtime.NumCPU()}
	m.CPUUsed = s.meter.used(m.CPUs)
	m.MemTotal, m.MemUsed, m.MemCache = memory()
	m.TotalMiB, m.UsedMiB = m.MemTotal>>20, m.MemUsed>>20
	var st unix.Statfs_t
	if unix.Statfs("/", &st) == nil {
		m.DiskTotal = st.Blocks * uint64(st.Bsize)
		m.DiskUsed = (st.Blocks - st.Bfree) * uint64(st.Bsize)
	}
	w.Header().Set("Cache-Control", "no-store")
	rest.JSON(w, m)
}

func (m *meter) used(cpus int) float64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	now, busy := time.Now(), cpuTime()
	// Two clients at once must not make the interval too short to mean anything.
	if passed := now.Sub(m.at); passed > 100*time.Millisecond {
		if !m.at.IsZero() && cpus > 0 {
			m.pct = 100 * float64(busy-m.busy) / float64(passed) / float64(cpus)
			m.pct = math.Round(100*min(max(m.pct, 0), 100)) / 100
		}
		m.at, m.busy = now, busy
	}
	return m.pct
}

// cpuTime is the time that processors were busy: the sandbox's own where its cgroup
// can be seen, else the machine's.
func cpuTime() time.Duration {
	if usec, ok := field("/sys/fs/cgroup/cpu.stat", "usage_usec"); ok {
		return time.Duration(usec) * time.Microsecond
	}
	if ns, ok := number("/sys/fs/cgroup/cpuacct/cpuacct.usage"); ok {
		return time.Duration(ns)
	}
	data, _ := os.ReadFile("/proc/stat")
	line, _, _ := bytes.Cut(data, []byte("\n"))
	fields := strings.Fields(string(line)) // cpu user nice system idle iowait irq softirq steal …
	var ticks uint64
	for i, f := range fields {
		if i >= 1 && i <= 8 && i != 4 && i != 5 {
			n, _ := strconv.ParseUint(f, 10, 64)
			ticks += n
		}
	}
	return time.Duration(ticks) * (time.Second / 100) // USER_HZ is 100 in every ABI of ours
}

// memory is the sandbox's own where its cgroup can be seen, else the machine's.
func memory() (total, used, cache uint64) {
	const info = "/proc/meminfo"
	kib := func(name string) uint64 { n, _ := field(info, name+":"); return n << 10 }
	total = kib("MemTotal")
	if current, ok := number("/sys/fs/cgroup/memory.current"); ok {
		if limit, ok := number("/sys/fs/cgroup/memory.max"); ok {
			total = min(total, limit)
		}
		cache, _ = field("/sys/fs/cgroup/memory.stat", "file")
		return total, current - min(cache, current), cache
	}
	if current, ok := number("/sys/fs/cgroup/memory/memory.usage_in_bytes"); ok {
		if limit, ok := number("/sys/fs/cgroup/memory/memory.limit_in_bytes"); ok {
			total = min(total, limit)
		}
		cache, _ = field("/sys/fs/cgroup/memory/memory.stat", "total_cache")
		return total, current - min(cache, current), cache
	}
	cache = kib("Cached") + kib("Buffers")
	return total, total - min(kib("MemAvailable"), total), cache
}

// number reads a file that holds one number.
func number(file string) (uint64, bool) {
	data, err := os.ReadFile(file)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseUint(string(bytes.TrimSpace(data)), 10, 64)
	return n, err == nil // "max" is no limit
}

// field reads the number after a name in a file of lines.
func field(file, name string) (uint64, bool) {
	f, err := os.Open(file)
	if err != nil {
		return 0, false
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if parts := strings.Fields(lines.Text()); len(parts) >= 2 && parts[0] == name {
			n, err := strconv.ParseUint(parts[1], 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}
