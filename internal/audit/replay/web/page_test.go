package web

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/audit/audittest"
	"github.com/berm-sandbox/berm/internal/audit/replay"
	"github.com/berm-sandbox/berm/internal/audit/trail"
)

const (
	id   = berm.SandboxID("i0aaaaaaaaaaaaaaaaaaa")
	evil = berm.SandboxID("i0ccccccccccccccccccc")
)

func written(t *testing.T, id berm.SandboxID, p replay.Part) string {
	t.Helper()
	l := audittest.New(t, t.TempDir())
	l.Session("i0aaaaaaaaaaaaaaaaaaa")
	l.Hostile(evil)
	tl, err := replay.Load(trail.Dir(l.Dir), id)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := Write(&out, tl, p); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

var dataOf = regexp.MustCompile(`(?s)<script type="application/json" id="data">(.*?)</script>`)

func decoded(t *testing.T, page string) (s session) {
	t.Helper()
	m := dataOf.FindStringSubmatch(page)
	if m == nil {
		t.Fatal("the page has no data")
	}
	if err := json.Unmarshal([]byte(m[1]), &s); err != nil {
		t.Fatal(err)
	}
	return s
}

func TestPageHasTheSession(t *testing.T) {
	s := decoded(t, written(t, id, replay.Part{}))
	if len(s.Commands) != 4 || len(s.Files) != 3 || len(s.Processes) < 8 || len(s.Panes) != 6 || len(s.Warnings) != 1 {
		t.Errorf("%d commands, %d looks at files, %d processes, panes %v, warnings %v", len(s.Commands), len(s.Files), len(s.Processes), s.Panes, s.Warnings)
	}
	npm := s.Commands[2]
	if n := len(npm.Screens); n != 3 || fmt.Sprint(npm.Lines[npm.Screens[2][1]]) != "[[added 1 package 3 0 0]  in 1s]" {
		t.Errorf("%d screens, lines %v", n, npm.Lines)
	}
	last := s.Files[2]
	if len(last.List) != 5 || !strings.Contains(s.Diffs[last.List[3].Diff], "+    fmt.Println(\"hello, world\")") {
		t.Errorf("files %+v, diffs %q", last.List, s.Diffs)
	}
	for _, p := range s.Processes {
		if p.PID == 11 && s.Processes[p.Parent].PID != 10 {
			t.Errorf("the parent of %+v is %+v", p, s.Processes[p.Parent])
		}
	}
	only := decoded(t, written(t, id, replay.Part{Lanes: []string{replay.Network}}))
	if len(only.Panes) != 2 || len(only.Commands) != 0 || len(only.Events) != 6 {
		t.Errorf("only the network: %v, %d events", only.Panes, len(only.Events))
	}
}

// A command that prints without end has a page of bounded size.
func TestPageIsBounded(t *testing.T) {
	l := audittest.New(t, t.TempDir())
	var steps []audittest.Step
	line := strings.Repeat("0123456789", 9)
	lines := 2 * perCommand
	if os.Getenv("BERM_TEST_ALL") != "" {
		lines *= 2
	}
	for i := range lines {
		steps = append(steps, audittest.Step{After: 50 * time.Millisecond, Text: fmt.Sprintf("%d %s\n%s%d\n%d%s\n", i, line, line, i, i, line)})
	}
	l.Run(id, audit.Actor{Type: "key"}, audittest.Command{PID: 5, Argv: []string{"yes"}, Steps: steps})
	tl, err := replay.Load(trail.Dir(l.Dir), id)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := Write(&out, tl, replay.Part{}); err != nil {
		t.Fatal(err)
	}
	s := decoded(t, out.String())
	if n := len(s.Commands[0].Screens); n < 1000 || n > perCommand+1 || out.Len() > 2*maxScreens {
		t.Errorf("%d screens in %d bytes", n, out.Len())
	}
	shown := s.Commands[0].Screens[len(s.Commands[0].Screens)-1]
	if got := fmt.Sprint(s.Commands[0].Lines[shown[len(shown)-1]]); !strings.Contains(got, fmt.Sprint(lines-1)) {
		t.Errorf("the last line is %s", got)
	}
}

// Nothing of a sandbox's choice is markup, and none of it is hidden or orders other text anew.
func TestPageOfAHostileSession(t *testing.T) {
	page := written(t, evil, replay.Part{})
	if n := strings.Count(strings.ToLower(page), "<script"); n != 2 {
		t.Errorf("%d scripts", n)
	}
	body := strings.Replace(page, script, "", 1)
	for _, markup := range []string{"<img", "<!--", "</script><script>w"} {
		if strings.Contains(body, markup) {
			t.Errorf("the page has %s", markup)
		}
	}
	for _, r := range body {
		if r != '\n' && !unicode.IsPrint(r) {
			t.Fatalf("the page has %q", r)
		}
	}
	if !strings.Contains(page, hash(script)) || !strings.Contains(page, hash(style)) || strings.Contains(page, "unsafe") {
		t.Error("the policy does not allow exactly the page's own script and style")
	}
	if strings.Contains(script, "innerHTML") || strings.Contains(script, "eval(") || strings.Contains(script, "document.write") {
		t.Error("the script makes markup of data")
	}
}

// A browser runs the page's own script and nothing of the sandbox's, and connects to nobody.
func TestPageInABrowser(t *testing.T) {
	if os.Getenv("BERM_TEST_ALL") == "" {
		t.Skip("starts browsers; BERM_TEST_ALL=1 runs it")
	}
	browser, err := exec.LookPath("chromium")
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal("chromium is not installed")
		}
		t.Skip("chromium is not installed")
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	var connections atomic.Int32
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			connections.Add(1)
			_ = c.Close()
		}
	}()
	dom := func(page, at string) string {
		t.Helper()
		path := filepath.Join(t.TempDir(), "page.html")
		if err := os.WriteFile(path, []byte(page), 0o600); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		var stderr bytes.Buffer
		cmd := exec.CommandContext(ctx, browser, "--headless", "--no-sandbox", "--disable-gpu", "--user-data-dir="+t.TempDir(),
			"--disable-background-networking", "--disable-component-update", "--no-first-run",
			"--host-resolver-rules=MAP *.test "+listener.Addr().String(), "--dump-dom", "file://"+path+at)
		cmd.Stderr = &stderr
		cmd.WaitDelay = 10 * time.Second
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v: %s", err, stderr.String())
		}
		return string(out)
	}
	seen := dom(written(t, id, replay.Part{}), "#t=4.3")
	for _, want := range []string{
		"00:04.300 / 00:09.148", "deny tcp telemetry.evil.test:443", "git.test:443", "npm install left-pad", "the files API",
	} {
		if !strings.Contains(seen, want) {
			t.Errorf("after 4.3 s the page does not show %q", want)
		}
	}
	for _, at := range []string{"#t=0", "#t=9"} {
		seen = dom(written(t, evil, replay.Part{}), at)
		if n := strings.Count(seen, "<script"); n != 2 {
			t.Errorf("%d scripts", n)
		}
		if strings.Contains(strings.Replace(seen, script, "", 1), "<img") || !strings.Contains(seen, "<title>Sandbox "+string(evil)+"</title>") {
			t.Error("content became markup")
		}
	}
	if !strings.Contains(seen, "end of it") {
		t.Error("the output is not shown")
	}
	// The same content as markup would run, and would be stopped by the policy alone.
	policy := regexp.MustCompile(`<meta http-equiv[^>]*>`).FindString(written(t, id, replay.Part{}))
	seen = dom("<!doctype html>"+policy+"<title>x</title><body><p>calm</p><script>document.querySelector('p').textContent='owned'</script><img src=http://evil.test/x>", "")
	if !strings.Contains(seen, "<p>calm</p>") {
		t.Error("the policy lets a script of the content run")
	}
	if n := connections.Load(); n != 0 {
		t.Errorf("%d connections", n)
	}
}

// A page opens where all is to be seen, and says of a run on this machine what the account does.
func TestPageOfAQuietRun(t *testing.T) {
	l := audittest.New(t, t.TempDir())
	code := 0
	l.Add(audit.Record{Sandbox: id, Type: audit.ExecStart, TraceID: "t", Data: audit.Command{Argv: []string{"true"}}})
	l.Wait(2 * time.Second)
	l.Add(audit.Record{Sandbox: id, Type: audit.ExecExit, TraceID: "t", Data: audit.Command{Argv: []string{"true"}, Code: &code}})
	tl, err := replay.Load(trail.Dir(l.Dir), id)
	if err != nil {
		t.Fatal(err)
	}
	s := collect(tl, replay.Part{})
	if s.Length == 0 || s.From != s.Length {
		t.Errorf("it opens at %d of %d", s.From, s.Length)
	}
	if s.Commands[0].Note != "" {
		t.Errorf("of a command that printed nothing: %q", s.Commands[0].Note)
	}

	l = audittest.New(t, t.TempDir())
	l.Add(audit.Record{Sandbox: id, Type: audit.SandboxCreate, Src: "local", Data: map[string]any{"argv": []string{"true"}}})
	if tl, err = replay.Load(trail.Dir(l.Dir), id); err != nil {
		t.Fatal(err)
	}
	s = collect(tl, replay.Part{})
	if !strings.Contains(s.NoFiles, "berm diff") {
		t.Errorf("files: %q", s.NoFiles)
	}
	if !strings.Contains(s.Commands[0].Note, "not on record") {
		t.Errorf("of a command whose output berm run does not keep: %q", s.Commands[0].Note)
	}
}
