package files

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// TokenHeader carries the access token.
const TokenHeader = "X-Access-Token"

// The operations that a signature can be for.
const (
	read  = "read"
	write = "write"
)

var (
	errToken     = errors.New("access token present in header but does not match")
	errMissing   = errors.New("missing signature query parameter")
	errSignature = errors.New("invalid signature")
	errExpired   = errors.New("signature is already expired")
)

// authorize accepts the token in a header or a signature made with it. The texts of
// its errors are part of the protocol.
func (h *Handler) authorize(r *http.Request, query url.Values, operation string) error {
	if !h.config.Secured() {
		return nil
	}
	if token := r.Header.Get(TokenHeader); token != "" {
		if !h.config.Authorized(token) {
			return errToken
		}
		return nil
	}
	return verify(query, operation, h.config.Token(), time.Now())
}

// verify checks the signature of a query. Expiry is told only to holders of a right
// signature.
func verify(query url.Values, operation, token string, now time.Time) error {
	// "+" of unescaped base64 arrives as a space.
	got := strings.ReplaceAll(query.Get("signature"), " ", "+")
	if got == "" {
		return errMissing
	}
	expiry := query.Get("signature_expiration")
	want := sign(query.Get("path"), operation, query.Get("username"), token, expiry)
	if subtle.ConstantTimeCompare([]byte(got), []byte(want)) != 1 {
		return errSignature
	}
	if expiry != "" {
		at, err := strconv.ParseInt(expiry, 10, 64)
		if err != nil {
			return errSignature
		}
		if at < now.Unix() {
			return errExpired
		}
	}
	return nil
}

// sign makes a signature: of the raw path and user as the query has them, and of the
// expiry in Unix seconds unless that is "".
func sign(path, operation, user, token, expiry string) string {
	text := path + ":" + operation + ":" + user + ":" + token
	if expiry != "" {
		text += ":" + expiry
	}
	sum := sha256.Sum256([]byte(text))
	return "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
}
