// Package root finds out what the programs of a root file system trust.
package root

import (
	"errors"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"

	"github.com/berm-sandbox/berm"
)

// File is a file of a root.
type File struct {
	Path string `json:"path"` // absolute, of directories that are no links
	Data []byte `json:"data"`
}

// Root is where the authorities lie that the programs of a root trust. All paths are absolute,
// of directories that are no links.
type Root struct {
	Bundles []File   `json:"bundles,omitempty"` // all authorities in one file
	Anchors []string `json:"anchors,omitempty"` // where an authority goes that is to be in the next bundle
	Stores  []string `json:"stores,omitempty"`  // Java's own
}

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

// bundleLimit bounds what is read of a template, whose maker need not be trusted. Mozilla's
// list has 220 KiB.
const bundleLimit = 8 << 20

// Survey reads a root. Kind: Invalid when it has a list that cannot be read.
func Survey(root fs.FS) (Root, error) {
	var r Root
	for _, name := range bundles {
		real, data, err := readRegular(root, name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return Root{}, berm.Errorf(berm.Invalid, "the template's list of certificate authorities /%s: %w", name, err)
		}
		if real = "/" + real; !slices.ContainsFunc(r.Bundles, func(f File) bool { return f.Path == real }) {
			r.Bundles = append(r.Bundles, File{real, data})
		}
	}
	for _, a := range anchors {
		dir, _, err := resolve(root, path.Dir(a.path))
		if _, has := fs.Stat(root, a.tool); has == nil && err == nil {
			r.Anchors = append(r.Anchors, "/"+path.Join(dir, path.Base(a.path)))
		}
	}
	stores, err := javaStores(root)
	for _, name := range stores {
		r.Stores = append(r.Stores, "/"+name)
	}
	return r, err
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
