// Package containertest stands in for what runs inside a container, for the tests of what is above.
package containertest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os/user"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/container"
	"github.com/berm-sandbox/berm/internal/guest/config"
	"github.com/berm-sandbox/berm/internal/guest/files"
	"github.com/berm-sandbox/berm/internal/guest/filesystem"
	"github.com/berm-sandbox/berm/internal/proto/filesystem/filesystemconnect"
)

// Interpreter speaks the protocol of an interpreter. Its language has one statement a line:
//
//	print TEXT      writes TEXT
//	show JSON       gives a result with the fields of an object
//	raise NAME      fails
//	env NAME        writes the value of a variable of the execution
//	wait            waits until the client leaves
//	much N          writes N MiB
//	raw TEXT        sends TEXT as it is
//	cut             cuts the connection
//	queue           alone: is refused, since too much waits
type Interpreter struct {
	// Waits gets an element for each wait that begins, and Left for each whose client left; nil for
	// nobody to know.
	Waits, Left chan struct{}

	mu       sync.Mutex
	contexts []container.Context
	count    int
	Headers  []http.Header // of executions
}

// Ports are the servers inside a container: an interpreter, and the guest agent with the files of a
// directory.
func Ports(t testing.TB, i *Interpreter, dir string) map[uint16]http.Handler {
	t.Helper()
	me, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	c, _ := config.Open(nil, "")
	if err := c.Init(fmt.Appendf(nil, `{"defaultUser":%q,"defaultWorkdir":%q}`, me.Username, dir)); err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle(filesystemconnect.NewFilesystemHandler(filesystem.NewService(c)))
	f := files.NewHandler(c)
	mux.HandleFunc("GET /files", f.Get)
	mux.HandleFunc("POST /files", f.Post)
	return map[uint16]http.Handler{container.Port: i, berm.AgentPort: mux}
}

func (i *Interpreter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	switch call := r.Method + " " + parts[0]; {
	case call == "POST execute":
		i.execute(w, r)
	case call == "GET contexts":
		i.mu.Lock()
		defer i.mu.Unlock()
		_ = json.NewEncoder(w).Encode(append([]container.Context{{ID: "default", Language: "python", Cwd: "/home/user"}}, i.contexts...))
	case call == "POST contexts" && len(parts) == 1:
		var in struct{ Language, Cwd string }
		_ = json.NewDecoder(r.Body).Decode(&in)
		i.mu.Lock()
		defer i.mu.Unlock()
		c := container.Context{ID: fmt.Sprintf("c-%d", len(i.contexts)+1), Language: in.Language, Cwd: in.Cwd}
		i.contexts = append(i.contexts, c)
		_ = json.NewEncoder(w).Encode(c)
	case len(parts) > 1 && !i.has(parts[1]):
		http.Error(w, "Context "+parts[1]+" not found", http.StatusNotFound)
	}
}

func (i *Interpreter) has(name string) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, c := range i.contexts {
		if c.ID == name {
			return true
		}
	}
	return name == "default"
}

func (i *Interpreter) execute(w http.ResponseWriter, r *http.Request) {
	var in struct {
		Code     string            `json:"code"`
		Context  string            `json:"context_id"`
		Language string            `json:"language"`
		Env      map[string]string `json:"env_vars"`
	}
	_ = json.NewDecoder(r.Body).Decode(&in)
	if in.Context != "" && !i.has(in.Context) {
		http.Error(w, "Context "+in.Context+" not found", http.StatusNotFound)
		return
	}
	if in.Language == "cobol" {
		http.Error(w, "no kernel for cobol", http.StatusBadRequest)
		return
	}
	if in.Code == "queue" {
		http.Error(w, "100 executions wait", http.StatusTooManyRequests)
		return
	}
	i.mu.Lock()
	i.count++
	count := i.count
	i.Headers = append(i.Headers, r.Header.Clone())
	i.mu.Unlock()
	send := func(line any) {
		text, _ := json.Marshal(line)
		_, _ = fmt.Fprintf(w, "%s\n", text)
		_ = http.NewResponseController(w).Flush()
	}
	for line := range strings.Lines(in.Code) {
		what, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		switch what {
		case "print":
			send(map[string]string{"type": "stdout", "text": rest + "\n", "timestamp": "2026-01-02T03:04:05Z"})
		case "env":
			send(map[string]string{"type": "stdout", "text": in.Env[rest] + "\n"})
		case "show":
			fields := map[string]any{"type": "result", "is_main_result": true, "extra": map[string]any{}}
			_ = json.Unmarshal([]byte(rest), &fields)
			send(fields)
		case "raise":
			send(map[string]string{"type": "error", "name": rest, "value": "of " + rest, "traceback": "Traceback\n" + rest})
		case "much":
			n, _ := strconv.Atoi(rest)
			for range n {
				send(map[string]string{"type": "stdout", "text": strings.Repeat("x", 1<<20)})
			}
		case "raw":
			_, _ = fmt.Fprintf(w, "%s\n", rest)
		case "cut":
			panic(http.ErrAbortHandler)
		case "wait":
			send(map[string]string{"type": "keepalive"})
			if i.Waits != nil {
				i.Waits <- struct{}{}
			}
			<-r.Context().Done()
			if i.Left != nil {
				i.Left <- struct{}{}
			}
			return
		}
	}
	send(map[string]any{"type": "number_of_executions", "execution_count": count})
	send(map[string]any{"type": "end_of_execution"})
}
