package cli

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/berm-sandbox/berm"
)

// A wrong command line is told by what is wrong with it.
func TestUsage(t *testing.T) {
	for line, want := range map[string][2]string{
		"one":               {"one: NAME is missing", ""},
		"one a b":           {`one: unexpected argument "b"`, ""},
		"many":              {"many: NAME is missing", ""},
		"none a":            {`none: unexpected argument "a"`, ""},
		"none --at a":       {`none: unexpected argument "a"`, "--at=a"},
		"nosuch":            {`unknown command "nosuch" for "berm"`, "`berm --help` lists the commands."},
		"on":                {`unknown command "on" for "berm"`, "Did you mean none or one?"},
		"version":           {`unknown command "version" for "berm"`, "berm --version"},
		"help nosuch":       {`unknown command "nosuch" for "berm"`, "`berm --help` lists the commands."},
		"help one more":     {`unknown command "more" for "berm one"`, "Usage: berm one [flags] NAME. More: `berm one --help`."},
		"completion nosuch": {`unknown command "nosuch" for "berm completion"`, "`berm completion --help` lists the commands."},
	} {
		root := NewRoot("1")
		nothing := func(*cobra.Command, []string) error { return nil }
		none := &cobra.Command{Use: "none [flags]", Args: UsageArgs(cobra.NoArgs), RunE: nothing}
		none.Flags().String("at", "", "")
		none.Flags().Lookup("at").NoOptDefVal = "HEAD"
		root.AddCommand(none,
			&cobra.Command{Use: "one [flags] NAME", Args: UsageArgs(cobra.ExactArgs(1)), RunE: nothing},
			&cobra.Command{Use: "many [--] NAME...", Args: UsageArgs(cobra.MinimumNArgs(1)), RunE: nothing})
		root.SetOut(io.Discard)
		_, err := execute(context.Background(), root, strings.Fields(line))
		if usage := (UsageError{}); !errors.As(err, &usage) || err.Error() != want[0] || berm.HintOf(err) != want[1] {
			t.Errorf("%s: %v, hint %q; want %q", line, err, berm.HintOf(err), want)
		}
	}
}
