// Package web writes a timeline as one page for a browser. It loads nothing, and runs no
// script but its own: what a sandbox chose is data in it.
package web

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html"
	"io"

	"github.com/berm-sandbox/berm/internal/audit/replay"
	"github.com/berm-sandbox/berm/internal/terminal"
)

//go:embed page.js
var script string

//go:embed page.css
var style string

// maxAccount bounds the account in words, in bytes.
const maxAccount = 1 << 20

// Write writes the page of what of a timeline is told.
func Write(w io.Writer, t *replay.Timeline, p replay.Part) error {
	var account bytes.Buffer
	if err := replay.Account(&account, t, p, terminal.Style(false)); err != nil {
		return err
	}
	words := account.Bytes()
	if len(words) > maxAccount {
		words = append(words[:maxAccount], "…\n(`berm replay` prints all of it)"...)
	}
	// json escapes what could end the element that it stands in.
	data, err := json.Marshal(collect(t, p))
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, `<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src '%s'; style-src '%s'; base-uri 'none'; form-action 'none'">
<meta name="referrer" content="no-referrer">
<meta name="viewport" content="width=device-width">
<title>Sandbox %s</title>
<style>%s</style>
<body>
<div id="app"></div>
<details id="words"><summary>In words</summary><pre>%s</pre></details>
<script type="application/json" id="data">%s</script>
<script>%s</script>
</body>
</html>
`, hash(script), hash(style), html.EscapeString(string(t.Sandbox)), style, html.EscapeString(string(bytes.ToValidUTF8(words, nil))), data, script)
	return err
}

// hash is the source of a policy that allows one script or style.
func hash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return "sha256-" + base64.StdEncoding.EncodeToString(sum[:])
}
