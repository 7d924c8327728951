package inspect

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"software.sslmate.com/src/go-pkcs12"

	"github.com/berm-sandbox/berm"
)

// File is a file to be written into a sandbox's root, world-readable and owned by root.
type File struct {
	Path string // absolute, of directories that are no links
	Data []byte
}

// anchor is where the authority stands alone. Debian's update-ca-certificates looks there,
// so that the bundle keeps it when the sandbox makes a new one.
const anchor = "usr/local/share/ca-certificates/sandbox.crt"

// bundles are where systems keep all authorities in one file. Most are links to another.
var bundles = []string{
	"etc/ssl/certs/ca-certificates.crt",                // Debian, Alpine, Arch, Gentoo
	"etc/pki/tls/certs/ca-bundle.crt",                  // Fedora
	"etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", // Fedora
	"etc/ca-certificates/extracted/tls-ca-bundle.pem",  // Arch
	"var/lib/ca-certificates/ca-bundle.pem",            // SUSE
	"etc/ssl/ca-bundle.pem",                            // SUSE
	"etc/ssl/cert.pem",                                 // Alpine, LibreSSL
	"etc/pki/tls/cert.pem",                             // Fedora
	"opt/homebrew/etc/ca-certificates/cert.pem",        // Homebrew
	"home/linuxbrew/.linuxbrew/etc/ca-certificates/cert.pem",
}

// anchors are, by the tool that reads them, where a system's next bundle comes from.
var anchors = []struct{ tool, path string }{
	{"usr/bin/update-ca-trust", "etc/pki/ca-trust/source/anchors/sandbox.crt"},
	{"usr/bin/trust", "etc/ca-certificates/trust-source/anchors/sandbox.crt"},
	{"usr/sbin/update-ca-certificates", "etc/pki/trust/anchors/sandbox.crt"},
}

// keystores are patterns of Java's own stores, which all of Java reads without being told.
var keystores = []string{
	"usr/lib/jvm/*/lib/security/cacerts",
	"usr/lib/jvm/*/jre/lib/security/cacerts",
	"usr/lib64/jvm/*/lib/security/cacerts",
	"usr/java/*/lib/security/cacerts",
	"usr/local/openjdk-*/lib/security/cacerts",
	"opt/*/lib/security/cacerts",
	"opt/java/*/lib/security/cacerts",
	"root/.sdkman/candidates/java/*/lib/security/cacerts",
	"home/*/.sdkman/candidates/java/*/lib/security/cacerts",
	"etc/ssl/certs/java/cacerts",
}

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

// bundleLimit bounds what is read of a template, whose maker need not be trusted. Mozilla's
// list has 220 KiB.
const bundleLimit = 8 << 20

// Trust returns the files and the variables by which the programs of a root come to trust
// an authority, given in PEM. Everything that the root trusts already it goes on to trust;
// where it has no list, roots in PEM are taken. The files are whole: whoever writes them
// replaces what is there. It fails with Invalid when the root has a list that cannot be read.
func Trust(root fs.FS, ca, roots []byte) ([]File, map[string]string, error) {
	files := []File{{"/" + anchor, ca}}
	var first string
	add := func(name string, data []byte) string {
		name = "/" + name
		if !slices.ContainsFunc(files, func(f File) bool { return f.Path == name }) {
			files = append(files, File{name, data})
		}
		return name
	}
	for _, name := range bundles {
		real, data, err := readRegular(root, name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, nil, berm.Errorf(berm.Invalid, "the template's list of certificate authorities /%s: %w", name, err)
		}
		written := add(real, joinPEM(data, ca))
		if first == "" {
			first, roots = written, data
		}
	}
	if first == "" {
		first = add(bundles[0], joinPEM(roots, ca))
	}
	for _, a := range anchors {
		dir, _, err := resolve(root, path.Dir(a.path))
		if _, has := fs.Stat(root, a.tool); has == nil && err == nil {
			add(path.Join(dir, path.Base(a.path)), ca)
		}
	}
	stores, err := javaStores(root)
	if err != nil {
		return nil, nil, err
	}
	if len(stores) > 0 {
		store, err := javaStore(joinPEM(roots, ca))
		if err != nil {
			return nil, nil, err
		}
		for _, name := range stores {
			add(name, store)
		}
	}
	env := map[string]string{}
	for _, name := range bundleVariables {
		env[name] = first
	}
	for _, name := range anchorVariables {
		env[name] = "/" + anchor
	}
	for name, value := range otherVariables {
		env[name] = value
	}
	return files, env, nil
}

func joinPEM(list, ca []byte) []byte {
	list = bytes.TrimRight(list, "\n")
	if len(list) > 0 {
		list = append(slices.Clone(list), '\n')
	}
	return append(list, ca...)
}

// readRegular reads a regular file and tells where it really is.
func readRegular(root fs.FS, name string) (real string, data []byte, err error) {
	real, info, err := resolve(root, name)
	if err != nil {
		return "", nil, err
	}
	if !info.Mode().IsRegular() {
		return "", nil, errors.New("it is not a regular file")
	}
	f, err := root.Open(real)
	if err != nil {
		return "", nil, err
	}
	defer f.Close() //nolint:errcheck // it was only read
	data, err = io.ReadAll(io.LimitReader(f, bundleLimit+1))
	if err == nil && len(data) > bundleLimit {
		err = errors.New("it is longer than 8 MiB")
	}
	return real, data, err
}

// resolve follows the links in a path as they are meant inside the root: an absolute one
// begins there.
func resolve(root fs.FS, name string) (string, fs.FileInfo, error) {
	rest := strings.Split(name, "/")
	at := "."
	var info fs.FileInfo
	for links := 0; len(rest) > 0; {
		next := path.Join(at, rest[0])
		rest = rest[1:]
		if !fs.ValidPath(next) {
			next = "." // above the root is the root
		}
		var err error
		if info, err = fs.Lstat(root, next); err != nil {
			return "", nil, err
		}
		if info.Mode().Type() != fs.ModeSymlink {
			at = next
			continue
		}
		if links++; links > 40 { // as the kernel has it
			return "", nil, errors.New("it has too many links")
		}
		target, err := fs.ReadLink(root, next)
		if err != nil {
			return "", nil, err
		}
		if strings.HasPrefix(target, "/") {
			at = "."
		}
		parts := strings.FieldsFunc(target, func(r rune) bool { return r == '/' })
		rest = append(parts, rest...)
	}
	return at, info, nil
}

// javaStores returns where Java's stores really are.
func javaStores(root fs.FS) ([]string, error) {
	var found []string
	for _, pattern := range keystores {
		names, err := fs.Glob(root, pattern)
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			real, info, err := resolve(root, name)
			if err == nil && info.Mode().IsRegular() && !slices.Contains(found, real) {
				found = append(found, real)
			}
		}
	}
	return found, nil
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
