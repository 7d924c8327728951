package template

import (
	"os"
	"testing"
)

func TestMain(m *testing.M) {
	RunHelper()
	os.Exit(m.Run())
}
