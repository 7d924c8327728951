package policy

import (
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
)

var units = [...]struct {
	name string
	size int64
}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"B", 1}, {"", 1}}

// parseBytes reads an amount such as 512KiB.
func parseBytes(s string) (int64, error) {
	digits := strings.TrimRight(s, "TGMKiB")
	for _, u := range units {
		if s != digits+u.name || digits == "" || strings.Trim(digits, "0123456789") != "" {
			continue
		}
		n, err := strconv.ParseInt(digits, 10, 64)
		if err != nil || n == 0 || n > math.MaxInt64/u.size {
			break
		}
		return n * u.size, nil
	}
	return 0, berm.Errorf(berm.Invalid, "%q is not an amount of bytes such as 512KiB, 10MiB or 1GiB", clip(s))
}

func formatBytes(n int64) string {
	for _, u := range units {
		if n%u.size == 0 && n >= u.size && u.name != "B" {
			return strconv.FormatInt(n/u.size, 10) + u.name
		}
	}
	return strconv.FormatInt(n, 10)
}

var periods = [...]struct {
	name string
	per  time.Duration
}{{"s", time.Second}, {"m", time.Minute}, {"h", time.Hour}, {"d", 24 * time.Hour}}

// parseRate reads an amount, or an amount in each period such as 50MiB/h.
func parseRate(s string) (Rate, error) {
	amount, period, periodic := strings.Cut(s, "/")
	n, err := parseBytes(amount)
	if err != nil || !periodic {
		return Rate{Bytes: n}, err
	}
	for _, p := range periods {
		if p.name == period {
			return Rate{n, p.per}, nil
		}
	}
	return Rate{}, berm.Errorf(berm.Invalid, "%q is not a period: s, m, h or d", clip(period))
}

func (r Rate) String() string {
	s := formatBytes(r.Bytes)
	for _, p := range periods {
		if p.per == r.Per {
			s += "/" + p.name
		}
	}
	return s
}
