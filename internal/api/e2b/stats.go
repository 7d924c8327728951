package e2b

import (
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/berm-sandbox/berm/internal/control"
)

// stats is what GET /metrics shows to Prometheus.
type stats struct {
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	handler  http.Handler
}

func newStats(sessions *control.Manager) *stats {
	s := &stats{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berm_requests_total", Help: "Requests to the control plane.",
		}, []string{"method", "route", "code"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "berm_request_seconds", Help: "Time to answer requests to the control plane.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30},
		}, []string{"method", "route"}),
	}
	gauge := func(name, help string, value func() int) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 { return float64(value()) })
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		s.requests, s.seconds,
		gauge("berm_sandboxes_running", "Sandboxes that run.", func() int { running, _ := sessions.Running(); return running }),
		gauge("berm_sandboxes", "Sandboxes that exist, paused ones too.", func() int { _, all := sessions.Running(); return all }),
		traffic{sessions},
		pools{sessions},
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	s.handler = promhttp.HandlerFor(registry, promhttp.HandlerOpts{})
	return s
}

// traffic shows what each living sandbox did on networks. Its series end with the sandbox.
type traffic struct{ sessions *control.Manager }

var (
	trafficBytes = prometheus.NewDesc("berm_sandbox_network_bytes_total", "Bytes of a sandbox's flows that ended, by direction as the sandbox sees it.",
		[]string{"sandbox", "direction"}, nil)
	trafficFlows = prometheus.NewDesc("berm_sandbox_network_flows_total", "Flows of a sandbox that ended or were denied.",
		[]string{"sandbox", "action"}, nil)
	trafficQueries = prometheus.NewDesc("berm_sandbox_network_denied_queries_total", "Names that a sandbox asked for and was denied.",
		[]string{"sandbox"}, nil)
)

func (traffic) Describe(out chan<- *prometheus.Desc) {
	out <- trafficBytes
	out <- trafficFlows
	out <- trafficQueries
}

func (t traffic) Collect(out chan<- prometheus.Metric) {
	for id, n := range t.sessions.Traffic() {
		tell := func(what *prometheus.Desc, value float64, labels ...string) {
			out <- prometheus.MustNewConstMetric(what, prometheus.CounterValue, value, append([]string{string(id)}, labels...)...)
		}
		tell(trafficBytes, float64(n.Up), "up")
		tell(trafficBytes, float64(n.Down), "down")
		tell(trafficFlows, float64(n.Allowed), "allow")
		tell(trafficFlows, float64(n.Denied), "deny")
		tell(trafficQueries, float64(n.DeniedQueries))
	}
}

// pools shows the pools of sandboxes that wait.
type pools struct{ sessions *control.Manager }

var (
	poolWaiting = prometheus.NewDesc("berm_pool_waiting", "Sandboxes of a pool that wait for whoever creates one.", []string{"template", "level"}, nil)
	poolAsked   = prometheus.NewDesc("berm_pool_creates_total", "Creations of a pool's template and level, by whether they found a sandbox that waited.",
		[]string{"template", "level", "warm"}, nil)
)

func (pools) Describe(out chan<- *prometheus.Desc) {
	out <- poolWaiting
	out <- poolAsked
}

func (p pools) Collect(out chan<- prometheus.Metric) {
	for _, state := range p.sessions.Pools() {
		level := string(state.Level)
		out <- prometheus.MustNewConstMetric(poolWaiting, prometheus.GaugeValue, float64(state.Waiting), state.Template, level)
		out <- prometheus.MustNewConstMetric(poolAsked, prometheus.CounterValue, float64(state.Hits), state.Template, level, "true")
		out <- prometheus.MustNewConstMetric(poolAsked, prometheus.CounterValue, float64(state.Misses), state.Template, level, "false")
	}
}

func (s *stats) observe(rt route, code int, took time.Duration) {
	s.requests.WithLabelValues(rt.method, rt.path, strconv.Itoa(code)).Inc()
	s.seconds.WithLabelValues(rt.method, rt.path).Observe(took.Seconds())
}

func (a *API) prometheus(w http.ResponseWriter, r *http.Request) error {
	a.stats.handler.ServeHTTP(w, r)
	return nil
}
