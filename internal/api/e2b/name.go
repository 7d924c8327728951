package e2b

import (
	"strings"

	"github.com/berm-sandbox/berm"
)

// withoutTeam takes the server's team from a name, [TEAM/]NAME[:TAG]. What names another team means
// nothing here and is not found, as at E2B, which looks in the team that a name has and in no other
// (packages/api/internal/cache/templates/alias_cache.go).
func withoutTeam(ref string) string { return strings.TrimPrefix(ref, berm.Team("").String()+"/") }

// newName is the name of what is to be made. Another team's is refused, as at E2B: it would have to
// become another name.
func newName(name string) (string, error) {
	name = withoutTeam(strings.TrimSpace(name))
	if other, rest, ok := strings.Cut(name, "/"); ok {
		return "", invalid("namespace '%s' must match your team '%s': name it '%s'", other, berm.Team(""), rest)
	}
	return name, nil
}
