package preset

import (
	"slices"
	"strings"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

// Credential is one for the command's requests, whose secret is read when the command runs.
type Credential struct {
	egress.Credential
	Source string // env:NAME or file:PATH
	// Optional says that it is one of several, of which those are used whose secret there is.
	Optional bool
}

// isCredential says whether a text can be the name of a credential, which is a part of a host's
// name where it has an endpoint.
func isCredential(name string) bool {
	return name != "" && len(name) < 60 && strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-") == "" && strings.Trim(name, "-") == name
}

// CheckCredential says what is wrong with an entry of a list of credentials: one, or -NAME,
// which takes one away.
func CheckCredential(text string) error {
	if name, taken := strings.CutPrefix(text, "-"); taken {
		if !isCredential(name) {
			return berm.Errorf(berm.Invalid, "-NAME takes a credential away, whose name is of a-z, 0-9 and -")
		}
		return nil
	}
	_, err := ParseCredential(text)
	return err
}

// checkNamed says what is wrong with an entry of a project's file, which names no secret: -NAME,
// or NAME, which asks for one.
func checkNamed(text string) error {
	if !isCredential(strings.TrimPrefix(text, "-")) {
		return berm.Errorf(berm.Invalid, "a project names no secret: it must be NAME, which asks for a credential, or -NAME, which takes one away")
	}
	return nil
}

// String says what a credential is and where its secret is, which is not read.
func (c Credential) String() string {
	text := c.Name + " (" + c.Source
	for _, part := range []struct {
		words  string
		values []string
	}{
		{"for the service", []string{c.Service}}, {"for", c.Hosts}, {"methods", c.Methods}, {"paths", c.Paths},
		{"in the header", []string{c.Header}}, {"in the cookie", []string{c.Cookie}}, {"in the query as", []string{c.Query}}, {"user", []string{c.User}},
		{"repositories", c.Repositories}, {"which may write", c.Push}, {"placeholder in", []string{c.Env}}, {"base URL in", []string{c.URL}},
	} {
		if values := strings.Join(part.values, " "); values != "" {
			text += ", " + part.words + " " + values
		}
	}
	if c.Swap {
		text += ", where its placeholder is sent"
	}
	if c.Endpoint && c.URL == "" {
		text += ", with a base URL"
	}
	if c.Service == "github" {
		if len(c.Repositories)+len(c.Push) > 0 {
			text += "; by the API it reads these repositories, and writes their issues, pull requests without merging them, comments and status alone; no GraphQL"
		} else {
			text += "; by the API it does whatever the token may"
		}
	}
	return text + ")"
}

const credentialHint = "write NAME=env:VARIABLE or NAME=file:PATH, for a service that is known by its name, as github=env:GITHUB_TOKEN, or with ,host=api.example.com"

// ParseCredential reads NAME=SOURCE[,KEY=VALUE...]. Kind: Invalid. What does not read may be
// a secret in the wrong place, so the error does not repeat it.
func ParseCredential(text string) (Credential, error) {
	return parseCredential(text, credentialHint, "env", "file")
}

// ParseStored is ParseCredential of one whose secret a server has stored: the source is
// secret:NAME.
func ParseStored(text string) (Credential, error) {
	return parseCredential(text, "write NAME=secret:SECRET, for a service that is known by its name, as github=secret:my-token, or with ,host=api.example.com", "secret")
}

func parseCredential(text, hint string, sources ...string) (Credential, error) {
	var c Credential
	head, options, more := strings.Cut(text, ",")
	var ok bool
	if c.Name, c.Source, ok = strings.Cut(head, "="); !ok || !isCredential(c.Name) {
		return c, berm.Errorf(berm.Invalid, "a credential begins with its name, of a-z, 0-9 and -").WithHint("%s", hint)
	}
	invalid := func(format string, args ...any) (Credential, error) {
		return c, berm.Errorf(berm.Invalid, "credential "+c.Name+": "+format, args...).WithHint("%s", hint)
	}
	if strings.HasPrefix(c.Source, "secret:") && !slices.Contains(sources, "secret") {
		return invalid("secret: is one that a server has stored; berm run has env:VARIABLE and file:PATH")
	}
	if scheme, name, _ := strings.Cut(c.Source, ":"); !slices.Contains(sources, scheme) || name == "" {
		if scheme != "" && name != "" && sources[0] == "secret" {
			return invalid("%s: is for berm run, which takes secrets from this machine; a server has those that berm secret set gave it", scheme)
		}
		return invalid("it does not say where its secret is")
	}
	places, git := 0, false
	for option := range strings.SplitSeq(options, ",") {
		if !more {
			break
		}
		key, value, _ := strings.Cut(option, "=")
		switch option {
		case "swap":
			c.Swap = true
			continue
		case "endpoint":
			c.Endpoint = true
			continue
		}
		if value == "" {
			return invalid("%q has no value", key)
		}
		one := map[string]*string{"service": &c.Service, "header": &c.Header, "prefix": &c.Prefix, "user": &c.User, "cookie": &c.Cookie, "query": &c.Query, "env": &c.Env, "endpoint": &c.URL}
		many := map[string]*[]string{"host": &c.Hosts, "method": &c.Methods, "path": &c.Paths, "repo": &c.Repositories, "push": &c.Push}
		switch key {
		case "header", "user", "cookie", "query":
			places++
		case "repo", "push":
			git = true
		case "endpoint":
			c.Endpoint = true
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
	case git && c.Service == "" && (c.Header+c.Cookie+c.Query != "" || len(c.Paths)+len(c.Methods) > 0 || c.Env != "" || c.Swap || c.Endpoint):
		return invalid("repo and push are for git alone, which has a user at most")
	case c.Swap && c.Service == "" && c.Env == "":
		return invalid("swap needs env=VARIABLE, the variable inside whose value is swapped")
	case c.Endpoint && c.Service == "" && c.URL == "":
		return invalid("an endpoint needs a variable for its URL: endpoint=VARIABLE")
	}
	if c.Header != "" && c.Prefix != "" && !strings.HasSuffix(c.Prefix, " ") && strings.EqualFold(c.Header, "Authorization") {
		c.Prefix += " " // RFC 9110: the scheme and the credentials are two words
	}
	return c, nil
}
