package trail

import "testing"

// The public key of any private one is found again, as the first key of a log has to be after a
// crash. Half of them have a + in their last part.
func TestPublicKey(t *testing.T) {
	for range 100 {
		private, public, err := newKey("berm-audit-0123456789abcdef")
		if err != nil {
			t.Fatal(err)
		}
		if got, err := publicKey(private); err != nil || got != public {
			t.Fatalf("of %s: %s, %v; want %s", private, got, err, public)
		}
	}
	for _, text := range []string{"", "PRIVATE+KEY+x+12345678", "PRIVATE+KEY+x+12345678+AA=="} {
		if got, err := publicKey(text); err == nil {
			t.Errorf("%q is the key %s", text, got)
		}
	}
}
