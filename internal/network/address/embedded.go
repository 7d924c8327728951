package address

import (
	"encoding/binary"
	"net/netip"
)

var (
	compatible = netip.MustParsePrefix("::/96")           // RFC 4291 2.5.5.1
	translated = netip.MustParsePrefix("::ffff:0:0:0/96") // SIIT, RFC 2765 2.1
	wellKnown  = netip.MustParsePrefix("64:ff9b::/96")    // RFC 6052 2.1
	localUse   = netip.MustParsePrefix("64:ff9b:1::/48")  // RFC 8215; how long its parts are is the network's choice
	teredo     = netip.MustParsePrefix("2001::/32")       // RFC 4380 4
	sixToFour  = netip.MustParsePrefix("2002::/16")       // RFC 3056 2
	nat64Sizes = [...]int{32, 40, 48, 56, 64, 96}         // RFC 6052 2.2
	isatapIDs  = [...]uint32{0x0000_5efe, 0x0200_5efe}    // RFC 5214 6.1
)

// embedded returns every IPv4 address that routers or hosts may take out of an IPv6 one.
func (t *Table) embedded(addr netip.Addr) []netip.Addr {
	if addr.Is4() {
		return nil
	}
	a := addr.As16()
	var found []netip.Addr
	add := func(v4 []byte) { found = append(found, netip.AddrFrom4([4]byte(v4))) }
	if compatible.Contains(addr) || translated.Contains(addr) || wellKnown.Contains(addr) {
		add(a[12:])
	}
	if localUse.Contains(addr) {
		for _, bits := range nat64Sizes {
			if bits >= 48 {
				found = append(found, nat64(a, bits))
			}
		}
	}
	for _, p := range t.nat64 {
		if p.Contains(addr) {
			found = append(found, nat64(a, p.Bits()))
		}
	}
	if sixToFour.Contains(addr) {
		add(a[2:6])
	}
	if teredo.Contains(addr) {
		add(a[4:8])                                 // the server
		add([]byte{^a[12], ^a[13], ^a[14], ^a[15]}) // the client, whose bits are flipped
	}
	for _, id := range isatapIDs {
		if binary.BigEndian.Uint32(a[8:]) == id {
			add(a[12:])
		}
	}
	return found
}

// Canonical is the address that an address stands for: IPv4 for what is mapped to IPv6 or
// reached through a configured NAT64 prefix, else itself. Ranges are compared with it.
func (t *Table) Canonical(addr netip.Addr) netip.Addr {
	addr = addr.Unmap()
	for _, p := range t.nat64 {
		if p.Contains(addr) {
			return nat64(addr.As16(), p.Bits())
		}
	}
	return addr
}

// nat64 takes the IPv4 address out of an address with a NAT64 prefix of so many bits.
// Bits 64 to 71 are not part of it (RFC 6052 2.2).
func nat64(a [16]byte, bits int) netip.Addr {
	var v4 [4]byte
	at := bits / 8
	for i := range v4 {
		if at == 8 {
			at++
		}
		v4[i] = a[at]
		at++
	}
	return netip.AddrFrom4(v4)
}
