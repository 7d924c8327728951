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
		z.Write(data)
		z.Close()
		p.line(plain, "literal %d", len(data))
		for rest := packed.Bytes(); len(rest) > 0; {
			n := min(52, len(rest))
			p.w.WriteByte(lineLength(n))
			for i := 0; i < n; i += 4 {
				var word [4]byte
				copy(word[:], rest[i:n])
				v := binary.BigEndian.Uint32(word[:])
				var digits [5]byte
				for j := range digits {
					digits[4-j] = base85[v%85]
					v /= 85
				}
				p.w.Write(digits[:])
			}
			p.w.WriteByte('\n')
			rest = rest[n:]
		}
		p.w.WriteByte('\n')
	}
}

// lineLength writes the number of bytes in a line: A to Z for 1 to 26, a to z up to 52.
func lineLength(n int) byte {
	if n <= 26 {
		return byte('A' + n - 1)
	}
	return byte('a' + n - 27)
}
