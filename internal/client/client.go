// Package client talks to a Berm or E2B server: sandboxes over REST, processes
// and files over the protocol of the guest agent.
package client

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/berm-sandbox/berm"
)

// requestTimeout bounds a REST call. A create may have to unpack a template.
const requestTimeout = 2 * time.Minute

// maxBody bounds a JSON answer in bytes.
const maxBody = 64 << 20

// Config says which server, and as whom.
type Config struct {
	URL        string // of the REST API
	SandboxURL string // one origin for every sandbox's agent; "" lets the client find it
	Key        string // API key; "" sends none
	CA         string // PEM file of further certificate authorities; "" for none
}

// Client is a connection to one server. It is safe for concurrent use.
type Client struct {
	base    *url.URL
	sandbox *url.URL // nil: by the domain of each sandbox
	key     string
	http    *http.Client
}

// New checks a configuration. It does not connect. Kind: Invalid.
func New(c Config) (*Client, error) {
	base, err := parseURL(c.URL)
	if err != nil {
		return nil, err
	}
	client := &Client{base: base, key: c.Key}
	if c.SandboxURL != "" {
		if client.sandbox, err = parseURL(c.SandboxURL); err != nil {
			return nil, err
		}
	}
	if strings.ContainsFunc(c.Key, func(r rune) bool { return r <= ' ' || r >= 0x7f }) {
		return nil, berm.Errorf(berm.Invalid, "the API key holds blanks or characters outside ASCII")
	}
	// A peer that vanished is noticed within 35 s, also while nothing is sent: a shell
	// can then take up its connection again.
	dialer := &net.Dialer{Timeout: 10 * time.Second, KeepAliveConfig: net.KeepAliveConfig{
		Enable: true, Idle: 20 * time.Second, Interval: 5 * time.Second, Count: 3,
	}}
	transport := &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           dialer.DialContext,
		TLSHandshakeTimeout:   10 * time.Second,
		ExpectContinueTimeout: time.Second,
		ForceAttemptHTTP2:     true,
		HTTP2:                 &http.HTTP2Config{SendPingTimeout: 20 * time.Second, PingTimeout: 15 * time.Second},
		MaxIdleConnsPerHost:   8,
		IdleConnTimeout:       90 * time.Second,
		WriteBufferSize:       64 << 10,
		ReadBufferSize:        64 << 10,
	}
	if c.CA != "" {
		pem, err := os.ReadFile(c.CA)
		if err != nil {
			return nil, berm.Errorf(berm.Invalid, "certificate authority: %w", err)
		}
		pool, err := x509.SystemCertPool()
		if err != nil {
			pool = x509.NewCertPool()
		}
		if !pool.AppendCertsFromPEM(pem) {
			return nil, berm.Errorf(berm.Invalid, "%s holds no certificate in PEM form", c.CA)
		}
		transport.TLSClientConfig = &tls.Config{RootCAs: pool}
	}
	client.http = &http.Client{
		Transport: transport,
		// A redirect is an answer: Go would send the key along to another host.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return client, nil
}

func parseURL(s string) (*url.URL, error) {
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" || u.User != nil {
		return nil, berm.Errorf(berm.Invalid, "%q is no server address", s).WithHint("It looks like http://HOST:PORT or https://HOST.")
	}
	u.Path = strings.TrimSuffix(u.Path, "/")
	return u, nil
}

// URL is the address of the REST API.
func (c *Client) URL() string { return c.base.String() }

// answer is what a REST call returned.
type answer struct {
	status int
	header http.Header
	body   []byte
}

// call makes one REST request with a JSON body (nil: none) and decodes the answer
// into out (nil: dropped).
func (c *Client) call(ctx context.Context, method, path string, query url.Values, body, out any) (answer, error) {
	return c.callWith(ctx, nil, method, path, query, body, out)
}

// callWith is call with fields of the header.
func (c *Client) callWith(ctx context.Context, header http.Header, method, path string, query url.Values, body, out any) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	u := c.base.String() + path
	if len(query) > 0 {
		u += "?" + query.Encode()
	}
	var send io.Reader
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return answer{}, err
		}
		send = bytes.NewReader(text)
	}
	req, err := http.NewRequestWithContext(ctx, method, u, send)
	if err != nil {
		return answer{}, err
	}
	maps.Copy(req.Header, header)
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.key != "" {
		req.Header.Set("X-API-Key", c.key)
	}
	req.Header.Set("User-Agent", "berm")
	resp, err := c.http.Do(req)
	if err != nil {
		return answer{}, c.unreachable(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxBody+1))
	if err != nil {
		return answer{}, c.unreachable(err)
	}
	if len(text) > maxBody {
		return answer{}, berm.Errorf(berm.Internal, "the answer of %s is larger than %d MiB", c.base.Host, maxBody>>20)
	}
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		return answer{}, c.refused(resp.StatusCode, text)
	}
	if out != nil {
		if err := json.Unmarshal(text, out); err != nil {
			return answer{}, berm.Errorf(berm.Internal, "%s did not answer in the form of the E2B API: %w", c.base.Host, err).
				WithHint("Is %s the address of a Berm server?", c.base)
		}
	}
	return answer{resp.StatusCode, resp.Header, text}, nil
}

// unreachable explains an error of the transport.
func (c *Client) unreachable(err error) error {
	if errors.Is(err, context.Canceled) {
		return err
	}
	var fault *url.Error
	if errors.As(err, &fault) {
		err = fault.Err // without method and URL, which the message has
	}
	e := berm.Errorf(berm.Unavailable, "no answer from %s: %w", c.base, err)
	var certificate *tls.CertificateVerificationError
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return e.WithHint("No server listens there. Start one with `berm serve`, or name yours: `berm context add NAME URL`, or the variable BERM_URL.")
	case errors.As(err, &certificate):
		return e.WithHint("If the certificate is your own, add its authority: `berm context add --ca FILE NAME URL`.")
	case errors.Is(err, http.ErrSchemeMismatch):
		return e.WithHint("The server speaks plain HTTP on that port: use http:// in its address.")
	case errors.Is(err, context.DeadlineExceeded):
		return e.WithHint("The server took too long. Is it overloaded, or is a firewall between?")
	}
	return e
}

// refused makes an error of an HTTP status and a body, which has a message if it
// came from the server and not from a proxy between.
func (c *Client) refused(status int, body []byte) *berm.Error {
	e := statusError(status, body)
	if status == http.StatusUnauthorized {
		return e.WithHint("Set BERM_API_KEY to a key of %s, or store one: `berm context add NAME URL`. `berm key create` on the server makes a new one.", c.base)
	}
	return e
}

func statusError(status int, body []byte) *berm.Error {
	var said struct {
		Message string
		Berm    struct{ Hint string }
	}
	if json.Unmarshal(body, &said) != nil || said.Message == "" {
		said.Message = fmt.Sprintf("HTTP status %d %s", status, http.StatusText(status))
	}
	e := berm.Errorf(kindOf(status), "%s", said.Message)
	e.Hint = said.Berm.Hint
	return e
}

// kindOf reverses the server's map from kinds to statuses.
func kindOf(status int) berm.Kind {
	switch status {
	case http.StatusBadRequest, http.StatusRequestEntityTooLarge, http.StatusUnprocessableEntity:
		return berm.Invalid
	case http.StatusUnauthorized, http.StatusForbidden:
		return berm.Denied
	case http.StatusNotFound:
		return berm.NotFound
	case http.StatusConflict, http.StatusPreconditionFailed:
		return berm.Conflict
	case http.StatusTooManyRequests, http.StatusInsufficientStorage:
		return berm.Exhausted
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return berm.Unavailable
	case http.StatusNotImplemented, http.StatusMethodNotAllowed:
		return berm.Unsupported
	}
	return berm.Internal
}
