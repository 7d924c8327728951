// Package server is the guest agent's HTTP server: E2B's envd protocol, version
// berm.AgentVersion.
package server

import (
	"context"
	"io"
	"math"
	"net"
	"net/http"
	"slices"
	"time"

	"connectrpc.com/connect"

	"github.com/berm-sandbox/berm/internal/guest/config"
	"github.com/berm-sandbox/berm/internal/guest/files"
	"github.com/berm-sandbox/berm/internal/guest/filesystem"
	"github.com/berm-sandbox/berm/internal/guest/ports"
	"github.com/berm-sandbox/berm/internal/guest/process"
	"github.com/berm-sandbox/berm/internal/guest/rest"
	"github.com/berm-sandbox/berm/internal/proto/codec"
	"github.com/berm-sandbox/berm/internal/proto/filesystem/filesystemconnect"
	"github.com/berm-sandbox/berm/internal/proto/process/processconnect"
)

const (
	headerTimeout = 10 * time.Second
	maxHeader     = 64 << 10
	// idleTimeout is longer than any proxy's, so that the proxy lets go first.
	idleTimeout = 640 * time.Second
	maxInit     = 1 << 20
	// maxMessage bounds one RPC request, decompressed: the input to a process.
	maxMessage = 32 << 20
	// minCompress is never reached: compressed requests are read, but answers go out
	// plain. Go clients ask for gzip unasked; it would take four fifths of the speed
	// of a command's output, and a megabyte of memory.
	minCompress = math.MaxInt
)

// reserved are the paths of the control plane. Programs inside and clients of the
// sandbox must not call them.
var reserved = []string{"/init", "/freeze", "/unfreeze", "/fsfreeze", "/fsthaw", "/collapse", "/upgrade"}

// Server serves the protocol.
type Server struct {
	config *config.Config
	http   http.Server
	meter  meter
}

// New returns a server for the sandbox of c.
func New(c *config.Config) *Server {
	s := &Server{config: c}

	options := []connect.HandlerOption{
		connect.WithReadMaxBytes(maxMessage),
		connect.WithCompressMinBytes(minCompress),
		connect.WithCodec(codec.JSON{}),
	}
	mux := http.NewServeMux()
	mux.Handle(processconnect.NewProcessHandler(process.NewService(c), options...))
	mux.Handle(filesystemconnect.NewFilesystemHandler(filesystem.NewService(c), options...))
	f := files.NewHandler(c)
	mux.HandleFunc("GET /files", f.Get)
	mux.HandleFunc("POST /files", f.Post)
	mux.HandleFunc("POST /files/compose", f.Compose)
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		w.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("GET /metrics", s.metrics)
	mux.HandleFunc("GET /envs", s.envs)
	mux.HandleFunc("POST /init", s.init)

	s.http = http.Server{
		Handler:           releaseWhenIdle(s.guard(mux)),
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			_, outside := c.(*ports.Conn)
			return context.WithValue(ctx, outsideKey{}, outside)
		},
		Protocols: new(http.Protocols),
	}
	s.http.Protocols.SetHTTP1(true)
	s.http.Protocols.SetUnencryptedHTTP2(true)
	return s
}

// outsideKey is set on requests that did not come from inside the sandbox.
type outsideKey struct{}

// Serve answers on l until it is closed. Only what a ports.Listener accepts counts
// as coming from outside.
func (s *Server) Serve(l net.Listener) error { return s.http.Serve(l) }

// Close ends all connections.
func (s *Server) Close() error { return s.http.Close() }

// guard decides who may call what.
func (s *Server) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path := r.URL.Path
		outside, _ := r.Context().Value(outsideKey{}).(bool)
		control := slices.Contains(reserved, path)
		if control && !outside {
			http.Error(w, "path "+path+" is reserved for the E2B control plane", http.StatusNotFound)
			return
		}
		if !control {
			cors(w.Header(), r.Header)
			if r.Method == http.MethodOptions {
				w.WriteHeader(http.StatusNoContent)
				return
			}
		}
		open := path == "/health" && r.Method == http.MethodGet
		switch {
		case open || control: // init checks for itself
		case !s.config.Ready():
			rest.Error(w, http.StatusServiceUnavailable, "the sandbox is not configured yet")
			return
		case path == "/files" && (r.Method == http.MethodGet || r.Method == http.MethodPost): // token or signature
		case !s.config.Authorized(r.Header.Get(files.TokenHeader)):
			rest.Error(w, http.StatusUnauthorized, "unauthorized access, please provide a valid access token or method signing if supported")
			return
		}
		if r.Header.Get("Connect-Timeout-Ms") == "0" {
			r.Header.Del("Connect-Timeout-Ms") // clients mean no deadline
		}
		next.ServeHTTP(w, r)
	})
}

// cors lets pages of any origin call: the token protects, not the origin.
func cors(h, request http.Header) {
	h.Set("Access-Control-Allow-Origin", "*")
	h.Set("Access-Control-Expose-Headers", "*, Location, Cache-Control, X-Content-Type-Options, Content-Encoding, Grpc-Status, Grpc-Message, Grpc-Status-Details-Bin")
	if request.Get("Access-Control-Request-Method") != "" {
		h.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE")
		h.Set("Access-Control-Max-Age", "7200")
		// "*" would not cover Authorization.
		if names := request.Get("Access-Control-Request-Headers"); names != "" {
			h.Set("Access-Control-Allow-Headers", names)
		}
		h.Add("Vary", "Access-Control-Request-Headers")
	}
}

func (s *Server) envs(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Cache-Control", "no-store")
	rest.JSON(w, s.config.Env())
}

// init takes a new configuration. Once there is a token, only its holder may change
// anything, the token included.
func (s *Server) init(w http.ResponseWriter, r *http.Request) {
	if !s.config.Authorized(r.Header.Get(files.TokenHeader)) {
		rest.Error(w, http.StatusUnauthorized, "access token validation failed")
		return
	}
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxInit))
	if err == nil {
		err = s.config.Init(data)
	}
	if err != nil {
		rest.Error(w, http.StatusBadRequest, err.Error())
		return
	}
	w.WriteHeader(http.StatusNoContent)
}
