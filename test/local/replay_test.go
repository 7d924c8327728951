package local

import (
	"strings"
	"testing"
)

// A replay tells what changed, also when nothing did, and never that nothing happened where nobody looked.
func TestReplay(t *testing.T) {
	each(t, func(p *person) {
		tells := func(want string, args ...string) {
			p.Helper()
			p.sh(args[0], args[1:]...).exits(0)
			if r := p.berm("replay").exits(0); !strings.Contains(r.stdout, want) || strings.Contains(r.stdout, "nothing was tried") {
				p.Errorf("%q:\n%v", want, r)
			}
		}
		tells("0 added, 0 changed, 0 deleted, seen at", "true")
		file := p.path("project/new")
		tells("add     "+file+" (2 bytes)", "echo 1 > new")
		if r := p.berm("audit", "--local", "--path", file).exits(0); strings.Count(r.stdout, "fs.change") != 1 {
			p.Errorf("who changed %s: %v", file, r)
		}
		tells("it wrote straight into the project", "echo 1 > new", "--rw", ".")
		tells("it had no network", "true")
		tells("it had the network of this machine", "true", "--network", "host")
	})
}
