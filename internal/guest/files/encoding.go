package files

import (
	"strconv"
	"strings"
)

// acceptEncoding reads an Accept-Encoding header: whether gzip is asked for before
// plain, and whether plain may be sent at all (RFC 9110, 12.5.3).
func acceptEncoding(header string) (gzip, plain bool) {
	const unset = -1.0
	qGzip, qPlain, qAny := unset, unset, unset
	for item := range strings.SplitSeq(header, ",") {
		name, params, _ := strings.Cut(item, ";")
		q := 1.0
		for param := range strings.SplitSeq(params, ";") {
			key, value, _ := strings.Cut(strings.TrimSpace(param), "=")
			if strings.EqualFold(key, "q") {
				if f, err := strconv.ParseFloat(value, 64); err == nil && f >= 0 && f <= 1 {
					q = f
				}
			}
		}
		switch strings.ToLower(strings.TrimSpace(name)) {
		case "gzip", "x-gzip":
			qGzip = q
		case "identity":
			qPlain = q
		case "*":
			qAny = q
		}
	}
	plain = qPlain > 0 || qPlain == unset && qAny != 0
	switch {
	case qGzip > 0:
		gzip = qGzip >= qPlain
	case qGzip == unset && qAny > 0:
		gzip = !plain
	}
	return gzip, plain
}
