package preset

import (
	"errors"
	"maps"
	"slices"
	"strings"
)

// CleanEnv makes a sandbox's environment out of the host's. The last entry that fits a
// name decides about it:
//
//	NAME        the host's value
//	PREFIX*     the host's values of all names that begin so, but not of one that looks
//	            like a secret, such as X_TOKEN: those are named in full or stay out
//	NAME=VALUE  this value
//	-NAME       nothing; also -PREFIX*, for secrets too
//
// The result is sorted.
func CleanEnv(environ, entries []string) []string {
	host := make(map[string]string, len(environ))
	for _, variable := range environ {
		name, value, ok := strings.Cut(variable, "=")
		if _, twice := host[name]; ok && name != "" && !twice { // getenv(3) finds the first
			host[name] = value
		}
	}
	values := make(map[string]string, len(host))
	for _, entry := range entries {
		if pattern, ok := strings.CutPrefix(entry, "-"); ok {
			maps.DeleteFunc(values, func(name, _ string) bool { return matches(pattern, name) })
		} else if name, value, ok := strings.Cut(entry, "="); ok {
			values[name] = value
		} else if value, ok := host[entry]; ok {
			values[entry] = value
		} else if strings.HasSuffix(entry, "*") {
			for name, value := range host {
				if matches(entry, name) && !secret(name) {
					values[name] = value
				}
			}
		}
	}
	env := make([]string, 0, len(values))
	for name, value := range values {
		env = append(env, name+"="+value)
	}
	slices.Sort(env)
	return env
}

// CheckEnv says what is wrong with an entry for CleanEnv.
func CheckEnv(entry string) error {
	name, value, sets := strings.Cut(entry, "=")
	if !sets {
		name = strings.TrimSuffix(strings.TrimPrefix(name, "-"), "*")
	}
	if (name == "" && !strings.HasSuffix(entry, "*")) || strings.Trim(name, nameChars) != "" || strings.IndexByte(value, 0) >= 0 {
		return errors.New(`it must be NAME, PREFIX*, NAME=VALUE or, to take one away, -NAME`)
	}
	return nil
}

const nameChars = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_"

// matches says whether pattern, a name or "PREFIX*", fits name.
func matches(pattern, name string) bool {
	prefix, wild := strings.CutSuffix(pattern, "*")
	return pattern == name || wild && strings.HasPrefix(name, prefix)
}

// secret says whether a variable's name looks like that of a secret.
func secret(name string) bool {
	name = strings.ToUpper(name)
	for _, word := range [...]string{"TOKEN", "SECRET", "PASS", "KEY", "CREDENTIAL", "AUTH", "COOKIE", "PRIVATE", "HEADERS"} {
		if strings.Contains(name, word) {
			return true
		}
	}
	return false
}
