package drivertest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// snapshot saves a sandbox and returns where.
func snapshot(t *testing.T, s berm.Sandbox) string {
	t.Helper()
	dir := t.TempDir()
	if _, err := s.Snapshot(testContext(t), dir, false); err != nil {
		t.Fatalf("snapshot: %v (%s)", err, berm.HintOf(err))
	}
	return dir
}

// from makes a sandbox begin with a snapshot.
func from(dir string) func(*berm.Spec) { return func(spec *berm.Spec) { spec.From = dir } }

// identity is what no two sandboxes share.
const identity = "cat /etc/machine-id /proc/sys/kernel/random/boot_id"

// snapshotCases save sandboxes and begin with what was saved.
var snapshotCases = []testCase{
	{name: "SnapshotKeepsFiles", needs: []Feature{Snapshot, Exec}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		sh(t, s, `mkdir /d && echo one >/d/f && ln /d/f /d/hard && ln -s f /d/soft && chmod 4711 /d/f && mkfifo /d/pipe && mkdir /bin2 && cp /bin/sh /bin2/sh
			echo changed >/etc/motd; rm -rf /root; dd if=/dev/urandom of=/d/big bs=65536 count=64 2>/dev/null; sha256sum /d/big >/d/sum
			sh -c 'while echo tick >>/d/ticks; do sleep 0.01; done' >/dev/null 2>&1 &
			until test -s /d/ticks; do sleep 0.01; done`)
		pipe, isPipe := "pipe", "644 1 fifo\n"
		if _, own := h.Missing[Kernel]; own { // another kernel may keep it in its own memory
			pipe, isPipe = "", ""
		}
		dir := snapshot(t, s)
		// The one that was saved goes on.
		before := sh(t, s, "wc -l </d/ticks")
		eventually(t, patience, func() error {
			if now := sh(t, s, "wc -l </d/ticks"); now == before {
				return fmt.Errorf("%s ticks as before", now)
			}
			return nil
		})
		own := sh(t, s, identity)
		sh(t, s, "until rm -rf /d 2>/dev/null; do :; done")
		var children []berm.Sandbox
		for _, name := range []string{"left", "right"} {
			child := create(t, h, from(dir), func(spec *berm.Spec) { spec.Hostname = name })
			if got := sh(t, child, "hostname; cat /etc/hostname"); got != name+"\n"+name {
				t.Errorf("its name is %q", got)
			}
			children = append(children, child)
			if got := sh(t, child, `cd /d && cat f hard soft | sort -u && sha256sum -c sum >/dev/null && stat -c '%a %h %F' f `+pipe+` && readlink soft && cat /etc/motd && ls -d /root 2>&1 | wc -l && test ! -e /root && tail -n 1 ticks`); got != "one\n4711 2 regular file\n"+isPipe+"f\nchanged\n1\ntick" {
				t.Errorf("%q", got)
			}
			if id := sh(t, child, identity); id == own || sharesLine(id, own) {
				t.Errorf("of the new one %q, of the old one %q", id, own)
			}
			if n := sh(t, child, "n=$(wc -l </d/ticks); sleep 0.1; echo $(($(wc -l </d/ticks) - n))"); n != "0" {
				t.Errorf("a process goes on in a sandbox of files: %s", n)
			}
		}
		if a, b := sh(t, children[0], identity), sh(t, children[1], identity); sharesLine(a, b) {
			t.Errorf("two of one snapshot: %q and %q", a, b)
		}
		sh(t, children[0], "echo two >/d/f")
		if got := sh(t, children[1], "cat /d/f"); got != "one" {
			t.Errorf("what its sibling wrote shows: %q", got)
		}
		// And a snapshot of one that began with a snapshot.
		again := create(t, h, from(snapshot(t, children[0])))
		if got := sh(t, again, "cat /d/f; test ! -e /root"); got != "two" {
			t.Errorf("the second generation has %q", got)
		}
	}},
	{name: "SnapshotOfPaused", needs: []Feature{Snapshot, Exec, Freeze}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		sh(t, s, "echo one >/f")
		if err := s.Pause(testContext(t)); err != nil {
			t.Fatal(err)
		}
		dir := snapshot(t, s)
		if status, err := s.Status(testContext(t)); err != nil || status.State != berm.Paused {
			t.Errorf("%+v, %v", status, err)
		}
		kill(t, s)
		// With the id of the one that was, as a resume has it.
		if got := sh(t, create(t, h, from(dir), func(spec *berm.Spec) { spec.ID = s.ID() }), "cat /f"); got != "one" {
			t.Errorf("%q", got)
		}
	}},
	{name: "VersionOfTheDisk", needs: []Feature{Snapshot, Exec}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		version := func() string {
			t.Helper()
			v, err := s.Version(testContext(t))
			if err != nil {
				t.Fatal(err)
			}
			return v
		}
		sh(t, s, "echo one >/f; ls / /bin /etc") // the first list of a directory has overlayfs write attributes
		last := version()
		for _, reads := range []string{"true", "cat /f /etc/passwd; ls / /bin", "sha256sum /bin/sh", "echo >/dev/shm/x; echo >/dev/null"} {
			sh(t, s, reads)
			if now := version(); now != last {
				t.Errorf("after %q it is %s, and was %s", reads, now, last)
			}
		}
		snapshot(t, s)
		if now := version(); now != last {
			t.Errorf("after a snapshot it is %s, and was %s", now, last)
		}
		seen := map[string]bool{last: true}
		for _, writes := range []string{"echo two >/f", "echo owt >/f", "touch -d 2001-01-01 /f", "chmod 600 /f", "mv /f /g", "rm /g", "mkdir /d", "rm -rf /root"} {
			sh(t, s, writes)
			now := version()
			if seen[now] {
				t.Errorf("after %q it is %s as before", writes, now)
			}
			seen[now] = true
		}
		// Nothing hides in the time that its clock stands still.
		for i := range 50 {
			now := version()
			if seen[now] && i > 0 {
				t.Fatalf("write %d hides behind %s", i, now)
			}
			seen[now] = true
			sh(t, s, "echo more >>/h")
		}
	}},
	{name: "SnapshotOfAWreck", needs: []Feature{Snapshot, Exec}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		sh(t, s, "rm -f /etc/hostname /etc/hosts /etc/machine-id; mkfifo /etc/hostname; ln -s /proc/self/mem /etc/hosts; ln -s /nowhere /etc/machine-id; echo kept >/f")
		if got := sh(t, create(t, h, from(snapshot(t, s))), "cat /etc/hostname /f"); got != "box\nkept" {
			t.Errorf("%q", got)
		}
	}},
	// What a sandbox made of the places of its identity is its own, and no reason not to start.
	{name: "SnapshotWithoutAPlaceForIdentity", needs: []Feature{Snapshot, Exec}, run: func(t *testing.T, h Harness) {
		for _, c := range [][2]string{
			{"rm -f /etc/hostname; mkdir -p /etc/hostname/d; echo kept >/etc/hostname/d/f", "cat /etc/hostname/d/f"},
			{"mkdir /other; cp /etc/passwd /etc/group /other; echo kept >/other/hostname; mv /etc /etc2; ln -s other /etc", "cat /other/hostname; ls /other | grep -v -e hostname -e passwd -e group || true"},
			{"mv /etc /etc2; echo kept >/etc", ""}, // nobody can log in
		} {
			s := create(t, h)
			sh(t, s, c[0])
			child := create(t, h, from(snapshot(t, s)))
			if err := health(testContext(t), child); err != nil {
				t.Errorf("after %q: %v", c[0], err)
			}
			if c[1] == "" {
				continue
			}
			if got := sh(t, child, c[1]); got != "kept" {
				t.Errorf("after %q: %q", c[0], got)
			}
		}
	}},
	// A sandbox that has used up all inodes is saved, and goes on from what was saved, again and again.
	{name: "SnapshotOfAFullDisk", needs: []Feature{Snapshot, Exec, DiskLimit}, run: func(t *testing.T, h Harness) {
		small := func(spec *berm.Spec) { spec.Limits.Disk = 16 << 20 }
		s := create(t, h, small)
		for i, before := range []string{"true", "true", "rm /etc/hostname /etc/hosts /etc/machine-id /etc/resolv.conf", "true"} {
			if got := sh(t, s, fmt.Sprintf("%s; mkdir -p /x; seq 2000 | sed 's|^|/x/%d-|' | xargs touch 2>/dev/null; touch /y 2>/dev/null || echo full", before, i)); got != "full" {
				t.Fatalf("round %d: %q", i, got)
			}
			dir := snapshot(t, s)
			kill(t, s)
			s = create(t, h, small, from(dir), func(spec *berm.Spec) { spec.ID = s.ID() })
			if got := sh(t, s, "cat /etc/hostname"); got != "box" {
				t.Errorf("round %d: its name is %q", i, got)
			}
		}
	}},
	{name: "MemoryGoesOn", needs: []Feature{Snapshot, Memory, Exec, Freeze}, run: func(t *testing.T, h Harness) {
		linked := func(spec *berm.Spec) { spec.Link = h.Missing[Link] == "" }
		s := create(t, h, linked)
		// What it counts is in its memory alone; it adds what it was told by others.
		sh(t, s, `mkdir -p /www && cat >/count.sh <<'END'
i=0; while :; do i=$((i+1)); read -r more 2>/dev/null </more && i=$((i+more)) && rm /more; echo $i >/count.new; mv /count.new /count; sleep 0.02; done
END
			sh /count.sh >/dev/null 2>&1 & echo $! >/pid; (sleep 3; echo rang >/rang) >/dev/null 2>&1 &
			httpd -p 8080 -h /www; echo served >/www/f; exec 3>/held; echo held >&3; rm /held; sh -c 'sleep 1000 & wait' >/dev/null 2>&1 3>&3 &
			until test -s /count; do sleep 0.01; done`)
		counts := func(s berm.Sandbox) string {
			return sh(t, s, `a=$(cat /count); for i in $(seq 500); do sleep 0.01; b=$(cat /count); [ "$b" -gt "$a" ] && break; done; [ "$b" -gt "$a" ] && kill -0 $(cat /pid) && echo $b`)
		}
		own := sh(t, s, identity)
		dir := t.TempDir()
		saved, err := s.Snapshot(testContext(t), dir, true)
		if err != nil {
			t.Fatalf("%v (%s)", err, berm.HintOf(err))
		}
		if !saved.Memory || saved.Size == 0 || saved.Stopped <= 0 {
			t.Errorf("%+v", saved)
		}
		counts(s) // it goes on
		want := func(s berm.Sandbox, name string) {
			t.Helper()
			counts(s)
			if got := sh(t, s, "hostname; cat /etc/hostname"); got != name+"\n"+name {
				t.Errorf("its name is %q", got)
			}
			if got := sh(t, s, "wget -qO- http://127.0.0.1:8080/f"); got != "served" {
				t.Errorf("a server inside says %q", got)
			}
		}
		var ids []string
		var children []berm.Sandbox
		for i, name := range []string{"left", "right"} {
			child := create(t, h, linked, from(dir), func(spec *berm.Spec) {
				spec.Memory, spec.Hostname, spec.Guest.Env = true, name, map[string]string{"CHILD": name}
			})
			want(child, name)
			if got := sh(t, child, "echo $CHILD"); got != name {
				t.Errorf("its environment has %q", got)
			}
			sh(t, child, fmt.Sprintf("echo %d >/more.new; mv /more.new /more; while test -e /more; do sleep 0.01; done", (i+1)*1000000))
			ids = append(ids, sh(t, child, identity))
			if id := ids[i]; sharesLine(id, own) {
				t.Errorf("of the new one %q, of the old one %q", id, own)
			}
			children = append(children, child)
		}
		if sharesLine(ids[0], ids[1]) {
			t.Errorf("two of one snapshot: %q and %q", ids[0], ids[1])
		}
		for i, child := range children { // each its own way
			if n, _ := strconv.Atoi(counts(child)); n/1000000 != i+1 {
				t.Errorf("child %d counts %d", i, n)
			}
			eventually(t, patience, func() error {
				if r, err := Shell(testContext(t), child, "cat /rang"); err != nil || r.Output != "rang\n" {
					return fmt.Errorf("the timer: %+v, %w", r, err)
				}
				return nil
			})
		}
		// The same one goes on as itself, also when it was frozen when it was saved.
		if err := children[0].Pause(testContext(t)); err != nil {
			t.Fatal(err)
		}
		dir = t.TempDir()
		if _, err := children[0].Snapshot(testContext(t), dir, true); err != nil {
			t.Fatal(err)
		}
		if status, err := children[0].Status(testContext(t)); err != nil || status.State != berm.Paused {
			t.Errorf("%+v, %v", status, err)
		}
		kill(t, children[0])
		again := create(t, h, linked, from(dir), func(spec *berm.Spec) { spec.ID, spec.Memory, spec.Hostname = children[0].ID(), true, "left" })
		want(again, "left")
		if id := sh(t, again, identity); id != ids[0] {
			t.Errorf("it was %q, and is %q", ids[0], id)
		}
		if h.Missing[Link] == "" {
			if got := sh(t, again, "wc -l </proc/net/route"); got != "3" {
				t.Errorf("%s lines of routes", got)
			}
		}
		// Its files alone begin anew.
		files := create(t, h, from(dir))
		if got := sh(t, files, "cat /rang; kill -0 $(cat /pid) 2>/dev/null || echo dead"); got != "rang\ndead" {
			t.Errorf("with files alone: %q", got)
		}
	}},
	{name: "MemoryRefused", needs: []Feature{Snapshot, Memory, Exec, PIDLimit}, slow: true, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		lives := func() {
			t.Helper()
			if got := sh(t, s, "echo lives"); got != "lives" {
				t.Errorf("it says %q", got)
			}
		}
		refused := func(kind berm.Kind, dir string, change func(*berm.Spec)) {
			t.Helper()
			spec := h.Spec()
			spec.From, spec.Memory = dir, true
			change(&spec)
			_, err := h.Driver.Create(testContext(t), spec)
			want(t, err, kind)
		}
		refused(berm.NotFound, snapshot(t, s), func(*berm.Spec) {})
		dir := t.TempDir()
		if _, err := s.Snapshot(testContext(t), dir, true); err != nil {
			t.Fatal(err)
		}
		refused(berm.Unsupported, dir, func(spec *berm.Spec) { spec.Limits.PIDs++ })
		// No room: it goes on all the same.
		small := t.TempDir()
		if err := unix.Mount("small", small, "tmpfs", 0, "size=64k"); err != nil {
			t.Fatal(err)
		}
		_, err := s.Snapshot(testContext(t), small, true)
		if err := unix.Unmount(small, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
		want(t, err, berm.Unavailable)
		lives()
		// What is cut short is no memory.
		for _, name := range []string{"checkpoint.img", "pages_meta.img", "pages.img"} {
			cut := t.TempDir()
			if err := os.CopyFS(cut, os.DirFS(dir)); err != nil {
				t.Fatal(err)
			}
			file := filepath.Join(cut, "memory", name)
			info, err := os.Stat(file)
			if err == nil {
				err = os.Truncate(file, info.Size()/2)
			}
			if err != nil {
				t.Fatal(err)
			}
			spec := h.Spec()
			spec.From, spec.Memory = cut, true
			if child, err := h.Driver.Create(testContext(t), spec); err == nil {
				t.Errorf("with half of %s", name)
				kill(t, child)
			}
		}
		// An agent that does not let go of its connections, which root inside can bring about.
		ctx, cancel := context.WithTimeout(testContext(t), time.Second)
		defer cancel()
		if _, err := Shell(ctx, s, "kill -STOP $PPID; sleep 1000"); err == nil {
			t.Fatal("the agent was not stopped")
		}
		_, err = s.Snapshot(testContext(t), t.TempDir(), true)
		want(t, err, berm.Unavailable)
		if status, err := s.Status(testContext(t)); err != nil || status.State != berm.Running {
			t.Errorf("%+v, %v", status, err)
		}
	}},
	{name: "MemoryOverAndOver", needs: []Feature{Snapshot, Memory, Exec, Freeze}, slow: true, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		sh(t, s, `cat >/sum.sh <<'END'
sum=0; while :; do if read -r n 2>/dev/null </told; then rm /told; sum=$((sum+n)); echo $sum >/sum.new; mv /sum.new /sum; fi; sleep 0.01; done
END
			sh /sum.sh >/dev/null 2>&1 &`)
		sum, cycles := 0, 30
		if n, err := strconv.Atoi(os.Getenv("BERM_TEST_CYCLES")); err == nil {
			cycles = n
		}
		for i := 1; i <= cycles; i++ {
			sum += i
			sh(t, s, fmt.Sprintf("echo %d >/told.new; mv /told.new /told; head -c %d /dev/urandom >/d%d && sha256sum /d%d >>/sums; while test -e /told; do sleep 0.01; done", i, i*997, i%7, i%7))
			if i%2 == 0 {
				if err := s.Pause(testContext(t)); err != nil {
					t.Fatal(err)
				}
			}
			dir := t.TempDir()
			if _, err := s.Snapshot(testContext(t), dir, true); err != nil {
				t.Fatal(err)
			}
			kill(t, s)
			s = create(t, h, from(dir), func(spec *berm.Spec) { spec.ID, spec.Memory = s.ID(), true })
			if got := sh(t, s, fmt.Sprintf("until [ $(cat /sum) = %d ]; do sleep 0.01; done; tail -n 1 /sums | sha256sum -c >/dev/null && echo ok", sum)); got != "ok" {
				t.Fatalf("cycle %d: %q", i, got)
			}
		}
	}},
	{name: "KillDuringCheckpoint", needs: []Feature{Snapshot, Memory, Exec}, run: func(t *testing.T, h Harness) {
		for i := range 5 {
			s := create(t, h)
			done := make(chan error, 1)
			dir := t.TempDir()
			go func() {
				_, err := s.Snapshot(testContext(t), dir, true)
				done <- err
			}()
			time.Sleep(time.Duration(i*i*4) * time.Millisecond)
			kill(t, s)
			if err := <-done; err != nil && berm.KindOf(err) != berm.NotFound {
				t.Errorf("one that was cut: %v", err)
			}
		}
	}},
	{name: "SnapshotRefused", needs: []Feature{Snapshot}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		if !h.Driver.Probe(testContext(t)).Memory {
			_, err := s.Snapshot(testContext(t), t.TempDir(), true)
			want(t, err, berm.Unsupported)
			if berm.HintOf(err) == "" && h.Missing[Exec] == "" {
				t.Errorf("no hint which level can: %v", err)
			}
		}
		_, err := s.Snapshot(testContext(t), filepath.Join(t.TempDir(), "missing"), false)
		if err == nil {
			t.Error("saved into no directory")
		}
		if err := health(testContext(t), s); err != nil {
			t.Errorf("after a snapshot that failed: %v", err)
		}
		dir := snapshot(t, s)
		spec := h.Spec()
		spec.From = t.TempDir()
		_, err = h.Driver.Create(testContext(t), spec)
		want(t, err, berm.NotFound)
		if h.Missing[DiskLimit] == "" {
			spec = h.Spec()
			spec.From, spec.Limits.Disk = dir, spec.Limits.Disk+1<<20
			_, err = h.Driver.Create(testContext(t), spec)
			want(t, err, berm.Unsupported)
		}
		kill(t, s)
		_, err = s.Snapshot(testContext(t), t.TempDir(), false)
		want(t, err, berm.NotFound)
	}},
	{name: "SnapshotImpossible", run: func(t *testing.T, h Harness) {
		if h.Missing[Snapshot] == "" {
			t.Skip("snapshots can be had")
		}
		s := create(t, h)
		for _, memory := range []bool{false, true} {
			_, err := s.Snapshot(testContext(t), t.TempDir(), memory)
			want(t, err, berm.Unsupported)
			if berm.HintOf(err) == "" {
				t.Errorf("no hint what is needed: %v", err)
			}
			if err := health(testContext(t), s); err != nil {
				t.Fatalf("after a snapshot that was refused (memory: %t): %v", memory, err)
			}
		}
	}},
	{name: "SnapshotsAtOnce", needs: []Feature{Snapshot}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		var group sync.WaitGroup
		errs := make(chan error, 8)
		for range cap(errs) {
			dir := t.TempDir()
			group.Go(func() {
				_, err := s.Snapshot(testContext(t), dir, false)
				errs <- err
			})
		}
		group.Wait()
		done := 0
		for range cap(errs) {
			switch err := <-errs; {
			case err == nil:
				done++
			case berm.KindOf(err) != berm.Conflict:
				t.Error(err)
			}
		}
		if done == 0 {
			t.Error("none was taken")
		}
	}},
	// A sandbox that was stopped in the middle of its own start loses nothing, nor later.
	{name: "SnapshotsOfTheYoung", needs: []Feature{Snapshot, Exec}, slow: true, run: func(t *testing.T, h Harness) {
		var all sync.WaitGroup
		for range 6 {
			s := create(t, h)
			for range 3 {
				snapshot(t, s)
			}
			all.Go(func() {
				time.Sleep(7 * time.Second) // what was lost is missed by the timers of the agent
				r, err := Shell(testContext(t), s, "echo hi")
				status, _ := s.Status(testContext(t))
				if err != nil || r.Output != "hi\n" || status.Agent != 1 {
					t.Errorf("%+v, %v, %+v", r, err, status)
				}
			})
		}
		all.Wait()
	}},
	{name: "KillDuringSnapshot", needs: []Feature{Snapshot, Exec}, run: func(t *testing.T, h Harness) {
		for i := range 6 {
			s := create(t, h)
			sh(t, s, "dd if=/dev/zero of=/big bs=1048576 count=24 2>/dev/null")
			done := make(chan error, 1)
			dir := t.TempDir()
			go func() {
				_, err := s.Snapshot(testContext(t), dir, false)
				done <- err
			}()
			time.Sleep(time.Duration(i*i) * time.Millisecond)
			kill(t, s)
			if err := <-done; err != nil && berm.KindOf(err) != berm.NotFound {
				t.Errorf("a snapshot that was cut: %v", err)
			}
		}
	}},
	{name: "SnapshotDuringWrites", needs: []Feature{Snapshot, Exec}, slow: true, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		// What is torn or missing shows in the product beside each number.
		begin(t, s, `i=0; while :; do i=$((i+1)); echo "$i $((i * 7919))" >>/log; echo $i >/last.new; mv /last.new /last; done`)
		eventually(t, patience, func() error {
			if r, err := Shell(testContext(t), s, "test -e /last"); err != nil || r.Code != 0 {
				return fmt.Errorf("%+v, %w", r, err)
			}
			return nil
		})
		for i := range 10 {
			child := create(t, h, from(snapshot(t, s)))
			if got := sh(t, child, `awk -v last="$(cat /last)" '$1 != NR || $2 != NR * 7919 { bad = 1; print "line " NR ": " $0; exit }
				END { if (!bad) print (NR - last <= 1 && last <= NR) ? "whole" : NR " lines, last " last }' /log`); got != "whole" {
				t.Errorf("snapshot %d: %s", i, got)
			}
			kill(t, child)
		}
	}},
	{name: "PauseToFilesAHundredTimes", needs: []Feature{Snapshot, Exec, Freeze}, slow: true, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		for i := range 100 {
			sh(t, s, fmt.Sprintf("echo %d >>/log && head -c %d /dev/urandom >/d%d && sha256sum /d%d >>/sums", i, 1+i*997, i%7, i%7))
			if err := s.Pause(testContext(t)); err != nil {
				t.Fatal(err)
			}
			dir := snapshot(t, s)
			kill(t, s)
			s = create(t, h, from(dir), func(spec *berm.Spec) { spec.ID = s.ID() })
			if got := sh(t, s, "wc -l </log; tail -n 1 /log; tail -n 1 /sums | sha256sum -c >/dev/null && echo ok"); got != fmt.Sprintf("%d\n%d\nok", i+1, i) {
				t.Fatalf("cycle %d: %q", i, got)
			}
		}
	}},
}

// sharesLine says whether two texts have a line in common.
func sharesLine(a, b string) bool {
	for line := range strings.Lines(a) {
		if strings.Contains(b, strings.TrimSpace(line)) {
			return true
		}
	}
	return false
}
