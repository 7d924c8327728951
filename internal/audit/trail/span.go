package trail

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/berm-sandbox/berm/internal/audit"
)

// spans are records by their numbers, ascending.
type spans []audit.Removal

// spanText shows a span as 1-5, or 9.
func spanText(s audit.Removal) string {
	text := strconv.FormatUint(s.From, 10)
	if s.To > s.From {
		text += "-" + strconv.FormatUint(s.To, 10)
	}
	return text
}

// parseSpans reads what ranges wrote.
func parseSpans(text string) (spans, error) {
	var all spans
	for part := range strings.SplitSeq(text, ",") {
		from, to, isRange := strings.Cut(part, "-")
		if !isRange {
			to = from
		}
		a, err := strconv.ParseUint(from, 10, 63)
		b, err2 := strconv.ParseUint(to, 10, 63)
		if err != nil || err2 != nil || b < a || len(all) > 0 && a <= all[len(all)-1].To {
			return nil, fmt.Errorf("%q are not ascending numbers", part)
		}
		all = append(all, audit.Removal{From: a, To: b})
	}
	return all, nil
}

// count is how many records they are.
func (s spans) count() (n uint64) {
	for _, part := range s {
		n += part.To - part.From + 1
	}
	return n
}

// has reports whether a record is one of them.
func (s spans) has(seq uint64) bool {
	_, found := slices.BinarySearchFunc(s, seq, func(part audit.Removal, seq uint64) int {
		switch {
		case part.To < seq:
			return -1
		case part.From > seq:
			return 1
		}
		return 0
	})
	return found
}

// merge brings spans in any order into theirs, with none beside another.
func (s spans) merge() spans {
	slices.SortFunc(s, func(a, b audit.Removal) int { return cmp.Compare(a.From, b.From) })
	var all spans
	for _, part := range s {
		if last := len(all) - 1; last >= 0 && part.From <= all[last].To+1 {
			all[last].To = max(all[last].To, part.To)
			continue
		}
		all = append(all, part)
	}
	return all
}

// lacks is the first record of a span that merged ones do not have; 0 is none.
func (s spans) lacks(of audit.Removal) uint64 {
	at, _ := slices.BinarySearchFunc(s, of.From, func(part audit.Removal, seq uint64) int { return cmp.Compare(part.To, seq) })
	switch {
	case at == len(s) || s[at].From > of.From:
		return of.From
	case s[at].To < of.To:
		return s[at].To + 1
	}
	return 0
}

// common is how many records are in both.
func (s spans) common(with spans) (n uint64) {
	for i, j := 0, 0; i < len(s) && j < len(with); {
		from, to := max(s[i].From, with[j].From), min(s[i].To, with[j].To)
		if from <= to {
			n += to - from + 1
		}
		if s[i].To < with[j].To {
			i++
		} else {
			j++
		}
	}
	return n
}
