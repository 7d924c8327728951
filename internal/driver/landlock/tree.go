package landlock

import (
	"bytes"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// mostRounds bounds how long processes are stopped before the first are killed: some may
// wake the others again.
const mostRounds = 64

// endTree ends all descendants of this process, their reaper, until none is left, which
// closes alone. They are stopped before they are killed, so that those that fork without
// end use up their places instead of getting free ones.
func endTree(alone <-chan struct{}) {
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		h := herd{}
		for range mostRounds {
			if !h.stopNew() {
				break
			}
		}
		for _, fd := range h {
			_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0) // it may have ended
			unix.Close(fd)
		}
		select {
		case <-alone:
			return
		case <-time.After(pause):
		}
	}
}

// A herd is processes that were stopped: their numbers and descriptors.
type herd map[int]int

// stopNew stops the descendants that are not in the herd yet and says whether there were
// any.
func (h herd) stopNew() bool {
	found := false
	self := os.Getpid()
	queue := []int{self}
	for n := 0; n < len(queue); n++ {
		pids, _ := children(queue[n]) // nothing when it has ended
		queue = append(queue, pids...)
		for _, pid := range pids {
			if _, known := h[pid]; !known && h.stop(self, pid) {
				found = true
			}
		}
	}
	return found
}

// stop stops one process. Its number may be another's by now, who is no descendant; so
// the parent is looked at once it is held by descriptor, which a signal goes to.
func (h herd) stop(self, pid int) bool {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return false
	}
	parent := parentOf(pid)
	holder, ours := h[parent]
	if parent != self && (!ours || unix.PidfdSendSignal(holder, 0, nil, 0) != nil) || unix.PidfdSendSignal(fd, unix.SIGSTOP, nil, 0) != nil {
		unix.Close(fd)
		return false
	}
	h[pid] = fd
	return true
}

// parentOf reads the parent of a process, 0 when it has ended.
func parentOf(pid int) int {
	stat, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	// The name, in parentheses, can hold any byte.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 2 {
		return 0
	}
	parent, _ := strconv.Atoi(string(fields[1]))
	return parent
}

// children lists the children of all threads of a process.
func children(pid int) ([]int, error) {
	dir := "/proc/" + strconv.Itoa(pid) + "/task"
	threads, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, t := range threads {
		var list []byte
		list, err = os.ReadFile(dir + "/" + t.Name() + "/children")
		for field := range bytes.FieldsSeq(list) {
			if child, err := strconv.Atoi(string(field)); err == nil {
				pids = append(pids, child)
			}
		}
	}
	return pids, err
}

// pass sends a signal to the command, a child of this process.
func pass(command int, s unix.Signal) {
	fd, err := unix.PidfdOpen(command, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if parentOf(command) == os.Getpid() {
		_ = unix.PidfdSendSignal(fd, s, nil, 0) // it may have ended
	}
}
