package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/driver/namespace"
)

// Version is that of gvisor.dev/gvisor in go.mod, which `make runsc` builds. Another one is
// refused: what it takes and does is not what was tested.
const Version = "v0.0.0-20260701204157-69c2d17aea96"

// Program is the name of the executable.
const Program = "runsc"

// tryLimit bounds how long a platform may take to run a program: kvm hangs for ever on
// machines that emulate it.
const tryLimit = 20 * time.Second

// Platforms are the ways in which gVisor can get hold of system calls.
var Platforms = []string{"systrap", "ptrace", "kvm"}

// found is what a probe found.
type found struct {
	runsc    string
	platform string
	features []berm.Feature
	err      error // why the level cannot be had
}

// flags are those that runsc gets for a sandbox.
func (f found) flags(linked bool) []string {
	network := "none"
	if linked {
		network = "sandbox" // a stack inside, on the interface that it finds in its namespace
	}
	return []string{
		"--platform=" + f.platform, "--network=" + network, "--ignore-cgroups", "--overlay2=none",
		"--host-settings=ignore", "--control-rpc-stop-timeout=0",
		"--restore-spec-validation=ignore", // a copy has other ids on the host; what matters is in the manifest
	}
}

// once looks at the host at the first call alone: to try takes as long as a sandbox.
func once(config Config) func() found {
	return sync.OnceValue(func() found { return look(context.Background(), config) })
}

// Probe says what this host offers to the level.
func (d *Driver) Probe(ctx context.Context) berm.Probe {
	return probe(d.Driver.Probe(ctx), d.probed())
}

// Probe says what this host offers to the level, for the user of this process, without a
// driver, but for what the namespace level found.
func Probe(ctx context.Context, host berm.Probe, config Config) berm.Probe {
	return probe(host, look(ctx, config))
}

// probe adds what was found to what the namespace level found, whose parts this one has.
func probe(host berm.Probe, f found) berm.Probe {
	limits := maps.Clone(host.Unlimited)
	delete(limits, "pids") // gVisor counts them itself
	// It starts many times slower, and what runs inside is not recorded: nobody gets that who
	// did not ask for it.
	p := berm.Probe{Level: berm.GVisor, Usable: host.Usable && f.err == nil, ByName: true, Features: f.features, Unlimited: limits, Degraded: host.Degraded, Memory: true, Unsaved: host.Unsaved}
	p.Features = append(p.Features, berm.Feature{
		Name: "namespace level", Found: host.Usable, Required: true,
		Detail: "its monitor, disk and control group", Fix: "see what is missing there",
	})
	if host.Usable {
		p.Features[len(p.Features)-1].Fix = ""
	}
	return p
}

// look finds runsc and a platform that works.
func look(ctx context.Context, config Config) (f found) {
	add := func(name string, required bool, detail string, err error, fix string) {
		feature := berm.Feature{Name: name, Found: err == nil, Required: required, Detail: detail}
		if err != nil {
			feature.Detail, feature.Fix = err.Error(), fix
			if required && f.err == nil {
				f.err = berm.Errorf(berm.Unsupported, "isolation level gvisor cannot be had here: %s: %w", name, err).WithHint("%s", fix)
			}
		}
		f.features = append(f.features, feature)
	}
	err := namespace.AllIDs()
	add("user ids", true, "", err, "give the user 65536 ids in /etc/subuid and /etc/subgid, and install newuidmap (package uidmap)")
	if err != nil {
		return f
	}
	f.runsc, err = find(config.Runsc)
	add(Program, true, f.runsc, err, "make runsc builds it; put it beside berm, where this user may execute it")
	if err != nil {
		return f
	}
	platforms := []string{"systrap", "ptrace"}
	if config.Platform != "" {
		platforms = []string{config.Platform}
	}
	for _, p := range platforms {
		err := try(ctx, f.runsc, p)
		add("gVisor on "+p, false, "", err, "")
		if err == nil {
			f.platform = p
			return f
		}
	}
	add("gVisor's platform", true, "", fmt.Errorf("none of %s runs a program", strings.Join(platforms, ", ")), "see why above")
	return f
}

// find looks for runsc of the right version.
func find(path string) (string, error) {
	if path == "" {
		// What was started, and not the file that runs: berm executes what it unpacked.
		if self, err := exec.LookPath(os.Args[0]); err == nil {
			if self, err = filepath.EvalSymlinks(self); err == nil {
				path = filepath.Join(filepath.Dir(self), Program)
			}
		}
		if _, err := os.Stat(path); err != nil {
			if path, err = exec.LookPath(Program); errors.Is(err, exec.ErrNotFound) {
				return "", errors.New("not found beside berm, nor in PATH")
			} else if err != nil {
				return "", err
			}
		}
	}
	path, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("%s does not exist", path)
	}
	ctx, cancel := context.WithTimeout(context.Background(), tryLimit)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, "--version").Output()
	if err != nil {
		return "", fmt.Errorf("%s --version: %w", path, err)
	}
	first, _, _ := strings.Cut(string(out), "\n")
	if version := strings.TrimPrefix(first, "runsc version "); version != Version {
		return "", fmt.Errorf("%s is of version %q, this berm is for %s", path, version, Version)
	}
	return path, nil
}

// try runs a program on a platform: runsc itself, which is there for certain.
func try(ctx context.Context, runsc, platform string) error {
	ctx, cancel := context.WithTimeout(ctx, tryLimit)
	defer cancel()
	state, err := os.MkdirTemp("", "berm-runsc-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(state)
	args := append([]string{"--root=" + state}, found{platform: platform}.flags(false)...)
	if os.Geteuid() != 0 {
		args = append(args, "--rootless")
	}
	cmd := exec.CommandContext(ctx, runsc, slices.Concat(args, []string{"do", "--quiet", runsc, "--version"})...)
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		return fmt.Errorf("it did not run a program within %s", tryLimit)
	}
	if err != nil {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(string(out)))
	}
	return nil
}

func joined(options []string) string { return strings.Join(options, ",") }
