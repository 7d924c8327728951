// Package rest holds the forms that the guest agent's HTTP routes share.
package rest

import (
	"encoding/json"
	"net/http"
)

// Error answers with the protocol's error body.
func Error(w http.ResponseWriter, code int, message string) {
	h := w.Header()
	h.Del("Content-Encoding")
	h.Set("Content-Type", "application/json; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}{code, message})
}

// JSON answers 200 with v.
func JSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}
