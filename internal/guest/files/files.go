// Package files serves the content of files over HTTP: uploads and downloads of any
// size in constant memory, with the access token or a signature made with it.
//
// Only regular files are read and written: whatever else a path leads to could hold
// the agent for ever.
package files

import (
	"errors"
	"net/http"
	"os"
	"syscall"

	"github.com/berm-sandbox/berm/internal/guest/account"
	"github.com/berm-sandbox/berm/internal/guest/config"
	"github.com/berm-sandbox/berm/internal/guest/rest"
)

// Handler serves /files.
type Handler struct {
	config *config.Config
}

// NewHandler returns a handler.
func NewHandler(c *config.Config) *Handler { return &Handler{c} }

// failure is an HTTP error.
type failure struct {
	code    int
	message string
}

func (f *failure) answer(w http.ResponseWriter) { rest.Error(w, f.code, f.message) }

// resolve finds the user and makes the path absolute.
func (h *Handler) resolve(name, path string) (*account.Account, string, *failure) {
	user, err := h.config.Account(name)
	if _, ok := errors.AsType[*config.UserError](err); ok {
		return nil, "", &failure{http.StatusUnauthorized, err.Error()}
	}
	if err != nil {
		return nil, "", &failure{http.StatusInternalServerError, err.Error()}
	}
	path, err = user.Resolve(path, h.config.Workdir())
	if err != nil {
		return nil, "", &failure{http.StatusBadRequest, err.Error()}
	}
	return user, path, nil
}

// fault maps a file system error to a status. message is for a full disk.
func fault(err error) *failure {
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return &failure{http.StatusInsufficientStorage, "not enough disk space available"}
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.EISDIR), errors.Is(err, syscall.ELOOP),
		errors.Is(err, syscall.ENAMETOOLONG), errors.Is(err, syscall.EINVAL):
		return &failure{http.StatusBadRequest, err.Error()}
	case errors.Is(err, os.ErrPermission), errors.Is(err, syscall.EROFS), errors.Is(err, syscall.ETXTBSY):
		return &failure{http.StatusForbidden, err.Error()}
	}
	return &failure{http.StatusInternalServerError, err.Error()}
}
