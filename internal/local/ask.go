package local

import (
	"context"
	"time"

	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/local/asking"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

// replyTime bounds how long a service may take to take an answer.
const replyTime = 10 * time.Second

// openDoor lets somebody answer what the policy's rules ask, in another terminal. The
// services get each answer; the one that holds credentials first, for the other passes flows
// on to it as soon as it has it.
func (o *online) openDoor(r *Request, services ...*egress.Link) (*asking.Door, error) {
	door, err := asking.Open(asking.Run{Sandbox: r.ID, Command: r.Told, Project: r.Place.Workspace}, func(reply egress.Reply) error {
		ctx, cancel := context.WithTimeout(o.ctx, replyTime)
		defer cancel()
		o.journal.add(o.journal.record(audit.NetAsk, audit.OK, "", reply), false)
		for _, service := range services {
			if err := service.Reply(ctx, reply); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil {
		o.task.Notice("the policy has rules that ask: `berm net ask` in another terminal answers them; what nobody answers is denied")
	}
	return door, err
}
