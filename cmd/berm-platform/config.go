package main

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/template"
)

// configFile is the configuration file. The section of a command sets its flags by
// their names.
type configFile struct {
	Version int                  `yaml:"version"`
	Serve   map[string]yaml.Node `yaml:"serve"`
	// Registries are those that images are fetched from in a way of their own, by host.
	Registries map[string]template.RegistryConfig `yaml:"registries"`
	// The others are of local mode, which judges them itself.
	Preset        yaml.Node `yaml:"preset"`
	Presets       yaml.Node `yaml:"presets"`
	UpstreamProxy yaml.Node `yaml:"upstream-proxy"`
	UpstreamCA    yaml.Node `yaml:"upstream-ca"`
}

// configure sets the flags of cmd that were not given from the environment, and what
// is left from the configuration file. A path names a file that must exist.
func configure(cmd *cobra.Command, path string, env func(string) (string, bool)) error {
	file, name, err := readConfig(path, env)
	if err != nil {
		return err
	}
	for key := range file.Serve {
		if flag := cmd.Flags().Lookup(key); flag == nil || key == "config" || key == "help" {
			return berm.Errorf(berm.Invalid, "%s: serve has no setting %q", name, key).
				WithHint("the settings are the flags of `berm serve`")
		}
	}
	cmd.Flags().VisitAll(func(flag *pflag.Flag) {
		if flag.Changed || err != nil || flag.Name == "config" || flag.Name == "help" {
			return
		}
		variable := "BERM_" + strings.ToUpper(strings.ReplaceAll(flag.Name, "-", "_"))
		if value, ok := env(variable); ok {
			if e := flag.Value.Set(value); e != nil {
				err = berm.Errorf(berm.Invalid, "%s: %w", variable, e)
			}
		} else if node, ok := file.Serve[flag.Name]; ok {
			if node.Kind != yaml.ScalarNode {
				err = berm.Errorf(berm.Invalid, "%s:%d: %s is a single value", name, node.Line, flag.Name)
			} else if e := flag.Value.Set(node.Value); e != nil {
				err = berm.Errorf(berm.Invalid, "%s:%d: %w", name, node.Line, e)
			}
		}
	})
	return err
}

// readConfig reads the configuration file, which may be missing when nobody named
// it.
func readConfig(path string, env func(string) (string, bool)) (file configFile, name string, err error) {
	named := path != ""
	if !named {
		if path, named = env("BERM_CONFIG"); !named {
			dir, err := os.UserConfigDir()
			if err != nil {
				return file, "", nil // no home, no file
			}
			path = filepath.Join(dir, "berm", "config.yaml")
		}
	}
	content, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) && !named {
		return file, path, nil
	}
	if err != nil {
		return file, path, berm.Errorf(berm.Invalid, "configuration: %w", err)
	}
	decoder := yaml.NewDecoder(bytes.NewReader(content))
	decoder.KnownFields(true)
	if err := decoder.Decode(&file); err != nil && !errors.Is(err, io.EOF) {
		return file, path, berm.Errorf(berm.Invalid, "%s: %w", path, err)
	}
	if file.Version != 1 {
		return file, path, berm.Errorf(berm.Invalid, "%s: version is %d, want version: 1", path, file.Version)
	}
	return file, path, nil
}

// registries are those of the configuration file.
func registries(path string, env func(string) (string, bool)) (*template.Registries, error) {
	file, name, err := readConfig(path, env)
	if err != nil {
		return nil, err
	}
	all, err := template.NewRegistries(file.Registries)
	if err != nil {
		return nil, berm.Errorf(berm.Invalid, "%s: %w", name, err)
	}
	return all, nil
}

// configureData sets the flag "data" of a command beside the server to what the server
// has, when it was not given.
func configureData(cmd *cobra.Command, env func(string) (string, bool)) error {
	flag := cmd.Flags().Lookup("data")
	if flag.Changed {
		return nil
	}
	if value, ok := env("BERM_DATA"); ok {
		return flag.Value.Set(value)
	}
	file, _, err := readConfig("", env)
	if err != nil {
		return err
	}
	if node, ok := file.Serve["data"]; ok {
		return flag.Value.Set(node.Value)
	}
	return nil
}
