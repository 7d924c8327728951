package seccomp

import (
	"encoding/binary"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
)

// data is struct seccomp_data.
type data struct {
	number, arch uint32
	args         [6]uint64
}

// decide is what the profile says of a call, in the plainest way.
func (p Profile) decide(arch string, d data) action {
	if d.arch != auditArch[arch] {
		return p.unlisted
	}
	for _, c := range calls {
		if n := c.number(arch); n >= 0 && uint32(n) == d.number {
			if policy, listed := p.policies[c.name]; listed {
				return decide(policy, d.args)
			}
		}
	}
	return p.unlisted
}

func decide(p policy, args [6]uint64) action {
	switch p := p.(type) {
	case partial:
		return decide(p.policy, args)
	case action:
		return p
	case byArg:
		value := uint32(args[p.arg])
		if p.mask != 0 {
			value &= p.mask
		}
		for _, c := range p.cases {
			if slices.Contains(c.values, value) {
				return decide(c.then, args)
			}
		}
		return decide(p.rest, args)
	case nullArg:
		if args[p.arg] == 0 {
			return decide(p.null, args)
		}
		return decide(p.rest, args)
	}
	panic("unknown policy")
}

// machine runs a filter as the kernel does.
func machine(t testing.TB, filter []unix.SockFilter) func(data) action {
	t.Helper()
	raw := make([]bpf.RawInstruction, len(filter))
	for i, f := range filter {
		raw[i] = bpf.RawInstruction{Op: f.Code, Jt: f.Jt, Jf: f.Jf, K: f.K}
	}
	program, ok := bpf.Disassemble(raw)
	if !ok {
		t.Fatal("the filter has unknown instructions")
	}
	vm, err := bpf.NewVM(program)
	if err != nil {
		t.Fatal(err)
	}
	return func(d data) action {
		// The kernel loads words in its own byte order, the machine in network order.
		words := []uint32{d.number, d.arch, 0, 0}
		for _, a := range d.args {
			words = append(words, uint32(a), uint32(a>>32))
		}
		var in []byte
		for _, w := range words {
			in = binary.BigEndian.AppendUint32(in, w)
		}
		verdict, err := vm.Run(in)
		if err != nil {
			t.Fatal(err)
		}
		return action(verdict)
	}
}

// profiles are all that there are, each also as it is in the host's namespaces.
func profiles() []Profile {
	var list []Profile
	for _, name := range Profiles() {
		p, _ := Lookup(name)
		list = append(list, p, p.Shared("truncate"), p.WithoutSetID(), p.WithoutSetID().WithoutGroup(true))
	}
	return append(list, Egress(), Broker())
}

func each(t *testing.T, f func(t *testing.T, p Profile, arch string, run func(data) action)) {
	for _, p := range profiles() {
		for _, arch := range []string{"amd64", "arm64"} {
			t.Run(p.name+"/"+arch, func(t *testing.T) {
				filter, err := p.Assemble(arch)
				if err != nil {
					t.Fatal(err)
				}
				f(t, p, arch, machine(t, filter))
			})
		}
	}
}

// interesting are the values that policies compare with.
func interesting(p policy) []uint32 {
	if part, ok := p.(partial); ok {
		return interesting(part.policy)
	}
	b, ok := p.(byArg)
	if !ok {
		return nil
	}
	values := interesting(b.rest)
	for _, c := range b.cases {
		values = append(append(values, c.values...), interesting(c.then)...)
	}
	return append(values, b.mask)
}

func TestFilterDecidesAsProfile(t *testing.T) {
	tries := 5
	if os.Getenv("BERM_TEST_ALL") != "" {
		tries = 100
	}
	each(t, func(t *testing.T, p Profile, arch string, run func(data) action) {
		values := []uint32{0, 1, 2, 3, 8, 10, 0xffffffff}
		for _, policy := range p.policies {
			values = append(values, interesting(policy)...)
		}
		random := rand.New(rand.NewPCG(1, 2))
		argument := func() uint64 {
			v := uint64(values[random.IntN(len(values))])
			switch random.IntN(4) {
			case 0:
				v |= random.Uint64() << 32
			case 1:
				v ^= 1 << random.IntN(32)
			case 2:
				v = random.Uint64()
			}
			return v
		}
		check := func(d data) {
			if got, want := run(d), p.decide(arch, d); got != want {
				t.Fatalf("%+v: %#x, want %#x", d, got, want)
			}
		}
		for n := range uint32(700) { // all numbers, and tries with arguments
			check(data{number: n, arch: auditArch[arch]})
			check(data{number: n | 0x40000000, arch: auditArch[arch]})
			for range tries {
				d := data{number: n, arch: auditArch[arch]}
				for i := range d.args {
					d.args[i] = argument()
				}
				check(d)
			}
		}
		for range 100 * tries {
			d := data{number: random.Uint32(), arch: auditArch[arch]}
			if random.IntN(2) == 0 {
				d.arch = random.Uint32()
			}
			check(d)
		}
	})
}

func FuzzFilter(f *testing.F) {
	type subject struct {
		p    Profile
		arch string
		run  func(data) action
	}
	var subjects []subject
	for _, p := range profiles() {
		for _, arch := range []string{"amd64", "arm64"} {
			filter, err := p.Assemble(arch)
			if err != nil {
				f.Fatal(err)
			}
			subjects = append(subjects, subject{p, arch, machine(f, filter)})
		}
	}
	f.Add(uint32(41), uint32(unix.AUDIT_ARCH_X86_64), uint64(2), uint64(3), uint64(1))
	f.Add(uint32(198), uint32(unix.AUDIT_ARCH_AARCH64), uint64(16), uint64(3), uint64(9))
	f.Add(uint32(0x40000000+39), uint32(unix.AUDIT_ARCH_X86_64), uint64(0), uint64(0), uint64(0))
	f.Add(uint32(20), uint32(unix.AUDIT_ARCH_I386), uint64(0), uint64(0), uint64(0))
	f.Fuzz(func(t *testing.T, number, arch uint32, a, b, c uint64) {
		d := data{number: number, arch: arch, args: [6]uint64{a, b, c}}
		for _, s := range subjects {
			if got, want := s.run(d), s.p.decide(s.arch, d); got != want {
				t.Errorf("%s %s %+v: %#x, want %#x", s.p.name, s.arch, d, got, want)
			}
		}
	})
}

// Filters of other ABIs are closed whatever the number.
func TestForeignABI(t *testing.T) {
	each(t, func(t *testing.T, p Profile, _ string, run func(data) action) {
		for n := range uint32(700) {
			for _, arch := range []uint32{unix.AUDIT_ARCH_I386, unix.AUDIT_ARCH_ARM, 0} {
				if got := run(data{number: n, arch: arch}); got != p.unlisted {
					t.Fatalf("%d of ABI %#x: %#x", n, arch, got)
				}
			}
		}
	})
}

// The lists name known calls, each once.
func TestLists(t *testing.T) {
	known := map[string]bool{}
	for _, c := range calls {
		known[c.name] = true
	}
	seen := map[string]bool{}
	for _, name := range strings.Fields(allowed + denied) {
		if !known[name] || seen[name] || partials[name].policy != nil {
			t.Errorf("%s is unknown or listed twice", name)
		}
		seen[name] = true
	}
	for name, part := range partials {
		if !known[name] || part.text == "" {
			t.Errorf("%s is unknown or has no text", name)
		}
		seen[name] = true
	}
	for name, policy := range sharedPartials() {
		if part, ok := policy.(partial); !ok || !known[name] || !seen[name] || part.text == "" {
			t.Errorf("%s is not in the default profile or has no text", name)
		}
	}
	for _, name := range append(strings.Fields(notStrict), sharedDenied...) {
		if !seen[name] {
			t.Errorf("%s is not in the default profile", name)
		}
	}
}

// The size of the filter is time at each start of a sandbox, the number of calls is
// attack surface: neither grows unnoticed.
func TestSize(t *testing.T) {
	most := map[string][2]int{
		"default/amd64": {170, 290}, "default/arm64": {160, 255}, "strict/amd64": {170, 255}, "strict/arm64": {155, 230},
		"default, shared namespaces/amd64": {225, 265}, "default, shared namespaces/arm64": {200, 230},
		"strict, shared namespaces/amd64": {220, 250}, "strict, shared namespaces/arm64": {195, 215},
		"default, without set-id bits/amd64": {220, 290}, "default, without set-id bits/arm64": {190, 255},
		"strict, without set-id bits/amd64": {215, 255}, "strict, without set-id bits/arm64": {185, 230},
		"default, without set-id bits, without the caller's group/amd64": {235, 290}, "default, without set-id bits, without the caller's group/arm64": {200, 255},
		"strict, without set-id bits, without the caller's group/amd64": {230, 255}, "strict, without set-id bits, without the caller's group/arm64": {195, 230},
		"egressd/amd64": {160, 60}, "egressd/arm64": {150, 60}, "brokerd/amd64": {145, 55}, "brokerd/arm64": {135, 55},
	}
	each(t, func(t *testing.T, p Profile, arch string, _ func(data) action) {
		filter, _ := p.Assemble(arch)
		open := 0
		for _, c := range calls {
			if policy, listed := p.policies[c.name]; listed && c.number(arch) >= 0 && policy != fail(unix.EPERM) && policy != fail(unix.ENOSYS) {
				open++
			}
		}
		t.Logf("%d instructions, %d calls", len(filter), open)
		if limit := most[p.name+"/"+arch]; len(filter) > limit[0] || open > limit[1] {
			t.Errorf("more than %d instructions or %d calls", limit[0], limit[1])
		}
	})
}

func TestLookup(t *testing.T) {
	if p, err := Lookup(""); err != nil || p.Name() != Default {
		t.Errorf("Lookup of nothing: %s, %v", p.Name(), err)
	}
	if _, err := Lookup("none"); berm.KindOf(err) != berm.Invalid {
		t.Errorf("Lookup of none: %v", err)
	}
	p, _ := Lookup(Strict)
	if _, err := p.Assemble("riscv64"); berm.KindOf(err) != berm.Unsupported {
		t.Errorf("Assemble for riscv64: %v", err)
	}
}

func TestDescribe(t *testing.T) {
	p, _ := Lookup(Default)
	d := p.Describe()
	if d.Profile != Default || d.Default != "ENOSYS" || !slices.Contains(d.Allowed, "openat") || slices.Contains(d.Allowed, "mount") || slices.Contains(d.Allowed, "socket") {
		t.Errorf("%+v", d)
	}
	rules := strings.Join(d.Rules, "\n")
	for name := range partials {
		if !strings.Contains(rules, name+": ") {
			t.Errorf("no rule of %s", name)
		}
	}
	if !strings.Contains(rules, " mount ") {
		t.Error("refused calls are not listed")
	}
}

func BenchmarkAssemble(b *testing.B) {
	for b.Loop() {
		p, _ := Lookup(Default)
		if _, err := p.Assemble(""); err != nil {
			b.Fatal(err)
		}
	}
}
