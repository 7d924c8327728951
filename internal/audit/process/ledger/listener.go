package ledger

import (
	"syscall"

	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/kernel/notify"
)

// Heard records what a listener tells of a process, and closes its file. hurry is that of
// Hashes.Sum.
func (l *Ledger) Heard(e notify.Event, hashes *Hashes, hurry func() bool) {
	if e.File != nil {
		defer e.File.Close()
	}
	p := audit.Process{PID: e.PID, PPID: e.Parent, Host: e.Host, UID: e.UID, Ago: Ago(e.At)}
	if e.Exit {
		if e.Known {
			Ended(&p, syscall.WaitStatus(e.Status))
		}
		l.Take(audit.ProcExit, p, nil)
		return
	}
	p.Exe, p.Asked = e.Exe, e.Asked
	l.Take(audit.ProcExec, p, func(p *audit.Process) {
		p.Cwd = audit.Shorten(e.Cwd, 1024)
		Args(p, e.Argv, e.Cut)
		v := Version(e.Version)
		if p.SHA256 = hashes.Known(v); p.SHA256 == "" && e.File != nil {
			p.SHA256 = hashes.Sum(e.File, v, hurry)
		}
	})
}
