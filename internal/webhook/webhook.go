// Package webhook sends signed requests to a server of the operator's.
package webhook

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strconv"
	"time"

	"github.com/berm-sandbox/berm"
)

// The headers of a request. The signature is "v1=" and the HMAC-SHA256, in hexadecimal, of the
// timestamp in seconds, a dot and the body, with the secret as the key.
const (
	HeaderTimestamp = "Berm-Timestamp"
	HeaderSignature = "Berm-Signature"
)

const (
	leastSecret = 16       // bytes
	maxAnswer   = 16 << 10 // bytes
)

// Hook is a server that gets requests. Its methods are safe for concurrent use.
type Hook struct {
	url    string
	secret []byte
	client *http.Client
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
			WithHint("over http anybody could read what is sent and answer; only on this host it is taken")
	}
	secret, err := readSecret(secretFile)
	if err != nil {
		return nil, err
	}
	return &Hook{
		url: u.String(), secret: secret,
		client: &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }},
	}, nil
}

func readSecret(path string) ([]byte, error) {
	if path == "" {
		return nil, berm.Errorf(berm.Invalid, "a webhook needs a secret, by which its requests are signed").WithHint("name a file of mode 0600 that holds it")
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

// Post sends a body of JSON and returns status and body of the answer, of which the body is at
// most 16 KiB; more is an error. Redirects are not followed. Kinds: Unavailable, Invalid.
func (h *Hook) Post(ctx context.Context, contentType string, body []byte) (status int, answer []byte, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, h.url, bytes.NewReader(body))
	if err != nil {
		return 0, nil, berm.Errorf(berm.Internal, "webhook: %w", err)
	}
	timestamp := strconv.FormatInt(time.Now().Unix(), 10)
	request.Header.Set("Content-Type", contentType)
	request.Header.Set(HeaderTimestamp, timestamp)
	request.Header.Set(HeaderSignature, sign(h.secret, timestamp, body))
	response, err := h.client.Do(request)
	if err != nil {
		var failed *url.Error
		if errors.As(err, &failed) {
			err = failed.Err // without the URL, which may hold a secret
		}
		return 0, nil, berm.Errorf(berm.Unavailable, "webhook: %w", err)
	}
	defer response.Body.Close()
	answer, err = io.ReadAll(io.LimitReader(response.Body, maxAnswer+1))
	if err != nil {
		return 0, nil, berm.Errorf(berm.Unavailable, "read what the webhook answers: %w", err)
	}
	if len(answer) > maxAnswer {
		return 0, nil, berm.Errorf(berm.Invalid, "the webhook answers with more than %d bytes", maxAnswer)
	}
	return response.StatusCode, answer, nil
}

func sign(secret []byte, timestamp string, body []byte) string {
	mac := hmac.New(sha256.New, secret)
	mac.Write([]byte(timestamp + "."))
	mac.Write(body)
	return "v1=" + hex.EncodeToString(mac.Sum(nil))
}
