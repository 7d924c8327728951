package change

import (
	"bytes"
	"compress/zlib"
	"encoding/binary"
)

// base85 is git's alphabet.
const base85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"

// literal writes both contents of a binary file, the new one first, as git apply takes
// them: compressed and in base 85, 52 bytes a line.
func (p *printer) literal(old, new []byte) {
	p.line(plain, "GIT binary patch")
	for _, data := range [][]byte{new, old} {
		var packed bytes.Buffer
		z := zlib.NewWriter(&packed)
		_, _ = z.Write(data) // a Buffer takes everything
		_ = z.Close()
		p.line(plain, "literal %d", len(data))
		for rest := packed.Bytes(); len(rest) > 0; {
			n := min(52, len(rest))
			line := []byte{lineLength(n)}
			for i := 0; i < n; i += 4 {
				var word [4]byte
				copy(word[:], rest[i:n])
				v := binary.BigEndian.Uint32(word[:])
				var digits [5]byte
				for j := range digits {
					digits[4-j] = base85[v%85]
					v /= 85
				}
				line = append(line, digits[:]...)
			}
			p.line(plain, "%s", line)
			rest = rest[n:]
		}
		p.line(plain, "")
	}
}

// lineLength writes the number of bytes in a line: A to Z for 1 to 26, a to z up to 52.
func lineLength(n int) byte {
	if n <= 26 {
		return byte('A' + n - 1)
	}
	return byte('a' + n - 27)
}
