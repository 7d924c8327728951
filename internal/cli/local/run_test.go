package local

import (
	"testing"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/local"
	"github.com/berm-sandbox/berm/internal/local/preset"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

// What is denied is explained, or the flag that lets it through is named.
func TestRemedy(t *testing.T) {
	for _, test := range []struct {
		event egress.Event
		allow string
		want  string
	}{
		{egress.Event{Reason: "not_listed", Detail: "Denied (not_listed): …"}, "", "; --allow a.example:80 lets it through"},
		{egress.Event{Reason: "not_listed", Protocol: "udp", Detail: "Denied (not_listed): 9.8.7.6:53/udp is not in the policy. This rule would allow it:\n  - {to: [\"9.8.7.6\"], proto: udp}"}, "", "; a policy with the rule {to: [\"9.8.7.6\"], proto: udp} lets it through (--policy FILE)"},
		{egress.Event{Reason: "port"}, "", "; --allow a.example:80 lets it through"},
		{egress.Event{Reason: "dns_private_answer", Detail: "Denied (dns_private_answer): a.example:80 cannot be reached: it has no public address.\n  more"}, "", ": a.example:80 cannot be reached: it has no public address."},
		{egress.Event{Reason: "dns_private_answer", Name: "a.example", Port: 80, Detail: "Denied (dns_private_answer): a.example:80 cannot be reached: its address 10.1.2.3 is not public: a rule must name the host, and the operator must open the address."}, "", ": its address 10.1.2.3 is not public; --allow a.example:80 with --open 10.1.2.3 lets it through"},
		{egress.Event{Reason: "dns_private_answer", Name: "a.example", Port: 80, Detail: "Denied (dns_private_answer): a.example:80 cannot be reached: its address 10.1.2.3 is not public: …"}, "a.example", ": its address 10.1.2.3 is not public; --open 10.1.2.3 lets it through"},
		{egress.Event{Reason: "host", Address: "192.0.2.2"}, "a.example:80", ": 192.0.2.2 is closed whatever is allowed; --open 192.0.2.2 lets it through"},
		{egress.Event{Reason: "host", Address: "192.0.2.2"}, "", ": 192.0.2.2 is closed whatever is allowed; --allow a.example:80 with --open 192.0.2.2 lets it through"},
		{egress.Event{Reason: "private", Address: "fd00::2"}, "", ": fd00::2 is closed whatever is allowed; --allow a.example:80 with --open fd00::2 lets it through"},
		{egress.Event{Reason: "private", Detail: "Denied (private): a.example:80 is in a private network. No policy can allow it."}, "", ": a.example:80 is in a private network. No policy can allow it."},
		{egress.Event{Reason: "limit"}, "", ""},
	} {
		if got := remedy(test.event, "a.example:80", []string{test.allow}); got != test.want {
			t.Errorf("%+v: %q, not %q", test.event, got, test.want)
		}
	}
}

// Only a command that failed by itself, and has no network, is told how it gets one.
func TestOffline(t *testing.T) {
	failed := local.Outcome{ExitCode: 1, Reason: berm.ReasonExit, Started: true}
	succeeded, absent, late := failed, failed, failed
	succeeded.ExitCode, absent.Started, late.Reason = 0, false, berm.ReasonTimeout
	for _, test := range []struct {
		outcome local.Outcome
		rights  preset.Rights
		want    bool
	}{
		{failed, preset.Rights{}, true},
		{succeeded, preset.Rights{}, false},
		{absent, preset.Rights{}, false},
		{late, preset.Rights{}, false},
		{failed, preset.Rights{Allow: []string{"a.example"}}, false},
		{failed, preset.Rights{Network: preset.NetworkHost}, false},
	} {
		f := runFlags{task: local.Task{Dir: t.TempDir(), Environ: []string{"HOME=" + t.TempDir(), "PATH=/usr/bin:/bin"}, Argv: []string{"false"}, Rights: test.rights}}
		if got := f.offline(local.Result{Outcome: test.outcome}); got != test.want {
			t.Errorf("%+v with %+v: %v", test.outcome, test.rights, got)
		}
	}
}
