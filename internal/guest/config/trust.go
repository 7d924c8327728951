package config

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/trust"
	"github.com/berm-sandbox/berm/internal/trust/root"
)

// trustAuthority makes the programs of this root trust the authority of a configuration, as
// an agent before this one may have done. What a program has read already it goes by.
func (c *Config) trustAuthority(g *berm.GuestConfig) error {
	if g.Authority == "" {
		return nil
	}
	failed := func(err error) error { return fmt.Errorf("trust an authority: %w", err) }
	dir, ok := strings.CutSuffix(c.run, RunDir)
	if !ok {
		return failed(errors.New("this agent has no root of its own"))
	}
	r, err := root.Survey(os.DirFS(dir + "/"))
	if err != nil {
		return failed(err)
	}
	files, env, err := trust.Files(r, []byte(g.Authority), nil)
	if err != nil {
		return failed(err)
	}
	for _, f := range files {
		if err := replace(dir+f.Path, f.Data); err != nil {
			return failed(err)
		}
	}
	c.trust.Store(&env)
	return nil
}

// replace writes a file that everybody may read. Who has the old one open keeps it.
func replace(path string, data []byte) error {
	if old, err := os.ReadFile(path); err == nil && string(old) == string(data) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	file, err := os.CreateTemp(filepath.Dir(path), ".berm-*")
	if err != nil {
		return err
	}
	_, err = file.Write(data)
	if err == nil {
		err = file.Chmod(0o644)
	}
	if closeErr := file.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		os.Remove(file.Name())
	}
	return err
}
