package berm

import "strings"

// Team names a group of API keys that share sandboxes, templates, secrets and limits, and reach those
// of no other team. "" is the server's own, which people call "default".
type Team string

const (
	ownTeam     = "default"
	maxTeamName = 40
)

// String is the name as people write it.
func (t Team) String() string {
	if t == "" {
		return ownTeam
	}
	return string(t)
}

// Trim takes the team from before a name that has it, TEAM/NAME.
func (t Team) Trim(name string) string { return strings.TrimPrefix(name, t.String()+"/") }

// ParseTeam reads a team as people write it: up to 40 of a-z, 0-9 and -, beginning with a letter. Kind
// Invalid.
func ParseTeam(s string) (Team, error) {
	if s == ownTeam {
		return "", nil
	}
	// No regular expression: compiling one costs every process inside 0.3 ms.
	if s == "" || len(s) > maxTeamName || s[0] < 'a' || s[0] > 'z' || strings.Trim(s, idAlphabet+"-") != "" {
		return "", Errorf(Invalid, "%.80q is no name of a team: up to %d of a-z, 0-9 and -, the first a letter", s, maxTeamName)
	}
	return Team(s), nil
}
