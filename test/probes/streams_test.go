package probes

import (
	"os"
	"strings"
	"testing"
)

// reopen opens the standard streams again, for more than they were given for, and looks at
// what is beside them.
const reopen = `import os
for fd, flags in ((0, os.O_RDWR), (1, os.O_RDWR), (0, os.O_WRONLY | os.O_TRUNC)):
    try:
        again = os.open(f"/proc/self/fd/{fd}", flags)
        print("reopened", fd, os.pread(again, 100, 0) if flags == os.O_RDWR else "")
    except OSError as e:
        print("refused", fd, e.strerror)
for path in ("/proc/self/fd/0/..", "/proc/self/fd/0/../secret", "/proc/self/fd/1/../secret"):
    for look in (os.listdir, open):
        try:
            print("BESIDE", look(path))
        except OSError:
            pass
`

// A standard stream is a file that the caller gave: whoever may write the file can open it
// again for writing, though it was given for reading, and that is an ordinary user's
// command, which has the user's id. Nothing beside the file is reached through it.
func TestStreams(t *testing.T) {
	v, j := newLocal(t)
	v.each(t, false, func(t *testing.T, a *account) {
		a.write("streams/in", "input\n")
		a.write("streams/secret", j.token("a file beside a stream"))
		a.write("streams/out", "")
		open := func(name string, flags int) *os.File {
			f, err := os.OpenFile(a.dir+name, flags, 0)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { f.Close() })
			return f
		}
		in, out, dir := open("/streams/in", os.O_RDONLY), open("/streams/out", os.O_WRONLY|os.O_APPEND), open("", os.O_RDONLY)
		before := v.files()
		cmd := a.command("run", "-q", "--", "python3", "-c", reopen)
		cmd.Stdin, cmd.Stdout = in, out
		if err := cmd.Run(); err != nil {
			t.Fatal(err)
		}
		text, _ := os.ReadFile(a.dir + "/streams/out")
		output := string(text)
		if strings.Contains(output, "BESIDE") {
			t.Error(output)
		}
		j.leaks(t, v, before, output, a.dir+"/streams/in", a.dir+"/streams/out")
		content, _ := os.ReadFile(a.dir + "/streams/in")
		if written := len(content) == 0; written != (a.uid != 0) {
			t.Errorf("uid %d: the input is %q: the README is wrong\n%s", a.uid, content, output)
		}

		// A directory leads out, so it is refused.
		cmd = a.command("run", "--", "true")
		cmd.Stdin = dir
		if err := cmd.Run(); err == nil || cmd.ProcessState.ExitCode() != 125 {
			t.Errorf("a directory as standard input: %v", err)
		}

		// What the caller has open by accident is not passed on.
		cmd = a.command("run", "-q", "--", "sh", "-c", "ls -l /proc/self/fd/ /proc/self/fd/*/; cat <&5")
		cmd.ExtraFiles = []*os.File{dir, dir, open("/streams/secret", os.O_RDONLY)}
		text, _ = cmd.CombinedOutput()
		j.leaks(t, v, before, string(text), a.dir+"/streams/in", a.dir+"/streams/out")
		if strings.Contains(string(text), "streams") {
			t.Errorf("descriptors are passed on: %s", text)
		}
	})
}
