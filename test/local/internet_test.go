package local

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/cgi"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"github.com/berm-sandbox/berm/test/harness"
)

// internetAddress is that of every name below .example.
const internetAddress = harness.InternetAddress

// internet is the part of this program that is the internet for the command that follows.
// It runs in namespaces of its own.
func internet(dir string, argv []string) (int, error) {
	proxy := &harness.Proxy{User: "user", Password: proxyPassword, Dial: func(ctx context.Context, target string) (net.Conn, error) {
		_, port, err := net.SplitHostPort(target)
		if err != nil {
			return nil, err
		}
		return new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(internetAddress, port))
	}}
	return harness.Internet(dir, site(dir, proxy), proxy, []string{"*.example", "*.sub.example"}, argv)
}

const proxyPassword = "pass-of-the-proxy"

// serve answers each request with its method and target; /hash with the hash of what
// authorises it, and /echo with that itself. git.example has a repository for whoever knows
// the secret. /via says what the proxy was asked for, which listens there too, with and without
// TLS.
func site(dir string, proxy *harness.Proxy) http.Handler {
	repository := filepath.Join(dir, "o", "r.git")
	made := sync.OnceValue(func() error {
		return exec.Command("git", "init", "-q", "--bare", repository).Run()
	})
	git := &cgi.Handler{Path: "/usr/bin/git", Args: []string{"http-backend"}, Env: []string{"GIT_PROJECT_ROOT=" + dir, "GIT_HTTP_EXPORT_ALL=1", "REMOTE_USER=agent"}}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Host == "git.example" {
			if user, password, _ := r.BasicAuth(); user != "x-access-token" || password != secret || made() != nil {
				http.Error(w, "who?", http.StatusForbidden)
				return
			}
			body, _ := io.ReadAll(r.Body) // CGI knows no chunks
			r.Body, r.ContentLength, r.TransferEncoding = io.NopCloser(bytes.NewReader(body)), int64(len(body)), nil
			git.ServeHTTP(w, r)
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		switch r.URL.Path {
		case "/hash":
			fmt.Fprintf(w, "%x", sha256.Sum256([]byte(r.Header.Get("Authorization"))))
			return
		case "/via":
			fmt.Fprintf(w, "<%s>", proxy.Via(r.RemoteAddr))
			return
		case "/redirect":
			http.Redirect(w, r, "https://"+r.Host+"/next", http.StatusFound)
			return
		case "/echo":
			w.Header().Set("Echo", r.Header.Get("Authorization"))
			fmt.Fprintf(w, "<%s>", r.Header.Get("Authorization"))
			return
		}
		if size, ok := strings.CutPrefix(r.URL.Path, "/fill/"); ok {
			n, _ := strconv.Atoi(size)
			_, _ = w.Write(make([]byte, n))
			return
		}
		fmt.Fprintf(w, "%s %s %s\n", r.Method, r.Host, r.URL)
	})
}
