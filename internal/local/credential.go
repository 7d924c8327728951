package local

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

// Credential is one for the command's requests, whose secret is read when the command runs.
type Credential struct {
	egress.Credential
	Source string // env:NAME or file:PATH
}

const credentialHint = "write NAME=env:VARIABLE or NAME=file:PATH, for a service that is known by its name, as github=env:GITHUB_TOKEN, or with ,host=api.example.com"

// ParseCredential reads NAME=SOURCE[,KEY=VALUE...]. Kind: Invalid. What does not read may be
// a secret in the wrong place, so the error does not repeat it.
func ParseCredential(text string) (Credential, error) {
	var c Credential
	head, options, more := strings.Cut(text, ",")
	var ok bool
	if c.Name, c.Source, ok = strings.Cut(head, "="); !ok || c.Name == "" || strings.Trim(c.Name, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" {
		return c, berm.Errorf(berm.Invalid, "a credential begins with its name, of a-z, 0-9 and -").WithHint(credentialHint)
	}
	invalid := func(format string, args ...any) (Credential, error) {
		return c, berm.Errorf(berm.Invalid, "credential "+c.Name+": "+format, args...).WithHint(credentialHint)
	}
	if scheme, name, _ := strings.Cut(c.Source, ":"); scheme != "env" && scheme != "file" || name == "" {
		return invalid("it does not say where its secret is")
	}
	places, git := 0, false
	for option := range strings.SplitSeq(options, ",") {
		if !more {
			break
		}
		key, value, _ := strings.Cut(option, "=")
		if value == "" {
			return invalid("%q has no value", key)
		}
		one := map[string]*string{"service": &c.Service, "header": &c.Header, "prefix": &c.Prefix, "user": &c.User, "cookie": &c.Cookie, "query": &c.Query, "env": &c.Env}
		many := map[string]*[]string{"host": &c.Hosts, "method": &c.Methods, "path": &c.Paths, "repo": &c.Repositories, "push": &c.Push}
		switch key {
		case "header", "user", "cookie", "query":
			places++
		case "repo", "push":
			git = true
		}
		switch to, list := one[key], many[key]; {
		case list != nil:
			*list = append(*list, value)
		case to == nil:
			return invalid("there is no option %q", key)
		case *to != "":
			return invalid("%s is there twice", key)
		default:
			*to = value
		}
	}
	if len(c.Hosts) == 0 && c.Service == "" {
		c.Service = c.Name
	}
	switch {
	case places > 1:
		return invalid("it has one place of header, user, cookie and query")
	case c.Prefix != "" && c.Header == "":
		return invalid("a prefix is for a header")
	case git && c.Service == "" && (c.Header+c.Cookie+c.Query != "" || len(c.Paths)+len(c.Methods) > 0 || c.Env != ""):
		return invalid("repo and push are for git alone, which has a user at most")
	}
	if c.Header != "" && c.Prefix != "" && !strings.HasSuffix(c.Prefix, " ") && strings.EqualFold(c.Header, "Authorization") {
		c.Prefix += " " // RFC 9110: the scheme and the credentials are two words
	}
	return c, nil
}

// read returns the credential with its secret.
func (c Credential) read(environ []string) (egress.Credential, error) {
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
func (o *online) startBroker(r *Request, policy egress.Policy) (_ *broker, err error) {
	n := o.task.Network
	if len(n.Credentials) == 0 {
		return nil, nil
	}
	var credentials []egress.Credential
	defer func() {
		for _, c := range credentials {
			clear(c.Value)
		}
	}()
	for _, c := range n.Credentials {
		full, err := c.read(o.task.Environ)
		if err != nil {
			return nil, err
		}
		credentials = append(credentials, full)
	}
	ours, theirs, err := egress.Pair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	var conn *net.UnixConn
	if conn, err = n.StartBroker(); err != nil {
		ours.Close()
		return nil, err
	}
	b := &broker{network: ours}
	if b.Link, b.Brokered, err = egress.Broker(o.ctx, conn, r.ID, policy, n.Open, credentials, theirs, o.event); err != nil {
		ours.Close()
		return nil, err
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
