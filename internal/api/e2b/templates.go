package e2b

import (
	"cmp"
	"math"
	"net/http"
	"slices"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/template"
)

type templateInfo struct {
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
	Berm          *templateOwn    `json:"berm,omitempty"`
}

// templateOwn is what E2B has no word for.
type templateOwn struct {
	Arriving *berm.Arriving `json:"arriving"`
}

// toTemplate is a template as a team is told of it.
func toTemplate(team berm.Team, builds []berm.Template) templateInfo {
	t := builds[0]
	var all []string
	for _, b := range builds {
		all = append(all, b.Names...)
	}
	names := aliases(team, all)
	var own *templateOwn
	if t.Arriving != nil {
		own = &templateOwn{t.Arriving}
	}
	return templateInfo{
		TemplateID: t.ID, BuildID: t.BuildID, CPUCount: int64(math.Ceil(t.Limits.CPU)),
		MemoryMB: t.Limits.Memory >> 20, DiskSizeMB: t.Limits.Disk >> 20,
		Aliases: names, Names: names, CreatedAt: builds[len(builds)-1].CreatedAt, UpdatedAt: t.CreatedAt, Public: t.Public,
		BuildCount: int64(len(builds)), EnvdVersion: berm.AgentVersion, BuildStatus: "ready", Berm: own,
	}
}

// listTemplates returns the builds of all templates that are for the team, newest first.
func (a *API) listTemplates(r *http.Request) ([][]berm.Template, error) {
	if asked := r.URL.Query().Get("teamID"); asked != "" {
		team, err := a.Keys.Team(r.Context(), keyOf(r).Team)
		if err == nil && team.ID != asked {
			err = berm.Errorf(berm.Invalid, "team %q is not the team of this API key", asked)
		}
		if err != nil {
			return nil, err
		}
	}
	all, err := a.Templates.List(r.Context())
	all = slices.DeleteFunc(all, func(t berm.Template) bool { return !t.For(keyOf(r).Team) })
	slices.SortFunc(all, func(x, y berm.Template) int {
		if c := y.CreatedAt.Compare(x.CreatedAt); c != 0 {
			return c
		}
		return cmp.Compare(x.ID, y.ID)
	})
	var grouped [][]berm.Template
	at := map[berm.TemplateID]int{}
	for _, t := range all {
		i, ok := at[t.ID]
		if !ok {
			i, at[t.ID] = len(grouped), len(grouped)
			grouped = append(grouped, nil)
		}
		grouped[i] = append(grouped[i], t)
	}
	return grouped, err
}

func told(r *http.Request, all [][]berm.Template) []templateInfo {
	return mapped(all, func(builds []berm.Template) templateInfo { return toTemplate(keyOf(r).Team, builds) })
}

func (a *API) templates(w http.ResponseWriter, r *http.Request) error {
	all, err := a.listTemplates(r)
	if err != nil {
		return err
	}
	return answer(w, http.StatusOK, told(r, all))
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
		i := slices.IndexFunc(all, func(t []berm.Template) bool { return string(t[0].ID) == token })
		if i < 0 {
			return invalid("nextToken is not one of this list")
		}
		all = all[i+1:]
	}
	if int64(len(all)) > limit {
		all = all[:limit]
		w.Header().Set("X-Next-Token", string(all[limit-1][0].ID))
	}
	return answer(w, http.StatusOK, told(r, all))
}

func (a *API) template(w http.ResponseWriter, r *http.Request) error {
	found, err := a.Templates.Resolve(r.Context(), keyOf(r).Team, r.PathValue("templateID"))
	if err != nil {
		return err
	}
	all, err := a.listTemplates(r)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(all, func(t []berm.Template) bool { return t[0].ID == found.ID })
	if i < 0 { // removed meanwhile
		return berm.Errorf(berm.NotFound, "template '%s' not found", r.PathValue("templateID"))
	}
	type build struct {
		BuildID    berm.BuildID   `json:"buildID"`
		Status     template.State `json:"status"`
		CreatedAt  time.Time      `json:"createdAt"`
		UpdatedAt  time.Time      `json:"updatedAt"`
		FinishedAt *time.Time     `json:"finishedAt,omitempty"`
		CPUCount   int64          `json:"cpuCount"`
		MemoryMB   int64          `json:"memoryMB"`
		DiskSizeMB int64          `json:"diskSizeMB"`
		Envd       string         `json:"envdVersion"`
	}
	var builds []build
	add := func(id berm.BuildID, state template.State, begin, end time.Time, l berm.Limits) {
		if slices.ContainsFunc(builds, func(b build) bool { return b.BuildID == id }) {
			return
		}
		b := build{id, state, begin, begin, nil, int64(math.Ceil(l.CPU)), l.Memory >> 20, l.Disk >> 20, berm.AgentVersion}
		if !end.IsZero() {
			b.UpdatedAt, b.FinishedAt = end, &end
		}
		builds = append(builds, b)
	}
	if a.Builder != nil {
		for _, b := range a.Builder.Builds(keyOf(r).Team, found.ID) {
			add(b.ID, b.State, b.CreatedAt, b.FinishedAt, b.Limits)
		}
	}
	for _, t := range all[i] { // those that were not ordered here: images, recipes
		add(t.BuildID, template.Ready, t.CreatedAt, t.CreatedAt, t.Limits)
	}
	one := toTemplate(keyOf(r).Team, all[i])
	return answer(w, http.StatusOK, map[string]any{
		"templateID": one.TemplateID, "public": one.Public, "aliases": one.Aliases, "names": one.Names,
		"createdAt": one.CreatedAt, "updatedAt": one.UpdatedAt, "lastSpawnedAt": nil, "spawnCount": one.SpawnCount, "builds": builds,
	})
}

func (a *API) alias(w http.ResponseWriter, r *http.Request) error {
	t, err := a.Templates.Resolve(r.Context(), keyOf(r).Team, r.PathValue("alias"))
	if err != nil {
		return err
	}
	return answer(w, http.StatusOK, map[string]any{"templateID": t.ID, "public": t.Public})
}
