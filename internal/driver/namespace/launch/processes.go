package launch

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
)

// mostProcesses bounds the work that a sandbox without a limit can make of measuring it.
const mostProcesses = 4096

// tick is the unit of processor time in /proc (USER_HZ, on every architecture of Go's).
const tick = 10 * time.Millisecond

// measure fills in what no control group counts here, from the table of processes: init
// and all that descend from it, which is everybody in its pid namespace. Memory is what
// processes do not share; processor time is of those that live or were waited for.
func measure(init int, u *berm.Usage) {
	var memory, threads int64
	var spent time.Duration
	for _, pid := range tree(init) {
		dir := "/proc/" + strconv.Itoa(pid)
		stat, err := os.ReadFile(dir + "/stat")
		if err != nil {
			continue // it has ended
		}
		// The name, in parentheses, can hold any byte; numbers are those of proc(5) less 3.
		fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		if len(fields) < 18 {
			continue
		}
		number := func(i int) int64 { v, _ := strconv.ParseInt(fields[i], 10, 64); return v }
		spent += time.Duration(number(11)+number(12)+number(13)+number(14)) * tick
		threads += number(17)
		if statm, err := os.ReadFile(dir + "/statm"); err == nil {
			var size, resident, shared int64
			if _, err := fmt.Sscan(string(statm), &size, &resident, &shared); err == nil {
				memory += (resident - shared) * int64(os.Getpagesize())
			}
		}
	}
	if u.MemoryUsed == 0 {
		u.MemoryUsed = max(memory, 0)
	}
	if u.PIDs == 0 {
		u.PIDs = threads
	}
	if u.CPUTime == 0 {
		u.CPUTime = spent
	}
}

// tree lists a process and all that descend from it.
func tree(root int) []int {
	all := []int{root}
	for n := 0; n < len(all); n++ {
		lists, _ := filepath.Glob("/proc/" + strconv.Itoa(all[n]) + "/task/*/children") // of each thread
		for _, list := range lists {
			children, _ := os.ReadFile(list) // nothing when it has ended
			for field := range strings.FieldsSeq(string(children)) {
				if pid, err := strconv.Atoi(field); err == nil && len(all) < mostProcesses {
					all = append(all, pid)
				}
			}
		}
	}
	return all
}
