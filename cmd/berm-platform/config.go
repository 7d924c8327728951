package main

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/document"
	"github.com/berm-sandbox/berm/internal/template"
)

// configFile is the configuration file. The section of a command sets its flags by
// their names.
type configFile struct {
	Version int                  `json:"version"`
	Serve   map[string]yaml.Node `json:"serve"`
	// Registries are those that images are fetched from in a way of their own, by host.
	Registries map[string]yaml.Node `json:"registries"`
	// The others are of local mode, which judges them itself.
	Preset        yaml.Node `json:"preset"`
	Presets       yaml.Node `json:"presets"`
	UpstreamProxy yaml.Node `json:"upstream-proxy"`
	UpstreamCA    yaml.Node `json:"upstream-ca"`
}

// maxConfig bounds the configuration file in bytes.
const maxConfig = 256 << 10

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
	source := configSource(path)
	root, err := source.YAML(content)
	if err != nil {
		return file, path, err
	}
	if root.Kind == yaml.MappingNode { // a section of which all is commented out is none
		for i := len(root.Content) - 2; i >= 0; i -= 2 {
			if root.Content[i+1].ShortTag() == "!!null" {
				root.Content = slices.Delete(root.Content, i, i+2)
			}
		}
	}
	if err := source.Fill(root, "the configuration", &file); err != nil {
		return file, path, err
	}
	if file.Version != 1 {
		return file, path, berm.Errorf(berm.Invalid, "%s: version is %d, want version: 1", path, file.Version)
	}
	return file, path, nil
}

func configSource(path string) document.Source { return document.Source{Name: path, Max: maxConfig} }

// registries are those of the configuration file.
func registries(path string, env func(string) (string, bool)) (*template.Registries, error) {
	file, name, err := readConfig(path, env)
	if err != nil {
		return nil, err
	}
	source, all := configSource(name), map[string]template.RegistryConfig{}
	for _, host := range slices.Sorted(maps.Keys(file.Registries)) {
		node := file.Registries[host]
		var c template.RegistryConfig
		if err := source.Fill(&node, "registry "+host, &c); err != nil {
			return nil, err
		}
		// Alone first, for an error to have its line.
		if _, err := template.NewRegistries(map[string]template.RegistryConfig{host: c}); err != nil {
			return nil, source.Errorf(&node, "%w", err)
		}
		all[host] = c
	}
	return template.NewRegistries(all)
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
