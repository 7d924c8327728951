package e2b

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/builder"
	"github.com/berm-sandbox/berm/internal/control"
	"github.com/berm-sandbox/berm/internal/template"
)

// building makes the handler of a route that needs a builder.
func building(handle func(*API, http.ResponseWriter, *http.Request) error) func(*API, http.ResponseWriter, *http.Request) error {
	return func(a *API, w http.ResponseWriter, r *http.Request) error {
		if a.Builder == nil {
			return berm.Errorf(berm.Unsupported, "This server builds no templates: its user has no subordinate ids").
				WithHint("give it 65536 in /etc/subuid and /etc/subgid there, or make one of an image: berm template import")
		}
		return handle(a, w, r)
	}
}

// maxBuildLog is how many lines of a build's log one answer has.
const maxBuildLog = 100

func (a *API) newBuild(w http.ResponseWriter, r *http.Request) error {
	var in struct {
		Name, Alias   string
		Tags          []string
		CPUCount      int64
		MemoryMB      int64
		MinFreeDiskMb int64
	}
	if err := decode(w, r, &in); err != nil {
		return err
	}
	if in.Name == "" {
		in.Name = in.Alias
	}
	if in.Name == "" {
		return invalid("name is required")
	}
	name, err := newName(r, in.Name)
	if err != nil {
		return err
	}
	// Who asks for a name gets the snapshot.
	if alias, _, _ := strings.Cut(strings.ToLower(name), ":"); len(a.Sessions.Snapshots(control.SnapshotFilter{Team: teamOf(r), Ref: alias})) > 0 {
		return berm.Errorf(berm.AlreadyExists, "'%s' is the name of a snapshot: give the template another name", alias)
	}
	b, err := a.Builder.New(builder.Request{
		Team: keyOf(r).Team, Name: name, Tags: in.Tags, CPU: float64(in.CPUCount), Memory: in.MemoryMB << 20, Disk: in.MinFreeDiskMb << 20,
	})
	if err != nil {
		return err
	}
	names := aliases(b.Team, b.Names)
	return answer(w, http.StatusAccepted, map[string]any{
		"templateID": b.TemplateID, "buildID": b.ID, "public": false, "names": names, "aliases": names, "tags": mapped(b.Names, template.TagOf),
	})
}

// uploadTime is how long a link to upload files is good.
const uploadTime = time.Hour

// files tells whether a step's files are there, and where to send them, which needs no key: SDKs
// send none with the files.
func (a *API) files(w http.ResponseWriter, r *http.Request) error {
	id, hash := r.PathValue("templateID"), r.PathValue("hash")
	present, err := a.Builder.Uploaded(keyOf(r).Team, berm.TemplateID(id), hash)
	if err != nil {
		return err
	}
	scheme := "http://"
	if r.TLS != nil || r.Header.Get("X-Forwarded-Proto") == "https" {
		scheme = "https://"
	}
	until := strconv.FormatInt(time.Now().Add(uploadTime).Unix(), 10)
	return answer(w, http.StatusCreated, map[string]any{
		"present": present,
		"url":     scheme + r.Host + "/berm/v1/uploads/" + id + "/" + hash + "?until=" + until + "&signature=" + a.uploadSignature(id, hash, until),
	})
}

func (a *API) uploadSignature(id, hash, until string) string {
	mac := hmac.New(sha256.New, a.UploadKey)
	for _, part := range []string{"upload", id, hash, until} {
		_, _ = io.WriteString(mac, part+"\x00")
	}
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

// upload takes a step's files.
func (a *API) upload(w http.ResponseWriter, r *http.Request) error {
	id, hash, q := r.PathValue("templateID"), r.PathValue("hash"), r.URL.Query()
	until, err := strconv.ParseInt(q.Get("until"), 10, 64)
	if err != nil || !hmac.Equal([]byte(a.uploadSignature(id, hash, q.Get("until"))), []byte(q.Get("signature"))) {
		return &httpError{http.StatusForbidden, "", "This link to upload files is not one of this server's."}
	}
	if time.Now().Unix() > until {
		return &httpError{http.StatusForbidden, "", "This link to upload files is too old. Ask for another."}
	}
	// As long as bytes come.
	body := &patient{body: r.Body, control: http.NewResponseController(w)}
	if err := a.Builder.Upload(berm.TemplateID(id), hash, body); err != nil {
		return err
	}
	w.WriteHeader(http.StatusOK)
	return nil
}

// patient moves the deadline of a connection with every part of a body that comes.
type patient struct {
	body    io.Reader
	control *http.ResponseController
}

func (p *patient) Read(b []byte) (int, error) {
	_ = p.control.SetReadDeadline(time.Now().Add(bodyTime))
	return p.body.Read(b)
}

func (a *API) startBuild(w http.ResponseWriter, r *http.Request) error {
	var in struct {
		FromImage         string
		FromTemplate      string
		FromImageRegistry *struct {
			Type, Username, Password                      string
			AWSAccessKeyID, AWSSecretAccessKey, AWSRegion string
			ServiceAccountJSON                            string
		}
		Steps              []builder.Step
		StartCmd, ReadyCmd string
		Force              bool
		Berm               struct {
			Stages []struct {
				Name, FromImage, FromTemplate, FromStage string
				Steps                                    []builder.Step
			}
			FromStage string
		}
	}
	if err := decode(w, r, &in); err != nil {
		return err
	}
	o := builder.Order{
		From:  builder.From{Image: in.FromImage, Template: in.FromTemplate, Stage: in.Berm.FromStage},
		Steps: in.Steps, Start: in.StartCmd, Ready: in.ReadyCmd, Force: in.Force,
	}
	for _, s := range in.Berm.Stages {
		o.Stages = append(o.Stages, builder.Stage{Name: s.Name, From: builder.From{Image: s.FromImage, Template: s.FromTemplate, Stage: s.FromStage}, Steps: s.Steps})
	}
	if c := in.FromImageRegistry; c != nil {
		var err error
		switch c.Type {
		case "registry":
			o.Login = template.Basic(c.Username, c.Password)
		case "gcp":
			o.Login, err = template.Google(c.ServiceAccountJSON)
		case "aws":
			o.Login, err = template.Amazon(c.AWSAccessKeyID, c.AWSSecretAccessKey, c.AWSRegion)
		default:
			err = invalid("fromImageRegistry.type %q is none of registry, aws and gcp", c.Type)
		}
		if err != nil {
			return err
		}
	}
	if err := a.Builder.Start(keyOf(r).Team, berm.TemplateID(r.PathValue("templateID")), berm.BuildID(r.PathValue("buildID")), o, actor(r)); err != nil {
		return err
	}
	w.WriteHeader(http.StatusAccepted)
	return nil
}

var buildID = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// aBuild finds the build that a request names.
func (a *API) aBuild(r *http.Request, offset, limit int64) (template.Build, error) {
	id := r.PathValue("buildID")
	if !buildID.MatchString(id) {
		return template.Build{}, invalid("%q is no id of a build", id)
	}
	return a.Builder.Build(keyOf(r).Team, berm.TemplateID(r.PathValue("templateID")), berm.BuildID(id), int(offset), int(limit))
}

func (a *API) buildStatus(w http.ResponseWriter, r *http.Request) error {
	offset, err := queryInt(r, "logsOffset", 0, 0, 1<<31)
	if err != nil {
		return err
	}
	limit, err := queryInt(r, "limit", maxBuildLog, 0, maxBuildLog)
	if err != nil {
		return err
	}
	b, err := a.aBuild(r, offset, limit)
	if err != nil {
		return err
	}
	lines := append([]template.LogLine{}, b.Log...)
	texts := make([]string, len(lines))
	for i, l := range lines {
		texts[i] = l.Message
	}
	out := map[string]any{"templateID": b.TemplateID, "buildID": b.ID, "status": b.State, "logEntries": lines, "logs": texts}
	if f := b.Failure; f != nil {
		out["reason"] = map[string]any{"message": f.Message, "step": f.Step, "stage": f.Stage, "logEntries": []template.LogLine{}}
	}
	return answer(w, http.StatusOK, out)
}

// buildLogs pages through the log of a build, by the number of a line.
func (a *API) buildLogs(w http.ResponseWriter, r *http.Request) error {
	cursor, err := queryInt(r, "cursor", 0, 0, 1<<31)
	if err != nil {
		return err
	}
	limit, err := queryInt(r, "limit", maxBuildLog, 1, maxBuildLog)
	if err != nil {
		return err
	}
	b, err := a.aBuild(r, cursor, limit)
	if err != nil {
		return err
	}
	return answer(w, http.StatusOK, map[string]any{"logs": append([]template.LogLine{}, b.Log...)})
}

// cancelBuild ends a build that is under way.
func (a *API) cancelBuild(w http.ResponseWriter, r *http.Request) error {
	if err := a.Builder.Cancel(keyOf(r).Team, berm.TemplateID(r.PathValue("templateID")), berm.BuildID(r.PathValue("buildID"))); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// addTags gives tags to a build, "name:tag", of a template.
func (a *API) addTags(w http.ResponseWriter, r *http.Request) error {
	var in struct {
		Target string
		Tags   []string
	}
	if err := decode(w, r, &in); err != nil {
		return err
	}
	if in.Target == "" || len(in.Tags) == 0 {
		return invalid("target and tags are required")
	}
	t, err := a.Builder.Store.AddTags(r.Context(), keyOf(r).Team, in.Target, in.Tags)
	if err != nil {
		return err
	}
	a.Sessions.PruneBegun(r.Context()) // of a build that had the tag
	return answer(w, http.StatusCreated, map[string]any{"buildID": t.BuildID, "tags": in.Tags})
}

func (a *API) removeTags(w http.ResponseWriter, r *http.Request) error {
	var in struct {
		Name string
		Tags []string
	}
	if err := decode(w, r, &in); err != nil {
		return err
	}
	if in.Name == "" || len(in.Tags) == 0 {
		return invalid("name and tags are required")
	}
	if err := a.Builder.Store.RemoveTags(r.Context(), keyOf(r).Team, in.Name, in.Tags); err != nil {
		return err
	}
	a.Sessions.PruneBegun(r.Context())
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *API) tags(w http.ResponseWriter, r *http.Request) error {
	tags, err := a.Builder.Store.Tags(keyOf(r).Team, r.PathValue("templateID"))
	if err != nil {
		return err
	}
	return answer(w, http.StatusOK, mapped(tags, func(t template.Tag) map[string]any {
		return map[string]any{"tag": t.Name, "buildID": t.BuildID, "createdAt": t.CreatedAt}
	}))
}

// publish says whether other teams may use a template, too.
func (a *API) publish(w http.ResponseWriter, r *http.Request) error {
	var in struct{ Public *bool }
	if err := decode(w, r, &in); err != nil {
		return err
	}
	if in.Public == nil {
		return invalid("public is required")
	}
	t, err := a.Builder.Store.SetPublic(r.Context(), keyOf(r).Team, r.PathValue("templateID"), *in.Public)
	if err != nil {
		return err
	}
	return answer(w, http.StatusOK, map[string]any{"names": aliases(t.Team, t.Names)})
}

// aliases are names as a team calls them, without tags, each once.
func aliases(team berm.Team, names []string) []string {
	all := []string{}
	for _, name := range names {
		if alias, _, _ := strings.Cut(team.Trim(name), ":"); !slices.Contains(all, alias) {
			all = append(all, alias)
		}
	}
	return all
}
