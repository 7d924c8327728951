package audit

// maxDepth bounds how deep values of a record lie in each other.
const maxDepth = 1000

// valueEnd returns where the JSON value ends that begins at i, -1 if there is none. JSON as
// json.Marshal writes it has no space anywhere, and none is taken here. It is done by hand because
// most of what a record costs that another process hands over is here.
func valueEnd(b []byte, i, depth int) int {
	if i >= len(b) || depth > maxDepth {
		return -1
	}
	switch b[i] {
	case '"':
		return textEnd(b, i)
	case '{':
		return listEnd(b, i, '}', depth)
	case '[':
		return listEnd(b, i, ']', depth)
	case 't':
		return wordEnd(b, i, "true")
	case 'f':
		return wordEnd(b, i, "false")
	case 'n':
		return wordEnd(b, i, "null")
	}
	return numberEnd(b, i)
}

func wordEnd(b []byte, i int, word string) int {
	if end := i + len(word); end <= len(b) && string(b[i:end]) == word {
		return end
	}
	return -1
}

func textEnd(b []byte, i int) int {
	for i++; i < len(b); i++ {
		switch c := b[i]; {
		case c == '"':
			return i + 1
		case c < 0x20:
			return -1
		case c != '\\':
			continue
		}
		if i++; i == len(b) {
			return -1
		}
		switch b[i] {
		case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		case 'u':
			for range 4 {
				if i++; i == len(b) || !isHex(b[i]) {
					return -1
				}
			}
		default:
			return -1
		}
	}
	return -1
}

func isHex(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c && c <= 'f' || 'A' <= c && c <= 'F'
}

// listEnd is valueEnd of an object or an array.
func listEnd(b []byte, i int, last byte, depth int) int {
	if i++; i < len(b) && b[i] == last {
		return i + 1
	}
	for {
		if last == '}' {
			if i >= len(b) || b[i] != '"' {
				return -1
			}
			if i = textEnd(b, i); i < 0 || i == len(b) || b[i] != ':' {
				return -1
			}
			i++
		}
		if i = valueEnd(b, i, depth+1); i < 0 || i == len(b) {
			return -1
		}
		switch b[i] {
		case last:
			return i + 1
		case ',':
			i++
		default:
			return -1
		}
	}
}

func numberEnd(b []byte, i int) int {
	if b[i] == '-' {
		i++
	}
	start := i
	if i = digitsEnd(b, i); i < 0 || b[start] == '0' && i > start+1 {
		return -1
	}
	if i < len(b) && b[i] == '.' {
		if i = digitsEnd(b, i+1); i < 0 {
			return -1
		}
	}
	if i < len(b) && (b[i] == 'e' || b[i] == 'E') {
		if i++; i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		return digitsEnd(b, i)
	}
	return i
}

// digitsEnd is where digits end, of which there is one at least.
func digitsEnd(b []byte, i int) int {
	start := i
	for i < len(b) && '0' <= b[i] && b[i] <= '9' {
		i++
	}
	if i == start {
		return -1
	}
	return i
}
