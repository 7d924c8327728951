package e2b

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"net/http"

	"github.com/berm-sandbox/berm"
)

// status maps the kinds of errors to HTTP.
var status = map[berm.Kind]int{
	berm.Internal:      http.StatusInternalServerError,
	berm.NotFound:      http.StatusNotFound,
	berm.AlreadyExists: http.StatusConflict,
	berm.Invalid:       http.StatusBadRequest,
	berm.Denied:        http.StatusForbidden,
	berm.Conflict:      http.StatusConflict,
	berm.Exhausted:     http.StatusTooManyRequests,
	berm.Unavailable:   http.StatusServiceUnavailable,
	berm.Unsupported:   http.StatusNotImplemented,
}

// httpError is an error whose status no kind maps to.
type httpError struct {
	status  int
	code    string // what E2B calls it; "" where it has no name
	message string
}

func (e *httpError) Error() string { return e.message }

var unauthorized = &httpError{http.StatusUnauthorized, "", "Unauthorized: the API key is missing or wrong. It goes into the header X-API-Key."}

// errorBody is the body of every error: clients compare code.
type errorBody struct {
	Code    int        `json:"code"`
	Message string     `json:"message"`
	Name    string     `json:"error_code,omitempty"`
	Berm    *errorHint `json:"berm,omitempty"`
}

type errorHint struct {
	Hint string `json:"hint"`
}

// fail answers with err.
func (a *API) fail(w http.ResponseWriter, r *http.Request, err error, trace string) {
	var he *httpError
	if errors.As(err, &he) {
		if he.status == http.StatusUnauthorized {
			w.Header().Set("WWW-Authenticate", "Bearer")
		}
		_ = answer(w, he.status, errorBody{Code: he.status, Message: he.message, Name: he.code})
		return
	}
	code, body := a.explain(r, err, trace)
	switch berm.KindOf(err) {
	case berm.Unavailable:
		w.Header().Set("Retry-After", "1")
	case berm.Exhausted:
		w.Header().Set("Should-Retry", "false") // clients would try again for a minute
	}
	_ = answer(w, code, body) // strings always marshal
}

// explain is what is told of an error that is no httpError.
func (a *API) explain(r *http.Request, err error, trace string) (int, errorBody) {
	kind := berm.KindOf(err)
	body := errorBody{Code: status[kind], Message: err.Error()}
	if kind == berm.Internal {
		// What broke is told to the operator: it may hold paths of the host.
		a.Log.Error("request failed", "method", r.Method, "path", r.URL.Path, "error", err, "trace", trace)
		body.Message = "Internal error, see the server's log for trace " + trace
	}
	if hint := berm.HintOf(err); hint != "" {
		body.Berm = &errorHint{hint}
	}
	return body.Code, body
}

func fail(w http.ResponseWriter, code int, message string) {
	_ = answer(w, code, errorBody{Code: code, Message: message}) // strings always marshal
}

// answer writes v as JSON. An error of writing means that the client is gone.
func answer(w http.ResponseWriter, code int, v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return berm.Errorf(berm.Internal, "answer: %w", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_, _ = w.Write(body)
	return nil
}

func newTraceID() string {
	random := make([]byte, 8)
	rand.Read(random)
	return hex.EncodeToString(random)
}
