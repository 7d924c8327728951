package inspect

import (
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

// originForm returns the target of a request to f without scheme and authority, and
// whether the client wrote the port into the authority (RFC 9112 section 3.2, RFC 9113
// section 8.3.1). Whatever names a host must name that of the flow: a server may serve
// many at one address.
func originForm(r *http.Request, f Flow, scheme string) (target string, port bool, denial *Denial) {
	authority, target := r.Host, r.RequestURI
	if written, after, absolute := strings.Cut(target, "://"); absolute && isScheme(written) {
		if !strings.EqualFold(written, scheme) {
			return "", false, misdirected(f, "the request's target has another scheme than the connection")
		}
		end := strings.IndexAny(after, "/?")
		if end < 0 {
			end = len(after)
		}
		if authority, target = after[:end], after[end:]; !strings.HasPrefix(target, "/") {
			target = "/" + target
		}
	}
	if !strings.HasPrefix(target, "/") && target != "*" {
		return "", false, malformed("the request's target is neither a path nor a URL")
	}
	port, ok := sameAuthority(authority, f)
	if !ok {
		return "", false, misdirected(f, "the request is for "+strconv.Quote(printable(authority))+" and the connection for "+f.Name)
	}
	for _, host := range r.Header["Host"] { // beside :authority
		if _, ok := sameAuthority(host, f); !ok {
			return "", false, misdirected(f, "the request names two hosts")
		}
	}
	return target, port, nil
}

func isScheme(s string) bool {
	return s != "" && strings.Trim(strings.ToLower(s), "abcdefghijklmnopqrstuvwxyz") == ""
}

func misdirected(f Flow, message string) *Denial {
	return &Denial{Status: http.StatusMisdirectedRequest, Reason: ReasonAuthority, Message: message,
		Hint: "open a connection of its own for each host; this one is for " + f.Address()}
}

// sameAuthority says whether a Host or :authority names the flow, and whether it has the
// port in it.
func sameAuthority(authority string, f Flow) (port, ok bool) {
	host := authority
	if written, found := strings.CutSuffix(authority, ":"+strconv.Itoa(int(f.Port))); found {
		host, port = written, true
	}
	if strings.Contains(f.Name, ":") {
		return port, strings.EqualFold(host, "["+f.Name+"]")
	}
	return port, sameName(host, f.Name)
}

// sameName says whether a name as a client wrote it is the canonical name.
func sameName(written, name string) bool {
	for i := range len(written) {
		if written[i] >= 0x80 {
			return false // EqualFold takes the Kelvin sign for a k
		}
	}
	return strings.EqualFold(strings.TrimSuffix(written, "."), name)
}

// hostField is what the upstream is told as its host. The port stays as the client wrote it,
// who may have signed it.
func hostField(f Flow, port bool) string {
	host := f.Name
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	if port {
		host += ":" + strconv.Itoa(int(f.Port))
	}
	return host
}

// targetURL makes a URL that net/http sends with exactly this target; false when it cannot.
func targetURL(scheme string, f Flow, target string) (*url.URL, bool) {
	path, query, hasQuery := strings.Cut(target, "?")
	plain, err := url.PathUnescape(path)
	u := &url.URL{Scheme: scheme, Host: f.Address(), Path: plain, RawPath: path, RawQuery: query, ForceQuery: hasQuery && query == ""}
	return u, err == nil && strings.HasPrefix(path, "/") && !strings.HasPrefix(path, "//") && u.RequestURI() == target
}
