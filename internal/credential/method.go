package credential

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

// Method is how a kind of binding authorises a request. Its methods are called by many
// goroutines at once, for one request in the order Sent, Clear, Put.
type Method interface {
	// Slot names the place in a request that the method fills, the same for all that fill it.
	Slot() string
	// Sent returns what the sandbox has put there, decoded.
	Sent(out *http.Request) ([]string, error)
	// Clear takes away what the sandbox has put there.
	Clear(out *http.Request)
	// Put authorises the request. In mode swap, sent is what Sent returned with the placeholder
	// replaced by the secret; otherwise it is nil.
	Put(ctx context.Context, out *http.Request, secret string, sent []string) error
}

// methodOf makes the method of a built-in kind, nil for others.
func methodOf(b Binding) Method {
	switch b.Kind {
	case Header, APIKey:
		return field{b.Name, b.Prefix}
	case Bearer:
		return field{"Authorization", "Bearer "}
	case Basic, Git:
		return basic{b.User}
	case Cookie:
		return cookie{b.Name}
	case Query:
		return query{b.Name}
	case JSON:
		return body{b.Name}
	}
	return nil
}

// field sets a field to a prefix and the secret.
type field struct{ name, prefix string }

func (f field) Slot() string { return "field " + fold(f.name) }

// fold makes names alike that gateways of the CGI take for the same.
func fold(name string) string { return strings.ReplaceAll(strings.ToLower(name), "_", "-") }

// sameField says whether two names are alike; it makes no strings.
func sameField(a, b string) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range len(a) {
		if x, y := a[i], b[i]; x != y && foldByte(x) != foldByte(y) {
			return false
		}
	}
	return true
}

func foldByte(c byte) byte {
	switch {
	case c >= 'A' && c <= 'Z':
		return c + 'a' - 'A'
	case c == '_':
		return '-'
	}
	return c
}

func (f field) Sent(out *http.Request) (sent []string, _ error) {
	for name, values := range out.Header {
		if !sameField(name, f.name) {
			continue
		}
		for _, value := range values {
			if n := len(f.prefix); len(value) >= n && strings.EqualFold(value[:n], f.prefix) {
				value = value[n:]
			} else if scheme, rest, ok := strings.Cut(value, " "); ok && f.prefix == "Bearer " && strings.EqualFold(scheme, "token") {
				value = rest // what GitHub's older clients send
			}
			sent = append(sent, value)
		}
	}
	return sent, nil
}

func (f field) Clear(out *http.Request) { clearField(out, f.name) }

func clearField(out *http.Request, slot string) {
	for name := range out.Header {
		if sameField(name, slot) {
			delete(out.Header, name)
		}
	}
	for name := range out.Trailer {
		if sameField(name, slot) {
			delete(out.Trailer, name)
		}
	}
}

func (f field) Put(_ context.Context, out *http.Request, secret string, _ []string) error {
	out.Header.Set(f.name, f.prefix+secret)
	return nil
}

// basic sets Authorization to a user and the secret (RFC 7617). In mode swap the
// placeholder may be either of the two.
type basic struct{ user string }

func (basic) Slot() string { return "field authorization" }

func (basic) Sent(out *http.Request) ([]string, error) {
	values := out.Header.Values("Authorization")
	if len(values) != 1 {
		return values, nil
	}
	user, password, ok := out.BasicAuth()
	if !ok {
		return values, nil
	}
	return []string{user, password}, nil
}

func (basic) Clear(out *http.Request) { clearField(out, "Authorization") }

func (b basic) Put(_ context.Context, out *http.Request, secret string, sent []string) error {
	user, password := b.user, secret
	if sent != nil {
		if len(sent) != 2 {
			return errors.New("the field Authorization is not of the scheme Basic")
		}
		user, password = sent[0], sent[1]
	}
	out.Header.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(user+":"+password)))
	return nil
}

// cookie sets one cookie among others.
type cookie struct{ name string }

func (c cookie) Slot() string { return "cookie " + c.name }

func (c cookie) Sent(out *http.Request) (sent []string, _ error) {
	c.each(out, func(value string) { sent = append(sent, strings.Trim(value, `"`)) })
	return sent, nil
}

func (c cookie) Clear(out *http.Request) { c.each(out, func(string) {}) }

// each calls do with the values of the cookie; the others stay.
func (c cookie) each(out *http.Request, do func(string)) {
	var others, all []string
	for _, line := range out.Header["Cookie"] {
		for pair := range strings.SplitSeq(line, ";") {
			pair = strings.TrimSpace(pair)
			all = append(all, pair)
			if name, value, _ := strings.Cut(pair, "="); strings.TrimSpace(name) == c.name {
				do(strings.TrimSpace(value))
			} else if pair != "" {
				others = append(others, pair)
			}
		}
	}
	if len(others) == len(all) {
		return
	}
	out.Header.Del("Cookie")
	if len(others) > 0 {
		out.Header.Set("Cookie", strings.Join(others, "; "))
	}
}

func (c cookie) Put(_ context.Context, out *http.Request, secret string, _ []string) error {
	if strings.ContainsAny(secret, " \t\",;\\") {
		return errors.New("the secret has a character that a cookie cannot have")
	}
	pair := c.name + "=" + secret
	if others := out.Header.Get("Cookie"); others != "" {
		pair = others + "; " + pair
	}
	out.Header.Set("Cookie", pair)
	return nil
}

// query sets one key of the query and leaves the others as they are written.
type query struct{ key string }

func (q query) Slot() string { return "query " + q.key }

func (q query) Sent(out *http.Request) (sent []string, _ error) {
	for pair := range strings.SplitSeq(out.URL.RawQuery, "&") {
		name, value, _ := strings.Cut(pair, "=")
		name, err := url.QueryUnescape(name)
		if err == nil {
			value, err = url.QueryUnescape(value)
		}
		if err != nil || strings.Contains(pair, ";") {
			// Some servers part a query at semicolons.
			return nil, errors.New("the query could be read in two ways")
		}
		if name == q.key {
			sent = append(sent, value)
		}
	}
	return sent, nil
}

func (q query) Clear(out *http.Request) {
	var others []string
	for pair := range strings.SplitSeq(out.URL.RawQuery, "&") {
		name, _, _ := strings.Cut(pair, "=")
		if name, err := url.QueryUnescape(name); (err != nil || name != q.key) && pair != "" {
			others = append(others, pair)
		}
	}
	out.URL.RawQuery = strings.Join(others, "&")
}

func (q query) Put(_ context.Context, out *http.Request, secret string, _ []string) error {
	pair := url.QueryEscape(q.key) + "=" + url.QueryEscape(secret)
	if out.URL.RawQuery != "" {
		pair = out.URL.RawQuery + "&" + pair
	}
	out.URL.RawQuery = pair
	return nil
}

// maxJSON bounds the bodies that are read whole for a field.
const maxJSON = 1 << 20

// body sets the string at a JSON pointer, and leaves every other byte of the body.
type body struct{ pointer string }

func (b body) Slot() string { return "body" }

func (b body) Sent(out *http.Request) ([]string, error) {
	text, err := b.read(out)
	if err != nil || text == nil {
		return nil, err
	}
	from, to, err := find(text, b.pointer)
	if err != nil || from < 0 {
		return nil, err
	}
	var value string
	if json.Unmarshal(text[from:to], &value) != nil {
		return nil, errors.New("the field of the body is not a string")
	}
	return []string{value}, nil
}

// read reads the body and puts it back. It is nil when there is none.
func (b body) read(out *http.Request) ([]byte, error) {
	if out.Body == nil || out.Body == http.NoBody {
		return nil, nil
	}
	kind, _, err := mime.ParseMediaType(out.Header.Get("Content-Type"))
	if err != nil || kind != "application/json" && !strings.HasSuffix(kind, "+json") || out.Header.Get("Content-Encoding") != "" {
		return nil, errors.New("the body is not plain JSON")
	}
	text, err := io.ReadAll(io.LimitReader(out.Body, maxJSON+1))
	if err != nil {
		return nil, fmt.Errorf("the body could not be read: %w", err)
	}
	if len(text) > maxJSON {
		out.Body = again(text, out.Body)
		return nil, errors.New("the body is longer than 1 MiB")
	}
	out.Body.Close()
	b.write(out, text)
	return text, nil
}

// again is a body of which some was read.
func again(read []byte, rest io.ReadCloser) io.ReadCloser {
	return struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(read), rest), rest}
}

func (body) write(out *http.Request, text []byte) {
	out.Body = io.NopCloser(bytes.NewReader(text))
	out.ContentLength = int64(len(text))
	out.TransferEncoding = nil
	out.Header.Del("Content-Length")
}

func (b body) Clear(out *http.Request) { b.set(out, "") } //nolint:errcheck // Sent has read the same body

func (b body) Put(_ context.Context, out *http.Request, secret string, _ []string) error {
	return b.set(out, secret)
}

func (b body) set(out *http.Request, value string) error {
	text, err := b.read(out)
	if err != nil {
		return err
	}
	from, to, err := find(text, b.pointer)
	if err != nil {
		return err
	}
	if from < 0 {
		return errors.New("the body has no field of that name")
	}
	quoted, _ := json.Marshal(value) // a string
	b.write(out, bytes.Join([][]byte{text[:from], text[to:]}, quoted))
	return nil
}

// find returns the place of the value at a pointer in JSON, -1 when it has none. A text in
// which two values answer to a pointer, or that does not parse, is refused: the server may
// read the other one.
func find(text []byte, pointer string) (from, to int, err error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	f := finder{decoder: d, text: text, want: pointer, from: -1}
	if err := f.value("", 0); err != nil {
		return 0, 0, err
	}
	if _, err := d.Token(); err != io.EOF {
		return 0, 0, errors.New("the body is not one JSON value")
	}
	return f.from, f.to, nil
}

type finder struct {
	decoder  *json.Decoder
	text     []byte
	want     string
	from, to int
}

// maxDepth bounds what is nested.
const maxDepth = 64

var escapePointer = strings.NewReplacer("~", "~0", "/", "~1")

func (f *finder) value(at string, depth int) error {
	if depth > maxDepth {
		return errors.New("the body is nested too deeply")
	}
	start := int(f.decoder.InputOffset())
	token, err := f.decoder.Token()
	if err != nil {
		return errors.New("the body is not JSON")
	}
	switch token {
	case json.Delim('{'):
		seen := map[string]bool{}
		for f.decoder.More() {
			key, err := f.decoder.Token()
			name, ok := key.(string)
			if err != nil || !ok {
				return errors.New("the body is not JSON")
			}
			// Decoders that ignore case, as Go's, take both for one.
			folded := strings.ToLower(name)
			if seen[folded] {
				return errors.New("the body has a field twice")
			}
			seen[folded] = true
			if err := f.value(at+"/"+escapePointer.Replace(name), depth+1); err != nil {
				return err
			}
		}
	case json.Delim('['):
		for i := 0; f.decoder.More(); i++ {
			if err := f.value(at+"/"+strconv.Itoa(i), depth+1); err != nil {
				return err
			}
		}
	default:
		if at == f.want {
			f.to = int(f.decoder.InputOffset())
			f.from = start + bytes.IndexAny(f.text[start:f.to], "\"-0123456789tfn")
		}
		return nil
	}
	if _, err := f.decoder.Token(); err != nil {
		return errors.New("the body is not JSON")
	}
	return nil
}
