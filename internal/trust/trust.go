// Package trust makes the programs of a root file system trust an authority.
package trust

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"slices"
	"strconv"

	"software.sslmate.com/src/go-pkcs12"

	"github.com/berm-sandbox/berm/internal/trust/root"
)

// File is a file to be written into a sandbox's root, world-readable and owned by root.
type File = root.File

// Anchor is where the authority stands alone. Debian's update-ca-certificates looks there,
// so that the bundle keeps it when the sandbox makes a new one.
const Anchor = "/usr/local/share/ca-certificates/sandbox.crt"

// firstBundle is made where a root has none.
const firstBundle = "/etc/ssl/certs/ca-certificates.crt"

// Of the variables some name the only authorities, and some one more.
var (
	bundleVariables = []string{
		"SSL_CERT_FILE", // OpenSSL, and with it Ruby, Python, .NET; Go; rustls-native-certs
		"CURL_CA_BUNDLE", "GIT_SSL_CAINFO",
		"REQUESTS_CA_BUNDLE", "PIP_CERT", "HTTPLIB2_CA_CERTS", "CONDA_SSL_VERIFY", // Python
		"AWS_CA_BUNDLE", "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE",
		"npm_config_cafile", "YARN_HTTPS_CA_FILE_PATH",
		"CARGO_HTTP_CAINFO", "PERL_LWP_SSL_CA_FILE", "BUNDLE_SSL_CA_CERT", "HEX_CACERTS_PATH",
		"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", "NIX_SSL_CERT_FILE",
	}
	anchorVariables = []string{"NODE_EXTRA_CA_CERTS", "DENO_CERT"}
	otherVariables  = map[string]string{
		"DENO_TLS_CA_STORE": "system,mozilla",
		"UV_NATIVE_TLS":     "true",
	}
)

// Files returns the files and the variables by which the programs of a root come to trust
// an authority, given in PEM. Everything that the root trusts already it goes on to trust;
// where it has no list, roots in PEM are taken. The files are whole: whoever writes them
// replaces what is there.
func Files(r root.Root, ca, roots []byte) ([]File, map[string]string, error) {
	files := []File{{Path: Anchor, Data: ca}}
	add := func(name string, data []byte) {
		if !slices.ContainsFunc(files, func(f File) bool { return f.Path == name }) {
			files = append(files, File{Path: name, Data: data})
		}
	}
	bundle := firstBundle
	if len(r.Bundles) > 0 {
		bundle, roots = r.Bundles[0].Path, r.Bundles[0].Data
	}
	for _, b := range r.Bundles {
		add(b.Path, joinPEM(b.Data, ca))
	}
	add(bundle, joinPEM(roots, ca))
	for _, name := range r.Anchors {
		add(name, ca)
	}
	if len(r.Stores) > 0 {
		store, err := javaStore(joinPEM(roots, ca))
		if err != nil {
			return nil, nil, err
		}
		for _, name := range r.Stores {
			add(name, store)
		}
	}
	env := map[string]string{}
	for _, name := range bundleVariables {
		env[name] = bundle
	}
	for _, name := range anchorVariables {
		env[name] = Anchor
	}
	for name, value := range otherVariables {
		env[name] = value
	}
	return files, env, nil
}

// joinPEM adds the authority, unless it is there.
func joinPEM(list, ca []byte) []byte {
	if bytes.Contains(list, bytes.TrimSpace(ca)) {
		return list
	}
	list = bytes.TrimRight(list, "\n")
	if len(list) > 0 {
		list = append(slices.Clone(list), '\n')
	}
	return append(list, ca...)
}

// javaStore makes a store of a list in PEM. It has no password, because Java reads its own
// without one.
func javaStore(list []byte) ([]byte, error) {
	var entries []pkcs12.TrustStoreEntry
	for block, rest := pem.Decode(list); block != nil; block, rest = pem.Decode(rest) {
		// What Go cannot read (negative serial numbers) Java does without.
		if cert, err := x509.ParseCertificate(block.Bytes); err == nil {
			entries = append(entries, pkcs12.TrustStoreEntry{Cert: cert, FriendlyName: "ca-" + strconv.Itoa(len(entries))})
		}
	}
	return pkcs12.Passwordless.EncodeTrustStoreEntries(entries, "")
}
