package policy

import (
	"net/netip"
	"strings"

	"golang.org/x/net/idna"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/network/address"
)

// Host is a destination as a client names it: a name or an address. It is made by
// ParseHost and AddrHost only, so that there is one form of each to compare.
type Host struct {
	name string     // lower case, A-labels, no dot at the end; "" for an address
	addr netip.Addr // not valid for a name
}

// AddrHost is the host of an address.
func AddrHost(addr netip.Addr) Host { return Host{addr: addr.Unmap()} }

// Name is the canonical name, "" for an address.
func (h Host) Name() string { return h.name }

// Addr is the address, not valid for a name.
func (h Host) Addr() netip.Addr { return h.addr }

// nameable says whether a rule can name the host: a name of one label could be that of a
// group, and is what a search list makes of it.
func (h Host) nameable() bool { return h.name == "" || strings.Contains(h.name, ".") }

func (h Host) String() string {
	if h.name != "" {
		return h.name
	}
	return h.addr.String()
}

// ParseHost reads a host as it stands in a DNS question, a TLS hello, a Host header or a
// proxy request. It is the one parser of all of them: what it does not take is refused
// before anything is resolved. It fails with Invalid, also for an address that is not in
// its usual form.
func ParseHost(s string) (Host, error) {
	if addr, plain, found := address.Literal(s); found {
		if !plain {
			return Host{}, disguised(s, addr)
		}
		return AddrHost(addr), nil
	}
	name, err := canonicalName(s)
	return Host{name: name}, err
}

func disguised(s string, addr netip.Addr) error {
	if !addr.IsValid() {
		return berm.Errorf(berm.Invalid, "%q is neither a name nor an address", clip(s))
	}
	return berm.Errorf(berm.Invalid, "%q is the address %s in another form", clip(s), addr).
		WithHint("write addresses in their usual form")
}

// canonicalName is the one form of a name in which names are compared.
func canonicalName(s string) (string, error) {
	name := s
	for i := range len(s) {
		if s[i] >= 0x80 {
			var err error
			if name, err = idna.Lookup.ToASCII(s); err != nil {
				return "", berm.Errorf(berm.Invalid, "%q is not a name: %w", clip(s), err)
			}
			break
		}
	}
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	if addr, _, found := address.Literal(name); found { // wide digits
		return "", disguised(s, addr)
	}
	if name == "" || len(name) > 253 {
		return "", berm.Errorf(berm.Invalid, "%q is not a name: it must have 1 to 253 characters", clip(s))
	}
	for label := range strings.SplitSeq(name, ".") {
		if !validLabel(label) {
			return "", berm.Errorf(berm.Invalid, "%q is not a name: %q is not a label of letters, digits and hyphens", clip(s), clip(label))
		}
		if strings.HasPrefix(label, "xn--") {
			// A label that does not decode, or decodes to what the profile refuses.
			if again, err := idna.Lookup.ToASCII(label); err != nil || again != label {
				return "", berm.Errorf(berm.Invalid, "%q is not a name: %q is no international label", clip(s), clip(label))
			}
		}
	}
	return name, nil
}

func validLabel(label string) bool {
	if label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' {
		return false
	}
	return strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-") == ""
}

// forbidden is the reason for which a name is denied whatever a policy says, "" for none.
func forbidden(name string) Reason {
	first, _, _ := strings.Cut(name, ".")
	switch {
	// Names under which clouds' metadata services answer.
	case name == "metadata", name == "metadata.google.internal", name == "metadata.goog", name == "metadata.azure.internal",
		name == "metadata.azure.com", first == "instance-data":
		return ReasonMetadata
	case name == "localhost", strings.HasSuffix(name, ".localhost"):
		return ReasonHost
	}
	return ""
}

// private says whether a name is one of a private network (RFC 6761, 6762, 8375, ICANN's
// resolution on .internal), which only a rule that names it can mean.
func private(name string) bool {
	if !strings.Contains(name, ".") {
		return true
	}
	for _, suffix := range [...]string{".internal", ".local", ".home.arpa", ".onion"} {
		if strings.HasSuffix(name, suffix) {
			return true
		}
	}
	return false
}
