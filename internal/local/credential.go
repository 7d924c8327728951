package local

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/local/preset"
	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/service"
	"github.com/berm-sandbox/berm/internal/trust/root"
)

// read returns the credential with its secret.
func read(c preset.Credential, environ []string) (egress.Credential, error) {
	scheme, name, _ := strings.Cut(c.Source, ":")
	var value []byte
	var err error
	if scheme == "env" {
		value = []byte(variable(environ, name))
	} else {
		value, err = readSecret(name)
	}
	if err == nil && len(value) == 0 {
		err = berm.Errorf(berm.NotFound, "%s %s is not set or empty", map[string]string{"env": "the variable", "file": "the file"}[scheme], name)
	}
	if err != nil {
		return egress.Credential{}, berm.Errorf(berm.KindOf(err), "credential %s: %w", c.Name, err)
	}
	full := c.Credential
	full.Value = value
	return full, nil
}

// maxSecret bounds the file of a secret in bytes.
const maxSecret = 64 << 10

// readSecret reads a file without the end of its last line.
func readSecret(path string) ([]byte, error) {
	if rest, ok := strings.CutPrefix(path, "~/"); ok {
		home, err := os.UserHomeDir()
		if err != nil {
			return nil, berm.Errorf(berm.Invalid, "there is no home: %w", err)
		}
		path = filepath.Join(home, rest)
	}
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // a pipe must not hold us up
	if err != nil {
		kind := berm.Denied
		if errors.Is(err, os.ErrNotExist) {
			kind = berm.NotFound
		}
		return nil, berm.Errorf(kind, "its file: %w", err)
	}
	defer file.Close()
	if info, err := file.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, berm.Errorf(berm.Invalid, "%s is no regular file", path)
	}
	value, err := io.ReadAll(io.LimitReader(file, maxSecret+1))
	if err != nil || len(value) > maxSecret {
		return nil, berm.Errorf(berm.Invalid, "%s cannot be read, or is longer than 64 KiB", path)
	}
	return bytes.TrimRight(value, "\r\n"), nil
}

// broker is the service of credentials of one run.
type broker struct {
	*egress.Link
	egress.Brokered
	network *os.File // the network service's end of their connection
}

// startBroker gives the secrets to a process of their own, and takes them out of the
// command's environment; nil when there are none.
func (o *online) startBroker(r *Request, policy egress.Policy, programs *root.Root) (_ *broker, err error) {
	n := o.task.Network
	if len(r.Grant.Credentials) == 0 {
		return nil, nil
	}
	var credentials []egress.Credential
	defer func() {
		for _, c := range credentials {
			clear(c.Value)
		}
	}()
	var missing []string // sources of which one would do
	for _, c := range r.Grant.Credentials {
		full, err := read(c, o.task.Environ)
		switch {
		case err != nil && c.Optional && berm.KindOf(err) == berm.NotFound:
			missing = append(missing, c.Source)
		case err != nil:
			return nil, err
		default:
			credentials = append(credentials, full)
		}
	}
	if len(credentials) == 0 {
		return nil, berm.Errorf(berm.NotFound, "--keyless has no key for the requests of the preset %s: %s is not set", r.Grant.Preset, strings.Join(missing, ", nor ")).
			WithHint("set one, or name another place with --cred NAME=file:PATH; a log-in that the program keeps in a file is not used with --keyless")
	}
	ours, theirs, err := service.Pair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	var conn *net.UnixConn
	if conn, err = n.StartBroker(o.ended("what needs credentials is refused")); err != nil {
		ours.Close()
		return nil, err
	}
	b := &broker{network: ours}
	if b.Link, b.Brokered, err = egress.Broker(o.ctx, conn, r.ID, egress.Bindings{
		Policy: policy, Open: n.Open, Credentials: credentials, Door: theirs, Trust: true, Root: programs,
	}, o.brokered); err != nil {
		ours.Close()
		return nil, err
	}
	if b.Keep != nil { // a run does not outlive its services
		b.Keep.Close()
	}
	o.task.withhold(r, b.Env, credentials)
	return b, nil
}

// withhold gives the command what stands for secrets, and takes the secrets themselves out of
// its environment, whatever has put them there: but for --env, which is obeyed.
func (t *Task) withhold(r *Request, env map[string]string, credentials []egress.Credential) {
	asked := map[string]bool{}
	for _, e := range t.Rights.Env {
		name, _, _ := strings.Cut(e, "=")
		asked[name] = true
	}
	for _, c := range credentials {
		if slices.ContainsFunc(r.Argv, func(arg string) bool { return strings.Contains(arg, string(c.Value)) }) {
			t.Notice("the command's arguments hold the secret of the credential " + c.Name + ", so that the sandbox has it")
		}
	}
	var kept []string
	for _, e := range r.Env {
		name, value, _ := strings.Cut(e, "=")
		_, replaced := env[name]
		holds := ""
		for _, c := range credentials {
			if strings.Contains(value, string(c.Value)) {
				holds = c.Name
			}
		}
		switch {
		case asked[name] && holds != "":
			t.Notice("--env gives the command the secret of the credential " + holds + " in " + name + ": without it, it would never see it")
		case asked[name]:
		case replaced || holds != "":
			continue
		}
		kept = append(kept, e)
	}
	for name, value := range env {
		if !asked[name] {
			kept = append(kept, name+"="+value)
		}
	}
	r.Env = kept
}
