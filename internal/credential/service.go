package credential

import (
	"maps"
	"slices"
	"strings"
)

// service is an API that is known, whose clients take its base URL from the environment.
type service struct {
	host string
	kind Kind
	name string // of the field
	base string // what the base URL has after the host
	urls []string
	// more are further variables; {} stands for the endpoint's host.
	more map[string]string
	env  string // the variable of the key
	form string // shape of the key
}

// services are what the programs document themselves. Of package registries, the files that
// an index names elsewhere are fetched from there.
var services = map[string]service{
	"anthropic": {host: "api.anthropic.com", kind: APIKey, name: "X-Api-Key", urls: []string{"ANTHROPIC_BASE_URL"}, env: "ANTHROPIC_API_KEY", form: "anthropic"},
	"gemini":    {host: "generativelanguage.googleapis.com", kind: APIKey, name: "X-Goog-Api-Key", urls: []string{"GOOGLE_GEMINI_BASE_URL"}, env: "GEMINI_API_KEY", form: "google"},
	github:      {host: "api.github.com", kind: Bearer, urls: []string{"GITHUB_API_URL"}, env: "GITHUB_TOKEN", form: "github"},
	"goproxy":   {host: "proxy.golang.org", kind: Basic, urls: []string{"GOPROXY"}},
	"npm":       {host: "registry.npmjs.org", kind: Bearer, base: "/", urls: []string{"npm_config_registry"}},
	"openai":    {host: "api.openai.com", kind: Bearer, base: "/v1", urls: []string{"OPENAI_BASE_URL"}, env: "OPENAI_API_KEY", form: "openai"},
	"pypi":      {host: "pypi.org", kind: Basic, base: "/simple", urls: []string{"PIP_INDEX_URL"}, more: map[string]string{"PIP_TRUSTED_HOST": "{}"}},
}

// github is the service whose API can write what git pushes.
const github = "github"

// Services lists the names that Binding.Service may have.
func Services() []string { return slices.Sorted(maps.Keys(services)) }

// fill sets what a binding of the service leaves open.
func (s service) fill(b Binding) Binding {
	if b.Kind == "" {
		b.Kind, b.Name = s.kind, s.name
	}
	if len(b.Hosts) == 0 {
		b.Hosts = []string{s.host}
	}
	if b.Env == "" {
		b.Env = s.env
		if b.Shape == "" {
			b.Shape = s.form
		}
	}
	return b
}

// variables have clients send what is for the binding to its endpoint, the host.
func (b Binding) variables(host string) map[string]string {
	s, env := services[b.Service], map[string]string{}
	for _, name := range append(slices.Clone(s.urls), b.URL) {
		if name != "" {
			env[name] = "http://" + host + s.base
		}
	}
	for name, value := range s.more {
		env[name] = strings.ReplaceAll(value, "{}", host)
	}
	return env
}
