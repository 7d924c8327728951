package network

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A secret that is inside all the same does not come out by output of commands, by the files
// API and by what is recorded; everything else comes as it is, and when it does.
func TestMaskedOutput(t *testing.T) {
	ctx, s := startTrusting(t)
	setSecret(t, ctx, s, "Token", stored)
	sandbox := create(t, ctx, s, object{"berm": object{"credentials": []object{{"name": "api", "secret": "secret:token", "hosts": []string{"www.example.com"}}}}})
	runes := []rune(stored)
	for i, j := 0, len(runes)-1; i < j; i, j = i+1, j-1 {
		runes[i], runes[j] = runes[j], runes[i]
	}
	secret := "$(echo " + string(runes) + " | rev)"
	stars := strings.Repeat("*", len(stored))
	for _, to := range []string{"", " >&2"} {
		out := run(t, ctx, sandbox, "printf 'a%sb' \""+secret+"\""+to)
		if text := out.Stdout + out.Stderr; text != "a"+stars+"b" {
			t.Errorf("output%s: %q", to, text)
		}
	}
	if out := run(t, ctx, sandbox, "printf 'xy%s' \""+secret+"\" | base64 -w0"); !strings.HasPrefix(out.Stdout, "eHl") || strings.Count(out.Stdout, "Kioq") < len(stored)/3-1 {
		t.Errorf("base64 that is output: %q", out.Stdout)
	}
	for script, want := range map[string]string{
		"for c in C A N; do printf $c; sleep .2; done": "CAN",
		"echo CANARY-stored; echo ready":               "CANARY-stored\nready\n",
	} {
		if out := run(t, ctx, sandbox, script); out.Stdout != want {
			t.Errorf("%s: %+v, want %q", script, out, want)
		}
	}
	read := func(path string) []byte {
		t.Helper()
		body, err := sandbox.Read(ctx, "user", path)
		if err != nil {
			t.Fatal(err)
		}
		defer body.Close()
		content, err := io.ReadAll(body)
		if err != nil {
			t.Fatal(err)
		}
		return content
	}
	out := run(t, ctx, sandbox, "mkdir -p /dev/shm/m && cd /dev/shm/m && s=\""+secret+"\" && echo \"<$s>\" >f && printf 'xy%s' \"$s\" | base64 -w0 >b && printf '%s' \"$s\" | od -An -tx1 | tr -d ' \\n' >h && head -c 5000000 /dev/urandom >big && sha256sum <big")
	if got := string(read("/dev/shm/m/f")); got != "<"+stars+">\n" {
		t.Errorf("a file: %q", got)
	}
	if got := string(read("/dev/shm/m/b")); !strings.HasPrefix(got, "eHl") || strings.Count(got, "Kioq") < len(stored)/3-1 {
		t.Errorf("base64: %q", got)
	}
	if got := string(read("/dev/shm/m/h")); got != stars+stars {
		t.Errorf("hexadecimal: %q", got)
	}
	if got := fmt.Sprintf("%x  -\n", sha256.Sum256(read("/dev/shm/m/big"))); got != out.Stdout {
		t.Errorf("a large file came as %s, not %s", got, out.Stdout)
	}
	// What is kept of files, while the sandbox lives and when it is killed.
	kept := func(when string) {
		t.Helper()
		found := false
		_ = filepath.WalkDir(filepath.Join(s.Data, "audit", "blobs"), func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() {
				content, _ := os.ReadFile(path)
				found = found || string(content) == when+" <"+stars+">\n"
			}
			return nil
		})
		if !found {
			t.Errorf("%s: content with the secret masked is not kept", when)
		}
	}
	run(t, ctx, sandbox, "echo \"asked <"+secret+">\" >~/asked")
	if err := s.Call(ctx, "POST", "/berm/v1/sandboxes/"+sandbox.ID+"/changes", nil, nil); err != nil {
		t.Fatal(err)
	}
	kept("asked")
	run(t, ctx, sandbox, "echo \"killed <"+secret+">\" >~/killed")
	if err := sandbox.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	kept("killed")
	leak := false
	err := filepath.WalkDir(s.Data, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && !isImage(path) {
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			leak = leak || bytes.Contains(content, []byte(`"credential.leak"`))
			if bytes.Contains(content, []byte(stored)) {
				t.Errorf("%s has it", path)
			}
		}
		return err
	})
	if err != nil || !leak {
		t.Errorf("recorded: %v, %v", leak, err)
	}
}

// isImage says whether a file of the server's is an empty disk, which is large.
func isImage(path string) bool { return strings.Contains(path, "/images/") }
