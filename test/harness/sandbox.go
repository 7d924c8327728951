package harness

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// StatusError is an answer of the server other than success.
type StatusError struct {
	Status int
	Body   string
}

func (e *StatusError) Error() string { return fmt.Sprintf("HTTP %d: %s", e.Status, e.Body) }

// Call sends one request of the control plane. in and out may be nil.
func (s *Server) Call(ctx context.Context, method, path string, in, out any) error {
	_, err := s.call(ctx, method, path, in, out)
	return err
}

func (s *Server) call(ctx context.Context, method, path string, in, out any) (http.Header, error) {
	var body io.Reader
	if in != nil {
		encoded, err := json.Marshal(in)
		if err != nil {
			return nil, err
		}
		body = bytes.NewReader(encoded)
	}
	request, err := http.NewRequestWithContext(ctx, method, s.URL+path, body)
	if err != nil {
		return nil, err
	}
	request.Header.Set("X-API-Key", s.Key)
	if in != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	response, err := s.client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	return response.Header, decode(response, out)
}

func decode(response *http.Response, out any) error {
	defer drain(response.Body)
	if response.StatusCode >= 300 {
		text, _ := io.ReadAll(io.LimitReader(response.Body, 4096))
		return &StatusError{response.StatusCode, string(text)}
	}
	if out == nil {
		return nil
	}
	return json.NewDecoder(response.Body).Decode(out)
}

// Sandbox is one sandbox of a Server.
type Sandbox struct {
	ID    string `json:"sandboxID"`
	Token string `json:"envdAccessToken"`

	// Steps is what the server says each step of the creation took, in order.
	Steps []Step

	server *Server
}

// Step is one part of a creation.
type Step struct {
	Name string
	Took time.Duration
}

// Create makes a sandbox of template "base" that lives for timeout. options are
// further fields of the request, and may be nil.
func (s *Server) Create(ctx context.Context, timeout time.Duration, options map[string]any) (*Sandbox, error) {
	body := map[string]any{"templateID": "base", "timeout": int(timeout.Seconds())}
	for name, value := range options {
		body[name] = value
	}
	sandbox := &Sandbox{server: s}
	header, err := s.call(ctx, "POST", "/v2/sandboxes", body, sandbox)
	if err != nil {
		return nil, err
	}
	for entry := range strings.SplitSeq(header.Get("Server-Timing"), ", ") {
		name, took, ok := strings.Cut(entry, ";dur=")
		if ms, err := strconv.ParseFloat(took, 64); ok && err == nil {
			sandbox.Steps = append(sandbox.Steps, Step{name, time.Duration(ms * float64(time.Millisecond))})
		}
	}
	return sandbox, nil
}

// Sandbox finds a sandbox that is there.
func (s *Server) Sandbox(ctx context.Context, id string) (*Sandbox, error) {
	sandbox := &Sandbox{server: s}
	return sandbox, s.Call(ctx, "GET", "/sandboxes/"+id, nil, sandbox)
}

// Fork makes one more sandbox of what another one is.
func (s *Server) Fork(ctx context.Context, of *Sandbox, timeout time.Duration) (*Sandbox, error) {
	var forks []struct {
		Sandbox *Sandbox
		Error   json.RawMessage
	}
	if err := s.Call(ctx, "POST", "/sandboxes/"+of.ID+"/fork", map[string]any{"count": 1, "timeout": int(timeout.Seconds())}, &forks); err != nil {
		return nil, err
	}
	if len(forks) != 1 || forks[0].Sandbox == nil {
		return nil, fmt.Errorf("no fork: %s", forks[0].Error)
	}
	forks[0].Sandbox.server = s
	return forks[0].Sandbox, nil
}

// Kill ends the sandbox.
func (sb *Sandbox) Kill(ctx context.Context) error {
	return sb.server.Call(ctx, "DELETE", "/sandboxes/"+sb.ID, nil, nil)
}

// Request makes an HTTP request to a port inside.
func (sb *Sandbox) Request(ctx context.Context, method string, port int, path string, body io.Reader) (*http.Request, error) {
	request, err := http.NewRequestWithContext(ctx, method, sb.server.URL+path, body)
	if err != nil {
		return nil, err
	}
	request.Header.Set("E2b-Sandbox-Id", sb.ID)
	request.Header.Set("E2b-Sandbox-Port", strconv.Itoa(port))
	if sb.Token != "" {
		request.Header.Set("X-Access-Token", sb.Token)
	}
	return request, nil
}

// Do sends a request made by Request.
func (sb *Sandbox) Do(request *http.Request) (*http.Response, error) {
	return sb.server.client.Do(request)
}

const agentPort = 49983

// Write stores a file inside as user, streaming content.
func (sb *Sandbox) Write(ctx context.Context, user, path string, content io.Reader) error {
	query := url.Values{"path": {path}, "username": {user}}
	request, err := sb.Request(ctx, "POST", agentPort, "/files?"+query.Encode(), content)
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/octet-stream")
	response, err := sb.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	return decode(response, nil)
}

// Read opens a file inside as user.
func (sb *Sandbox) Read(ctx context.Context, user, path string) (io.ReadCloser, error) {
	query := url.Values{"path": {path}, "username": {user}}
	request, err := sb.Request(ctx, "GET", agentPort, "/files?"+query.Encode(), nil)
	if err != nil {
		return nil, err
	}
	response, err := sb.Do(request)
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		return nil, decode(response, nil)
	}
	return response.Body, nil
}

// Result is how a command ended.
type Result struct {
	Stdout, Stderr string
	Code           int
	Status         string // such as "exit status 1" or "signal: killed"
	Truncated      bool   // more output came than was kept
	Bytes          int64  // of all output
}

// Command is one command to run inside.
type Command struct {
	User    string // "" is the template's default user
	Path    string
	Args    []string
	Env     map[string]string
	Timeout time.Duration // 0: none
	// Keep bounds the bytes kept of each output; 0 means 1 MiB. All of it is read.
	Keep int
	// First, when set, is called when the first output arrives.
	First func()
	// Started, when set, is called with the pid inside.
	Started func(pid int)
}

// Shell is a Command that runs text with bash.
func Shell(user, text string) Command {
	return Command{User: user, Path: "/bin/bash", Args: []string{"-c", text}}
}

// event is the ProcessEvent of envd's process service in JSON.
type event struct {
	Event struct {
		Start *struct{ Pid int }
		Data  *output
		End   *struct {
			ExitCode int
			Status   string
		}
	}
}

type output struct{ Stdout, Stderr string } // base64

// between returns the JSON string without escapes between a prefix and a suffix.
func between(text []byte, prefix, suffix string) (string, bool) {
	inner, begins := bytes.CutPrefix(text, []byte(prefix))
	inner, ends := bytes.CutSuffix(inner, []byte(suffix))
	if !begins || !ends || bytes.IndexByte(inner, '"') >= 0 || bytes.IndexByte(inner, '\\') >= 0 {
		return "", false
	}
	return string(inner), true
}

// Run runs a command inside and waits for its end.
func (sb *Sandbox) Run(ctx context.Context, c Command) (Result, error) {
	keep := c.Keep
	if keep == 0 {
		keep = 1 << 20
	}
	message, err := json.Marshal(map[string]any{
		"process": map[string]any{"cmd": c.Path, "args": c.Args, "envs": c.Env},
		"stdin":   false,
	})
	if err != nil {
		return Result{}, err
	}
	frame := binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message)))
	request, err := sb.Request(ctx, "POST", agentPort, "/process.Process/Start", bytes.NewReader(append(frame, message...)))
	if err != nil {
		return Result{}, err
	}
	request.Header.Set("Content-Type", "application/connect+json")
	request.Header.Set("Connect-Protocol-Version", "1")
	if c.Timeout > 0 {
		request.Header.Set("Connect-Timeout-Ms", strconv.FormatInt(c.Timeout.Milliseconds(), 10))
	}
	if c.User != "" {
		request.SetBasicAuth(c.User, "")
	}
	response, err := sb.Do(request)
	if err != nil {
		return Result{}, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return Result{}, decode(response, nil)
	}

	var result Result
	var out, errs strings.Builder
	add := func(to *strings.Builder, encoded string) error {
		result.Bytes += int64(len(encoded)/4*3 - strings.Count(encoded[max(len(encoded)-2, 0):], "="))
		if len(encoded) > 0 && to.Len() == keep {
			result.Truncated = true
			return nil
		}
		data, err := base64.StdEncoding.DecodeString(encoded)
		if err != nil {
			return err
		}
		if room := keep - to.Len(); len(data) > room {
			data, result.Truncated = data[:max(room, 0)], true
		}
		to.Write(data)
		return nil
	}
	first, ended := c.First, false
	var payload []byte
	for {
		var header [5]byte
		if _, err := io.ReadFull(response.Body, header[:]); err != nil {
			result.Stdout, result.Stderr = out.String(), errs.String()
			return result, fmt.Errorf("stream cut: %w", err)
		}
		n := int(binary.BigEndian.Uint32(header[1:]))
		payload = slices.Grow(payload[:0], n)[:n]
		if _, err := io.ReadFull(response.Body, payload); err != nil {
			return result, fmt.Errorf("stream cut: %w", err)
		}
		if header[0]&2 != 0 { // the end of the stream
			result.Stdout, result.Stderr = out.String(), errs.String()
			var trailer struct{ Error json.RawMessage }
			if err := json.Unmarshal(payload, &trailer); err != nil {
				return result, err
			}
			if trailer.Error != nil {
				return result, fmt.Errorf("command failed: %s", trailer.Error)
			}
			if !ended {
				return result, errors.New("stream ended without an end event")
			}
			return result, nil
		}
		var e event
		// Much output is taken out without a look at each character: what this client
		// costs must not be taken for the server's cost.
		if encoded, ok := between(payload, `{"event":{"data":{"stdout":"`, `"}}}`); ok {
			e.Event.Data = &output{Stdout: encoded}
		} else if err := json.Unmarshal(payload, &e); err != nil {
			return result, err
		}
		switch {
		case e.Event.Start != nil && c.Started != nil:
			c.Started(e.Event.Start.Pid)
		case e.Event.Data != nil:
			if first != nil {
				first()
				first = nil
			}
			if err := errors.Join(add(&out, e.Event.Data.Stdout), add(&errs, e.Event.Data.Stderr)); err != nil {
				return result, err
			}
		case e.Event.End != nil:
			ended = true
			result.Code, result.Status = e.Event.End.ExitCode, e.Event.End.Status
		}
	}
}
