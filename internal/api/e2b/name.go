package e2b

import (
	"net/http"
	"strings"
)

// newName is the name of what a team is to make, [TEAM/]NAME[:TAG], without the team. Another team's is
// refused, as at E2B: it would have to become another name.
func newName(r *http.Request, name string) (string, error) {
	team := keyOf(r).Team
	name = team.Trim(strings.TrimSpace(name))
	if other, rest, ok := strings.Cut(name, "/"); ok {
		return "", invalid("namespace '%s' must match your team '%s': name it '%s'", other, team, rest)
	}
	return name, nil
}
