package credential

import (
	"time"

	"github.com/berm-sandbox/berm"
)

// Reason is why a request was refused, in one word for programs.
type Reason string

// The reasons.
const (
	Revoked    Reason = "credential_revoked"    // the sandbox or the binding is gone
	Expired    Reason = "credential_expired"    //
	Used       Reason = "credential_used"       // as often as it may be
	Insecure   Reason = "credential_insecure"   // not by TLS to the name
	Ambiguous  Reason = "credential_ambiguous"  // more than one fits
	Misuse     Reason = "credential_misuse"     // a placeholder where it does not belong
	Leak       Reason = "credential_leak"       // a secret comes from inside
	Slot       Reason = "credential_slot"       // the place for it is not as it should be
	Repository Reason = "git_repository"        // git: this one may not be written
	Ref        Reason = "git_ref"               // git: this branch or tag may not be written
	Protocol   Reason = "git_protocol"          // git: what is sent is not understood
	Unrecorded Reason = "credential_unrecorded" // its use could not be recorded
)

// Refusal is why a request does not go on. It is an error of kind Denied, and holds no
// secret.
type Refusal struct {
	Reason  Reason
	Binding string // may be empty
	Message string
	Hint    string

	told  bool           // it is reported
	owner berm.SandboxID // whose placeholder it was: not for the one that is refused
}

func (r *Refusal) Error() string { return r.Message }

func (r *Refusal) Unwrap() error {
	return &berm.Error{Kind: berm.Denied, Msg: r.Message, Hint: r.Hint}
}

func refuse(reason Reason, b *live, message, hint string) *Refusal {
	r := &Refusal{Reason: reason, Message: message, Hint: hint}
	if b != nil {
		r.Binding = b.ID
	}
	return r
}

// EventType says what an Event tells.
type EventType string

// The types of events.
const (
	Use     EventType = "credential.use"    // a request went on with a secret
	Deny    EventType = "credential.deny"   // it did not
	Misused EventType = "credential.misuse" // it did not: a placeholder was where it does not belong
	Leaked  EventType = "credential.leak"   // it did not: a secret came from inside, where none should be
	Echo    EventType = "credential.echo"   // a reply held a secret
)

// Event is one thing that happened with credentials. It holds no secret.
type Event struct {
	Time     time.Time
	Type     EventType
	Sandbox  berm.SandboxID
	Revision uint64
	Binding  string
	Name     string // the host
	Port     uint16
	Method   string // empty when it holds what must not be told
	Reason   Reason
	// Owner is the sandbox whose placeholder it was, when it was that of another.
	Owner berm.SandboxID
}
