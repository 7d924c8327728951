package credential

import (
	"fmt"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/berm-sandbox/berm"
)

// Rules say what git may do over HTTPS with a credential. That a push rewrites history
// cannot be seen from it: a branch that must not be rewritten is protected by its server.
type Rules struct {
	// Repositories that the credential is for, as owner/name; * stands for a part of a segment.
	Repositories []string `json:"repositories"`
	// Push lists the refs that may be written, such as refs/heads/agent/*; a last segment **
	// stands for any rest. None: nothing is pushed.
	Push   []string `json:"push,omitempty"`
	Delete bool     `json:"delete,omitempty"` // refs may be deleted too
}

func (r *Rules) check() error {
	if len(r.Repositories) == 0 {
		return berm.Errorf(berm.Invalid, "rules for git name no repository")
	}
	for _, name := range r.Repositories {
		if name == "" || strings.HasPrefix(name, "/") || strings.HasSuffix(name, ".git") || strings.Contains(name, "**") || !wellFormed(name) {
			return berm.Errorf(berm.Invalid, "%s is no pattern of repositories", quote(name)).WithHint("write owner/name, without .git")
		}
	}
	for _, ref := range r.Push {
		if !strings.HasPrefix(ref, "refs/") || strings.Contains(strings.TrimSuffix(ref, "/**"), "**") || !wellFormed(ref) {
			return berm.Errorf(berm.Invalid, "%s is no pattern of refs", quote(ref)).WithHint("write it in full, as refs/heads/agent/*")
		}
	}
	return nil
}

// wanted says whether a request is one of git's smart protocol that the credential is for
// (gitprotocol-http). What others fetch goes on without it; no push does that breaks the rules.
func (r *Rules) wanted(l *live, out *http.Request) (bool, *Refusal) {
	repository, service := gitRequest(out)
	if service == "" {
		return false, nil
	}
	known := r.has(repository)
	switch {
	case service == "git-upload-pack":
		return known, nil
	case !known:
		return false, refuse(Repository, l, "the credential "+l.ID+" is not for pushing to "+quote(repository), "push to one of "+strings.Join(r.Repositories, ", "))
	case len(r.Push) == 0:
		return false, refuse(Ref, l, "the credential "+l.ID+" is for reading alone: it has no push= with the refs that it may write", "leave the commits in the sandbox, or ask for a right to push")
	case out.Method == http.MethodGet:
		return true, nil
	}
	return true, r.push(l, out)
}

// Missing is what there is to say when a host does not answer a request that got no credential:
// that git's credentials for the host are for other repositories. It is nil else. A client that
// shows the host something of its own is left to itself.
func (s *Set) Missing(f Flow, out *http.Request, status int) *Refusal {
	st := s.state.Load()
	repository, service := gitRequest(out)
	if st == nil || service == "" || len(out.Header["Authorization"]) > 0 ||
		status != http.StatusUnauthorized && status != http.StatusForbidden && status != http.StatusNotFound {
		return nil
	}
	var known []string
	var first *live
	for _, b := range st.bindings {
		if b.Kind != Git || !matchHost(b.Hosts, f.Name) || !slices.Contains(b.Ports, f.Port) {
			continue
		}
		if b.Git.has(repository) {
			return nil
		}
		if known = append(known, b.Git.Repositories...); first == nil {
			first = b
		}
	}
	if first == nil {
		return nil
	}
	refusal := refuse(Repository, first, "the credential "+first.ID+" is not for "+quote(repository)+", and without one "+f.Name+" answers with status "+strconv.Itoa(status),
		"it is for "+strings.Join(known, ", ")+"; whoever started the sandbox can give it others (repo=)")
	s.tell(f, out, refusal)
	return refusal
}

// has says whether the credential is for a repository.
func (r *Rules) has(repository string) bool {
	return slices.ContainsFunc(r.Repositories, func(pattern string) bool {
		ok, _ := path.Match(pattern, repository) // checked before
		return ok
	})
}

// writes are what GitHub's API may write of a repository: what is talked about, not what is in it,
// who may write it, or how it is built. A merge writes a branch.
var writes = []string{
	"/issues/**", "/labels/**", "/milestones/**", "/comments/**", "/commits/*/comments", "/statuses/*", "/check-runs/**",
	"/pulls", "/pulls/*", "/pulls/*/comments/**", "/pulls/*/reviews/**", "/pulls/*/requested_reviewers", "/pulls/comments/**",
}

// wantedByAPI is wanted of a request to GitHub's REST API
// (https://docs.github.com/en/rest). A read of something else goes on without the credential, as a
// fetch does, if the client sends nothing in its place.
func (r *Rules) wantedByAPI(l *live, out *http.Request) (bool, *Refusal) {
	hint := "it is for the repositories " + strings.Join(r.Repositories, ", ") + " by GitHub's REST API, and GET /user and /rate_limit"
	for name := range out.Header {
		if strings.Contains(fold(name), "method") { // such as X-HTTP-Method-Override
			return false, refuse(Protocol, l, "the field "+quote(name)+" could make it another method", "leave it out")
		}
	}
	reads := out.Method == http.MethodGet || out.Method == http.MethodHead
	var repository, rest string
	if parts := strings.SplitN(out.URL.Path, "/", 5); len(parts) >= 4 && parts[1] == "repos" {
		repository = parts[2] + "/" + parts[3]
		if len(parts) == 5 {
			rest = "/" + parts[4]
		}
	}
	switch {
	case r.has(repository) && reads, reads && (out.URL.Path == "/user" || out.URL.Path == "/rate_limit"):
		return true, nil
	case r.has(repository):
		if !slices.ContainsFunc(writes, func(pattern string) bool { return matchOne(pattern, rest) }) {
			return false, refuse(Ref, l, "the credential "+l.ID+" does not let "+quote(out.Method+" "+out.URL.Path)+" be done",
				"by the API it writes issues, pull requests, comments and the status of commits; push with git")
		}
		return true, nil
	case reads && len(out.Header["Authorization"]) == 0:
		return false, nil
	case out.URL.Path == "/graphql":
		return false, refuse(Repository, l, "the credential "+l.ID+" is not for GraphQL, which names no repository that could be held to", hint)
	}
	return false, refuse(Repository, l, "the credential "+l.ID+" is not for "+quote(out.Method+" "+out.URL.Path), hint)
}

// gitRequest returns the repository and the service of a request, "" when it is none of
// the smart protocol.
func gitRequest(out *http.Request) (repository, service string) {
	p := strings.TrimPrefix(out.URL.Path, "/")
	for _, name := range []string{"git-upload-pack", "git-receive-pack"} {
		if rest, ok := strings.CutSuffix(p, "/"+name); ok && out.Method == http.MethodPost {
			repository, service = rest, name
		}
		if rest, ok := strings.CutSuffix(p, "/info/refs"); ok && out.Method == http.MethodGet && out.URL.RawQuery == "service="+name {
			repository, service = rest, name
		}
	}
	return strings.TrimSuffix(repository, ".git"), service
}

// push looks at what a push writes.
func (r *Rules) push(l *live, out *http.Request) *Refusal {
	if out.Body == nil || out.Header.Get("Content-Encoding") != "" {
		return refuse(Protocol, l, "the push has no body that can be read", "")
	}
	commands, read, err := readCommands(out.Body)
	if err != nil {
		return refuse(Protocol, l, "the push cannot be read: "+err.Error(), "")
	}
	out.Body = again(read, out.Body)
	for _, c := range commands {
		if c.deletes && !r.Delete {
			return refuse(Ref, l, "the credential "+l.ID+" does not let refs be deleted", "")
		}
		if !slices.ContainsFunc(r.Push, func(pattern string) bool { return matchOne("/"+pattern, "/"+c.ref) }) {
			return refuse(Ref, l, "the credential "+l.ID+" does not let "+quote(c.ref)+" be written", "push to one of "+strings.Join(r.Push, ", "))
		}
	}
	return nil
}

// gitEnv has git ask hosts by HTTPS where a URL says SSH, and never ask at the terminal.
func gitEnv(hosts []string) map[string]string {
	if len(hosts) == 0 {
		return nil
	}
	slices.Sort(hosts)
	env := map[string]string{"GIT_TERMINAL_PROMPT": "0"}
	n := 0
	for _, host := range slices.Compact(hosts) {
		for _, from := range []string{"git@" + host + ":", "ssh://git@" + host + "/", "ssh://" + host + "/", "git://" + host + "/"} {
			env[fmt.Sprintf("GIT_CONFIG_KEY_%d", n)] = "url.https://" + host + "/.insteadOf"
			env[fmt.Sprintf("GIT_CONFIG_VALUE_%d", n)] = from
			n++
		}
	}
	env["GIT_CONFIG_COUNT"] = strconv.Itoa(n)
	return env
}
