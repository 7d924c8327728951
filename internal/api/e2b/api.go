// Package e2b serves the E2B control-plane REST API, both generations of it, and
// Berm's additions under /berm/v1.
package e2b

import (
	"cmp"
	"context"
	_ "embed"
	"log/slog"
	"net/http"
	"path"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/builder"
	"github.com/berm-sandbox/berm/internal/container"
	"github.com/berm-sandbox/berm/internal/control"
	"github.com/berm-sandbox/berm/internal/credential/vault"
	"github.com/berm-sandbox/berm/internal/store"
)

// Keys checks API keys.
type Keys interface {
	// Authenticate returns the valid key that secret is, and Denied when there is none.
	Authenticate(ctx context.Context, secret string) (store.Key, error)
	// Team returns a team. Kind NotFound.
	Team(ctx context.Context, name berm.Team) (store.Team, error)
}

// Secrets keeps secrets; see vault.Vault.
type Secrets interface {
	Create(ctx context.Context, team berm.Team, name string, value []byte, metadata map[string]string) (vault.Secret, error)
	Update(ctx context.Context, team berm.Team, idOrName string, value []byte, metadata map[string]string) (vault.Secret, error)
	Delete(ctx context.Context, team berm.Team, idOrName string) error
	Get(ctx context.Context, team berm.Team, idOrName string) (vault.Secret, error)
	List(ctx context.Context, team berm.Team, after string, limit int) ([]vault.Secret, error)
	Rotate(ctx context.Context) error
}

// Config is what an API is made of.
type Config struct {
	Sessions  *control.Manager
	Templates control.Templates
	Keys      Keys
	Secrets   Secrets
	// Containers are sandboxes of conversations.
	Containers *container.Manager
	// Builder makes templates; nil makes none.
	Builder *builder.Builder
	// UploadKey signs links to upload files for it.
	UploadKey []byte
	// Domain is what clients form host names of sandboxes under, with the port unless
	// it is 443; "" lets each client use its own.
	Domain string
	Audit  audit.Emitter
	Trail  Trail
	Eraser Eraser
	Log    *slog.Logger
}

// API is the control plane as an http.Handler.
type API struct {
	Config
	mux    *http.ServeMux
	stats  *stats
	calls  *calls
	routes []route
}

// route is one operation. Its path is also the one in openapi.yaml.
type route struct {
	method, path string
	handle       func(*API, http.ResponseWriter, *http.Request) error
	open         bool // needs no key
	// lacking says what of E2B this version does not have; it is the answer then.
	lacking string
}

//go:embed openapi.yaml
var openAPI []byte

// routes lists all that is served.
var routes = []route{
	{method: "GET", path: "/health", handle: (*API).health, open: true},
	{method: "GET", path: "/metrics", handle: ofServer((*API).prometheus)},
	{method: "GET", path: "/teams", handle: (*API).teams},

	{method: "POST", path: "/sandboxes", handle: (*API).createV1},
	{method: "POST", path: "/v2/sandboxes", handle: (*API).createV2},
	{method: "GET", path: "/sandboxes", handle: (*API).listV1},
	{method: "GET", path: "/v2/sandboxes", handle: (*API).listV2},
	{method: "GET", path: "/sandboxes/metrics", handle: (*API).latestMetrics},
	{method: "GET", path: "/sandboxes/{sandboxID}", handle: ofSandbox((*API).get)},
	{method: "DELETE", path: "/sandboxes/{sandboxID}", handle: ofSandbox((*API).kill)},
	{method: "POST", path: "/sandboxes/{sandboxID}/timeout", handle: ofSandbox((*API).setTimeout)},
	{method: "POST", path: "/sandboxes/{sandboxID}/refreshes", handle: ofSandbox((*API).refresh)},
	{method: "PUT", path: "/sandboxes/{sandboxID}/network", handle: ofSandbox((*API).setNetwork)},
	{method: "POST", path: "/sandboxes/{sandboxID}/pause", handle: ofSandbox((*API).pause)},
	{method: "POST", path: "/sandboxes/{sandboxID}/resume", handle: ofSandbox((*API).resume)},
	{method: "POST", path: "/sandboxes/{sandboxID}/connect", handle: ofSandbox((*API).connect)},
	{method: "POST", path: "/v2/sandboxes/{sandboxID}/connect", handle: ofSandbox((*API).connect)},
	{method: "GET", path: "/sandboxes/{sandboxID}/metrics", handle: ofSandbox((*API).metrics)},
	{method: "GET", path: "/sandboxes/{sandboxID}/logs", handle: ofSandbox((*API).logs)},
	{method: "GET", path: "/v2/sandboxes/{sandboxID}/logs", handle: ofSandbox((*API).logsV2)},

	{method: "GET", path: "/secrets", handle: (*API).secrets},
	{method: "POST", path: "/secrets", handle: (*API).createSecret},
	{method: "GET", path: "/secrets/{secretID}", handle: (*API).secret},
	{method: "POST", path: "/secrets/{secretID}", handle: (*API).updateSecret},
	{method: "DELETE", path: "/secrets/{secretID}", handle: (*API).deleteSecret},

	{method: "GET", path: "/templates", handle: (*API).templates},
	{method: "GET", path: "/default-templates", handle: (*API).templates},
	{method: "GET", path: "/v2/templates", handle: (*API).templatesV2},
	{method: "GET", path: "/templates/{templateID}", handle: (*API).template},
	{method: "GET", path: "/templates/aliases/{alias}", handle: (*API).alias},

	{method: "PUT", path: "/berm/v1/uploads/{templateID}/{hash}", handle: building((*API).upload), open: true},
	{method: "DELETE", path: "/berm/v1/templates/{templateID}/builds/{buildID}", handle: building((*API).cancelBuild)},
	{method: "GET", path: "/berm/v1/openapi.yaml", handle: (*API).openAPI, open: true},
	{method: "POST", path: "/berm/v1/secrets/rotate", handle: ofServer((*API).rotateSecrets)},
	{method: "GET", path: "/berm/v1/sandboxes/{sandboxID}", handle: ofSandbox((*API).inspect)},
	{method: "GET", path: "/berm/v1/sandboxes/{sandboxID}/policy", handle: ofSandbox((*API).policy)},
	{method: "GET", path: "/berm/v1/sandboxes/{sandboxID}/network", handle: ofSandbox((*API).networkPolicy)},
	{method: "PUT", path: "/berm/v1/sandboxes/{sandboxID}/network", handle: ofSandbox((*API).setNetworkPolicy)},
	{method: "GET", path: "/berm/v1/sandboxes/{sandboxID}/network/explain", handle: ofSandbox((*API).explainNetwork)},
	{method: "GET", path: "/berm/v1/sandboxes/{sandboxID}/network/check", handle: ofSandbox((*API).checkNetwork)},
	{method: "GET", path: "/berm/v1/sandboxes/{sandboxID}/credentials", handle: ofSandbox((*API).credentials)},
	{method: "PUT", path: "/berm/v1/sandboxes/{sandboxID}/credentials", handle: ofSandbox((*API).setCredentials)},
	{method: "GET", path: "/berm/v1/sandboxes/{sandboxID}/network/log", handle: ofSandbox((*API).networkLog)},
	{method: "GET", path: "/berm/v1/audit", handle: (*API).auditLog},
	{method: "GET", path: "/berm/v1/sandboxes/{sandboxID}/audit", handle: ofRecord((*API).auditOf)},
	{method: "POST", path: "/berm/v1/sandboxes/{sandboxID}/changes", handle: ofSandbox((*API).changes)},
	{method: "POST", path: "/berm/v1/sandboxes/{sandboxID}/erase", handle: ofRecord((*API).erase)},
	{method: "GET", path: "/berm/v1/sandboxes/{sandboxID}/audit/blobs/{sha256}", handle: ofRecord((*API).auditBlob)},

	{method: "POST", path: "/berm/v1/containers", handle: containing((*API).createContainer)},
	{method: "GET", path: "/berm/v1/containers", handle: containing((*API).containers)},
	{method: "GET", path: "/berm/v1/containers/{containerID}", handle: ofContainer((*API).container)},
	{method: "DELETE", path: "/berm/v1/containers/{containerID}", handle: ofContainer((*API).deleteContainer)},
	{method: "POST", path: "/berm/v1/containers/{containerID}/executions", handle: ofContainer((*API).execute)},
	{method: "GET", path: "/berm/v1/containers/{containerID}/contexts", handle: ofContainer((*API).contexts)},
	{method: "POST", path: "/berm/v1/containers/{containerID}/contexts", handle: ofContainer((*API).createContext)},
	{method: "POST", path: "/berm/v1/containers/{containerID}/contexts/{contextID}/restart", handle: ofContainer((*API).restartContext)},
	{method: "DELETE", path: "/berm/v1/containers/{containerID}/contexts/{contextID}", handle: ofContainer((*API).deleteContext)},
	{method: "POST", path: "/berm/v1/containers/{containerID}/files", handle: ofContainer((*API).putFile)},
	{method: "GET", path: "/berm/v1/containers/{containerID}/files", handle: ofContainer((*API).containerFiles)},
	{method: "GET", path: "/berm/v1/containers/{containerID}/files/{fileID}", handle: ofContainer((*API).containerFile)},
	{method: "DELETE", path: "/berm/v1/containers/{containerID}/files/{fileID}", handle: ofContainer((*API).deleteFile)},
	{method: "GET", path: "/berm/v1/containers/{containerID}/files/{fileID}/content", handle: ofContainer((*API).content)},

	{method: "POST", path: "/sandboxes/{sandboxID}/fork", handle: ofSandbox((*API).fork)},
	{method: "POST", path: "/sandboxes/{sandboxID}/snapshots", handle: ofSandbox((*API).takeSnapshot)},
	{method: "GET", path: "/snapshots", handle: (*API).snapshots},
	{method: "POST", path: "/berm/v1/sandboxes/{sandboxID}/rollback", handle: ofSandbox((*API).rollback)},
	{method: "GET", path: "/teams/{teamID}/metrics", lacking: "team metrics"},
	{method: "GET", path: "/teams/{teamID}/metrics/max", lacking: "team metrics"},
	{method: "POST", path: "/v3/templates", handle: building((*API).newBuild)},
	{method: "POST", path: "/v2/templates", lacking: "the template builder"},
	{method: "POST", path: "/templates", lacking: "the template builder"},
	{method: "POST", path: "/templates/{templateID}", lacking: "the template builder"},
	{method: "DELETE", path: "/templates/{templateID}", handle: (*API).deleteTemplate},
	{method: "PATCH", path: "/templates/{templateID}", handle: building((*API).publish)},
	{method: "PATCH", path: "/v2/templates/{templateID}", handle: building((*API).publish)},
	{method: "GET", path: "/templates/{templateID}/files/{hash}", handle: building((*API).files)},
	{method: "POST", path: "/templates/{templateID}/builds/{buildID}", lacking: "the template builder"},
	{method: "POST", path: "/v2/templates/{templateID}/builds/{buildID}", handle: building((*API).startBuild)},
	{method: "GET", path: "/templates/{templateID}/builds/{buildID}/status", handle: building((*API).buildStatus)},
	{method: "GET", path: "/templates/{templateID}/builds/{buildID}/logs", handle: building((*API).buildLogs)},
	{method: "POST", path: "/templates/tags", handle: building((*API).addTags)},
	{method: "DELETE", path: "/templates/tags", handle: building((*API).removeTags)},
	{method: "GET", path: "/templates/{templateID}/tags", handle: building((*API).tags)},
	{method: "GET", path: "/templates/{templateID}/tags/count", lacking: "template tags"},
	{method: "GET", path: "/templates/{templateID}/tags/exists", lacking: "template tags"},
	{method: "GET", path: "/templates/{templateID}/tags/groups", lacking: "template tags"},
	{method: "GET", path: "/templates/{templateID}/tags/{tag}/assignments", lacking: "template tags"},
	{method: "GET", path: "/volumes", lacking: "volumes"},
	{method: "POST", path: "/volumes", lacking: "volumes"},
	{method: "GET", path: "/volumes/{volumeID}", lacking: "volumes"},
	{method: "DELETE", path: "/volumes/{volumeID}", lacking: "volumes"},
	{method: "GET", path: "/api-keys", lacking: "managing keys by API"},
	{method: "POST", path: "/api-keys", lacking: "managing keys by API"},
	{method: "PATCH", path: "/api-keys/{keyID}", lacking: "managing keys by API"},
	{method: "DELETE", path: "/api-keys/{keyID}", lacking: "managing keys by API"},
}

// ofSandbox makes the handler of a route that names a sandbox.
func ofSandbox(handle func(*API, http.ResponseWriter, *http.Request, berm.SandboxID) error) func(*API, http.ResponseWriter, *http.Request) error {
	return func(a *API, w http.ResponseWriter, r *http.Request) error {
		id, err := sandboxID(r)
		if err == nil {
			err = a.reach(r, id)
		}
		if err != nil {
			return err
		}
		return handle(a, w, r, id)
	}
}

// reach refuses a sandbox of another team as one that is not there.
func (a *API) reach(r *http.Request, id berm.SandboxID) error {
	team, err := a.Sessions.TeamOf(r.Context(), id)
	return own(r, id, team, err)
}

// own refuses a sandbox that is of another team, or of nobody, for which err is of kind NotFound. Both are
// told in the same words, or who knows an id would learn that it is another's.
func own(r *http.Request, id berm.SandboxID, team berm.Team, err error) error {
	if err != nil && berm.KindOf(err) == berm.NotFound || err == nil && team != keyOf(r).Team {
		return control.NotFound(id)
	}
	return err
}

// ofRecord makes the handler of a route about what the audit log has of a sandbox, also long after its
// end.
func ofRecord(handle func(*API, http.ResponseWriter, *http.Request, berm.SandboxID) error) func(*API, http.ResponseWriter, *http.Request) error {
	return func(a *API, w http.ResponseWriter, r *http.Request) error {
		id, err := sandboxID(r)
		if err != nil {
			return err
		}
		team, err := a.Sessions.TeamOf(r.Context(), id)
		if err != nil && berm.KindOf(err) == berm.NotFound {
			team, err = a.Trail.Team(r.Context(), id)
		}
		if err := own(r, id, team, err); err != nil {
			return err
		}
		return handle(a, w, r, id)
	}
}

// ofServer makes the handler of a route that is about all of the server, which is for keys of its own
// team.
func ofServer(handle func(*API, http.ResponseWriter, *http.Request) error) func(*API, http.ResponseWriter, *http.Request) error {
	return func(a *API, w http.ResponseWriter, r *http.Request) error {
		if team := keyOf(r).Team; team != "" {
			return berm.Errorf(berm.Denied, "this is about all teams, and API keys of team %s do not reach it", team).
				WithHint("use a key of the team %s", berm.Team(""))
		}
		return handle(a, w, r)
	}
}

// New makes the API.
func New(c Config) *API {
	a := &API{Config: c, mux: http.NewServeMux(), stats: newStats(c.Sessions), calls: newCalls(c.Audit), routes: routes}
	// ServeMux does not take two patterns of which neither is more special, as these
	// two are to /templates/aliases/tags.
	var alias, tags http.Handler
	for _, r := range a.routes {
		handler := a.handler(r)
		switch r.method + r.path {
		case "GET/templates/aliases/{alias}":
			alias = handler
		case "GET/templates/{templateID}/tags":
			tags = handler
		default:
			a.mux.Handle(r.method+" "+r.path, handler)
		}
	}
	a.mux.HandleFunc("GET /templates/{templateID}/{last}", func(w http.ResponseWriter, r *http.Request) {
		switch last := r.PathValue("last"); {
		case r.PathValue("templateID") == "aliases":
			r.SetPathValue("alias", last)
			alias.ServeHTTP(w, r)
		case last == "tags":
			tags.ServeHTTP(w, r)
		default:
			fail(w, http.StatusNotFound, "no such route")
		}
	})
	return a
}

// bodyTime bounds how long a client may take to send a request's body.
const bodyTime = 30 * time.Second

// ServeHTTP serves the control plane.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Access-Control-Allow-Origin", "*")
	h.Set("Access-Control-Expose-Headers", "X-Next-Token, X-Total-Running, X-E2B-Trace-ID, Retry-After, ETag")
	h.Set("X-Content-Type-Options", "nosniff")
	if r.Method == http.MethodOptions {
		h.Set("Access-Control-Allow-Methods", "GET, POST, PUT, PATCH, DELETE, OPTIONS")
		h.Set("Access-Control-Allow-Headers", "*, Authorization")
		h.Set("Access-Control-Max-Age", "86400")
		w.WriteHeader(http.StatusNoContent)
		return
	}
	// A server under httptest.ResponseRecorder has no connection to bound.
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTime))
	if p := r.URL.EscapedPath(); path.Clean(p) != p {
		fail(w, http.StatusNotFound, "no such route") // ServeMux would redirect
		return
	}
	handler, pattern := a.mux.Handler(r)
	if pattern == "" {
		refusal := &statusOnly{header: http.Header{}}
		handler.ServeHTTP(refusal, r)
		if allow := refusal.header.Get("Allow"); allow != "" {
			h.Set("Allow", allow)
			fail(w, http.StatusMethodNotAllowed, "method not allowed")
			return
		}
		fail(w, http.StatusNotFound, "no such route")
		return
	}
	a.mux.ServeHTTP(w, r)
}

// statusOnly learns what ServeMux would answer to a request that it has no handler
// for.
type statusOnly struct{ header http.Header }

func (s *statusOnly) Header() http.Header         { return s.header }
func (s *statusOnly) Write(p []byte) (int, error) { return len(p), nil }
func (s *statusOnly) WriteHeader(int)             {}

type keyKey struct{}

// keyOf is the key that a request was made with; none, if it needed none or had no valid one.
func keyOf(r *http.Request) store.Key {
	key, _ := r.Context().Value(keyKey{}).(store.Key)
	return key
}

// teamOf is the team of that key, for filters.
func teamOf(r *http.Request) *berm.Team {
	team := keyOf(r).Team
	return &team
}

// actor is who made the request.
func actor(r *http.Request) audit.Actor {
	if key := keyOf(r); key.ID != "" {
		return audit.Actor{Type: "key", ID: key.ID}
	}
	return audit.Actor{}
}

// handler wraps a route in what all have: key check, errors as JSON, log and
// statistics.
func (a *API) handler(rt route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		begin := time.Now()
		trace := newTraceID()
		w.Header().Set("X-E2B-Trace-ID", trace)
		out := &recorder{ResponseWriter: w, status: http.StatusOK}
		var key store.Key
		err := error(nil)
		if !rt.open {
			if key, err = a.Keys.Authenticate(r.Context(), credential(r)); err != nil {
				if berm.KindOf(err) == berm.Denied {
					err = unauthorized
				}
			} else {
				r = r.WithContext(context.WithValue(r.Context(), keyKey{}, key))
			}
		}
		switch {
		case err != nil:
		case rt.lacking != "":
			err = a.lack(r, rt.lacking)
		default:
			err = rt.handle(a, out, r)
		}
		if err != nil {
			a.fail(out, r, err, trace)
		}
		took := time.Since(begin)
		a.stats.observe(rt, out.status, took)
		if err := a.calls.record(rt, r, a.concerns, out.status, trace); err != nil {
			a.Log.Error("audit record lost", "type", audit.APICall, "trace", trace, "error", err)
		}
		level := slog.LevelInfo
		if r.Method == http.MethodGet && out.status < 400 {
			level = slog.LevelDebug // clients poll
		}
		a.Log.Log(r.Context(), level, "request", "method", rt.method, "route", rt.path, "status", out.status,
			"ms", float64(took.Microseconds())/1000, "sandbox", sandboxOf(r), "key", key.ID, "trace", trace)
	})
}

// sandboxOf is the sandbox that a route names, also as a container; "" where it names none.
func sandboxOf(r *http.Request) string {
	return cmp.Or(r.PathValue("sandboxID"), r.PathValue("containerID"))
}

// lack refuses what this version does not have. That a sandbox does not exist is said
// first: clients tell the two apart.
func (a *API) lack(r *http.Request, what string) error {
	if r.PathValue("sandboxID") != "" {
		id, err := sandboxID(r)
		if err == nil {
			err = a.reach(r, id)
		}
		if err == nil {
			_, err = a.Sessions.Get(r.Context(), id)
		}
		if err != nil {
			return err
		}
	}
	return berm.Errorf(berm.Unsupported, "This version of Berm does not have %s", what)
}

// credential is the API key of a request. Clients of the API send it as X-API-Key,
// tools that know only OAuth as a bearer token.
func credential(r *http.Request) string {
	if key := r.Header.Get("X-API-Key"); key != "" {
		return key
	}
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if strings.EqualFold(scheme, "Bearer") {
		return token
	}
	return ""
}

// recorder remembers the status of an answer.
type recorder struct {
	http.ResponseWriter
	status int
}

func (r *recorder) WriteHeader(status int) {
	r.status = status
	r.ResponseWriter.WriteHeader(status)
}

func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }
