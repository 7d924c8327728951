package preset

import (
	"errors"
	"strconv"
	"strings"
	"time"
)

// ParseSize reads a number of bytes, "512MiB", "1.5G" or the like. Units are powers of
// 1024.
func ParseSize(s string) (int64, error) {
	digits := strings.TrimRight(s, "KMGTiB")
	var shift int
	switch strings.TrimSuffix(s[len(digits):], "iB") {
	case "", "B":
	case "K":
		shift = 10
	case "M":
		shift = 20
	case "G":
		shift = 30
	case "T":
		shift = 40
	default:
		digits = ""
	}
	v, err := strconv.ParseFloat(digits, 64)
	if v *= float64(int64(1) << shift); err != nil || !(v >= 1) || v > 1<<60 {
		return 0, errors.New(`it must be a size such as "512MiB", "2GiB" or a number of bytes`)
	}
	return int64(v), nil
}

// ParseDuration reads a time such as "90s" or "1h30m", or a number of seconds.
func ParseDuration(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if n, numberErr := strconv.ParseInt(s, 10, 32); numberErr == nil {
		d, err = time.Duration(n)*time.Second, nil
	}
	if err != nil || d <= 0 {
		return 0, errors.New(`it must be a time such as "90s", "5m" or a number of seconds`)
	}
	return d, nil
}

// ParseCPUs reads a number of processors such as "1.5".
func ParseCPUs(s string) (float64, error) {
	v, err := strconv.ParseFloat(s, 64)
	if err != nil || !(v >= 0.01) || v > 1<<16 {
		return 0, errors.New(`it must be a number of processors such as "2" or "0.5"`)
	}
	return v, nil
}

// ParsePIDs reads a number of processes.
func ParsePIDs(s string) (int64, error) {
	n, err := strconv.ParseInt(s, 10, 32)
	if err != nil || n <= 0 {
		return 0, errors.New("it must be a number of processes such as 512")
	}
	return n, nil
}

// CheckPath says what is wrong with a path as a person wrote it.
func CheckPath(s string) error {
	switch {
	case s == "":
		return errors.New("it must be a path, not nothing")
	case len(s) >= 4096: // PATH_MAX
		return errors.New("the path is too long")
	case strings.IndexByte(s, 0) >= 0:
		return errors.New("a path cannot hold a zero byte")
	case s[0] == '~' && s != "~" && s[1] != '/':
		return errors.New(`only the own home, "~/…", can be abbreviated`)
	}
	return nil
}

// CheckAllow says what is wrong with an entry of what may be reached: a host name, "*.name",
// an address range or a group, with ":port" or without. Whether it is one, the network
// service finds out.
func CheckAllow(s string) error {
	const longest = 300
	if _, rest, ok := strings.Cut(s, "://"); ok {
		host, _, _ := strings.Cut(rest, "/")
		return errors.New("it must be a name, not a URL: " + host[strings.LastIndex(host, "@")+1:])
	}
	for _, c := range s {
		if c <= ' ' || c == 0x7f {
			return errors.New("it must be HOST or HOST:PORT")
		}
	}
	if s == "" || len(s) > longest {
		return errors.New("it must be HOST or HOST:PORT")
	}
	return nil
}
