package control

import (
	"context"
	"maps"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

// Asker says whether flows may pass that rules leave to somebody.
type Asker interface {
	// Ask asks about an event of the kind egress.Asks; an error is no answer.
	Ask(ctx context.Context, id berm.SandboxID, metadata map[string]string, e egress.Event) (egress.Reply, error)
}

// replyTime bounds how long a service may take to take an answer.
const replyTime = 10 * time.Second

// asked has a question of the network service answered. What nobody answers is denied at
// once, and asked again when the sandbox tries again.
func (s *session) asked(e egress.Event) {
	ctx, cancel := context.WithCancel(s.m.ctx)
	defer cancel()
	go func() {
		select {
		case <-s.online.over:
			cancel()
		case <-ctx.Done():
		}
	}()
	info := s.snapshot()
	var reply egress.Reply
	var err error
	if s.m.Egress.Asker == nil {
		err = berm.Errorf(berm.Unsupported, "this server has nobody to ask")
	} else {
		reply, err = s.m.Egress.Asker.Ask(ctx, info.ID, maps.Clone(info.Metadata), e)
	}
	record := audit.Record{Sandbox: info.ID, Actor: system, Type: audit.NetAsk, Src: "control", Trust: audit.TrustHost, Outcome: audit.OK, PolicyID: e.Revision}
	if err != nil {
		reply = egress.Reply{Question: e.Question()}
		record.Outcome, record.Reason = audit.Failed, err.Error()
		s.m.Log.Warn("a question of a network policy has no answer", "sandbox", info.ID, "host", reply.Question.Host, "error", err)
	}
	record.Data = reply
	if err := s.m.Audit.Emit(record); err != nil {
		s.m.Log.Error("audit record lost", "sandbox", info.ID, "type", record.Type, "error", err)
	}
	sending, done := context.WithTimeout(ctx, replyTime)
	defer done()
	// The one that holds credentials first: the other passes flows on to it as soon as it has
	// the answer.
	link, broker := s.online.links()
	for _, l := range []Link{broker, link} {
		if l == nil {
			continue
		}
		if err := l.Reply(sending, reply); err != nil {
			if !s.isOver() {
				s.m.Log.Warn("an answer to a question of a network policy was not taken", "sandbox", info.ID, "error", err)
			}
			return
		}
	}
}
