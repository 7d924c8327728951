package serve

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/control/enginetest"
)

// The operator is told at the start what templates will go without, or be refused for.
func TestWarnsOfWhatTheHostCannotGive(t *testing.T) {
	for _, require := range []bool{false, true} {
		log := &enginetest.Log{}
		i := run(t, func(c *Config) {
			c.RequireLimits, c.Log = require, slog.New(slog.NewTextHandler(log, nil))
			e := &enginetest.Engine{Unlimited: map[string]string{"memory": "no controller", "writeBytes": "v1"}, Degraded: []string{"one id"}}
			c.Drivers = func(Watch, string) ([]berm.Driver, error) { return []berm.Driver{driver{e}}, nil }
		})
		i.shutdown()
		text := log.String()
		then := map[bool]string{false: "go without", true: "are refused"}[require]
		if strings.Count(text, "level=WARN") != 2 || !strings.Contains(text, `limit=memory reason="no controller"`) || !strings.Contains(text, then) || !strings.Contains(text, `"one id"`) {
			t.Errorf("required: %v\n%s", require, text)
		}
	}
}
