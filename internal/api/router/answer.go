package router

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html"
	"net/http"
	"strings"

	"github.com/berm-sandbox/berm"
)

// sign makes the signature of a file URL, as clients make it.
func sign(path, operation, user, token, expiration string) string {
	text := path + ":" + operation + ":" + user + ":" + token
	if expiration != "" {
		text += ":" + expiration
	}
	sum := sha256.Sum256([]byte(text))
	return "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
}

// problem is the body of an error of the router.
type problem struct {
	SandboxID berm.SandboxID `json:"sandboxId,omitempty"`
	Message   string         `json:"message"`
	Port      uint16         `json:"port,omitempty"`
	Code      int            `json:"code"`
}

// gone answers for a sandbox that is unknown, dead, or paused for good. Clients take
// 502, and nothing else, for the end of the sandbox.
func gone(w http.ResponseWriter, r *http.Request, id berm.SandboxID) {
	refuse(w, r, http.StatusBadGateway, problem{SandboxID: id, Message: "The sandbox was not found", Code: http.StatusBadGateway}, "Sandbox Not Found")
}

func closed(w http.ResponseWriter, r *http.Request, id berm.SandboxID, port uint16) {
	refuse(w, r, http.StatusBadGateway, problem{SandboxID: id, Message: "The sandbox is running but port is not open", Port: port, Code: http.StatusBadGateway}, "Port Is Closed")
}

func noTraffic(w http.ResponseWriter, r *http.Request, id berm.SandboxID, missing bool) {
	p := problem{SandboxID: id, Code: http.StatusForbidden, Message: "Sandbox is secured with traffic access token. Provided token in header 'e2b-traffic-access-token' is invalid"}
	title := "Invalid Traffic Access Token"
	if missing {
		p.Message = "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is missing"
		title = "Missing Traffic Access Token"
	}
	refuse(w, r, http.StatusForbidden, p, title)
}

// refuse answers with a page to a person's browser and with JSON to a program.
func refuse(w http.ResponseWriter, r *http.Request, status int, p problem, title string) {
	w.Header().Set("Access-Control-Allow-Origin", "*")
	w.Header().Set("Cache-Control", "no-store")
	if !navigation(r) {
		answerJSON(w, status, p)
		return
	}
	detail := p.Message
	if p.Port != 0 {
		detail = fmt.Sprintf("There is no service running on port %d of the sandbox.", p.Port)
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(status)
	_, _ = fmt.Fprintf(w, `<html lang="en"><head><meta charset="utf-8"><title>%[1]s</title>
<style>body{font:16px/1.5 system-ui,sans-serif;max-width:40em;margin:15vh auto;padding:0 1em}code{background:#8882;padding:.1em .3em}</style>
</head><body><h1>%[1]s</h1><p>%[2]s</p><p>Sandbox <code>%[3]s</code></p></body></html>`,
		html.EscapeString(title), html.EscapeString(detail), html.EscapeString(string(p.SandboxID)))
}

func answerJSON(w http.ResponseWriter, status int, p problem) {
	body, _ := json.Marshal(p) // strings and numbers always marshal
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = w.Write(body)
}

var browsers = []string{"Mozilla/", "Opera/"}

// navigation says whether a person's browser opens a page, as opposed to a script or
// a program that asks for data.
func navigation(r *http.Request) bool {
	h := r.Header
	accept := strings.ToLower(h.Get("Accept"))
	if json := strings.Index(accept, "application/json"); json >= 0 {
		if page := strings.Index(accept, "text/html"); page < 0 || json < page {
			return false
		}
	}
	if h.Get("X-Requested-With") != "" {
		return false
	}
	switch h.Get("Sec-Fetch-Mode") {
	case "cors", "no-cors", "same-origin", "websocket":
		return false
	}
	agent := h.Get("User-Agent")
	for _, b := range browsers {
		if strings.HasPrefix(agent, b) {
			return true
		}
	}
	return false
}
