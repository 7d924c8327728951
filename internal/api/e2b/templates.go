package e2b

import (
	"cmp"
	"math"
	"net/http"
	"slices"
	"time"

	"github.com/berm-sandbox/berm"
)

type template struct {
	TemplateID    berm.TemplateID `json:"templateID"`
	BuildID       berm.BuildID    `json:"buildID"`
	CPUCount      int64           `json:"cpuCount"`
	MemoryMB      int64           `json:"memoryMB"`
	DiskSizeMB    int64           `json:"diskSizeMB"`
	Public        bool            `json:"public"`
	Aliases       []string        `json:"aliases"`
	Names         []string        `json:"names"`
	CreatedAt     time.Time       `json:"createdAt"`
	UpdatedAt     time.Time       `json:"updatedAt"`
	CreatedBy     any             `json:"createdBy"`
	LastSpawnedAt any             `json:"lastSpawnedAt"`
	SpawnCount    int64           `json:"spawnCount"`
	BuildCount    int64           `json:"buildCount"`
	EnvdVersion   string          `json:"envdVersion"`
	BuildStatus   string          `json:"buildStatus"`
}

func toTemplate(t berm.Template) template {
	names := append([]string{}, t.Names...)
	return template{
		TemplateID: t.ID, BuildID: t.BuildID, CPUCount: int64(math.Ceil(t.Limits.CPU)),
		MemoryMB: t.Limits.Memory >> 20, DiskSizeMB: t.Limits.Disk >> 20,
		Aliases: names, Names: names, CreatedAt: t.CreatedAt, UpdatedAt: t.CreatedAt,
		BuildCount: 1, EnvdVersion: berm.AgentVersion, BuildStatus: "ready",
	}
}

// listTemplates returns all templates, newest first.
func (a *API) listTemplates(r *http.Request) ([]berm.Template, error) {
	if team := r.URL.Query().Get("teamID"); team != "" && team != teamID {
		return nil, berm.Errorf(berm.Invalid, "team %q is not the team of this API key", team)
	}
	all, err := a.Templates.List(r.Context())
	slices.SortFunc(all, func(x, y berm.Template) int {
		if c := y.CreatedAt.Compare(x.CreatedAt); c != 0 {
			return c
		}
		return cmp.Compare(x.ID, y.ID)
	})
	return all, err
}

func (a *API) templates(w http.ResponseWriter, r *http.Request) error {
	all, err := a.listTemplates(r)
	if err != nil {
		return err
	}
	return answer(w, http.StatusOK, mapped(all, toTemplate))
}

// templatesV2 pages by the id of the last template of a page.
func (a *API) templatesV2(w http.ResponseWriter, r *http.Request) error {
	all, err := a.listTemplates(r)
	if err != nil {
		return err
	}
	limit, err := queryInt(r, "limit", maxPage, 1, maxPage)
	if err != nil {
		return err
	}
	if token := r.URL.Query().Get("nextToken"); token != "" {
		i := slices.IndexFunc(all, func(t berm.Template) bool { return string(t.ID) == token })
		if i < 0 {
			return invalid("nextToken is not one of this list")
		}
		all = all[i+1:]
	}
	if int64(len(all)) > limit {
		all = all[:limit]
		w.Header().Set("X-Next-Token", string(all[limit-1].ID))
	}
	return answer(w, http.StatusOK, mapped(all, toTemplate))
}

func (a *API) template(w http.ResponseWriter, r *http.Request) error {
	t, err := a.Templates.Resolve(r.Context(), r.PathValue("templateID"))
	if err != nil {
		return err
	}
	one := toTemplate(t)
	return answer(w, http.StatusOK, map[string]any{
		"templateID": one.TemplateID, "public": one.Public, "aliases": one.Aliases, "names": one.Names,
		"createdAt": one.CreatedAt, "updatedAt": one.UpdatedAt, "lastSpawnedAt": nil, "spawnCount": one.SpawnCount,
		"builds": []map[string]any{{
			"buildID": one.BuildID, "status": one.BuildStatus, "createdAt": one.CreatedAt, "updatedAt": one.UpdatedAt,
			"finishedAt": one.CreatedAt, "cpuCount": one.CPUCount, "memoryMB": one.MemoryMB,
			"diskSizeMB": one.DiskSizeMB, "envdVersion": one.EnvdVersion,
		}},
	})
}

func (a *API) alias(w http.ResponseWriter, r *http.Request) error {
	t, err := a.Templates.Resolve(r.Context(), r.PathValue("alias"))
	if err != nil {
		return err
	}
	return answer(w, http.StatusOK, map[string]any{"templateID": t.ID, "public": false})
}
