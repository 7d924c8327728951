package feature

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/berm-sandbox/berm"
)

// What changes a process for ever, or needs fresh namespaces, is tried in a child: the
// running program starts itself again under this name. Any program that links the
// package can be such a child, hence the init function.
const childName = "berm-feature"

// roles are what a child can try. They return a detail.
var roles = map[string]func(args []string) (string, error){
	"again":      tryAgain,
	"rights":     tryRights,
	"proc":       tryProc,
	"wait":       tryWait,
	"mounts":     tryMounts,
	"overlay":    tryOverlay,
	"attributes": tryAttributes,
	"seccomp":    trySeccomp,
	"link":       tryLink,
	"kvm":        tryKvm,
}

// answer is what a child writes to its standard output.
type answer struct {
	Detail string    `json:"detail,omitempty"`
	Error  string    `json:"error,omitempty"`
	Hint   string    `json:"hint,omitempty"`
	Kind   berm.Kind `json:"kind,omitempty"`
}

func init() {
	if os.Args[0] != childName || len(os.Args) < 2 {
		return
	}
	role, ok := roles[os.Args[1]]
	if !ok {
		os.Exit(2)
	}
	var a answer
	var err error
	if a.Detail, err = role(os.Args[2:]); err != nil {
		a.Error, a.Hint, a.Kind = err.Error(), berm.HintOf(err), berm.KindOf(err)
	}
	if json.NewEncoder(os.Stdout).Encode(a) != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

// child tries a role in a child process. It fails with what the child found; with
// Denied or Unsupported when the child cannot be made as attr wants it.
func child(ctx context.Context, attr *syscall.SysProcAttr, role string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Args = append([]string{childName, role}, args...)
	cmd.SysProcAttr = attr
	cmd.WaitDelay = time.Second
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	switch err := cmd.Run(); {
	case ctx.Err() != nil:
		return "", berm.Errorf(berm.Internal, "took too long")
	case err != nil && cmd.Process == nil:
		return "", failed(err, "start a process")
	case err != nil:
		return "", berm.Errorf(berm.Internal, "the trying process ended: %w: %s", err, strings.TrimSpace(errs.String()))
	}
	var a answer
	if err := json.Unmarshal(out.Bytes(), &a); err != nil {
		return "", berm.Errorf(berm.Internal, "the trying process answered %q", out.String())
	}
	if a.Error != "" {
		e := berm.Errorf(a.Kind, "%s", a.Error)
		e.Hint = a.Hint
		return a.Detail, e
	}
	return a.Detail, nil
}
