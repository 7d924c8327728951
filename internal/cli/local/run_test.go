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
		{egress.Event{Reason: "dns_private_answer", Name: "a.example", Port: 80, Detail: "Denied (dns_private_answer): a.example:80 cannot be reached: its address 10.1.2.3 is not public: a rule must name the host, and the operator must open the address."}, ": its address 10.1.2.3 is not public; --allow a.example:80 with --open 10.1.2.3 lets it through"},
		{egress.Event{Reason: "host", Address: "192.0.2.2"}, ": 192.0.2.2 is closed whatever is allowed; --allow a.example:80 with --open 192.0.2.2 lets it through"},
		{egress.Event{Reason: "private", Address: "fd00::2"}, ": fd00::2 is closed whatever is allowed; --allow a.example:80 with --open fd00::2 lets it through"},
		{egress.Event{Reason: "private", Detail: "Denied (private): a.example:80 is in a private network. No policy can allow it."}, ": a.example:80 is in a private network. No policy can allow it."},
		{egress.Event{Reason: "limit"}, ""},
	} {
		if got := remedy(test.event, "a.example:80"); got != test.want {
			t.Errorf("%+v: %q, not %q", test.event, got, test.want)
		}
	}
}
