package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
)

// bare is a Jupyter kernel without Berm's server: started, asked, and answered, in milliseconds.
const bare = `import time; begin = time.monotonic()
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel()
seen = []
client.execute_interactive('print(1)', output_hook=lambda message: seen.append(message['content'].get('text')))
assert '1\n' in seen, seen
print((time.monotonic() - begin) * 1000)
manager.shutdown_kernel(now=True)`

// interpreter measures create → first result of the code interpreter from a pool and cold, print(1) on
// a warm context, and a bare kernel's start and first result in the same sandboxes, in turns. The template,
// which this does not build, is in the store that BERM_TEMPLATES names, or in the server's own.
func (b *bench) interpreter(ctx context.Context) error {
	for _, level := range []string{"namespace", "gvisor"} {
		if err := b.interpreterAt(ctx, level); err != nil {
			return fmt.Errorf("%s: %w", level, err)
		}
	}
	return nil
}

func (b *bench) interpreterAt(ctx context.Context, level string) (err error) {
	data, err := harness.DataDir()
	if err != nil {
		return err
	}
	defer os.RemoveAll(data)
	args := []string{"--level", level, "--pool", "code-interpreter-v1=1"}
	if templates := os.Getenv("BERM_TEMPLATES"); templates != "" {
		args = append(args, "--templates", templates)
	}
	if b.server, err = harness.Start(ctx, data, args...); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w\n%s", err, b.server.Log())
		}
		err = errors.Join(err, b.server.Stop(context.WithoutCancel(ctx)))
	}()
	if err := b.server.Call(ctx, "GET", "/templates/aliases/code-interpreter-v1", nil, nil); err != nil {
		fmt.Println("  berm template build code-interpreter-v1 first")
		return nil //nolint:nilerr // it takes minutes, and is not for everybody
	}
	ways := []struct {
		name    string
		options map[string]any
	}{
		{"from the pool", map[string]any{}},
		{"cold", map[string]any{"berm": map[string]any{"limits": otherwise}}},
	}
	found := map[string]times{}
	for range b.samples(10) {
		for _, way := range ways {
			if err := b.filled(ctx, 1); err != nil {
				return err
			}
			way.options["templateID"] = "code-interpreter-v1"
			begin := time.Now()
			sandbox, err := b.server.Create(ctx, 5*time.Minute, way.options)
			if err != nil {
				return err
			}
			if err := print1(ctx, sandbox); err != nil {
				return err
			}
			found[way.name] = append(found[way.name], time.Since(begin))
			for range 5 {
				begin := time.Now()
				if err := print1(ctx, sandbox); err != nil {
					return err
				}
				found["print(1), warm"] = append(found["print(1), warm"], time.Since(begin))
			}
			out, err := sandbox.Run(ctx, harness.Command{User: "user", Path: "python3", Args: []string{"-c", bare}})
			if err != nil {
				return err
			}
			took, err := strconv.ParseFloat(strings.TrimSpace(out.Stdout), 64)
			if err != nil {
				return fmt.Errorf("a bare kernel: %+v", out)
			}
			found["bare kernel"] = append(found["bare kernel"], time.Duration(took*float64(time.Millisecond)))
			if err := sandbox.Kill(ctx); err != nil {
				return err
			}
		}
	}
	row := map[string]any{}
	for _, name := range []string{"from the pool", "cold", "print(1), warm", "bare kernel"} {
		fmt.Printf("  %-9s %-15s %s  %.3f of a bare kernel\n", level, name, found[name], float64(found[name].at(0.5))/float64(max(found["bare kernel"].at(0.5), 1)))
		row[name] = found[name].summary()
	}
	b.results[level] = row
	return nil
}

// print1 runs print(1) by the protocol of the code interpreter.
func print1(ctx context.Context, sandbox *harness.Sandbox) error {
	request, err := sandbox.Request(ctx, "POST", 49999, "/execute", strings.NewReader(`{"code":"print(1)"}`))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("X-Access-Token", sandbox.Token)
	answer, err := sandbox.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err == nil && !strings.Contains(string(text), `"text":"1\n"`) {
		err = fmt.Errorf("print(1) gave %d: %.500s", answer.StatusCode, text)
	}
	return err
}
