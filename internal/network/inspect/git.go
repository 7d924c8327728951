package inspect

import (
	"fmt"
	"net/http"
	"strings"
)

// git is a denial as git's client shows it, and the type of that, if the request is one of git's
// smart protocol (gitprotocol-http). Of an answer to the first request of a fetch or a push the
// client shows plain text, of the later ones no answer but status 200, in which both have a place
// for errors: ERR (gitprotocol-pack), and the report of a push that was not unpacked, behind text
// in the side band, which every server offers and every client takes.
func (d *Denial) git(r *http.Request) (body []byte, media string, ok bool) {
	lines := []string{d.Message}
	if d.Hint != "" {
		lines = append(lines, strings.Split(d.Hint, "\n")...)
	}
	text := strings.Join(lines, "\n")
	switch path := r.URL.Path; {
	case r.Method == http.MethodGet && strings.HasSuffix(path, "/info/refs") && strings.HasPrefix(r.URL.RawQuery, "service=git-"):
		return []byte(text + "\n"), "text/plain", true
	case r.Method == http.MethodPost && strings.HasSuffix(path, "/git-upload-pack"):
		return []byte(packet("ERR "+text+"\n") + "0000"), "application/x-git-upload-pack-result", true
	case r.Method == http.MethodPost && strings.HasSuffix(path, "/git-receive-pack"):
		report := packet("unpack refused ("+string(d.Reason)+")\n") + "0000"
		return []byte(packet("\x02"+text+"\n") + packet("\x01"+report) + "0000"), "application/x-git-receive-pack-result", true
	}
	return nil, "", false
}

// packet is a pkt-line (gitprotocol-common), which has at most 65516 bytes.
func packet(text string) string {
	text = text[:min(len(text), 65516)]
	return fmt.Sprintf("%04x%s", len(text)+4, text)
}
