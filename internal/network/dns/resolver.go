package dns

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
)

// Resolver is a server that names are asked of: in the clear, over TLS (RFC 7858) or over
// HTTPS (RFC 8484). What is said to be over TLS is never asked in another way.
type Resolver struct {
	At   netip.AddrPort
	TLS  string // the name in its certificate; "" for one in the clear
	Path string // of its URL; "" for none

	config *tls.Config
	idle   chan net.Conn // of TLS
	client *http.Client  // of HTTPS
}

// Bounds of what is kept open to one resolver.
const (
	maxIdle    = 4
	idleFor    = 10 * time.Second
	maxMessage = 1<<16 - 1
)

// ParseResolver reads ADDRESS:PORT, tls://ADDRESS[:853] or https://ADDRESS[:443]/PATH, with
// "#NAME" behind it when the certificate is for a name, not for the address. Kind: Invalid.
func ParseResolver(text string) (*Resolver, error) {
	scheme, rest, encrypted := strings.Cut(text, "://")
	if !encrypted {
		at, err := netip.ParseAddrPort(text)
		if err != nil || at.Port() == 0 {
			return nil, invalidResolver(text)
		}
		return &Resolver{At: at}, nil
	}
	u, err := url.Parse(text)
	if err != nil || u.User != nil || u.RawQuery != "" || rest == "" {
		return nil, invalidResolver(text)
	}
	addr, err := netip.ParseAddr(u.Hostname())
	if err != nil || addr.Zone() != "" {
		return nil, invalidResolver(text)
	}
	port, r := u.Port(), &Resolver{TLS: addr.String(), Path: u.EscapedPath()}
	if u.Fragment != "" {
		if r.TLS = strings.ToLower(u.Fragment); !isHost(r.TLS) {
			return nil, invalidResolver(text)
		}
	}
	r.config = &tls.Config{ServerName: r.TLS, MinVersion: tls.VersionTLS12, ClientSessionCache: tls.NewLRUClientSessionCache(maxIdle)}
	switch {
	case scheme == "tls" && r.Path == "":
		if port == "" {
			port = "853"
		}
		r.idle = make(chan net.Conn, maxIdle)
	case scheme == "https" && r.Path != "" && r.Path != "/":
		if port == "" {
			port = "443"
		}
	default:
		return nil, invalidResolver(text)
	}
	if r.At, err = netip.ParseAddrPort(net.JoinHostPort(addr.String(), port)); err != nil || r.At.Port() == 0 {
		return nil, invalidResolver(text)
	}
	if r.Path != "" {
		r.client = &http.Client{
			Transport: &http.Transport{
				DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
					var d net.Dialer
					return d.DialContext(ctx, network, r.At.String())
				},
				TLSClientConfig: r.config, ForceAttemptHTTP2: true, MaxIdleConns: maxIdle, IdleConnTimeout: idleFor, MaxResponseHeaderBytes: 16 << 10,
			},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		}
	}
	return r, nil
}

func invalidResolver(text string) error {
	return berm.Errorf(berm.Invalid, "%q is not a resolver", text).
		WithHint("it is ADDRESS:PORT, tls://ADDRESS#NAME or https://ADDRESS/dns-query#NAME, such as 192.0.2.53:53")
}

func (r *Resolver) String() string {
	switch {
	case r.Path != "":
		return "https://" + r.At.String() + r.Path
	case r.TLS != "":
		return "tls://" + r.At.String()
	}
	return r.At.String()
}

// transact sends a message by an encrypted way and returns what comes back.
func (r *Resolver) transact(ctx context.Context, message []byte) ([]byte, error) {
	if r.client != nil {
		return r.post(ctx, message)
	}
	for {
		select {
		case conn := <-r.idle:
			if reply, err := r.over(ctx, conn, message); err == nil {
				return reply, nil
			}
			continue // the server gave it up, as it may at any time
		default:
		}
		dialer := tls.Dialer{Config: r.config}
		conn, err := dialer.DialContext(ctx, "tcp", r.At.String())
		if err != nil {
			return nil, err
		}
		return r.over(ctx, conn, message)
	}
}

// over sends a message over a connection, which is kept for the next one if all is well.
func (r *Resolver) over(ctx context.Context, conn net.Conn, message []byte) (reply []byte, err error) {
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	reply, err = streamed(conn, message)
	if !stop() || err != nil {
		conn.Close()
		return reply, err
	}
	select {
	case r.idle <- conn:
		time.AfterFunc(idleFor, func() {
			select {
			case old := <-r.idle: // the oldest
				old.Close()
			default:
			}
		})
	default:
		conn.Close()
	}
	return reply, nil
}

// streamed sends a message over a stream, with its length before it, and reads the reply.
func streamed(conn net.Conn, message []byte) ([]byte, error) {
	if _, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(message))), message...)); err != nil {
		return nil, err
	}
	var size [2]byte
	if _, err := io.ReadFull(conn, size[:]); err != nil {
		return nil, err
	}
	reply := make([]byte, binary.BigEndian.Uint16(size[:]))
	_, err := io.ReadFull(conn, reply)
	return reply, err
}

func (r *Resolver) post(ctx context.Context, message []byte) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+net.JoinHostPort(r.TLS, fmt.Sprint(r.At.Port()))+r.Path, bytes.NewReader(message))
	if err != nil {
		return nil, err
	}
	const kind = "application/dns-message"
	request.Header.Set("Content-Type", kind)
	request.Header.Set("Accept", kind)
	request.Header.Set("User-Agent", "")
	response, err := r.client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK || response.Header.Get("Content-Type") != kind {
		return nil, fmt.Errorf("it answers with status %d and %q", response.StatusCode, response.Header.Get("Content-Type"))
	}
	reply, err := io.ReadAll(io.LimitReader(response.Body, maxMessage+1))
	if err == nil && len(reply) > maxMessage {
		err = errors.New("its answer is too long")
	}
	return reply, err
}
