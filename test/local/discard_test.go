package local

import (
	"os"
	"testing"
)

// A session can always be given up, whatever became of its project or of an apply.
func TestDiscardAfterAll(t *testing.T) {
	each(t, func(p *person) {
		const journal = ".local/state/berm/sessions/project-1/apply.json"
		p.sh("echo new > file").exits(0)
		p.write(journal, `{"Version":1,"Token":"A","Steps":[]}`)
		p.must(os.Rename(p.project, p.project+"-moved"))
		p.link("project", "project-moved")
		p.in("elsewhere").berm("discard", "project-1").exits(0).says("may be left")
		p.must(os.Remove(p.project))
		p.must(os.Rename(p.project+"-moved", p.project))

		p.sh("echo new > file").exits(0)
		p.write(".local/state/berm/sessions/project-2/apply.json", "damaged")
		p.berm("discard").exits(0).says("damaged")
		p.berm("sessions").exits(0).prints("")
	})
}
