package router

import (
	"net/http"
	"strings"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/control"
)

// plain asks for an answer that can be looked through: whole, and not compressed.
func plain(h http.Header) {
	h.Set("Accept-Encoding", "identity")
	for _, name := range []string{"Connect-Accept-Encoding", "Grpc-Accept-Encoding", "Range", "If-Range"} {
		h.Del(name)
	}
}

// unmasked says that an answer could not be looked through.
type unmasked struct{ error }

// mask takes the secrets of a sandbox's credentials out of an answer of its guest agent.
func mask(route *control.Route, r *http.Response) error {
	for _, name := range []string{"Content-Encoding", "Connect-Content-Encoding", "Grpc-Encoding"} {
		if encoding := r.Header.Get(name); encoding != "" && !strings.EqualFold(encoding, "identity") {
			return &unmasked{berm.Errorf(berm.Internal, "the guest agent's answer is compressed, which was not asked for, and cannot be looked through for secrets")}
		}
	}
	if r.Body == nil || r.Body == http.NoBody {
		return nil
	}
	body, err := route.Mask(r.Request.Context(), r.Body)
	if err != nil {
		return &unmasked{err}
	}
	r.Body = body
	return nil
}
