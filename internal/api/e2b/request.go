package e2b

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/control"
)

// maxBody bounds the body of a request in bytes.
const maxBody = 1 << 20

// decode reads a JSON body into v. An empty body leaves v as it is. Unknown fields
// are ignored: clients send fields of their own.
func decode(w http.ResponseWriter, r *http.Request, v any) error {
	body, err := readBody(w, r)
	if err != nil {
		return err
	}
	return parse(body, v)
}

func readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err == nil {
		// The deadline was for the body. Left in force it would end the request while a
		// sandbox is being made.
		_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
	}
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return nil, &httpError{http.StatusRequestEntityTooLarge, "", "Request body is larger than 1 MiB"}
	case err != nil:
		return nil, berm.Errorf(berm.Invalid, "Error when reading request: %w", err)
	}
	return body, nil
}

func parse(body []byte, v any) error {
	if len(body) == 0 {
		return nil
	}
	var wrongType *json.UnmarshalTypeError
	if err := json.Unmarshal(body, v); errors.As(err, &wrongType) {
		if wrongType.Field == "" {
			return invalid("the request cannot be a JSON %s", wrongType.Value)
		}
		return invalid("%s cannot be a JSON %s", wrongType.Field, wrongType.Value)
	} else if err != nil {
		return berm.Errorf(berm.Invalid, "Error when parsing request: %w", err)
	}
	return nil
}

// maxIdempotencyKey is the length that E2B allows an idempotency key.
const maxIdempotencyKey = 255

// idempotency makes the name of a create out of its header Idempotency-Key. The key
// belongs to the API key, and stands for one body on one route.
func idempotency(r *http.Request, body []byte) (control.Request, error) {
	key := r.Header.Get("Idempotency-Key")
	if key == "" {
		return control.Request{}, nil
	}
	outside := func(c rune) bool { return c <= ' ' || c > '~' }
	if len(key) > maxIdempotencyKey || strings.ContainsFunc(key, outside) {
		return control.Request{}, invalid("Idempotency-Key takes up to %d visible ASCII characters", maxIdempotencyKey)
	}
	return control.Request{Key: hash(actor(r).ID, key), Body: hash(r.URL.Path, string(body))}, nil
}

// hash is SHA-256 of two texts, of which the first has no NUL.
func hash(a, b string) string {
	sum := sha256.Sum256([]byte(a + "\x00" + b))
	return hex.EncodeToString(sum[:])
}

// invalid is a violation of the schema, in the form that E2B gives it.
func invalid(format string, args ...any) error {
	return berm.Errorf(berm.Invalid, "validation error: "+format, args...)
}

// sandboxID is the sandbox that a route names.
func sandboxID(r *http.Request) (berm.SandboxID, error) {
	return berm.ParseSandboxID(r.PathValue("sandboxID"))
}

// seconds makes a time to live. What does not fit is left too large, for the check
// against the server's maximum.
func seconds(n int64) (time.Duration, error) {
	const most = int64(1) << 32
	if n < 0 {
		return 0, invalid("timeout must be at least 0")
	}
	return time.Duration(min(n, most)) * time.Second, nil
}

// queryInt reads a whole number from the query.
func queryInt(r *http.Request, name string, fallback, lowest, most int64) (int64, error) {
	text := r.URL.Query().Get(name)
	if text == "" {
		return fallback, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < lowest || n > most {
		return 0, invalid("%s must be a number from %d to %d", name, lowest, most)
	}
	return n, nil
}

// queryList reads a list: joined by commas, repeated, or both.
func queryList(r *http.Request, name string) []string {
	var list []string
	for _, value := range r.URL.Query()[name] {
		for _, item := range strings.Split(value, ",") {
			if item != "" {
				list = append(list, item)
			}
		}
	}
	return list
}

// parseFilter reads the filters of a list.
func parseFilter(r *http.Request) (control.Filter, error) {
	query := r.URL.Query()
	own := berm.Team("").Trim(keyOf(r).Team.Trim(query.Get("template"))) // whose names stand alone
	f := control.Filter{Team: teamOf(r), Template: own, Metadata: parseMetadata(query.Get("metadata"))}
	for _, state := range queryList(r, "state") {
		if !slices.Contains([]string{"running", "paused"}, state) {
			return f, invalid("state must be running or paused")
		}
		f.States = append(f.States, berm.State(state))
	}
	if after := query.Get("startedAfter"); after != "" {
		t, err := time.Parse(time.RFC3339Nano, after)
		if err != nil {
			return f, invalid("startedAfter must be a time as of RFC 3339")
		}
		f.StartedAfter = t
	}
	switch order := query.Get("order"); order {
	case "", "desc":
	case "asc":
		f.Ascending = true
	default:
		return f, invalid("order must be asc or desc")
	}
	return f, nil
}

// parseMetadata reads the metadata filter. The official clients encode each name
// and value, then the pairs, then the query: the query's encoding is off already. A
// client that encodes less is understood too, which is why "+" stays itself.
func parseMetadata(value string) map[string]string {
	if value == "" {
		return nil
	}
	pairs := map[string]string{}
	for _, pair := range strings.Split(unescape(value), "&") {
		name, v, _ := strings.Cut(pair, "=")
		pairs[unescape(name)] = unescape(v)
	}
	return pairs
}

func unescape(s string) string {
	if u, err := url.PathUnescape(s); err == nil {
		return u
	}
	return s
}

const maxPage = 100

// page cuts one page out of sorted sandboxes and returns the cursor of the next, ""
// on the last page. The cursor is the place of a page's last sandbox, so that
// sandboxes that come or go in between move nothing.
func page(r *http.Request, all []control.Sandbox, ascending bool) ([]control.Sandbox, string, error) {
	limit, err := queryInt(r, "limit", maxPage, 1, maxPage)
	if err != nil {
		return nil, "", err
	}
	if token := r.URL.Query().Get("nextToken"); token != "" {
		at, id, err := parseCursor(token, ascending)
		if err != nil {
			return nil, "", err
		}
		beyond := func(s control.Sandbox) bool {
			c := s.StartedAt.Compare(at)
			if c == 0 {
				c = strings.Compare(string(s.ID), string(id))
			}
			if ascending {
				return c > 0
			}
			return c < 0
		}
		if i := slices.IndexFunc(all, beyond); i >= 0 {
			all = all[i:]
		} else {
			all = nil
		}
	}
	if int64(len(all)) <= limit {
		return all, "", nil
	}
	last := all[limit-1]
	return all[:limit], formatCursor(last.StartedAt, last.ID, ascending), nil
}

func direction(ascending bool) string {
	if ascending {
		return "asc"
	}
	return "desc"
}

func formatCursor(at time.Time, id berm.SandboxID, ascending bool) string {
	return base64.RawURLEncoding.EncodeToString([]byte(strconv.FormatInt(at.UnixNano(), 10) + "__" + string(id) + "__" + direction(ascending)))
}

func parseCursor(token string, ascending bool) (time.Time, berm.SandboxID, error) {
	wrong := invalid("nextToken is not one of this list")
	text, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil {
		return time.Time{}, "", wrong
	}
	parts := strings.Split(string(text), "__")
	if len(parts) != 3 || parts[2] != direction(ascending) {
		return time.Time{}, "", wrong
	}
	nanos, err := strconv.ParseInt(parts[0], 10, 64)
	if err != nil {
		return time.Time{}, "", wrong
	}
	id, err := berm.ParseSandboxID(parts[1])
	if err != nil {
		return time.Time{}, "", wrong
	}
	return time.Unix(0, nanos).UTC(), id, nil
}
