package credential

import (
	"crypto/sha256"
	"io"
	"maps"
	"slices"
)

const (
	upper     = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
	lower     = "abcdefghijklmnopqrstuvwxyz"
	figures   = "0123456789"
	base62    = upper + lower + figures
	base32    = upper + "234567"
	crockford = lower + figures
)

// shape is how a service's keys look: programs check that.
type shape struct {
	prefix   string
	alphabet string
	length   int // of what follows the prefix: 128 random bits or more, where it has room
}

// shapes are by what the services call themselves. All but aws, whose 16 characters leave
// room for no more than 80 bits, begin with "berm" after the prefix, for people who read one.
var shapes = map[string]shape{
	"":            {"", crockford, 32},
	"anthropic":   {"sk-ant-api03-", base62, 95},
	"aws":         {"AKIA", base32, 16},
	"github":      {"ghp_", base62, 36},
	"gitlab":      {"glpat-", base62, 27},
	"google":      {"AIza", base62, 35},
	"huggingface": {"hf_", base62, 34},
	"npm":         {"npm_", base62, 36},
	"openai":      {"sk-proj-", base62, 48},
	"pypi":        {"pypi-", base62, 85},
	"slack":       {"xoxb-", base62, 48},
	"stripe":      {"sk_test_", base62, 99},
}

// Shapes lists the shapes of placeholders.
func Shapes() []string {
	return slices.Sorted(maps.Keys(shapes))[1:]
}

const infix = "berm"

func newPlaceholder(of string, from io.Reader) string {
	s := shapes[of]
	text := []byte(s.prefix)
	random := s.length
	if of != "aws" {
		text = append(text, infix...)
		random -= len(infix)
	}
	// Bytes beyond the last whole multiple of the alphabet are drawn again.
	limit := 256 - 256%len(s.alphabet)
	for buf := make([]byte, 64); random > 0; {
		_, _ = io.ReadFull(from, buf) // neither source fails
		for _, b := range buf {
			if int(b) < limit && random > 0 {
				text = append(text, s.alphabet[int(b)%len(s.alphabet)])
				random--
			}
		}
	}
	return string(text)
}

type digest = [sha256.Size]byte

func digestOf(text string) digest { return sha256.Sum256([]byte(text)) }
