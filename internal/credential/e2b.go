package credential

import (
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"net/http"
	"slices"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/berm-sandbox/berm"
)

const (
	secretOpen   = "${e2b.secrets."
	identityOpen = "${e2b.identity.tokens."
	anyOpen      = "${e2b."
)

// E2B makes bindings of the header transforms of E2B's network rules: fields by name, by
// the host or *.suffix that they are for. Values may hold ${e2b.secrets.NAME}. An exact host
// beats the longest suffix, and sets are not merged. Unsupported for identity tokens.
func E2B(rules map[string]map[string]string) ([]Binding, error) {
	var all []Binding
	hosts := slices.Sorted(maps.Keys(rules))
	for _, host := range hosts {
		patterns := []string{strings.ToLower(host)}
		for _, other := range hosts {
			if other = strings.ToLower(other); other != patterns[0] && matchHost(patterns[:1], strings.TrimPrefix(other, "*.")) {
				patterns = append(patterns, "!"+other)
			}
		}
		for _, name := range slices.Sorted(maps.Keys(rules[host])) {
			value := rules[host][name]
			if err := checkValue(value); err != nil {
				return nil, berm.Errorf(berm.KindOf(err), "transform of %s for %s: %w", quote(name), quote(host), err)
			}
			sum := sha256.Sum256([]byte(patterns[0] + "\n" + http.CanonicalHeaderKey(name)))
			b := Binding{ID: "e2b-" + hex.EncodeToString(sum[:8]), Kind: Header, Name: http.CanonicalHeaderKey(name), Value: value, Hosts: patterns}
			if _, err := b.normal(); err != nil {
				return nil, err
			}
			all = append(all, b)
		}
	}
	return all, nil
}

func checkValue(value string) error {
	if value == "" || !httpguts.ValidHeaderFieldValue(value) {
		return berm.Errorf(berm.Invalid, "the value is empty or has a control character")
	}
	for rest := value; ; {
		at := strings.Index(rest, anyOpen)
		if at < 0 {
			return nil
		}
		rest = rest[at:]
		if strings.HasPrefix(rest, identityOpen) {
			return berm.Errorf(berm.Unsupported, "this server issues no identity tokens").
				WithHint("keep a token as a secret and write ${e2b.secrets.NAME}")
		}
		name, after, ok := strings.Cut(strings.TrimPrefix(rest, secretOpen), "}")
		if !strings.HasPrefix(rest, secretOpen) || !ok || !isSecretName(name) {
			return berm.Errorf(berm.Invalid, "the value has a placeholder that is not ${e2b.secrets.NAME}")
		}
		rest = after
	}
}

// isSecretName says whether a name is one of E2B's secrets.
func isSecretName(name string) bool {
	return name != "" && len(name) <= 128 && strings.Trim(name, base62+"_-") == ""
}

// References returns the names of the secrets in a value of E2B's form, in lower case.
func References(value string) (names []string) {
	for {
		_, rest, ok := strings.Cut(value, secretOpen)
		if !ok {
			return names
		}
		name, after, ok := strings.Cut(rest, "}")
		if !ok {
			return names
		}
		names = append(names, strings.ToLower(name))
		value = after
	}
}

// expand puts secrets, in the order of references, into a value.
func expand(value string, secrets []string) string {
	var b strings.Builder
	for _, text := range secrets {
		before, rest, _ := strings.Cut(value, secretOpen)
		_, value, _ = strings.Cut(rest, "}")
		b.WriteString(before)
		b.WriteString(text)
	}
	b.WriteString(value)
	return b.String()
}
