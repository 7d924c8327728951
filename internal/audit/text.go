package audit

import (
	"encoding/json"
	"strings"
)

// Shorten cuts a text to at most n bytes.
func Shorten(s string, n int) string {
	if len(s) > n {
		return strings.ToValidUTF8(s[:n], "")
	}
	return s
}

// Fit keeps as many texts as take size bytes in JSON, where a byte may take six, and says
// whether it left something out.
func Fit(all []string, size int) (kept []string, cut bool) {
	for _, s := range all {
		line, _ := json.Marshal(s) // a text always marshals
		if len(line) > size {
			if s = Shorten(s, size/6); s != "" {
				kept = append(kept, s)
			}
			return kept, true
		}
		size -= len(line)
		kept = append(kept, s)
	}
	return kept, false
}
