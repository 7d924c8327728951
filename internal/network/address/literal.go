package address

import (
	"net/netip"
	"strconv"
	"strings"
)

// Literal reads a host as an address. Found says that some program would take it for one;
// plain says that every program would take it for the same one. What is found but not
// plain, such as 127.1, 0x7f000001 or 0177.0.0.1, is an address in disguise: to be judged
// for the record, never to be used. An address with a zone is found and not plain, and so
// is a number that is out of range, for which addr is invalid.
func Literal(host string) (addr netip.Addr, plain, found bool) {
	if inner, ok := strings.CutPrefix(host, "["); ok {
		addr, err := netip.ParseAddr(strings.TrimSuffix(inner, "]"))
		return addr, strings.HasSuffix(inner, "]") && err == nil && addr.Is6() && addr.Zone() == "", true
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		return addr, addr.Zone() == "", true
	}
	if strings.Contains(host, ":") {
		return netip.Addr{}, false, true
	}
	host = strings.TrimSuffix(host, ".")
	if !endsInNumber(host) {
		return netip.Addr{}, false, false
	}
	return aton(host), false, true
}

// endsInNumber is the test of the same name of the URL standard: a host whose last label
// is a number is an IPv4 address or wrong, never a name.
func endsInNumber(host string) bool {
	last := host[strings.LastIndexByte(host, '.')+1:]
	if last == "" {
		return false
	}
	if strings.Trim(last, "0123456789") == "" {
		return true
	}
	hex, ok := cutHex(last)
	return ok && strings.Trim(hex, "0123456789abcdefABCDEF") == ""
}

func cutHex(s string) (string, bool) {
	if len(s) >= 2 && s[0] == '0' && s[1]|0x20 == 'x' {
		return s[2:], true
	}
	return s, false
}

// aton reads an IPv4 address as inet_aton(3) does: one to four parts in decimal, octal
// or hexadecimal, of which the last fills what is left. The result is invalid when it is
// none.
func aton(host string) netip.Addr {
	parts := strings.Split(host, ".")
	if len(parts) > 4 {
		return netip.Addr{}
	}
	var v4 uint64
	for i, part := range parts {
		n, ok := atoi(part)
		width := 8
		if i == len(parts)-1 {
			width = 8 * (4 - i)
		}
		if !ok || n >= 1<<width {
			return netip.Addr{}
		}
		v4 = v4<<width | n
	}
	return netip.AddrFrom4([4]byte{byte(v4 >> 24), byte(v4 >> 16), byte(v4 >> 8), byte(v4)})
}

func atoi(part string) (uint64, bool) {
	digits, base := part, 10
	if hex, ok := cutHex(part); ok {
		if hex == "" {
			return 0, true // the URL standard and some C libraries read 0x as 0
		}
		digits, base = hex, 16
	} else if len(part) > 1 && part[0] == '0' {
		digits, base = part[1:], 8
	}
	if strings.Trim(digits, "0123456789abcdefABCDEF") != "" {
		return 0, false // strconv takes signs
	}
	n, err := strconv.ParseUint(digits, base, 64)
	return n, err == nil
}
