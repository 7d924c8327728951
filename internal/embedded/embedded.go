// Package embedded holds the helper binaries, so that berm is one file to install.
package embedded

import (
	"embed"
	"errors"
	"io/fs"
	"runtime"

	"github.com/berm-sandbox/berm"
)

// "all:" takes the placeholder file too, so that the package compiles on a clean
// checkout without binaries.
//
//go:embed all:bin
var files embed.FS

// The names of the binaries.
const (
	Monitor = "berm-monitor"
	Init    = "berm-init"
	Guest   = "berm-guest"
)

// Binary returns an executable for this architecture. It fails with Unsupported when
// this program was built without it.
func Binary(name string) ([]byte, error) {
	content, err := files.ReadFile("bin/" + runtime.GOARCH + "/" + name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, berm.Errorf(berm.Unsupported, "this build of berm has no %s for %s", name, runtime.GOARCH).
			WithHint("build it with `make build`")
	}
	return content, err
}
