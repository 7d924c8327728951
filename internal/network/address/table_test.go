package address

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/berm-sandbox/berm"
)

func table(t testing.TB, c Config) *Table {
	t.Helper()
	table, err := NewTable(c)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

func prefixes(list ...string) (p []netip.Prefix) {
	for _, s := range list {
		p = append(p, netip.MustParsePrefix(s))
	}
	return p
}

func TestJudge(t *testing.T) {
	strict := table(t, Config{})
	for s, want := range map[string]Class{
		"1.1.1.1": Public, "8.8.8.8": Public, "2606:4700::1111": Public, "223.255.255.255": Public,
		"0.0.0.0": Loopback, "0.1.2.3": Loopback, "127.0.0.1": Loopback, "127.255.0.9": Loopback, "::": Loopback, "::1": Loopback,
		"10.0.0.1": Private, "172.16.0.1": Private, "172.31.255.255": Private, "172.32.0.1": Public, "192.168.1.1": Private,
		"100.64.0.1": Private, "100.127.255.255": Private, "100.128.0.0": Public, "fd00::1": Private, "fec0::1": Private,
		"224.0.0.1": Multicast, "255.255.255.255": Multicast, "ff02::1": Multicast, "ff0e::1": Multicast,
		"240.0.0.1": Reserved, "192.0.2.1": Reserved, "198.18.0.1": Reserved, "2001:db8::1": Reserved, "3fff::1": Reserved,
		"5f00::1": Reserved, "100::1": Reserved, "4000::1": Reserved, "1000::1": Reserved, "2001:1ff::1": Reserved, "2001:200::1": Public,
		"fe80::1":         LinkLocal,
		"169.254.169.254": Metadata, "169.254.170.2": Metadata, "169.254.0.23": Metadata, "100.100.100.200": Metadata,
		"168.63.129.16": Metadata, "192.0.0.192": Metadata, "fd00:ec2::254": Metadata, "fd20:ce::254": Metadata, "fe80::a9fe:a9fe": Metadata,
		// The same in disguise: what is embedded decides when it is worse.
		"::ffff:169.254.169.254": Metadata, "::ffff:a9fe:a9fe": Metadata, "::169.254.169.254": Metadata, "::ffff:0:a9fe:a9fe": Metadata,
		"64:ff9b::a9fe:a9fe": Metadata, "64:ff9b:1::a9fe:a9fe": Metadata, "64:ff9b:1:a9fe:a9:fe00::": Metadata,
		"2002:a9fe:a9fe::1": Metadata, "2001:0:a9fe:a9fe::": Metadata, "2001:0:102:304::5601:5601": Metadata,
		"2606:4700::5efe:a9fe:a9fe": Metadata, "2606:4700::200:5efe:a00:1": Private, "2606:4700::5efe:808:808": Public,
		"64:ff9b::808:808": Tunnel, "2002:808:808::1": Tunnel, "2001::1": Loopback /* server 0.0.0.0 */, "::ffff:8.8.8.8": Public,
		"::8.8.8.8": Reserved, "2001:0:808:808:8000:0:f7f7:f7f7": Tunnel,
		"fe80::1%eth0": Malformed, "::1%lo": Malformed, "2606:4700::1%1": Malformed,
	} {
		if got := strict.Judge(netip.MustParseAddr(s)); got != want {
			t.Errorf("%s is %s, want %s", s, got, want)
		}
	}
	if got := strict.Judge(netip.Addr{}); got != Malformed {
		t.Errorf("no address is %s", got)
	}
}

func TestConfig(t *testing.T) {
	own := netip.MustParseAddr("203.0.114.7")
	c := table(t, Config{
		Open:  prefixes("10.1.0.0/16", "127.0.0.1/32", "169.254.0.0/16", "198.18.5.0/24", "192.168.0.0/16", "10.1.2.3/32", "224.0.0.0/8"),
		Close: prefixes("10.1.2.0/24", "9.9.9.9/32"),
		NAT64: prefixes("64:ff9b::/96", "2a00:1234::/32", "fd64::/64"),
		Own:   func(a netip.Addr) bool { return a == own || a == netip.MustParseAddr("192.168.0.9") },
	})
	for s, want := range map[string]Class{
		"10.1.0.1": Opened, "10.2.0.1": Private, "::ffff:10.1.0.1": Opened, "198.18.5.5": Opened, "8.8.8.8": Public,
		"10.1.2.3": Opened /* exactly this one */, "10.1.2.4": Host, "9.9.9.9": Host, "203.0.114.7": Host, "192.168.0.8": Opened, "192.168.0.9": Host,
		"127.0.0.1": Opened, "127.0.0.2": Loopback, "0.0.0.0": Loopback, "224.0.0.5": Multicast,
		"169.254.169.254": Metadata, "169.254.7.7": Metadata,
		"64:ff9b::808:808": Public, "64:ff9b::a01:1": Opened, "64:ff9b::a02:1": Private, "64:ff9b::a9fe:a9fe": Metadata,
		"2a00:1234:808:808::": Public, "2a00:1234:a9fe:a9fe::": Metadata, "2a00:1235:a9fe:a9fe::": Public,
		"fd64::8:808:800:0": Public, "fd64::a:200:100:0": Private, "fd64:0:0:1::": Private,
	} {
		if got := c.Judge(netip.MustParseAddr(s)); got != want {
			t.Errorf("%s is %s, want %s", s, got, want)
		}
	}
	for _, bad := range []Config{
		{Open: prefixes("0.0.0.0/0")}, {Open: prefixes("::/0")}, {Open: []netip.Prefix{{}}}, {Open: prefixes("10.0.0.1/8")},
		{Close: prefixes("::ffff:1.2.3.0/120")}, {NAT64: prefixes("64:ff9b::/95")}, {NAT64: prefixes("10.0.0.0/32")},
	} {
		if _, err := NewTable(bad); berm.KindOf(err) != berm.Invalid {
			t.Errorf("%v: %v", bad, err)
		}
	}
}

func all() []span { return slices.Concat(ranges()) }

func TestRanges(t *testing.T) {
	list := all()
	if len(list) < 50 {
		t.Fatalf("%d ranges", len(list))
	}
	for _, s := range list {
		if int(s.class) <= int(Opened) || int(s.class) >= len(classNames) || s.prefix != s.prefix.Masked() || s.what == "" {
			t.Errorf("%+v", s)
		}
	}
	if Describe(netip.MustParseAddr("::ffff:10.1.1.1")) != "private use (RFC 1918)" || Describe(netip.MustParseAddr("8.8.8.8")) != "" {
		t.Error("descriptions")
	}
}

// denied4 is a second table, made by hand and compared as text.
var denied4 = []string{
	"00000000", "00001010", "0110010001", "01111111", "1010100111111110", "101011000001", "110000000000000000000000", "110000000000000000000010",
	"110000000001111111000100", "110000000011010011000001", "110000000101100001100011", "1100000010101000", "110000001010111100110000",
	"110001100001001", "110001100011001101100100", "110010110000000001110001", "1110", "1111",
	"01100100011001000110010011001000", "10101000001111111000000100010000",
}

func bits(a netip.Addr) string {
	var s []byte
	for _, b := range a.AsSlice() {
		for i := 7; i >= 0; i-- {
			s = append(s, '0'+b>>i&1)
		}
	}
	return string(s)
}

func TestAgainstBits(t *testing.T) {
	strict := table(t, Config{})
	r, list := rand.New(rand.NewPCG(1, 2)), all()
	for i := range 50_000 {
		var v4 [4]byte
		for j := range v4 {
			v4[j] = byte(r.Uint32())
		}
		if s := list[r.IntN(len(list))].prefix; i%2 == 0 && s.Addr().Is4() {
			// The edges of ranges.
			v4 = s.Addr().As4()
			if i%4 == 0 {
				v4[3]--
			}
		}
		addr := netip.AddrFrom4(v4)
		text := bits(addr)
		want := slices.ContainsFunc(denied4, func(p string) bool { return len(p) <= len(text) && text[:len(p)] == p })
		if got := strict.Judge(addr).Denied(); got != want {
			t.Fatalf("%s: denied %v, want %v", addr, got, want)
		}
	}
}

func BenchmarkJudge(b *testing.B) {
	strict := table(b, Config{})
	for _, s := range []string{"8.8.8.8", "2606:4700::1111"} {
		addr := netip.MustParseAddr(s)
		b.Run(s, func(b *testing.B) {
			for b.Loop() {
				strict.Judge(addr)
			}
		})
	}
}
