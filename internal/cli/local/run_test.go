package local

import (
	"testing"

	"github.com/berm-sandbox/berm/internal/network/egress"
)

// What is denied is explained, or the flag that lets it through is named.
func TestRemedy(t *testing.T) {
	for _, test := range []struct {
		event egress.Event
		want  string
	}{
		{egress.Event{Reason: "not_listed", Detail: "Denied (not_listed): …"}, "; --allow a.example:80 lets it through"},
		{egress.Event{Reason: "port"}, "; --allow a.example:80 lets it through"},
		{egress.Event{Reason: "dns_private_answer", Detail: "Denied (dns_private_answer): a.example:80 cannot be reached: it has no public address.\n  more"}, ": a.example:80 cannot be reached: it has no public address."},
		{egress.Event{Reason: "host", Address: "192.0.2.2"}, ": 192.0.2.2 is closed whatever is allowed; --open 192.0.2.2/32 opens it"},
		{egress.Event{Reason: "private", Address: "fd00::2"}, ": fd00::2 is closed whatever is allowed; --open fd00::2/128 opens it"},
		{egress.Event{Reason: "private", Detail: "Denied (private): a.example:80 is in a private network. No policy can allow it."}, ": a.example:80 is in a private network. No policy can allow it."},
		{egress.Event{Reason: "limit"}, ""},
	} {
		if got := remedy(test.event, "a.example:80"); got != test.want {
			t.Errorf("%+v: %q, not %q", test.event, got, test.want)
		}
	}
}
