// Package lazy starts sandboxes of an image that has not arrived, breaks what brings it, and
// looks for what is left.
package lazy

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/stargz-snapshotter/estargz"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/berm-sandbox/berm/test/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }

// place is a registry with an image whose large pieces wait for a gate, and a store.
type place struct {
	ref       string
	templates string
	sum       string // of the file /noise
	mu        sync.Mutex
	gate      chan struct{}
}

// large is from how many bytes on a request waits: those that nobody waits for are larger.
const large = 4 << 20

func newPlace(t *testing.T) *place {
	t.Helper()
	p := &place{templates: t.TempDir()}
	if err := os.Chmod(p.templates, 0o700); err != nil {
		t.Fatal(err)
	}
	handler := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var from, to int64
		if n, _ := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &from, &to); n == 2 && to-from+1 >= large {
			p.mu.Lock()
			gate := p.gate
			p.mu.Unlock()
			if gate != nil {
				select {
				case <-gate:
				case <-r.Context().Done():
				}
			}
		}
		handler.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	p.ref = strings.TrimPrefix(server.URL, "http://") + "/app:v1"

	built, err := image()
	if err != nil {
		t.Fatal(err)
	}
	p.sum = built.sum
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(built.packed)), nil })
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.Append(empty.Image, mutate.Addendum{Layer: layer, Annotations: map[string]string{estargz.TOCJSONDigestAnnotation: built.table}})
	if err != nil {
		t.Fatal(err)
	}
	ref, err := name.ParseReference(p.ref)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(ref, img); err != nil {
		t.Fatal(err)
	}
	// The default template, so that the server builds none.
	saved := filepath.Join(t.TempDir(), "base.tar")
	plain, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(built.base)), nil })
	if err != nil {
		t.Fatal(err)
	}
	small, err := mutate.AppendLayers(empty.Image, plain)
	if err != nil {
		t.Fatal(err)
	}
	tag, err := name.NewTag("base")
	if err != nil {
		t.Fatal(err)
	}
	if err := tarball.WriteToFile(saved, tag, small); err != nil {
		t.Fatal(err)
	}
	p.berm(t, "import", saved, "--name", "base")
	return p
}

// built is what the image and the default template are made of.
type built struct {
	packed     []byte // the image's layer, an eStargz
	table, sum string // digests: of its table of contents, of its file /noise
	base       []byte // an archive
}

// image packs it once for all tests.
var image = sync.OnceValues(func() (b built, err error) {
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return b, fmt.Errorf("busybox-static is missing: %w", err)
	}
	program, err := os.ReadFile(busybox)
	if err != nil {
		return b, err
	}
	if b.base, err = archive(program); err != nil {
		return b, err
	}
	noise := make([]byte, 12<<20)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(noise)
	b.sum = fmt.Sprintf("%x", sha256.Sum256(noise))
	data, err := archive(program, file{"noise", 0o644, 0, noise}, file{"word", 0o640, 1000, []byte("swordfish\n")}, file{"late", 0o644, 0, []byte("late\n")})
	if err != nil {
		return b, err
	}
	blob, err := estargz.Build(io.NewSectionReader(bytes.NewReader(data), 0, int64(len(data))), estargz.WithCompressionLevel(1))
	if err != nil {
		return b, err
	}
	defer blob.Close()
	b.packed, err = io.ReadAll(blob)
	b.table = blob.TOCDigest().String()
	return b, err
})

type file struct {
	name    string
	mode    int64
	uid     int
	content []byte
}

// archive is a root with busybox and some files.
func archive(program []byte, files ...file) ([]byte, error) {
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	var failed error
	write := func(h *tar.Header, content []byte) {
		h.Size = int64(len(content))
		failed = errors.Join(failed, w.WriteHeader(h))
		_, err := w.Write(content)
		failed = errors.Join(failed, err)
	}
	for _, d := range []string{"bin", "etc", "tmp", "root"} {
		write(&tar.Header{Typeflag: tar.TypeDir, Name: d, Mode: 0o755}, nil)
	}
	write(&tar.Header{Typeflag: tar.TypeReg, Name: "bin/busybox", Mode: 0o755}, program)
	for _, applet := range []string{"sh", "cat", "sha256sum", "stat", "ls", "rm", "sleep"} {
		write(&tar.Header{Typeflag: tar.TypeSymlink, Name: "bin/" + applet, Linkname: "busybox", Mode: 0o777}, nil)
	}
	write(&tar.Header{Typeflag: tar.TypeReg, Name: "etc/passwd", Mode: 0o644}, []byte("root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/:/bin/sh\n"))
	write(&tar.Header{Typeflag: tar.TypeReg, Name: "etc/group", Mode: 0o644}, []byte("root:x:0:\nuser:x:1000:\n"))
	for _, f := range files {
		write(&tar.Header{Typeflag: tar.TypeReg, Name: f.name, Mode: f.mode, Uid: f.uid, Gid: f.uid}, f.content)
	}
	return out.Bytes(), errors.Join(failed, w.Close())
}

// berm runs `berm template`.
func (p *place) berm(t *testing.T, args ...string) string {
	t.Helper()
	binary, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var errs bytes.Buffer
	cmd := exec.CommandContext(ctx, binary, append([]string{"template", "--templates", p.templates}, args...)...)
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("berm template %q: %v\n%s", args, err, errs.String())
	}
	return string(out)
}

// close holds all large pieces until the gate is opened.
func (p *place) close() (open func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	gate := make(chan struct{})
	p.gate = gate
	return sync.OnceFunc(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.gate = nil
		close(gate)
	})
}

// arriving says whether the template app has not arrived in full.
func (p *place) arriving(t *testing.T) bool {
	t.Helper()
	var list []struct {
		Names    []string
		Arriving *struct{ Failed string }
	}
	if err := json.Unmarshal([]byte(p.berm(t, "ls", "--local", "--json")), &list); err != nil {
		t.Fatal(err)
	}
	for _, l := range list {
		if l.Names[0] == "app:v1" {
			if l.Arriving != nil && l.Arriving.Failed != "" {
				t.Fatal(l.Arriving.Failed)
			}
			return l.Arriving != nil
		}
	}
	t.Fatalf("no template app:v1 in %+v", list)
	return false
}

// processes are those of the arrival in this store, by name.
func (p *place) processes(name string) (pids []int) {
	all, _ := filepath.Glob("/proc/[0-9]*/comm")
	for _, file := range all {
		comm, _ := os.ReadFile(file)
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if strings.TrimSpace(string(comm)) == name && p.ours(pid) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// ours says whether a process has a file of the store open.
func (p *place) ours(pid int) bool {
	links, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, link := range links {
		if to, err := os.Readlink(link); err == nil && strings.HasPrefix(to, p.templates) {
			return true
		}
	}
	return false
}

// gone waits until nothing of an arrival is left.
func (p *place) gone(t *testing.T) {
	t.Helper()
	eventually(t, "the arrival to be gone", func() bool {
		left, err := os.ReadDir(filepath.Join(p.templates, "arriving"))
		mounts, _ := os.ReadFile("/proc/self/mounts")
		return err == nil && len(left) == 0 && !strings.Contains(string(mounts), p.templates) && len(p.processes("berm-arrival"))+len(p.processes("berm-fetch")) == 0
	})
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); !is(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited too long for %s", what)
		}
	}
}

func create(t *testing.T, server *harness.Server) *harness.Sandbox {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	sandbox, err := server.Create(ctx, 5*time.Minute, map[string]any{"templateID": "app:v1"})
	if err != nil {
		t.Fatalf("create: %v\n%s", err, server.Log())
	}
	return sandbox
}

func run(t *testing.T, sandbox *harness.Sandbox, text string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	result, err := sandbox.Run(ctx, harness.Command{User: "root", Path: "/bin/sh", Args: []string{"-c", text}})
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return result.Stdout + result.Stderr
}

// levels runs a test at each level that this machine has.
func levels(t *testing.T, test func(t *testing.T, args ...string)) {
	harness.Slow(t)
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		t.Fatal(err)
	}
	var major, minor int
	if _, err := fmt.Sscanf(string(release), "%d.%d", &major, &minor); err != nil {
		t.Fatal(err)
	}
	if major < 6 || major == 6 && minor < 12 {
		t.Skip("file systems of programs with mapped ids: Linux 6.12")
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skip("no /dev/fuse")
	}
	t.Run("namespace", func(t *testing.T) { test(t, "--level", "namespace") })
	t.Run("gvisor", func(t *testing.T) {
		binary, err := harness.Binary()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(filepath.Join(filepath.Dir(binary), "runsc")); err != nil {
			t.Skip("no bin/runsc: make runsc")
		}
		test(t, "--level", "gvisor")
	})
}

// A sandbox runs before its image has arrived, waits for what it reads and for nothing else,
// and can be killed while it waits. When all is there, new ones have ordinary layers.
func TestLazyStart(t *testing.T) {
	levels(t, func(t *testing.T, args ...string) {
		p := newPlace(t)
		server := harness.Serve(t, append(args, "--templates", p.templates)...)
		open := p.close()
		defer open()
		p.berm(t, "import", "--lazy", p.ref)
		first, second := create(t, server), create(t, server)
		if got := run(t, first, "cat /word; stat -c '%u %a' /word; echo mine > /word; cat /word; rm /bin/sleep; ls /bin"); got != "swordfish\n1000 640\nmine\nbusybox\ncat\nls\nrm\nsh\nsha256sum\nstat\n" {
			t.Errorf("got %q", got)
		}
		if !p.arriving(t) {
			t.Error("the image is whole though nothing can have come")
		}
		waits := make(chan string, 1)
		go func() { waits <- run(t, first, "sha256sum /noise") }()
		stuck := make(chan struct{})
		go func() {
			defer close(stuck)
			_, _ = second.Run(t.Context(), harness.Command{User: "root", Path: "/bin/cat", Args: []string{"/noise"}, Keep: 1})
		}()
		eventually(t, "the reader", func() bool { return strings.Contains(run(t, second, "cat /proc/[0-9]*/cmdline"), "/noise") })
		begun := time.Now()
		if err := second.Kill(t.Context()); err != nil {
			t.Errorf("kill: %v", err)
		}
		if took := time.Since(begun); took > 20*time.Second {
			t.Errorf("a sandbox that waits for its image took %v to be killed", took)
		}
		<-stuck
		open()
		if got := <-waits; got != p.sum+"  /noise\n" {
			t.Errorf("got %q, want %s", got, p.sum)
		}
		eventually(t, "the image", func() bool { return !p.arriving(t) })
		third := create(t, server)
		for _, sandbox := range []*harness.Sandbox{first, third} {
			if got := run(t, sandbox, "cat /late; sha256sum /noise"); got != "late\n"+p.sum+"  /noise\n" {
				t.Errorf("got %q", got)
			}
		}
		for _, sandbox := range []*harness.Sandbox{first, third} {
			if err := sandbox.Kill(t.Context()); err != nil {
				t.Error(err)
			}
		}
		p.gone(t)
	})
}

// Neither the end of the server nor that of the processes that bring an image loses it.
func TestLazyStartGoesOn(t *testing.T) {
	levels(t, func(t *testing.T, args ...string) {
		p := newPlace(t)
		server := harness.Serve(t, append(args, "--templates", p.templates)...)
		open := p.close()
		defer open()
		p.berm(t, "import", "--lazy", p.ref)
		sandbox := create(t, server)
		waits := make(chan string, 1)
		go func() { waits <- run(t, sandbox, "sha256sum /noise") }()
		eventually(t, "the reader", func() bool { return strings.Contains(run(t, sandbox, "cat /proc/[0-9]*/cmdline"), "/noise") })

		// The process that talks to the registry dies amid a read.
		kill(t, p.processes("berm-fetch"))
		eventually(t, "another fetcher", func() bool { return len(p.processes("berm-fetch")) == 1 })
		if got := run(t, sandbox, "cat /word"); got != "swordfish\n" {
			t.Errorf("after the fetcher's death: %q", got)
		}
		open()
		if got := <-waits; got != p.sum+"  /noise\n" {
			t.Errorf("the read that was on its way: %q, want %s", got, p.sum)
		}
		eventually(t, "the image", func() bool { return !p.arriving(t) })
		if err := sandbox.Kill(t.Context()); err != nil {
			t.Error(err)
		}
		p.gone(t)
	})
}

// When all processes of an arrival are killed, sandboxes get errors and no zeros. The next
// sandbox, and the next start of the server, have the layers served again.
func TestLazyStartFailsClosed(t *testing.T) {
	levels(t, func(t *testing.T, args ...string) {
		p := newPlace(t)
		server := harness.Serve(t, append(args, "--templates", p.templates)...)
		open := p.close()
		defer open()
		p.berm(t, "import", "--lazy", p.ref)
		sandbox := create(t, server)
		if got := run(t, sandbox, "cat /word"); got != "swordfish\n" {
			t.Errorf("got %q", got)
		}
		waits := make(chan string, 1)
		go func() { waits <- run(t, sandbox, "cat /noise | sha256sum; cat /late || echo refused") }()
		eventually(t, "the reader", func() bool { return strings.Contains(run(t, sandbox, "cat /proc/[0-9]*/cmdline"), "/noise") })
		kill(t, p.processes("berm-arrival"))
		kill(t, p.processes("berm-fetch"))
		if got := <-waits; strings.Contains(got, p.sum) || !strings.Contains(got, "rror") && !strings.Contains(got, "not connected") {
			t.Errorf("got %q", got)
		}
		if err := sandbox.Kill(t.Context()); err != nil {
			t.Error(err)
		}
		second := create(t, server)
		if got := run(t, second, "cat /word /late"); got != "swordfish\nlate\n" {
			t.Errorf("got %q", got)
		}
		if err := second.Kill(t.Context()); err != nil {
			t.Error(err)
		}
		kill(t, p.processes("berm-arrival"))
		kill(t, p.processes("berm-fetch"))
		server.Crash()
		if err := server.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the image to go on", func() bool { return len(p.processes("berm-fetch")) == 1 })
		again := create(t, server)
		if got := run(t, again, "cat /word /late"); got != "swordfish\nlate\n" {
			t.Errorf("got %q", got)
		}
		open()
		eventually(t, "the image", func() bool { return !p.arriving(t) })
		if got := run(t, again, "sha256sum /noise"); got != p.sum+"  /noise\n" {
			t.Errorf("got %q, want %s", got, p.sum)
		}
		if err := again.Kill(t.Context()); err != nil {
			t.Error(err)
		}
		p.gone(t)
	})
}

func kill(t *testing.T, pids []int) {
	t.Helper()
	if len(pids) == 0 {
		t.Fatal("no process to kill")
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
}
