// Command model plays the language model for a coding agent that has no network.
//
//	model -script SCRIPT -- AGENT [ARGUMENTS]
//	model -script SCRIPT -internet DIRECTORY -key KEY -- BERM run [...] AGENT [ARGUMENTS]
//
// It serves the Anthropic Messages API and the OpenAI Responses API on loopback, runs
// AGENT with {url} in its arguments replaced by the server's address, and answers each
// request with the next step of the script. Its exit status is AGENT's. Every request,
// and what each step gave, goes to standard output, one JSON object a line; all that
// AGENT prints goes to standard error.
//
// With -internet it is the services themselves, by their names and by TLS, for a sandbox that
// it runs in namespaces which are new, and answers those alone who bring the key.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
)

func main() {
	script := flag.String("script", "fix", "name of the script to play")
	internet := flag.String("internet", "", "be the internet, whose certificates come into this `DIRECTORY`")
	key := flag.String("key", "", "the key that requests must bring")
	timeout := flag.Duration("timeout", 50*time.Second, "end the agent after this time")
	flag.Parse()
	var status int
	var err error
	if *internet != "" {
		status, err = outside(*script, *internet, *key, flag.Args())
	} else {
		status, err = play(*script, *timeout, flag.Args())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "model:", err)
		os.Exit(125)
	}
	os.Exit(status)
}

// play serves the script while the agent runs and returns the agent's exit status.
func play(script string, timeout time.Duration, agent []string) (int, error) {
	if len(agent) == 0 {
		return 0, errors.New("no agent given after --")
	}
	steps, err := load(script)
	if err != nil {
		return 0, err
	}
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	server := &http.Server{Handler: newModel(steps, os.Stdout), ReadHeaderTimeout: timeout}
	defer server.Close()      //nolint:errcheck // the process ends too
	go server.Serve(listener) //nolint:errcheck // ends with Close

	url := "http://" + listener.Addr().String()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	arguments := strings.Split(strings.ReplaceAll(strings.Join(agent, "\x00"), "{url}", url), "\x00")
	command := exec.CommandContext(ctx, arguments[0], arguments[1:]...)
	command.Env = append(os.Environ(), "ANTHROPIC_BASE_URL="+url, "ANTHROPIC_API_KEY=fake", "OPENAI_API_KEY=fake")
	command.Stdout, command.Stderr = os.Stderr, os.Stderr
	// A grandchild may keep the output open after the agent is gone.
	command.WaitDelay = time.Second
	err = command.Run()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return 0, fmt.Errorf("the agent was ended after %s", timeout)
	case errors.As(err, &exit):
		return exit.ExitCode(), nil
	default:
		return 0, err
	}
}

// outside serves the script as the services do, while the command runs.
func outside(script, dir, key string, command []string) (int, error) {
	if len(command) == 0 {
		return 0, errors.New("no command given after --")
	}
	steps, err := load(script)
	if err != nil {
		return 0, err
	}
	model := newModel(steps, os.Stdout)
	return harness.Internet(dir, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.TLS == nil || r.Header.Get("X-Api-Key") != key && r.Header.Get("Authorization") != "Bearer "+key {
			http.Error(w, "who?", http.StatusUnauthorized)
			return
		}
		model.ServeHTTP(w, r)
	}), nil, []string{"api.anthropic.com", "api.openai.com"}, command)
}
