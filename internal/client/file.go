package client

import (
	"context"
	"io"
	"io/fs"
	"net/http"
	"net/url"

	"connectrpc.com/connect"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/proto/filesystem"
)

// FileInfo is what a sandbox tells of a path; a link is followed.
type FileInfo struct {
	Path string // absolute
	Dir  bool
	Mode fs.FileMode // permission bits
	Size int64
}

// Stat looks at a path in the sandbox. Relative ones begin at the user's home.
func (a *Agent) Stat(ctx context.Context, path string) (FileInfo, error) {
	got, err := a.filesystem.Stat(ctx, connect.NewRequest(&filesystem.StatRequest{Path: path}))
	if err != nil {
		err, _ = a.agentError(err)
		return FileInfo{}, err
	}
	e := got.Msg.GetEntry()
	return FileInfo{
		Path: e.GetPath(),
		Dir:  e.GetType() == filesystem.FileType_FILE_TYPE_DIRECTORY,
		Mode: fs.FileMode(e.GetMode()) & fs.ModePerm,
		Size: e.GetSize(),
	}, nil
}

// MakeDir makes a directory and its parents. One that exists is no error.
func (a *Agent) MakeDir(ctx context.Context, path string) error {
	_, err := a.filesystem.MakeDir(ctx, connect.NewRequest(&filesystem.MakeDirRequest{Path: path}))
	if err == nil || connect.CodeOf(err) == connect.CodeAlreadyExists {
		return nil
	}
	err, _ = a.agentError(err)
	return err
}

func (a *Agent) files(ctx context.Context, method, path string, body io.Reader) (*http.Request, error) {
	query := url.Values{"path": {path}}
	if a.user != "" {
		query.Set("username", a.user)
	}
	return http.NewRequestWithContext(ctx, method, a.origin+"/files?"+query.Encode(), body)
}

// Download opens a file of the sandbox for reading.
func (a *Agent) Download(ctx context.Context, path string) (io.ReadCloser, error) {
	req, err := a.files(ctx, http.MethodGet, path, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept-Encoding", "identity")
	resp, err := a.http.Do(req)
	if err != nil {
		return nil, a.client.unreachable(err)
	}
	if err := a.fileError(resp); err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// Upload writes a file of the sandbox from r; parents are made. A size of -1 says
// that it is not known. The caller closes r.
func (a *Agent) Upload(ctx context.Context, path string, r io.Reader, size int64) error {
	req, err := a.files(ctx, http.MethodPost, path, io.NopCloser(r))
	if err != nil {
		return err
	}
	req.ContentLength = size
	if size == 0 {
		req.Body = http.NoBody
	}
	req.Header.Set("Content-Type", "application/octet-stream")
	resp, err := a.http.Do(req)
	if err != nil {
		return a.client.unreachable(err)
	}
	if err := a.fileError(resp); err != nil {
		return err
	}
	return resp.Body.Close()
}

// fileError makes an error of an answer that is not a success, and closes it then.
func (a *Agent) fileError(resp *http.Response) error {
	if resp.StatusCode >= 200 && resp.StatusCode <= 299 {
		return nil
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return a.client.unreachable(err)
	}
	e := statusError(resp.StatusCode, body)
	if e.Kind == berm.Denied {
		return e.WithHint("--user names a user of the sandbox; the API key is not asked for here.")
	}
	return e
}
