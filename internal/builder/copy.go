package builder

import (
	"compress/gzip"
	"context"
	"errors"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/template"
)

// archive is where a step's files lie inside, while it runs.
const archive = "/tmp/.berm-build.tar"

// copy puts a step's files into the sandbox.
func (r *running) copy(ctx context.Context, s *Step, g template.Stage, sb *sandbox, line func(bool, string)) error {
	from, name, err := r.files(ctx, s, line)
	if err != nil {
		return err
	}
	defer from.Close()
	if err := sb.upload(ctx, archive, &bounded{from, maxUpload}); err != nil {
		return err
	}
	dest := absolute(g.Workdir, expand(s.Args[1], g.Env))
	if to := s.Args[1]; strings.HasSuffix(to, "/") || to == "." {
		dest = strings.TrimSuffix(dest, "/") + "/"
	}
	user, group, ok := strings.Cut(s.arg(2), ":")
	if user == "" && s.Berm.From == "" {
		user = g.User
	}
	if !ok {
		group = user
	}
	return sb.run(ctx, command{
		user: "root", workdir: "/", line: line,
		argv: []string{"/bin/sh", "-c", place, "sh", archive, name, dest, user, group, s.arg(3)},
	})
}

// files opens the archive of a step's files, and says which name in it is to be copied.
func (r *running) files(ctx context.Context, s *Step, line func(bool, string)) (io.ReadCloser, string, error) {
	if s.Berm.From != "" {
		return r.gather(ctx, s, line)
	}
	f, err := r.b.openUpload(r.build.TemplateID, s.FilesHash)
	if err != nil {
		return nil, "", err
	}
	plain, err := unzipped(f)
	if err != nil {
		_ = f.Close()
		return nil, "", err
	}
	return struct {
		io.Reader
		io.Closer
	}{plain, f}, source(s.Args[0]), nil
}

// gather packs what a step copies from a stage, in a sandbox made of that.
func (r *running) gather(ctx context.Context, s *Step, line func(bool, string)) (_ io.ReadCloser, name string, err error) {
	stage := r.made[s.Berm.From]
	sb, err := r.b.newSandbox(ctx, r.build, &stage, r.actor)
	if err != nil {
		return nil, "", err
	}
	defer func() {
		if killed := sb.kill(); killed != nil {
			r.b.Log.Error("a sandbox of a build is left until its deadline", "sandbox", sb.id, "build", r.build.ID, "error", killed)
		}
	}()
	err = sb.run(ctx, command{
		user: "root", workdir: "/", argv: []string{"/bin/sh", "-c", pick, "sh", archive, s.Args[0]},
		line: func(stderr bool, text string) {
			if found, ok := strings.CutPrefix(text, "name:"); ok && !stderr {
				name = found
				return
			}
			line(stderr, text)
		},
	})
	if err != nil {
		return nil, "", err
	}
	if path.Base(name) != name { // a sandbox tells it
		return nil, "", invalid("stage %s tells no name of what is copied", s.Berm.From)
	}
	kept, err := os.CreateTemp(r.b.Dir, "stage-")
	if err != nil {
		return nil, "", berm.Errorf(berm.Internal, "make a file: %w", err)
	}
	defer func() {
		_ = os.Remove(kept.Name()) // it is open, or of no use
		if err != nil {
			_ = kept.Close()
		}
	}()
	packed, err := sb.download(ctx, archive)
	if err != nil {
		return nil, "", err
	}
	defer packed.Close()
	if _, err := io.Copy(kept, &bounded{packed, maxUpload}); err != nil {
		return nil, "", err
	}
	if _, err := kept.Seek(0, io.SeekStart); err != nil {
		return nil, "", err
	}
	return kept, name, nil
}

// pick packs into $1 what a pattern $2 names, with its owners, and tells which name in it is to be
// copied.
const pick = `set -e
to=$(mktemp -d /tmp/.berm-build.XXXXXX)
name=.
IFS=
set -- "$1" $2
out=$1
shift
for from; do
	if [ -d "$from" ]; then
		cp -a "$from/." "$to/"
		name=.
	elif [ -e "$from" ]; then
		cp -pL "$from" "$to/"
		name=$(basename "$from")
	else
		echo "the stage has no $from" >&2
		exit 1
	fi
done
tar -cf "$out" -C "$to" .
echo "name:$name"
`

// place unpacks an archive $1, and puts what is at $2 in it to $3, with the owner $4, the group $5
// and the mode $6 ("" leaves them as they are). A directory's content is put into $3, beside what is there;
// directories that are there keep their owner and rights, and a link to one stays. Only GNU's tar
// can do that.
const place = newDirs + `
from=$(mktemp -d /tmp/.berm-build.XXXXXX)
trap 'rm -rf "$from" "$1"' EXIT
if [ -n "$4" ]; then tar -xof "$1" -C "$from"; else tar -xpf "$1" -C "$from"; fi
if [ ! -e "$from/$2" ] && [ ! -L "$from/$2" ]; then
	echo "the files have no $2" >&2
	exit 1
fi
if [ -n "$4" ]; then chown -hR "$4:$5" "$from"; fi
owner=${4:-root}:${5:-root}
if [ -n "$6" ] && [ ! -L "$from/$2" ]; then chmod -R "$6" "$from/$2"; fi
if [ -d "$from/$2" ] && [ ! -L "$from/$2" ]; then
	new_dirs "$3" "$owner"
	if tar --version 2>/dev/null | grep -q GNU; then
		tar -C "$from/$2" -cf - . | tar -C "$3" -xpf - --no-overwrite-dir --keep-directory-symlink
	else
		tar -C "$from/$2" -cf - . | tar -C "$3" -xpf -
	fi
	exit
fi
case $3 in
	*/) new_dirs "$3" "$owner" ;;
	*) new_dirs "$(dirname "$3")" "$owner" ;;
esac
if [ -d "$3" ]; then
	mv -f "$from/$2" "$3/"
else
	mv -f "$from/$2" "$3"
fi
`

// unzipped reads gzip or what is not compressed.
func unzipped(f io.ReadSeeker) (io.Reader, error) {
	magic := make([]byte, 2)
	_, err := io.ReadFull(f, magic)
	if _, back := f.Seek(0, io.SeekStart); back != nil {
		return nil, back
	}
	if err != nil || magic[0] != 0x1f || magic[1] != 0x8b {
		return f, nil
	}
	z, err := gzip.NewReader(f)
	if err != nil {
		return nil, invalid("the files are no archive: %w", err)
	}
	return z, nil
}

func (b *Builder) uploadPath(of berm.TemplateID, hash string) string {
	return filepath.Join(b.Dir, path.Base(string(of)), hash)
}

// openUpload opens what a client uploaded for a step.
func (b *Builder) openUpload(of berm.TemplateID, hash string) (*os.File, error) {
	name := b.uploadPath(of, hash)
	f, err := os.Open(name)
	if os.IsNotExist(err) {
		return nil, berm.Errorf(berm.NotFound, "the files were not uploaded")
	}
	if err == nil {
		now := time.Now()
		_ = os.Chtimes(name, now, now) // sweep looks at it
	}
	return f, err
}

// Uploaded says whether files of a team's client are there. Kinds: NotFound (the template), Invalid.
func (b *Builder) Uploaded(team berm.Team, of berm.TemplateID, hash string) (bool, error) {
	if err := b.takes(of, hash); err != nil {
		return false, err
	}
	if len(b.Builds(team, of)) == 0 {
		return false, noBuildOf(of)
	}
	_, err := os.Stat(b.uploadPath(of, hash))
	return err == nil, nil
}

// takes says whether files may be uploaded.
func (b *Builder) takes(of berm.TemplateID, hash string) error {
	if !filesHash.MatchString(hash) {
		return invalid("%q is no SHA-256 in hexadecimal digits", hash)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.builds {
		if s.TemplateID == of {
			return nil
		}
	}
	return noBuildOf(of)
}

func noBuildOf(of berm.TemplateID) error {
	return berm.Errorf(berm.NotFound, "template '%s' is not being built", of)
}

// Upload stores a client's files, whole or not at all. Whose it is decides who gets the link to
// upload them. Kinds: NotFound (the template), Invalid (the hash, or too many bytes), Exhausted (no room).
func (b *Builder) Upload(of berm.TemplateID, hash string, content io.Reader) error {
	if err := b.takes(of, hash); err != nil {
		return err
	}
	name := b.uploadPath(of, hash)
	if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
		return berm.Errorf(berm.Internal, "make the directory of uploads: %w", err)
	}
	f, err := os.CreateTemp(b.Dir, "upload-")
	if err != nil {
		return berm.Errorf(berm.Internal, "make an upload: %w", err)
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if _, err := io.Copy(f, &bounded{content, maxUpload}); err != nil {
		kind := berm.KindOf(err)
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			kind = berm.Exhausted
		}
		return berm.Errorf(kind, "upload: %w", err)
	}
	return os.Rename(f.Name(), name)
}
