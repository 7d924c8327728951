package policy

import (
	_ "embed" // groups.txt
	"maps"
	"slices"
	"strings"
	"sync"
)

// The groups that are no list.
const (
	groupPublic = "public" // the public internet, by name or address
	groupNames  = "names"  // the same by name only
)

//go:embed groups.txt
var groupsText string

var (
	parseGroups sync.Once
	groupList   map[string][]Target
)

func groups() map[string][]Target {
	parseGroups.Do(func() {
		groupList = map[string][]Target{}
		for line := range strings.Lines(groupsText) {
			name, hosts, ok := strings.Cut(line, ":")
			if !ok || strings.HasPrefix(line, "#") {
				continue
			}
			for _, host := range strings.Fields(hosts) {
				t, err := ParseTarget(host) // never a group, which would come back here
				if err != nil {
					panic("groups.txt: " + err.Error())
				}
				groupList[name] = append(groupList[name], t)
			}
		}
	})
	return groupList
}

// Groups are the names of all groups, sorted.
func Groups() []string {
	names := slices.Collect(maps.Keys(groups()))
	return slices.Sorted(slices.Values(append(names, groupPublic, groupNames)))
}
