// Package webhook asks an operator's own server over HTTP whether flows may pass.
package webhook

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strconv"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/egress"
)

// The headers of a question. The signature is "v1=" and the HMAC-SHA256, in hexadecimal, of
// the timestamp in seconds, a dot and the body, with the secret as the key.
const (
	HeaderTimestamp = "Berm-Timestamp"
	HeaderSignature = "Berm-Signature"
)

const (
	leastSecret = 16          // bytes
	maxAnswer   = 16 << 10    // bytes
	atOnce      = 64          // questions
	spare       = time.Second // of the flow's patience, for the way of the answer
)

// Hook is a server that is asked. Its methods are safe for concurrent use.
type Hook struct {
	url    string
	secret []byte
	client *http.Client
	slots  chan struct{}
}

// New returns a hook at a URL of https, or of http on this host, that signs with the secret in
// a file. Kinds: Invalid, NotFound.
func New(address, secretFile string) (*Hook, error) {
	u, err := url.Parse(address)
	if err != nil || u.Host == "" || u.User != nil {
		return nil, berm.Errorf(berm.Invalid, "%q is not a URL of a webhook", address)
	}
	if ip, err := netip.ParseAddr(u.Hostname()); u.Scheme != "https" && (u.Scheme != "http" || u.Hostname() != "localhost" && (err != nil || !ip.IsLoopback())) {
		return nil, berm.Errorf(berm.Invalid, "the webhook %s must be https", u.Redacted()).
			WithHint("an answer over http could be anybody's; only on this host it is taken")
	}
	secret, err := readSecret(secretFile)
	if err != nil {
		return nil, err
	}
	return &Hook{
		url: u.String(), secret: secret, slots: make(chan struct{}, atOnce),
		client: &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }},
	}, nil
}

func readSecret(path string) ([]byte, error) {
	if path == "" {
		return nil, berm.Errorf(berm.Invalid, "a webhook needs a secret, by which its questions are signed").WithHint("name a file of mode 0600 that holds it")
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, berm.Errorf(berm.NotFound, "the secret of the webhook: %w", err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, berm.Errorf(berm.Invalid, "the secret of the webhook, %s, can be read by others", path).WithHint("chmod 600 %s", path)
	}
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, berm.Errorf(berm.Invalid, "the secret of the webhook: %w", err)
	}
	if content = bytes.TrimSpace(content); len(content) < leastSecret {
		return nil, berm.Errorf(berm.Invalid, "the secret of the webhook has fewer than %d bytes", leastSecret).WithHint("openssl rand -hex 32 > %s", path)
	}
	return content, nil
}

// Question is the body of a question.
type Question struct {
	ID       string            `json:"id"` // another for each question
	Time     time.Time         `json:"time"`
	Deadline time.Time         `json:"deadline"` // what is not answered by then is denied
	Sandbox  berm.SandboxID    `json:"sandbox"`
	Metadata map[string]string `json:"metadata,omitempty"` // of the sandbox
	egress.Question
	Reason   string `json:"reason,omitempty"` // of the rule
	Revision string `json:"revision,omitempty"`
}

// Answer is the body of an answer; its status must be 200.
type Answer struct {
	Answer string       `json:"answer"` // allow or deny
	For    egress.Scope `json:"for"`    // empty: once
	Until  time.Time    `json:"until"`
}

// Ask asks about a flow. Whatever goes wrong is an error, and no answer. Kinds: Unavailable,
// Invalid (the answer).
func (h *Hook) Ask(ctx context.Context, id berm.SandboxID, metadata map[string]string, e egress.Event) (egress.Reply, error) {
	patience := time.Duration(e.Duration * float64(time.Second))
	ctx, cancel := context.WithTimeout(ctx, patience-min(spare, patience/2))
	defer cancel()
	now := time.Now().UTC()
	deadline, _ := ctx.Deadline()
	q := Question{
		ID: rand.Text(), Time: now, Deadline: deadline.UTC(), Sandbox: id, Metadata: metadata, Question: e.Question(), Reason: e.Detail, Revision: e.Revision,
	}
	body, err := json.Marshal(q)
	if err != nil {
		return egress.Reply{}, berm.Errorf(berm.Internal, "ask the webhook: %w", err)
	}
	select {
	case h.slots <- struct{}{}:
		defer func() { <-h.slots }()
	case <-ctx.Done():
		return egress.Reply{}, berm.Errorf(berm.Unavailable, "ask the webhook: too many questions at once")
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, h.url, bytes.NewReader(body))
	if err != nil {
		return egress.Reply{}, berm.Errorf(berm.Internal, "ask the webhook: %w", err)
	}
	timestamp := strconv.FormatInt(now.Unix(), 10)
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set(HeaderTimestamp, timestamp)
	request.Header.Set(HeaderSignature, h.sign(timestamp, body))
	response, err := h.client.Do(request)
	if err != nil {
		var failed *url.Error
		if errors.As(err, &failed) {
			err = failed.Err // without the URL, which may hold a secret
		}
		return egress.Reply{}, berm.Errorf(berm.Unavailable, "ask the webhook: %w", err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(io.LimitReader(response.Body, maxAnswer+1))
	switch {
	case err != nil:
		return egress.Reply{}, berm.Errorf(berm.Unavailable, "read what the webhook answers: %w", err)
	case response.StatusCode != http.StatusOK:
		return egress.Reply{}, berm.Errorf(berm.Unavailable, "the webhook answers with status %d", response.StatusCode)
	}
	return parse(q.Question, text, time.Now())
}

// sign is the signature of a question.
func (h *Hook) sign(timestamp string, body []byte) string {
	mac := hmac.New(sha256.New, h.secret)
	mac.Write([]byte(timestamp + "."))
	mac.Write(body)
	return "v1=" + hex.EncodeToString(mac.Sum(nil))
}

// parse reads an answer.
func parse(q egress.Question, text []byte, now time.Time) (egress.Reply, error) {
	wrong := func(what string) (egress.Reply, error) {
		return egress.Reply{}, berm.Errorf(berm.Invalid, "what the webhook answers %s", what).
			WithHint(`it must be such as {"answer": "allow", "for": "sandbox"}`)
	}
	var a Answer
	if len(text) > maxAnswer {
		return wrong("is too long")
	}
	if err := json.Unmarshal(text, &a); err != nil {
		return wrong("is no JSON object")
	}
	r := egress.Reply{Question: q, Allow: a.Answer == "allow", Scope: a.For}
	if !r.Allow && a.Answer != "deny" {
		return wrong("is neither allow nor deny")
	}
	switch r.Scope {
	case "":
		r.Scope = egress.ScopeOnce
	case egress.ScopeOnce, egress.ScopeSandbox:
	case egress.ScopeUntil:
		if r.Until = a.Until; !r.Until.After(now) {
			return wrong("holds until a time that is over")
		}
	default:
		return wrong("holds for neither once, sandbox nor until")
	}
	return r, nil
}
