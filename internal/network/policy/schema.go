package policy

import (
	_ "embed" // schema.json
	"slices"
)

//go:embed schema.json
var schema []byte

// Schema is the JSON schema of a policy's document, for editors. DecodeYAML and
// DecodeJSON are stricter than what a schema can say.
func Schema() []byte { return slices.Clone(schema) }
