package drivertest

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// wallCases look at the wall from inside. The escape corpus has its own place; these
// are what every change to a driver must not lose.
var wallCases = []testCase{
	{name: "OwnFiles", needs: []Feature{Exec}, run: func(t *testing.T, h Harness) {
		canary := t.TempDir() + "/canary"
		if err := os.WriteFile(canary, []byte("canary of the host"), 0o644); err != nil {
			t.Fatal(err)
		}
		s := create(t, h)
		out := sh(t, s, "cat "+canary+" /proc/*/root"+canary+" 2>/dev/null; cd /; cd ../../..; cat ."+canary+" 2>/dev/null; ls /proc/self/fd; true")
		if strings.Contains(out, "canary of the host") {
			t.Error("a file of the host was read")
		}
	}},
	{name: "OwnDescriptors", run: func(t *testing.T, h Harness) {
		// Whoever started this process let it inherit something, as shells and service managers do.
		var pipe [2]int
		if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = unix.Close(pipe[0]) }()
		defer func() { _ = unix.Close(pipe[1]) }()
		inherited, err := unix.FcntlInt(uintptr(pipe[1]), unix.F_DUPFD, 200)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = unix.Close(inherited) }()
		link, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", inherited))
		if err != nil {
			t.Fatal(err)
		}
		h.Driver = h.Reopen(t) // no monitor was started before
		create(t, h)
		names, err := filepath.Glob("/proc/[0-9]*/fd/*") // those that this user may look at
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			pid := strings.Split(name, "/")[2]
			if got, err := os.Readlink(name); err != nil || got != link || pid == strconv.Itoa(os.Getpid()) {
				continue
			}
			if who, _ := os.ReadFile("/proc/" + pid + "/comm"); string(who) != "berm-monitor\n" {
				t.Errorf("%s has a descriptor of the host's", strings.TrimSpace(string(who)))
			}
		}
	}},
	{name: "FewDevices", needs: []Feature{Exec}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		devices := "mem kmem port kvm loop0 loop-control vda sda mapper"
		if _, own := h.Missing[Kernel]; !own { // those of another kernel are not the host's
			devices += " fuse net"
		}
		for dir := range strings.SplitSeq(devices, " ") {
			if r, err := Shell(testContext(t), s, "ls /dev/"+dir); err == nil && r.Code == 0 {
				t.Errorf("/dev/%s exists", dir)
			}
		}
	}},
	{name: "NothingOfTheHostShows", needs: []Feature{Exec}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		for _, dir := range h.Scope.Dirs {
			out := sh(t, s, "cat /proc/self/mountinfo /proc/mounts /proc/self/maps /proc/*/cmdline /proc/*/environ /proc/net/unix /proc/self/cgroup 2>/dev/null; true")
			if strings.Contains(out, dir) {
				t.Errorf("the path %s shows inside", dir)
			}
		}
		own, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
		if err != nil {
			t.Fatal(err)
		}
		if out := sh(t, s, "cat /proc/sys/kernel/random/boot_id"); len(out) != 36 || out == strings.TrimSpace(string(own)) {
			t.Errorf("boot id %q", out)
		}
		if out := sh(t, s, "cat /proc/1/comm"); out != "init" {
			t.Errorf("process 1 is listed as %q", out)
		}
		if out := sh(t, s, "hostname; cat /etc/hostname"); out != "box\nbox" {
			t.Errorf("host name %q", out)
		}
		if out := sh(t, s, "cat /etc/machine-id"); len(out) != 32 {
			t.Errorf("machine id %q", out)
		}
	}},
	{name: "HostSecretsCannotBeRead", needs: []Feature{Exec, Kernel}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		for _, path := range strings.Fields("/proc/kcore /proc/keys /proc/kmsg /proc/kallsyms /proc/timer_list /proc/sysrq-trigger") {
			if r, err := Shell(testContext(t), s, "head -c 1 "+path); err != nil || r.Code == 0 {
				t.Errorf("%s can be read: %+v, %v", path, r, err)
			}
		}
	}},
	{name: "HostSettingsCannotBeWritten", needs: []Feature{Exec, Kernel}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		for _, path := range strings.Fields("/proc/sys/kernel/core_pattern /proc/sys/kernel/modprobe /proc/sysrq-trigger /proc/irq/default_smp_affinity /proc/sys/net/ipv4/ip_forward /sys/x /sys/devices/system/cpu/online") {
			// What is written is what is there, should it get through.
			r, err := Shell(testContext(t), s, fmt.Sprintf("cat %[1]s >/tmp/v 2>/dev/null; cat /tmp/v >%[1]s", path))
			if err != nil || r.Code == 0 {
				t.Errorf("%s: %+v, %v", path, r, err)
			}
		}
	}},
	{name: "FewRights", needs: []Feature{Exec}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		status := sh(t, s, "cat /proc/self/status")
		lines := []string{"CapInh:\t0000000000000000", "CapPrm:\t00000000000004fb", "CapEff:\t00000000000004fb", "CapBnd:\t00000000000004fb", "CapAmb:\t0000000000000000"}
		scripts := []string{
			"mount -t tmpfs x /tmp", "mount --bind / /tmp", "mknod /tmp/b b 8 0", "mknod /tmp/c c 1 1",
			"chroot /tmp /bin/true", "nsenter -t 1 -m true", "hostname other", "readlink /proc/1/fd/3",
			"ls /proc/1/root/", "cat /proc/1/environ", ">/proc/1/exe", ">/proc/1/mem",
		}
		if _, own := h.Missing[Kernel]; !own {
			lines = append(lines, "NoNewPrivs:\t1", "Seccomp:\t2")
			scripts = append(scripts, "unshare -r true", "dmesg")
		}
		for _, line := range lines {
			if !strings.Contains(status, line+"\n") {
				t.Errorf("no %q in\n%s", line, status)
			}
		}
		for _, script := range scripts {
			if r, err := Shell(testContext(t), s, script); err != nil || r.Code == 0 {
				t.Errorf("%s: %+v, %v", script, r, err)
			}
		}
		if out := sh(t, s, "ulimit -c; ls -d /proc/[0-9]* | wc -l"); !strings.HasPrefix(out, "0\n") {
			t.Errorf("core size and processes %q", out)
		}
		if out := sh(t, s, "ls /proc/self/fd | wc -l"); out != "4" { // 0, 1, 2 and the directory
			t.Errorf("%s descriptors are open", out)
		}
	}},
	{name: "SignalsDoNotEndInit", needs: []Feature{Exec, Kernel}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		// Its runtime handles SIGURG (23): others come while it does so, and while it starts
		// the agent.
		sh(t, s, "for k in 1 2 3; do for n in $(seq 1 64); do kill -23 1; kill -$n 1; done; done; sleep 0.3")
		if out := sh(t, s, "grep SigIgn /proc/$PPID/status"); out != "SigIgn:\t0000000000000000" {
			t.Errorf("of init's signals the agent has %q", out)
		}
	}},
	{name: "NoNetwork", needs: []Feature{Exec}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		if out := sh(t, s, "tail -n +3 /proc/net/dev | cut -d: -f1"); out != "lo" {
			t.Errorf("interfaces %q", out)
		}
		if r, err := Shell(testContext(t), s, "nc -w 1 192.0.2.1 80 </dev/null"); err != nil || r.Code == 0 {
			t.Errorf("%+v, %v", r, err)
		}
	}},
	{name: "TwoSandboxesApart", needs: []Feature{Exec, Ports}, run: func(t *testing.T, h Harness) {
		a, b := create(t, h), create(t, h)
		sh(t, a, "echo of a >/tmp/mark; echo of a >/etc/passwd.mark; echo of a >/dev/shm/mark")
		begin(t, a, "httpd -f -p 8080 -h /tmp")
		eventually(t, patience, func() error {
			conn, err := a.Dial(testContext(t), 8080)
			if err == nil {
				conn.Close()
			}
			return err
		})
		if r, err := Shell(testContext(t), b, "cat /tmp/mark /etc/passwd.mark /dev/shm/mark"); err != nil || strings.Contains(r.Output, "of a") {
			t.Errorf("files of the other: %+v, %v", r, err)
		}
		_, err := b.Dial(testContext(t), 8080)
		want(t, err, berm.Unavailable)
		id := func(s berm.Sandbox) string {
			return sh(t, s, "cat /etc/machine-id /proc/sys/kernel/random/boot_id")
		}
		if id(a) == id(b) {
			t.Error("both have the same identity")
		}
	}},
	{name: "Users", needs: []Feature{Exec, Users}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		if out := sh(t, s, "echo x >/tmp/f; chown 1000:1000 /tmp/f; stat -c %u:%g /tmp/f /; su user -c 'id -u; echo y >/tmp/f; cat /tmp/f'"); out != "1000:1000\n0:0\n1000\ny" {
			t.Errorf("%q", out)
		}
	}},
	{name: "LayersStayAsTheyAre", needs: []Feature{Exec}, run: func(t *testing.T, h Harness) {
		s := create(t, h)
		sh(t, s, "echo changed >>/etc/passwd; rm /etc/group; mv /home /house; mkdir /home; echo x >/bin/new")
		kill(t, s)
		next := create(t, h)
		if out := sh(t, next, "grep -c changed /etc/passwd; ls /etc/group /home; ls -d /house /bin/new 2>/dev/null; true"); strings.Contains(out, "house") || strings.Contains(out, "new") || !strings.Contains(out, "/etc/group") || !strings.HasPrefix(out, "0") {
			t.Errorf("%q", out)
		}
	}},
	{name: "SetuidOnlyWhereAsked", needs: []Feature{Exec, Users}, run: func(t *testing.T, h Harness) {
		filtered := "Seccomp:\t2"
		if _, own := h.Missing[Kernel]; own {
			filtered = "Seccomp:\t0" // the filter is around the whole kernel
		}
		for setuid, expect := range map[bool]string{false: "1000\nsu: ", true: "1000\n0\n"} {
			s := create(t, h, func(spec *berm.Spec) { spec.Setuid = setuid })
			out := sh(t, s, "cp /bin/busybox /tmp/su && chmod 4755 /tmp/su && su user -c 'id -u; /tmp/su root -c \"id -u\" 2>&1; grep -E \"^(CapEff|Seccomp:)\" /proc/self/status'")
			if !strings.HasPrefix(out, expect) || !strings.HasSuffix(out, filtered) || !strings.Contains(out, "CapEff:\t0000000000000000") {
				t.Errorf("set-uid programs allowed: %v: %q", setuid, out)
			}
		}
	}},
}
