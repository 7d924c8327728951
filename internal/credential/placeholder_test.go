package credential

import (
	"net/http"
	"strings"
	"testing"

	"golang.org/x/net/http/httpguts"
)

// Whatever is around a placeholder and wherever it stands, the secret goes out in its place
// alone, and the placeholder nowhere but in bodies to the hosts of credentials.
func FuzzPlaceholder(f *testing.F) {
	f.Add(uint8(0), true, "Bearer {P}")
	f.Add(uint8(0), true, "bearer {P}, Bearer {P}")
	f.Add(uint8(0), false, "Bearer {P}")
	f.Add(uint8(1), true, "x%2F{P}")
	f.Add(uint8(2), true, "a={P}&b=%67hp_")
	f.Add(uint8(3), true, "/v1/{P}/")
	f.Add(uint8(4), true, `{"key":"{P}"}`)
	f.Add(uint8(4), false, "&#103;{P}")
	f.Fuzz(func(t *testing.T, where uint8, bound bool, text string) {
		r := newRig()
		s := r.open(t, swap(bearer))
		p := s.Env(host)["API_TOKEN"]
		text = strings.ReplaceAll(text, "{P}", p)
		name := "api.test"
		if !bound {
			name = "other.test"
		}
		where %= 5
		if where < 2 && !httpguts.ValidHeaderFieldValue(text) || strings.Contains(text, "CANARY") {
			return
		}
		out := request(t, http.MethodPost, "https://"+name+"/v1/things", "")
		switch where {
		case 0:
			out.Header.Set("Authorization", text)
		case 1:
			out.Header.Set("X-Note", text)
		case 2:
			out.URL.RawQuery = text
		case 3:
			out.URL.Path = "/v1/" + strings.TrimPrefix(text, "/")
		case 4:
			body := request(t, http.MethodPost, "https://"+name+"/v1/things", text)
			out.Body, out.ContentLength = body.Body, int64(len(text))
		}
		var sent string
		_, err := s.Attach(Flow{Name: name, Port: 443, SNI: name}, out)
		if err == nil {
			sent, err = wire(out)
		}
		secrets := strings.Count(sent, tokenSecret)
		inPlace := bound && where == 0 && strings.HasSuffix(text, p) && len(text) <= len("Bearer ")+len(p)
		if secrets > 1 || secrets == 1 && !inPlace {
			t.Fatalf("the secret is in %q", sent)
		}
		if strings.Contains(sent, p) && (!bound || where != 4) {
			t.Fatalf("the placeholder is in %q: %v", sent, err)
		}
		if err == nil && !bound && strings.Contains(text, p) {
			t.Fatalf("%q went to another host", text)
		}
	})
}
