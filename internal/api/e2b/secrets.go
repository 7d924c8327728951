package e2b

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net/http"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/audit"
	"github.com/berm-sandbox/berm/internal/control"
	"github.com/berm-sandbox/berm/internal/credential/vault"
)

// maxSecretBody bounds a request that holds a secret.
const maxSecretBody = 512 << 10

type newSecret struct {
	Name     *string           `json:"name"`
	Value    *secretValue      `json:"value"`
	Metadata map[string]string `json:"metadata"`
}

// secretValue is a string of JSON that can be wiped.
type secretValue []byte

func (v *secretValue) UnmarshalJSON(text []byte) error {
	var s string // the one copy that nobody can wipe
	if err := json.Unmarshal(text, &s); err != nil {
		return err
	}
	*v = secretValue(s)
	return nil
}

// readSecret reads a request with a secret, which the caller wipes.
func readSecret(w http.ResponseWriter, r *http.Request, in *newSecret) error {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxSecretBody))
	defer clear(body)
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return &httpError{http.StatusRequestEntityTooLarge, "", "Request body is larger than 512 KiB"}
	case err != nil:
		return berm.Errorf(berm.Invalid, "Error when reading request: %w", err)
	}
	if err := parse(body, in); err != nil {
		return err
	}
	if in.Value == nil {
		return invalid("value is required")
	}
	return nil
}

func (a *API) secrets(w http.ResponseWriter, r *http.Request) error {
	limit, err := queryInt(r, "limit", maxPage, 1, maxPage)
	if err != nil {
		return err
	}
	after := ""
	if token := r.URL.Query().Get("nextToken"); token != "" {
		name, err := base64.RawURLEncoding.DecodeString(token)
		if err != nil {
			return invalid("nextToken is not one of this list")
		}
		after = string(name)
	}
	some, err := a.Secrets.List(r.Context(), keyOf(r).Team, after, int(limit)+1)
	if err != nil {
		return err
	}
	if len(some) > int(limit) {
		some = some[:limit]
		w.Header().Set("X-Next-Token", base64.RawURLEncoding.EncodeToString([]byte(some[limit-1].Name)))
	}
	return answerSecret(w, http.StatusOK, some)
}

// answerSecret answers what is to be kept nowhere on the way.
func answerSecret(w http.ResponseWriter, code int, v any) error {
	w.Header().Set("Cache-Control", "no-store")
	return answer(w, code, v)
}

func (a *API) createSecret(w http.ResponseWriter, r *http.Request) error {
	var in newSecret
	if err := readSecret(w, r, &in); err != nil {
		return err
	}
	defer clear(*in.Value)
	if in.Name == nil {
		return invalid("name is required")
	}
	s, err := a.Secrets.Create(r.Context(), keyOf(r).Team, *in.Name, *in.Value, in.Metadata)
	if err != nil {
		return err
	}
	return a.changed(w, r, http.StatusCreated, audit.SecretSet, s)
}

func (a *API) updateSecret(w http.ResponseWriter, r *http.Request) error {
	var in newSecret
	if err := readSecret(w, r, &in); err != nil {
		return err
	}
	defer clear(*in.Value)
	s, err := a.Secrets.Update(r.Context(), keyOf(r).Team, r.PathValue("secretID"), *in.Value, in.Metadata)
	if err != nil {
		return err
	}
	return a.changed(w, r, http.StatusOK, audit.SecretSet, s)
}

func (a *API) secret(w http.ResponseWriter, r *http.Request) error {
	s, err := a.Secrets.Get(r.Context(), keyOf(r).Team, r.PathValue("secretID"))
	if err != nil {
		return err
	}
	return answerSecret(w, http.StatusOK, s)
}

func (a *API) deleteSecret(w http.ResponseWriter, r *http.Request) error {
	s, err := a.Secrets.Get(r.Context(), keyOf(r).Team, r.PathValue("secretID"))
	if err == nil {
		err = a.Secrets.Delete(r.Context(), keyOf(r).Team, s.ID)
	}
	if err != nil {
		return err
	}
	return a.changed(w, r, http.StatusNoContent, audit.SecretRemove, s)
}

// rotateSecrets encrypts the secrets of all teams with a new key and forgets the old one.
func (a *API) rotateSecrets(w http.ResponseWriter, r *http.Request) error {
	if err := a.Audit.Emit(audit.Record{Actor: actor(r), Type: audit.SecretRotate, Src: "api", Trust: audit.TrustHost, Outcome: audit.OK}); err != nil {
		return err
	}
	if err := a.Secrets.Rotate(r.Context()); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// changed records that a secret was changed, has sandboxes get it, and answers.
func (a *API) changed(w http.ResponseWriter, r *http.Request, code int, what audit.Type, s vault.Secret) error {
	a.Sessions.SecretChanged(r.Context(), keyOf(r).Team, s.Name)
	err := a.Audit.Emit(audit.Record{
		Team: keyOf(r).Team, Actor: actor(r), Type: what, Src: "api", Trust: audit.TrustHost, Outcome: audit.OK,
		Data: map[string]any{"secret": s.ID, "name": s.Name, "version": s.Version},
	})
	if err != nil {
		return err
	}
	if code == http.StatusNoContent {
		w.WriteHeader(code)
		return nil
	}
	return answerSecret(w, code, s)
}

// credentials returns those of a sandbox, without secrets.
func (a *API) credentials(w http.ResponseWriter, _ *http.Request, id berm.SandboxID) error {
	all, fields, err := a.Sessions.Credentials(id)
	if err != nil {
		return err
	}
	told := map[string]any{"credentials": all}
	if len(fields) > 0 {
		told["fields"] = fields
	}
	return answer(w, http.StatusOK, told)
}

// setCredentials replaces those of a sandbox.
func (a *API) setCredentials(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	body, err := readBody(w, r)
	if err != nil {
		return err
	}
	var in struct {
		Credentials *[]control.Credential `json:"credentials"`
	}
	if err := parseStrict(body, &in); err != nil {
		return err
	}
	if in.Credentials == nil {
		return invalid("credentials is required")
	}
	if err := a.Sessions.SetCredentials(r.Context(), id, *in.Credentials, actor(r)); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// parseStrict is parse of what is ours: unknown fields are wrong.
func parseStrict(body []byte, v any) error {
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(v); err != nil {
		return berm.Errorf(berm.Invalid, "Error when parsing request: %w", err)
	}
	return nil
}
