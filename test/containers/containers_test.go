// Package containers drives containers of a real server, from outside, as their clients do.
package containers

import (
	"context"
	_ "embed"
	"errors"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }

//go:embed testdata/interpreter.py
var interpreter string

// server is a server whose containers are made of base, and get an interpreter from the test.
type server struct {
	*harness.Server
	t *testing.T
}

const at = "/berm/v1/containers"

func (s *server) call(method, path string, in, out any) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return s.Call(ctx, method, at+path, in, out)
}

type object map[string]any

type made struct {
	ID      string                `json:"id"`
	Network struct{ Type string } `json:"network_policy"`
}

// container makes or finds the container of a thread.
func (s *server) container(thread string) made {
	s.t.Helper()
	var c made
	if err := s.call("POST", "", object{"thread_id": thread}, &c); err != nil {
		s.t.Fatal(err)
	}
	return c
}

// equip starts the interpreter of a container.
func (s *server) equip(id string) *harness.Sandbox {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	sandbox, err := s.Sandbox(ctx, id)
	if err == nil {
		err = sandbox.Write(ctx, "user", "/tmp/interpreter.py", strings.NewReader(interpreter))
	}
	if err != nil {
		s.t.Fatal(err)
	}
	_, err = sandbox.Run(ctx, harness.Shell("user", `setsid python3 /tmp/interpreter.py </dev/null >/dev/null 2>&1 &
		until curl -sf http://127.0.0.1:49999/contexts; do sleep 0.1; done`))
	if err != nil {
		s.t.Fatal(err)
	}
	return sandbox
}

type result struct {
	Status, Stdout string
	Results        []struct{ Text string }
	Error          *struct{ Name string }
}

func (s *server) run(id, code string) (r result, err error) {
	err = s.call("POST", "/"+id+"/executions", object{"code": code}, &r)
	return r, err
}

// refused checks that a call failed with a status and a text.
func (s *server) refused(err error, status int, text string) {
	s.t.Helper()
	var refusal *harness.StatusError
	if !errors.As(err, &refusal) || refusal.Status != status || !strings.Contains(refusal.Body, text) {
		s.t.Errorf("%v, want %d with %q", err, status, text)
	}
}

func TestContainers(t *testing.T) {
	harness.Slow(t)
	s := &server{harness.Serve(t, "--container-template", "base"), t}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()

	c := s.container("a")
	sandbox := s.equip(c.ID)
	if again := s.container("a"); again.ID != c.ID || again.Network.Type != "disabled" {
		t.Errorf("%+v and %+v", c, again)
	}
	if _, err := s.run(c.ID, "x = 20"); err != nil {
		t.Fatal(err)
	}
	if r, err := s.run(c.ID, "x + 22"); err != nil || r.Status != "completed" || r.Results[0].Text != "42" {
		t.Errorf("%+v, %v", r, err)
	}
	if r, err := s.run(c.ID, "print('out')\n1 / 0"); err != nil || r.Status != "failed" || r.Error.Name != "ZeroDivisionError" {
		t.Errorf("%+v, %v", r, err)
	}
	// What it makes can be fetched; without a key or a token nobody gets in.
	if _, err := s.run(c.ID, "open('/home/user/out.txt', 'w').write('made inside')"); err != nil {
		t.Fatal(err)
	}
	var files struct {
		Data []struct{ ID, Path, Source string }
	}
	if err := s.call("GET", "/"+c.ID+"/files", nil, &files); err != nil || len(files.Data) != 1 || files.Data[0].Path != "/home/user/out.txt" || files.Data[0].Source != "assistant" {
		t.Errorf("%+v, %v", files, err)
	}
	// Directories that not even the agent may read do not spoil the list of others.
	if err := s.call("GET", "/"+c.ID+"/files?path=/proc/1", nil, &files); err != nil || len(files.Data) == 0 {
		t.Errorf("%d files, %v", len(files.Data), err)
	}
	request, err := sandbox.Request(ctx, "GET", 49999, "/contexts", nil)
	if err != nil {
		t.Fatal(err)
	}
	if answer, err := sandbox.Do(request); err != nil || answer.StatusCode != http.StatusForbidden {
		t.Errorf("the interpreter's port is open: %+v, %v", answer, err)
	} else {
		answer.Body.Close()
	}
	// By default it reaches nothing, metadata services least of all.
	if r, err := s.run(c.ID, `__import__("subprocess").run("curl -s -m 3 http://169.254.169.254/ || curl -s -m 3 http://[fd00:ec2::254]/ || curl -s -m 3 http://metadata.google.internal/ || curl -s -m 3 http://1.1.1.1/", shell=True).returncode`); err != nil || r.Results[0].Text == "0" {
		t.Errorf("%+v, %v", r, err)
	}

	// The server may die: thread, variables and time stay.
	s.Crash()
	if err := s.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	if again := s.container("a"); again.ID != c.ID {
		t.Errorf("after a restart the thread has %s, not %s", again.ID, c.ID)
	}
	if r, err := s.run(c.ID, "x"); err != nil || r.Results[0].Text != "20" {
		t.Errorf("%+v, %v", r, err)
	}

	// An interpreter that is killed says so, and so does a container.
	_, err = s.run(c.ID, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
	s.refused(err, http.StatusServiceUnavailable, "interpreter")
	_, err = s.run(c.ID, "x")
	s.refused(err, http.StatusServiceUnavailable, "hint")
	s.equip(c.ID)
	ended := make(chan error, 1)
	go func() { _, err := s.run(c.ID, "import time; open('/tmp/runs', 'w'); time.sleep(600)"); ended <- err }()
	if _, err := sandbox.Run(ctx, harness.Shell("user", "until [ -e /tmp/runs ]; do sleep 0.1; done")); err != nil {
		t.Fatal(err)
	}
	if err := s.call("DELETE", "/"+c.ID, nil, nil); err != nil {
		t.Fatal(err)
	}
	s.refused(<-ended, http.StatusNotFound, "was deleted")

	// At the end of its time it is gone, and the thread gets another one.
	c = s.container("a")
	if err := s.Call(ctx, "POST", "/sandboxes/"+c.ID+"/timeout", object{"timeout": 1}, nil); err != nil {
		t.Fatal(err)
	}
	for {
		var all struct{ Data []made }
		if err := s.call("GET", "", nil, &all); err != nil {
			t.Fatal(err)
		}
		if len(all.Data) == 0 {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	_, err = s.run(c.ID, "x")
	s.refused(err, http.StatusNotFound, "expired")
	if again := s.container("a"); again.ID == c.ID {
		t.Error("the thread has a container that ended")
	}
}

// The examples of the documentation work, as what the official client of the hosted API asks for.
func TestExamples(t *testing.T) {
	harness.Slow(t)
	python := os.Getenv("BERM_TEST_OPENAI_PYTHON")
	if python == "" {
		t.Skip("test/containers/run has a template with an interpreter and a Python with openai")
	}
	s := harness.Serve(t)
	for name, says := range map[string]string{
		"analysis.py": "north sells most", "script.py": "3 words begin with b", "exercises.py": "ann: passed\nben: failed, -1 is no sum\ncleo: not in time\ndan: passed",
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
			defer cancel()
			example, err := filepath.Abs(filepath.Join("..", "..", "examples", "containers", name))
			if err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(ctx, python, example)
			cmd.Dir = t.TempDir()
			cmd.Env = append(os.Environ(), "E2B_API_URL="+s.URL, "E2B_API_KEY="+s.Key, "PYTHONDONTWRITEBYTECODE=1")
			out, err := cmd.CombinedOutput()
			if err != nil || !strings.Contains(string(out), says) {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
