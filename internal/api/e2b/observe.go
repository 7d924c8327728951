package e2b

import (
	"encoding/json"
	"math"
	"net/http"
	"strings"
	"time"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/control"
	"github.com/berm-sandbox/berm/internal/store"
)

type metric struct {
	Timestamp     time.Time `json:"timestamp"`
	TimestampUnix int64     `json:"timestampUnix"`
	CPUCount      int64     `json:"cpuCount"`
	CPUUsedPct    float64   `json:"cpuUsedPct"`
	MemUsed       int64     `json:"memUsed"`
	MemTotal      int64     `json:"memTotal"`
	MemCache      int64     `json:"memCache"`
	DiskUsed      int64     `json:"diskUsed"`
	DiskTotal     int64     `json:"diskTotal"`
}

func toMetric(s control.Sample) metric {
	return metric{
		Timestamp: s.At.UTC(), TimestampUnix: s.At.Unix(),
		CPUCount: int64(math.Ceil(s.CPUs)), CPUUsedPct: math.Round(100*s.CPUPercent) / 100,
		MemUsed: s.MemoryUsed, MemTotal: s.MemoryTotal, MemCache: s.MemoryCache,
		DiskUsed: s.DiskUsed, DiskTotal: s.DiskTotal,
	}
}

func (a *API) metrics(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	start, err := queryInt(r, "start", 0, 0, math.MaxInt32*1000)
	if err != nil {
		return err
	}
	end, err := queryInt(r, "end", 0, 0, math.MaxInt32*1000)
	if err != nil {
		return err
	}
	var from, to time.Time
	if start > 0 {
		from = time.Unix(start, 0)
	}
	if end > 0 {
		to = time.Unix(end+1, 0).Add(-1) // the whole second
	}
	samples, err := a.Sessions.Metrics(id, from, to)
	if err != nil {
		return err
	}
	return answer(w, http.StatusOK, mapped(samples, toMetric))
}

func (a *API) latestMetrics(w http.ResponseWriter, r *http.Request) error {
	names := queryList(r, "sandbox_ids")
	if len(names) == 0 || len(names) > 100 {
		return invalid("sandbox_ids must name 1 to 100 sandboxes")
	}
	var ids []berm.SandboxID
	for _, name := range names {
		id, err := berm.ParseSandboxID(name)
		if err != nil {
			return err
		}
		if a.reach(r, id) == nil {
			ids = append(ids, id)
		}
	}
	metrics := map[berm.SandboxID]metric{}
	for id, sample := range a.Sessions.LatestMetrics(ids) {
		metrics[id] = toMetric(sample)
	}
	return answer(w, http.StatusOK, map[string]any{"sandboxes": metrics})
}

type logLine struct {
	Timestamp time.Time `json:"timestamp"`
	Line      string    `json:"line"`
}

type logEntry struct {
	Timestamp time.Time         `json:"timestamp"`
	Level     string            `json:"level"`
	Message   string            `json:"message"`
	Fields    map[string]string `json:"fields"`
}

func toEntry(l store.LogLine) logEntry {
	entry := logEntry{Timestamp: l.Time, Level: l.Level, Message: l.Message, Fields: map[string]string{}}
	_ = json.Unmarshal([]byte(l.Fields), &entry.Fields) // we wrote it
	return entry
}

// toLine makes the older form of a line, in which the text is a JSON object.
func toLine(l store.LogLine) logLine {
	object := map[string]string{}
	_ = json.Unmarshal([]byte(l.Fields), &object)
	object["level"], object["logger"], object["message"] = l.Level, "berm", l.Message
	text, _ := json.Marshal(object) // strings always marshal
	return logLine{Timestamp: l.Time, Line: string(text)}
}

const maxLogLines = 1000

func (a *API) logs(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	start, err := queryInt(r, "start", 0, 0, math.MaxInt64/int64(time.Millisecond))
	if err != nil {
		return err
	}
	limit, err := queryInt(r, "limit", maxLogLines, 0, math.MaxInt32)
	if err != nil {
		return err
	}
	lines, err := a.Sessions.Logs(r.Context(), id, time.UnixMilli(start), false, int(min(limit, maxLogLines)))
	if err != nil {
		return err
	}
	return answer(w, http.StatusOK, map[string]any{"logs": mapped(lines, toLine), "logEntries": mapped(lines, toEntry)})
}

// severity orders the levels of log lines.
var severity = map[string]int{"debug": 0, "info": 1, "warn": 2, "error": 3}

func (a *API) logsV2(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	query := r.URL.Query()
	backward := false
	switch query.Get("direction") {
	case "", "forward":
	case "backward":
		backward = true
	default:
		return invalid("direction must be forward or backward")
	}
	lowest, known := severity[query.Get("level")]
	if !known && query.Get("level") != "" {
		return invalid("level must be debug, info, warn or error")
	}
	fallback := int64(0)
	if backward {
		fallback = time.Now().UnixMilli() + 1
	}
	cursor, err := queryInt(r, "cursor", fallback, 0, math.MaxInt64/int64(time.Millisecond))
	if err != nil {
		return err
	}
	limit, err := queryInt(r, "limit", maxLogLines, 1, maxLogLines)
	if err != nil {
		return err
	}
	lines, err := a.Sessions.Logs(r.Context(), id, time.UnixMilli(cursor), backward, int(limit))
	if err != nil {
		return err
	}
	entries := []logEntry{}
	for _, line := range lines {
		if severity[line.Level] >= lowest && strings.Contains(line.Message, query.Get("search")) {
			entries = append(entries, toEntry(line))
		}
	}
	return answer(w, http.StatusOK, map[string]any{"logs": entries})
}

// inspect tells of a sandbox what E2B has no place for, also after its death.
func (a *API) inspect(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	s, err := a.Sessions.Inspect(r.Context(), id)
	if err != nil {
		return err
	}
	return answer(w, http.StatusOK, struct {
		listed
		CreatedAt time.Time   `json:"createdAt"`
		Limits    berm.Limits `json:"limits"`
		Lifecycle lifecycle   `json:"lifecycle"`
		Exit      *berm.Exit  `json:"exit,omitempty"`
	}{a.toListed(s), s.CreatedAt, s.Limits, lifecycle{s.OnDeadline, s.AutoResume}, s.Exit})
}

func (a *API) policy(w http.ResponseWriter, r *http.Request, id berm.SandboxID) error {
	policy, err := a.Sessions.Policy(r.Context(), id)
	if err != nil {
		return err
	}
	return answer(w, http.StatusOK, policy)
}

func (a *API) health(w http.ResponseWriter, _ *http.Request) error {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = w.Write([]byte("Health check successful"))
	return nil
}

func (a *API) openAPI(w http.ResponseWriter, _ *http.Request) error {
	w.Header().Set("Content-Type", "application/yaml")
	_, _ = w.Write(openAPI)
	return nil
}

// teams is what the E2B CLI asks for at login. The key in it is the caller's own, whose team is the only
// one that is told.
func (a *API) teams(w http.ResponseWriter, r *http.Request) error {
	team, err := a.Keys.Team(r.Context(), keyOf(r).Team)
	if err != nil {
		return err
	}
	return answer(w, http.StatusOK, []map[string]any{
		{"teamID": team.ID, "name": team.Name.String(), "apiKey": credential(r), "isDefault": true},
	})
}
