package berm

import (
	"errors"
	"fmt"
)

// Kind is the class of an error. The list is closed: protocols map kinds to
// their own codes at the edge, and nowhere else.
type Kind int

// The kinds of errors.
const (
	Internal      Kind = iota // a fault of ours or of the host
	NotFound                  // no such thing, or not any more
	AlreadyExists             // the name is taken
	Invalid                   // the request is wrong and stays wrong
	Denied                    // policy or missing rights forbid it
	Conflict                  // not in this state; may work after a change
	Exhausted                 // a quota or a resource is used up
	Unavailable               // not now; try again
	Unsupported               // this host, level or version cannot do it
)

var kindNames = [...]string{"internal", "not found", "already exists", "invalid", "denied", "conflict", "exhausted", "unavailable", "unsupported"}

func (k Kind) String() string {
	if k < 0 || int(k) >= len(kindNames) {
		return fmt.Sprintf("kind %d", int(k))
	}
	return kindNames[k]
}

// Error is an error with a kind, a cause and, where a person can do something
// about it, a hint that says what.
type Error struct {
	Kind Kind
	Msg  string // says what failed, the cause included, without the kind
	Hint string // says what to do; may be empty
	Err  error  // the cause; may be nil
}

func (e *Error) Error() string { return e.Msg }

func (e *Error) Unwrap() error { return e.Err }

// Errorf makes an Error of a kind. A %w verb sets the cause.
func Errorf(kind Kind, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Kind: kind, Msg: err.Error(), Err: errors.Unwrap(err)}
}

// WithHint sets what a person can do about the error and returns it.
func (e *Error) WithHint(format string, args ...any) *Error {
	e.Hint = fmt.Sprintf(format, args...)
	return e
}

// KindOf returns the kind of the first Error in err's chain, and Internal when
// there is none.
func KindOf(err error) Kind {
	var e *Error
	if errors.As(err, &e) {
		return e.Kind
	}
	return Internal
}

// HintOf returns the first hint in err's chain, or "".
func HintOf(err error) string {
	for e := (*Error)(nil); errors.As(err, &e); err = e.Err {
		if e.Hint != "" {
			return e.Hint
		}
		if e.Err == nil {
			break
		}
	}
	return ""
}

// Is makes errors.Is(err, &Error{Kind: k}) match by kind alone.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Msg == "" && t.Err == nil && t.Kind == e.Kind
}
