package layer

import (
	"encoding/hex"
	"io"
	"io/fs"
	"strings"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/local/change"
)

// Identity is what tells a sandbox who it is. Berm writes it to files inside, which are none of
// the changes that a sandbox makes.
type Identity struct {
	Sandbox    berm.SandboxID
	Template   berm.TemplateID
	Nameserver string // as /etc/resolv.conf names it
}

// maxOwn bounds the files that Berm writes, in bytes.
const maxOwn = 4 << 10

// wrote says whether Berm writes this content to a file, as the namespace driver does below
// etc and the guest agent in run/e2b.
func (i Identity) wrote(path, content string) bool {
	name := string(i.Sandbox)
	switch path {
	case "etc/hostname":
		return content == name+"\n"
	case "etc/hosts":
		return content == "127.0.0.1\tlocalhost\n127.0.1.1\t"+name+"\n::1\tlocalhost ip6-localhost ip6-loopback\n"
	case "etc/resolv.conf":
		return content == "nameserver "+i.Nameserver+"\noptions attempts:1 timeout:5\n"
	case "etc/machine-id": // random, and nobody remembers it
		id, err := hex.DecodeString(strings.TrimSuffix(content, "\n"))
		return err == nil && len(id) == 16
	case "run/e2b/.E2B_SANDBOX":
		return content == "true"
	case "run/e2b/.E2B_SANDBOX_ID":
		return content == name
	case "run/e2b/.E2B_TEMPLATE_ID":
		return content == string(i.Template)
	}
	return false
}

// own says whether Berm made a change, and nobody changed it since.
func (l *look) own(c change.Change) bool {
	if c.Kind == change.Deleted || l.ctx.Err() != nil {
		return false
	}
	want := fs.FileMode(0o444)
	switch {
	case c.Path == "run/e2b":
		return c.Kind == change.Added && c.New.Mode == fs.ModeDir|0o755
	case strings.HasPrefix(c.Path, "etc/"):
		want = 0o644
	case !strings.HasPrefix(c.Path, "run/e2b/"):
		return false
	}
	if c.New.Mode != want || c.New.Size > maxOwn {
		return false
	}
	f, err := change.OpenRegular(l.upper, c.Path)
	if err != nil {
		return false
	}
	defer f.Close()
	content, err := io.ReadAll(io.LimitReader(f, maxOwn+1))
	return err == nil && l.identity.wrote(c.Path, string(content))
}
