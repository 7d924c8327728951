package preset

import _ "embed" // builtin.yaml

// Default is the preset of a run that names none, and below every other.
const Default = "default"

// base is the preset Default. It is no YAML, so that a run without another preset reads
// none.
var base = Rights{
	Workspace: WorkspaceCopyOnWrite,
	Profile:   "default",
	Network:   NetworkNone,
	Env: []string{
		"TERM", "COLORTERM", "NO_COLOR", "FORCE_COLOR", "LANG", "LANGUAGE", "LC_*", "TZ",
		"PATH", "HOME", "USER", "LOGNAME", "SHELL",
		// Where toolchains lie.
		"ASDF_DATA_DIR", "ASDF_DIR", "BUN_INSTALL", "CARGO_HOME", "CONDA_PREFIX", "DENO_INSTALL", "DOTNET_ROOT", "FNM_DIR",
		"GEM_HOME", "GOBIN", "GOPATH", "GOROOT", "JAVA_HOME", "MISE_DATA_DIR", "NVM_DIR", "PNPM_HOME", "PYENV_ROOT",
		"RBENV_ROOT", "RUSTUP_HOME", "SDKMAN_DIR", "VIRTUAL_ENV", "VOLTA_HOME",
	},
}

//go:embed builtin.yaml
var builtin []byte

// builtins returns the other presets that Berm brings.
func builtins() (map[string]Rights, error) {
	config, err := parseConfig("builtin.yaml", builtin)
	if err != nil {
		return nil, err
	}
	return config.Presets, nil
}
