package e2b

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/berm-sandbox/berm/internal/template"
)

type newBuild struct {
	TemplateID, BuildID string
	Names, Tags         []string
}

func TestBuildOfNothing(t *testing.T) {
	w := newWorld(t)
	for body, part := range map[string]string{
		`{}`:                           "name is required",
		`{"name":"no good"}`:           "want lower-case letters",
		`{"name":"a","cpuCount":3}`:    "1 or an even number",
		`{"name":"a","cpuCount":64}`:   "at most 32",
		`{"name":"a","cpuCount":-1}`:   "at least 1",
		`{"name":"a","memoryMB":64}`:   "at least 128",
		`{"name":"a","memoryMB":513}`:  "divisible by 2",
		`{"name":"a","tags":["x y"]}`:  "template name",
		`{"name":"a:b:c"}`:             "template name",
		`{"name":"../../etc/passwd:"}`: "namespace '..'",
		`{"name":"acme/app"}`:          "namespace 'acme' must match your team 'default': name it 'app'",
		`{"name":"default/a/b"}`:       "namespace 'a'",
		`{"name":"/app"}`:              "namespace ''",
	} {
		if got := w.want(400, "POST", "/v3/templates", body); !strings.Contains(string(got.body), part) {
			t.Errorf("%s: %s", body, got.body)
		}
	}
	var b, other newBuild
	w.want(202, "POST", "/v3/templates", `{"name":"default/App:v1","tags":["x","v1"]}`).into(t, &b)
	if strings.Join(b.Tags, " ") != "v1 x" || strings.Join(b.Names, " ") != "app" {
		t.Errorf("%+v", b)
	}
	w.want(202, "POST", "/v3/templates", `{"alias":"app"}`).into(t, &other)
	if other.TemplateID != b.TemplateID || other.BuildID == b.BuildID || strings.Join(other.Tags, " ") != "default" {
		t.Errorf("%+v, %+v", b, other)
	}
	for _, name := range []string{"base", "Base:v2", "default/base", "desktop", "code-interpreter-v1"} {
		if got := w.want(409, "POST", "/v3/templates", `{"name":"`+name+`"}`); !strings.Contains(string(got.body), "berm template build") {
			t.Errorf("%s: %s", name, got.body)
		}
	}
	at := "/templates/" + b.TemplateID + "/builds/" + b.BuildID
	order := "/v2" + at
	for _, body := range []string{
		`{}`, `{"fromImage":"a","fromTemplate":"b"}`, `{"fromImage":"a","steps":[{"type":"SHELL","args":["x"]}]}`, `{"fromImage":"a","steps":[{"type":"RUN"}]}`,
		`{"fromImage":"a","steps":[{"type":"COPY","args":["a","b"],"filesHash":"../../x"}]}`, `{"fromImage":"a","steps":[{"type":"ENV","args":["A"]}]}`,
		`{"fromImage":"a","steps":[{"type":"USER","args":["-x;id"]}]}`, `{"fromImage":"a","fromImageRegistry":{"type":"other"}}`,
		`{"fromImage":"a","steps":[{"type":"COPY","args":["a","b","x;y"],"filesHash":"` + strings.Repeat("a", 64) + `"}]}`, `[`,
	} {
		w.want(400, "POST", order, body)
	}
	w.want(400, "POST", order, `{"fromImage":"a","fromImageRegistry":{"type":"aws","awsAccessKeyId":"a","awsSecretAccessKey":"b","awsRegion":"a.test/?"}}`)
	w.want(400, "POST", order, `{"fromImage":"a","fromImageRegistry":{"type":"gcp","serviceAccountJson":"{}"}}`)
	w.want(404, "POST", "/v2/templates/"+b.TemplateID+"/builds/"+strings.Replace(b.BuildID, b.BuildID[:4], "0000", 1), `{"fromTemplate":"none"}`)
	w.want(404, "POST", "/v2/templates/other/builds/"+b.BuildID, `{"fromTemplate":"none"}`)
	w.want(400, "GET", "/templates/"+b.TemplateID+"/builds/x/status", "")
	w.want(400, "GET", at+"/status?logsOffset=-1", "")

	w.want(202, "POST", order, `{"fromTemplate":"none"}`)
	w.want(409, "POST", order, `{"fromTemplate":"none"}`)
	var status struct {
		Status     template.State
		LogEntries []template.LogLine
		Reason     *template.Failure
	}
	for until := time.Now().Add(10 * time.Second); status.Status != template.Failed && time.Now().Before(until); time.Sleep(5 * time.Millisecond) {
		w.want(200, "GET", at+"/status", "").into(t, &status)
	}
	if status.Reason == nil || status.Reason.Step != "base" || !strings.Contains(status.Reason.Message, "'none' not found") || len(status.LogEntries) == 0 {
		t.Errorf("%+v", status)
	}
	w.want(200, "GET", at+fmt.Sprintf("/status?logsOffset=%d", len(status.LogEntries)), "").into(t, &status)
	if len(status.LogEntries) != 0 {
		t.Errorf("%+v", status.LogEntries)
	}
	w.want(200, "GET", at+"/logs?limit=1", "")
	w.want(404, "GET", "/templates/app", "")
	w.want(409, "DELETE", "/berm/v1"+at, "")
	w.want(204, "DELETE", "/berm/v1/templates/"+b.TemplateID+"/builds/"+other.BuildID, "")
	w.want(204, "DELETE", "/templates/"+b.TemplateID, "")
	w.want(404, "GET", at+"/status", "")
	w.want(404, "DELETE", "/templates/"+b.TemplateID, "")
}

func TestUpload(t *testing.T) {
	w := newWorld(t)
	var b newBuild
	w.want(202, "POST", "/v3/templates", `{"name":"app"}`).into(t, &b)
	hash := strings.Repeat("ab", 32)
	at := "/templates/" + b.TemplateID + "/files/"
	w.want(400, "GET", at+"x", "")
	w.want(404, "GET", "/templates/other/files/"+hash, "")
	var told struct {
		Present bool
		URL     string
	}
	w.want(201, "GET", at+hash, "").into(t, &told)
	if told.Present {
		t.Error("it is there before it came")
	}
	put := func(url, body string) int {
		t.Helper()
		r, err := http.NewRequest("PUT", url, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		return answer.StatusCode
	}
	for _, forged := range []string{
		strings.Replace(told.URL, hash, strings.Repeat("cd", 32), 1), strings.Replace(told.URL, "until=1", "until=2", 1), told.URL[:len(told.URL)-2], strings.Replace(told.URL, b.TemplateID, "other", 1),
	} {
		if got := put(forged, "x"); got != 403 {
			t.Errorf("%s: %d", forged, got)
		}
	}
	if got := put(told.URL, "files"); got != 200 {
		t.Errorf("%d", got)
	}
	w.want(201, "GET", at+hash, "").into(t, &told)
	if !told.Present {
		t.Error("it is not there after it came")
	}
}
