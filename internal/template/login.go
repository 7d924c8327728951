package template

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"io"
	"net/http"
	"regexp"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"

	"github.com/berm-sandbox/berm"
)

// Login tells what a registry is shown. Who asks it hands over the way to other services.
type Login func(ctx context.Context, way http.RoundTripper) (user, password string, err error)

// Basic is a user name and a password.
func Basic(user, password string) Login {
	return func(context.Context, http.RoundTripper) (string, string, error) { return user, password, nil }
}

// Anonymous shows a registry nothing.
var Anonymous = Basic("", "")

// Google is the key of a service account, in JSON, which Google's registries take as a password
// (cloud.google.com/artifact-registry/docs/docker/authentication, "JSON key"). It fails with
// Invalid.
func Google(key string) (Login, error) {
	var account struct {
		Type string `json:"type"`
	}
	if err := json.Unmarshal([]byte(key), &account); err != nil || account.Type != "service_account" {
		return nil, berm.Errorf(berm.Invalid, "the key of a service account of Google's is JSON with type service_account")
	}
	return Basic("_json_key", key), nil
}

// region is the form of names of Amazon's regions: they become part of a host's name.
var region = regexp.MustCompile(`^[a-z]{2,}(-[a-z]+)+-[0-9]{1,2}$`)

// maxToken bounds the answer that holds a password, in bytes.
const maxToken = 64 << 10

// Amazon is an access key, with which Amazon's registry service gives a password for twelve
// hours (GetAuthorizationToken of the API AmazonEC2ContainerRegistry_V20150921). It fails with
// Invalid; the Login with Denied and Unavailable.
func Amazon(id, secret, in string) (Login, error) {
	if !region.MatchString(in) {
		return nil, berm.Errorf(berm.Invalid, "%.100q is no region of AWS", in)
	}
	if id == "" || secret == "" {
		return nil, berm.Errorf(berm.Invalid, "an access key of AWS has an id and a secret")
	}
	host := "api.ecr." + in + ".amazonaws.com"
	if strings.HasPrefix(in, "cn-") {
		host += ".cn"
	}
	return func(ctx context.Context, way http.RoundTripper) (string, string, error) {
		body := []byte("{}")
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+host+"/", bytes.NewReader(body))
		if err != nil {
			return "", "", err
		}
		r.Header.Set("Content-Type", "application/x-amz-json-1.1")
		r.Header.Set("X-Amz-Target", "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken")
		sum := sha256.Sum256(body)
		key := aws.Credentials{AccessKeyID: id, SecretAccessKey: secret}
		if err := v4.NewSigner().SignHTTP(ctx, key, r, hex.EncodeToString(sum[:]), "ecr", in, time.Now()); err != nil {
			return "", "", err
		}
		client := http.Client{Transport: way, Timeout: 30 * time.Second, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
		answer, err := client.Do(r)
		if err != nil {
			return "", "", berm.Errorf(berm.Unavailable, "ask AWS for a registry's password: %w", err)
		}
		defer answer.Body.Close()
		return readToken(answer.StatusCode, io.LimitReader(answer.Body, maxToken))
	}, nil
}

// readToken reads what GetAuthorizationToken answers.
func readToken(status int, body io.Reader) (user, password string, err error) {
	var said struct {
		AuthorizationData []struct{ AuthorizationToken string }
		Type              string `json:"__type"`
		Message           string
	}
	err = json.NewDecoder(body).Decode(&said)
	switch {
	case status >= 500:
		return "", "", berm.Errorf(berm.Unavailable, "AWS gives no password for a registry: status %d", status)
	case status != http.StatusOK:
		return "", "", berm.Errorf(berm.Denied, "AWS gives no password for a registry: status %d, %.100q %.300q", status, said.Type, said.Message).
			WithHint("The access key needs ecr:GetAuthorizationToken, and rights to pull the image.")
	case err != nil || len(said.AuthorizationData) == 0:
		return "", "", berm.Errorf(berm.Unavailable, "AWS answered without a password for a registry")
	}
	token, err := base64.StdEncoding.DecodeString(said.AuthorizationData[0].AuthorizationToken)
	user, password, ok := strings.Cut(string(token), ":")
	if err != nil || !ok {
		return "", "", berm.Errorf(berm.Unavailable, "AWS answered with a password in an unknown form")
	}
	return user, password, nil
}
