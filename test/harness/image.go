package harness

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// WriteImage makes an image of one layer of a tree, as a file that `docker save` could have written.
func WriteImage(root, file string) error {
	packed := file + ".layer"
	defer os.Remove(packed)
	if out, err := exec.Command("tar", "-C", root, "--numeric-owner", "-cf", packed, ".").CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	layer, err := tarball.LayerFromFile(packed)
	if err != nil {
		return err
	}
	image, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		return err
	}
	config, err := image.ConfigFile()
	if err != nil {
		return err
	}
	config.OS, config.Architecture, config.Config.Env = "linux", runtime.GOARCH, []string{"PATH=/bin"}
	if image, err = mutate.ConfigFile(image, config); err != nil {
		return err
	}
	return tarball.WriteToFile(file, name.MustParseReference("box:latest"), image)
}
