package drivertest

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm"
)

// Result is what a command inside did.
type Result struct {
	Output string // standard output and error
	Status string // such as "exit status 0" or "signal: killed"
	Code   int
}

// Client speaks HTTP with the guest agent of a sandbox.
func Client(s berm.Sandbox) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return s.Dial(ctx, berm.AgentPort)
		},
	}}
}

// Shell runs a script as root inside and waits for its end.
func Shell(ctx context.Context, s berm.Sandbox, script string) (Result, error) {
	body, err := json.Marshal(map[string]any{"process": map[string]any{"cmd": "/bin/sh", "args": []string{"-c", script}}})
	if err != nil {
		return Result{}, err
	}
	// A Connect stream: flags, length, message.
	envelope := binary.BigEndian.AppendUint32([]byte{0}, uint32(len(body)))
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://sandbox/process.Process/Start", bytes.NewReader(append(envelope, body...)))
	if err != nil {
		return Result{}, err
	}
	request.Header.Set("Content-Type", "application/connect+json")
	request.Header.Set("Connect-Protocol-Version", "1")
	request.SetBasicAuth("root", "")
	response, err := Client(s).Do(request)
	if err != nil {
		return Result{}, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(response.Body)
		return Result{}, fmt.Errorf("start: %s: %s", response.Status, text)
	}
	var r Result
	var output strings.Builder
	for {
		var header [5]byte
		if _, err := io.ReadFull(response.Body, header[:]); err != nil {
			return r, fmt.Errorf("after %q: %w", output.String(), err)
		}
		message := make([]byte, binary.BigEndian.Uint32(header[1:]))
		if _, err := io.ReadFull(response.Body, message); err != nil {
			return r, err
		}
		if header[0]&2 != 0 { // the end of the stream
			return r, fmt.Errorf("no end event: %s", message)
		}
		var reply struct {
			Event struct {
				Data struct{ Stdout, Stderr []byte }
				End  *struct {
					ExitCode int
					Status   string
				}
			}
		}
		if err := json.Unmarshal(message, &reply); err != nil {
			return r, err
		}
		output.Write(reply.Event.Data.Stdout)
		output.Write(reply.Event.Data.Stderr)
		if end := reply.Event.End; end != nil {
			return Result{output.String(), end.Status, end.ExitCode}, nil
		}
	}
}

// sh runs a script inside that must succeed and returns its output.
func sh(t *testing.T, s berm.Sandbox, script string) string {
	t.Helper()
	r, err := Shell(testContext(t), s, script)
	if err != nil {
		t.Fatalf("sh -c %q: %v", script, err)
	}
	if r.Code != 0 {
		t.Fatalf("sh -c %q: %s: %s", script, r.Status, r.Output)
	}
	return strings.TrimSpace(r.Output)
}

// begin runs a script inside that does not end by itself.
func begin(t *testing.T, s berm.Sandbox, script string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = Shell(ctx, s, script) // its end is not of interest
	}()
	t.Cleanup(func() { cancel(); <-done })
}

// health asks the agent once.
func health(ctx context.Context, s berm.Sandbox) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://sandbox/health", nil)
	if err != nil {
		return err
	}
	response, err := Client(s).Do(request)
	if err != nil {
		return err
	}
	response.Body.Close()
	if response.StatusCode != http.StatusNoContent {
		return fmt.Errorf("health: %s", response.Status)
	}
	return nil
}
