package e2b

import (
	"strings"
	"unicode"

	"github.com/berm-sandbox/berm"
)

// identity is the workload identity that a create asks for: tokens by name, which E2B's proxy mints
// for requests.
type identity struct {
	Tokens map[string]struct {
		Audience  string `json:"audience"`
		TokenType string `json:"tokenType"`
	} `json:"tokens"`
}

// mostTokens is how many E2B takes.
const mostTokens = 5

// check refuses what cannot be honoured. Without tokens nothing is asked for.
func (i *identity) check() error {
	if i == nil || len(i.Tokens) == 0 {
		return nil
	}
	if len(i.Tokens) > mostTokens {
		return berm.Errorf(berm.Invalid, "iam.tokens has %d tokens, and may have %d", len(i.Tokens), mostTokens)
	}
	for name, token := range i.Tokens {
		switch {
		case name == "" || strings.ContainsFunc(name, func(r rune) bool { return r == '{' || r == '}' || unicode.IsControl(r) }):
			return berm.Errorf(berm.Invalid, "iam.tokens has the name %.80q, which is empty or has a brace or control character", name)
		case token.Audience == "":
			return berm.Errorf(berm.Invalid, "iam.tokens[%.80q] has no audience", name)
		case token.TokenType != "JWT-SVID":
			return berm.Errorf(berm.Invalid, "iam.tokens[%.80q] has the tokenType %.80q; there is JWT-SVID", name, token.TokenType)
		}
	}
	return berm.Errorf(berm.Unsupported, "iam.tokens cannot be honoured: who gets such a token fetches its issuer's keys from a public HTTPS address to verify it, and this server is no issuer with such an address").
		WithHint("store a token of the service's own as a secret, and set it with ${e2b.secrets.NAME} in network.rules, or with berm.credentials")
}
