package launch

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm/internal/driver/namespace/plan"
)

// What init said before it left is known, whether or not it read what was sent to it.
func TestReasonOfInit(t *testing.T) {
	for _, unread := range []bool{false, true} {
		s := &Sandbox{}
		theirs, err := s.connect(false)
		if err != nil {
			t.Fatal(err)
		}
		defer s.control.Close()
		if unread {
			if err := s.send(plan.Signal, []byte{1}, nil); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := theirs.Write(append([]byte{plan.Failed}, "clone /x: operation not permitted"...)); err != nil {
			t.Fatal(err)
		}
		theirs.Close()
		if unread {
			if told := s.follow(Command{}); told.Detail != "clone /x: operation not permitted" {
				t.Errorf("%+v", told)
			}
			continue
		}
		if err = s.send(plan.SetUp, []byte("plan"), nil); err == nil {
			t.Fatal("sent to nobody")
		}
		var refusal *Refusal
		if err := s.why(err); !errors.As(err, &refusal) || refusal.Step != "clone /x" || refusal.Errno != unix.EPERM {
			t.Error(err)
		}
	}
}
