package inspect

import (
	"encoding/json"
	"net"
	"net/http"
	"strconv"
	"time"
)

// Reason is why something was denied or failed, in one word for programs.
type Reason string

// The reasons of this package; a judge and a broker of credentials add theirs.
const (
	ReasonSNI       Reason = "sni_mismatch"       // TLS names another host than the flow
	ReasonAuthority Reason = "authority_mismatch" // HTTP names another host than the flow
	ReasonProtocol  Reason = "proto"              // neither TLS nor HTTP, or a version that is not taken
	ReasonFraming   Reason = "framing"            // HTTP that two parsers could read differently
	ReasonMethod    Reason = "method"             // never allowed
	ReasonUpgrade   Reason = "upgrade"            // leaves HTTP
	ReasonBody      Reason = "body"               // too long
	ReasonSecret    Reason = "credential"         // could not be used, or the reply showed it
	ReasonPolicy    Reason = "policy_error"       // a denial without a reason
	ReasonLimit     Reason = "limit"              // too many requests, of a judge

	// Failures that are not denials.
	ReasonUpstream    Reason = "upstream"
	ReasonCertificate Reason = "upstream_certificate"
)

// Failed says whether it is why an upstream failed, and no denial.
func (r Reason) Failed() bool { return r == ReasonUpstream || r == ReasonCertificate }

// Denial is a refusal that the client is told.
type Denial struct {
	Status  int    `json:"-"` // of HTTP; zero is 403
	Message string `json:"error"`
	Reason  Reason `json:"reason"`
	Rule    string `json:"rule,omitempty"`
	Hint    string `json:"hint,omitempty"`
}

func (d *Denial) Error() string { return d.Message }

// write answers a request that was refused.
func (d *Denial) write(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Cache-Control", "no-store")
	if d.Status != http.StatusBadGateway {
		w.Header().Set("X-Berm-Deny", string(d.Reason))
	}
	status := d.Status
	switch {
	case status != 0:
	case d.Reason == ReasonLimit:
		w.Header().Set("Retry-After", "1")
		status = http.StatusTooManyRequests
	default:
		status = http.StatusForbidden
	}
	body, _ := json.Marshal(d) // strings only
	body = append(body, '\n')
	media := "application/json"
	if text, m, ok := d.git(r); ok {
		if body, media = text, m; r.Method == http.MethodPost {
			status = http.StatusOK
		}
	}
	w.Header().Set("Content-Type", media)
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	w.Write(body) //nolint:errcheck // the client may be gone
}

// TLS alerts (RFC 8446 section 6).
const (
	alertAccessDenied     = 49
	alertUnrecognizedName = 112
)

// Alert tells a client that waits for a ServerHello that the flow is denied: TLS has no
// words for the reason. The caller closes the connection.
func (d *Denial) Alert(conn net.Conn) {
	code := byte(alertAccessDenied)
	if d.Reason == ReasonSNI {
		code = alertUnrecognizedName
	}
	conn.SetWriteDeadline(time.Now().Add(time.Second))        //nolint:errcheck // the write tells
	conn.Write([]byte{0x15, 0x03, 0x03, 0x00, 0x02, 2, code}) //nolint:errcheck // the client may be gone
}
