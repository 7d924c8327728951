package launch

import (
	"os"
	"runtime"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cleanup"
	"github.com/berm-sandbox/berm/internal/driver/namespace/plan"
	"github.com/berm-sandbox/berm/internal/kernel/cgroup"
)

// Remove deletes what a sandbox left in a directory, as the ids that it had: an ordinary
// user may not delete what belongs to the own subordinate ids. init is the executable.
func Remove(init *os.File, ids IDs, dir string) error {
	// The parent death signal of init comes with the end of this thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s := &Sandbox{order: Order{IDs: ids, Trees: []Tree{{Upper: true}}, Upper: Upper{Directory: dir}}, init: int(init.Fd()), group: &cgroup.Group{}}
	cu := cleanup.Make(s.close)
	defer cu.Clean()
	if err := s.spawn(); err != nil {
		return err
	}
	cu.Add(func() { s.Kill(); s.reap() })
	if err := s.enterAsUser(); err != nil {
		return err
	}
	if err := s.send(plan.Remove, nil, nil); err != nil {
		return err
	}
	ended := make(chan struct{})
	s.listen(ended)
	cu.Release()
	defer s.close()
	if status := s.reap(); status.ExitStatus() != 0 {
		return berm.Errorf(berm.Internal, "delete the files of a sandbox: %s", s.failure)
	}
	return nil
}
