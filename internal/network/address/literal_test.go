package address

import "testing"

func TestLiteral(t *testing.T) {
	for _, c := range []struct {
		host, addr   string
		plain, found bool
	}{
		{"1.2.3.4", "1.2.3.4", true, true}, {"::1", "::1", true, true}, {"[::1]", "::1", true, true}, {"[::ffff:1.2.3.4]", "::ffff:1.2.3.4", true, true},
		{"2852039166", "169.254.169.254", false, true}, {"0xa9fea9fe", "169.254.169.254", false, true},
		{"0251.0376.0251.0376", "169.254.169.254", false, true}, {"169.254.43518", "169.254.169.254", false, true},
		{"169.16689662", "169.254.169.254", false, true}, {"127.1", "127.0.0.1", false, true}, {"0", "0.0.0.0", false, true},
		{"0x", "0.0.0.0", false, true}, {"0x7f.1", "127.0.0.1", false, true}, {"0X7F.0.0.1", "127.0.0.1", false, true},
		{"169.254.169.254.", "169.254.169.254", false, true}, {"01.2.3.4", "1.2.3.4", false, true}, {"017.0.0.1", "15.0.0.1", false, true},
		{"00000000000000000177.1", "127.0.0.1", false, true},
		{"256.1.1.1", "", false, true}, {"1.2.3.4.5", "", false, true}, {"4294967296", "", false, true}, {"089.1.1.1", "", false, true},
		{"1.2.3.0x100", "", false, true}, {"a.b.1", "", false, true}, {"a.0x1f", "", false, true}, {"1..2", "", false, true},
		{"::1%lo", "::1%lo", false, true}, {"[::1%25lo]", "::1%25lo", false, true}, {"[1.2.3.4]", "1.2.3.4", false, true}, {"[::1", "::1", false, true}, {"[]", "", false, true},
		{"1:2", "", false, true}, {"host:80", "", false, true},
		{"", "", false, false}, {".", "", false, false}, {"example.com", "", false, false}, {"1.example", "", false, false}, {"0xg", "", false, false},
		{"face", "", false, false}, {"1.2.3.4x", "", false, false}, {"+1", "", false, false}, {"-1", "", false, false},
	} {
		addr, plain, found := Literal(c.host)
		text := ""
		if addr.IsValid() {
			text = addr.String()
		}
		if text != c.addr || plain != c.plain || found != c.found {
			t.Errorf("%q: %q %v %v, want %q %v %v", c.host, text, plain, found, c.addr, c.plain, c.found)
		}
	}
}
