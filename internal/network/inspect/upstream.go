package inspect

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"syscall"
	"time"

	"github.com/berm-sandbox/berm"
)

// siteLimit bounds the names of one sandbox whose upstream connections are kept: a wildcard
// rule lets the sandbox choose names.
const siteLimit = 512

// site is what the flows of one sandbox to one name and port share.
type site struct {
	siteKey
	tls       *tls.Config // towards the client that speaks HTTP/1
	tls2      *tls.Config // and towards the one that speaks HTTP/2 only
	transport *http.Transport
}

type siteKey struct {
	flow   Flow
	scheme string
	http2  bool // without TLS
}

// site returns the site, made when it is not there.
func (p *Proxy) site(key siteKey) (*site, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, net.ErrClosed
	}
	if s := p.sites[key]; s != nil {
		return s, nil
	}
	if len(p.sites) >= siteLimit {
		for other, s := range p.sites { // any one; its connections in use live on
			delete(p.sites, other)
			s.transport.CloseIdleConnections()
			break
		}
	}
	shared := p.Sessions.of(key, func() *session {
		// One configuration for all connections to the name: its tickets let clients resume.
		s := &session{cache: tls.NewLRUClientSessionCache(4)}
		s.tls = &tls.Config{
			MinVersion: tls.VersionTLS12,
			NextProtos: []string{"http/1.1", "http/1.0"},
			GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
				return p.CA.Leaf(key.flow.Name)
			},
		}
		s.tls2 = s.tls.Clone()
		s.tls2.NextProtos = []string{"h2"}
		return s
	})
	s := &site{siteKey: key, tls: shared.tls, tls2: shared.tls2}
	var protocols http.Protocols
	switch {
	case key.http2:
		protocols.SetUnencryptedHTTP2(true)
	case key.scheme == "https":
		protocols.SetHTTP2(true)
		fallthrough
	default:
		protocols.SetHTTP1(true)
	}
	s.transport = &http.Transport{
		Protocols: &protocols,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return p.Dial(ctx, key.flow)
		},
		TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: p.Roots, ServerName: key.flow.Name, ClientSessionCache: shared.cache},
		TLSHandshakeTimeout:    10 * time.Second,
		DisableCompression:     true,
		MaxIdleConnsPerHost:    16,
		IdleConnTimeout:        90 * time.Second,
		ExpectContinueTimeout:  time.Second,
		MaxResponseHeaderBytes: 256 << 10,
		// Larger buffers cost memory per connection and save system calls of large bodies.
		WriteBufferSize: 16 << 10,
		ReadBufferSize:  16 << 10,
		// What the client does not take of a reply.
		HTTP2: &http.HTTP2Config{MaxReceiveBufferPerStream: 512 << 10},
	}
	p.sites[key] = s
	return s, nil
}

// said says whether what upstreamFailed tells of an error is all that there is to tell.
func said(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout() || berm.KindOf(err) == berm.NotFound ||
		slices.ContainsFunc([]error{syscall.ECONNREFUSED, syscall.ECONNRESET, io.EOF, io.ErrUnexpectedEOF}, func(target error) bool { return errors.Is(err, target) })
}

// upstreamFailed says what is wrong with an upstream, in words for the client: addresses
// and proxies outside are not for its eyes.
func upstreamFailed(f Flow, err error) *Denial {
	d := &Denial{Status: http.StatusBadGateway, Reason: ReasonUpstream}
	var cert *tls.CertificateVerificationError
	var timeout net.Error
	switch {
	case berm.KindOf(err) == berm.Denied:
		d.Status, d.Reason = http.StatusForbidden, ReasonPolicy
		d.Message, d.Hint = err.Error(), berm.HintOf(err)
	case berm.KindOf(err) == berm.NotFound:
		d.Message = "there is no name " + f.Name
	case errors.As(err, &cert):
		d.Reason = ReasonCertificate
		d.Message = "the certificate of " + f.Address() + " cannot be verified: " + cert.Err.Error()
		d.Hint = "a private authority must be added to Berm's own roots; the sandbox's do not count"
	case errors.Is(err, syscall.ECONNREFUSED):
		d.Message = f.Address() + " refuses connections"
	case errors.As(err, &timeout) && timeout.Timeout():
		d.Message = f.Address() + " does not answer in time"
	default:
		d.Message = f.Address() + " cannot be reached, or broke the connection"
	}
	return d
}
