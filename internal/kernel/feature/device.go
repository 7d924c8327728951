package feature

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"time"

	"github.com/berm-sandbox/berm"
)

// kvmLimit is how long the test guest may run, and kvmGood how long it runs where a
// virtual machine runs at the speed of the processor: 1 ms with a large margin.
const (
	kvmLimit = time.Second
	kvmGood  = 20 * time.Millisecond
)

// KVM is hardware virtualization, by the time that a small guest takes: nested in some
// machines it works, but interprets each instruction.
var KVM = &Test{
	Name: "/dev/kvm at full speed", Fix: "use a machine with hardware virtualization, and let this user open /dev/kvm",
	try: func(ctx context.Context) (string, error) {
		if _, err := os.Stat("/dev/kvm"); err != nil {
			return "", berm.Errorf(berm.Unsupported, "no /dev/kvm")
		}
		ctx, cancel := context.WithTimeout(ctx, kvmLimit)
		defer cancel()
		answer, err := child(ctx, nil, "kvm")
		if ctx.Err() != nil {
			return "", berm.Errorf(berm.Unsupported, "a guest of 200,000 instructions does not end within %v", kvmLimit)
		}
		if err != nil {
			return "", err
		}
		ns, err := strconv.ParseInt(answer, 10, 64)
		if err != nil {
			return "", berm.Errorf(berm.Internal, "the guest took %q", answer)
		}
		took := time.Duration(ns)
		detail := fmt.Sprintf("a guest of 200,000 instructions took %v", took.Round(10*time.Microsecond))
		if took > kvmGood {
			return "", berm.Errorf(berm.Unsupported, "%s: its instructions are interpreted", detail)
		}
		return detail, nil
	},
}

func tryKvm([]string) (string, error) {
	runtime.LockOSThread() // a virtual processor belongs to a thread
	took, err := runGuest()
	return strconv.FormatInt(took.Nanoseconds(), 10), err
}
