package files

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"

	"github.com/berm-sandbox/berm/internal/guest/account"
	"github.com/berm-sandbox/berm/internal/guest/rest"
)

const maxCompose = 1 << 20 // bytes of a compose request

// Compose joins files into one and removes them. The destination is replaced when
// all is there, or not at all.
func (h *Handler) Compose(w http.ResponseWriter, r *http.Request) {
	var req struct {
		Sources     []string `json:"source_paths"`
		Destination string   `json:"destination"`
		User        string   `json:"username"`
	}
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxCompose)).Decode(&req); err != nil {
		rest.Error(w, http.StatusBadRequest, fmt.Sprintf("invalid request body: %v", err))
		return
	}
	if len(req.Sources) == 0 || req.Destination == "" {
		rest.Error(w, http.StatusBadRequest, "source_paths and destination must not be empty")
		return
	}
	user, dest, fail := h.resolve(req.User, req.Destination)
	if fail != nil {
		fail.answer(w)
		return
	}
	sources := make([]string, len(req.Sources))
	for i, s := range req.Sources {
		if _, sources[i], fail = h.resolve(req.User, s); fail != nil {
			fail.answer(w)
			return
		}
		if sources[i] == dest {
			rest.Error(w, http.StatusBadRequest, fmt.Sprintf("source path %q cannot be the same as destination", s))
			return
		}
	}
	if fail := compose(user, sources, dest); fail != nil {
		fail.answer(w)
		return
	}
	rest.JSON(w, entryOf(dest))
}

func compose(user *account.Account, sources []string, dest string) *failure {
	if err := user.MakeDirs(filepath.Dir(dest)); err != nil {
		return fault(err)
	}
	temp := filepath.Join(filepath.Dir(dest), ".compose-"+rand.Text())
	out, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return fault(err)
	}
	defer os.Remove(temp) // nothing is there any more after the rename
	defer out.Close()
	if err := out.Chown(int(user.UID), int(user.GID)); err != nil {
		return fault(err)
	}
	for _, source := range sources {
		in, _, fail := open(source)
		if fail != nil {
			return fail
		}
		_, err := out.ReadFrom(in) // copy_file_range: a reflink where the disk can
		in.Close()
		if err != nil {
			return fault(err)
		}
	}
	if err := out.Close(); err != nil {
		return fault(err)
	}
	if err := os.Rename(temp, dest); err != nil {
		return fault(err)
	}
	for _, source := range sources {
		os.Remove(source)
	}
	return nil
}
