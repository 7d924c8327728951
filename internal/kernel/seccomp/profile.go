// Package seccomp is the system call allowlists of sandboxes, and of the services beside
// them, as code.
package seccomp

import (
	"maps"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

//go:generate go run gen.go

// A call is one system call and its numbers.
type call struct {
	name         string
	amd64, arm64 int16
}

// number returns the call's number on arch, or -1.
func (c call) number(arch string) int {
	if arch == "arm64" {
		return int(c.arm64)
	}
	return int(c.amd64)
}

// Number is a system call's number on this machine.
func Number(name string) (int, bool) {
	i := slices.IndexFunc(calls, func(c call) bool { return c.name == name })
	if i < 0 {
		return 0, false
	}
	n := calls[i].number(runtime.GOARCH)
	return n, n >= 0
}

// A Profile says what a sandbox may ask of the kernel. A call that it does not list
// fails with ENOSYS, as on a kernel without it; so do all calls of foreign ABIs
// (i386 and x32 on amd64, arm on arm64). In the profiles of Berm's own services such
// calls end the process.
type Profile struct {
	name     string
	policies map[string]policy // by call
	unlisted action            // for calls that are not listed, and for those of foreign ABIs
}

// Default is the profile for development work: compilers, interpreters, package
// managers, debuggers of the sandbox's own processes, nested filters.
const Default = "default"

// Strict is Default without debuggers, asynchronous and zero-copy I/O, System V and
// POSIX IPC, personalities and nested filters.
const Strict = "strict"

// Profiles names the profiles, the default first.
func Profiles() []string { return []string{Default, Strict} }

// Lookup returns a profile by name; "" is the default. It fails with Invalid when
// there is none of that name.
func Lookup(name string) (Profile, error) {
	if name == "" {
		name = Default
	}
	p := Profile{name, map[string]policy{}, fail(unix.ENOSYS)}
	for _, c := range strings.Fields(allowed) {
		p.policies[c] = allow
	}
	for _, c := range strings.Fields(denied) {
		p.policies[c] = fail(eperm)
	}
	for c, part := range partials {
		p.policies[c] = part
	}
	switch name {
	case Default:
	case Strict:
		for _, c := range strings.Fields(notStrict) {
			p.policies[c] = fail(eperm)
		}
	default:
		return Profile{}, berm.Errorf(berm.Invalid, "unknown seccomp profile %q", name).
			WithHint("the profiles are %s", strings.Join(Profiles(), ", "))
	}
	return p, nil
}

// Name is the profile's name.
func (p Profile) Name() string { return p.name }

// Describe lists the profile for people. Calls that one of the architectures lacks
// are listed all the same.
func (p Profile) Describe() berm.Seccomp {
	d := berm.Seccomp{Profile: p.name, Default: "ENOSYS"}
	var refused []string
	for _, c := range slices.Sorted(maps.Keys(p.policies)) {
		switch policy := p.policies[c].(type) {
		case partial:
			d.Rules = append(d.Rules, c+": "+policy.text)
		case action:
			if policy == allow {
				d.Allowed = append(d.Allowed, c)
			} else {
				refused = append(refused, c)
			}
		}
	}
	d.Rules = append(d.Rules,
		"EPERM: "+strings.Join(refused, " "),
		"other ABIs of this machine: ENOSYS")
	return d
}
