package preset

import (
	"os"
	"slices"
	"testing"
)

func TestCleanEnv(t *testing.T) {
	environ := []string{
		"TERM=xterm", "LC_ALL=C", "LC_TOKEN=1", "PATH=/bin", "HOME=/home/u", "SSH_AUTH_SOCK=/run/s", "GH_TOKEN=t",
		"APP_NAME=a", "APP_API_KEY=k", "APP_PASSWORD=p", "EMPTY=", "=odd", "odd", "MULTI=a=b", "MULTI=second",
	}
	for _, c := range []struct {
		entries, want []string
	}{
		{nil, nil},
		{[]string{"TERM", "LC_*", "EMPTY", "MULTI", "MISSING"}, []string{"EMPTY=", "LC_ALL=C", "MULTI=a=b", "TERM=xterm"}},
		{[]string{"APP_*"}, []string{"APP_NAME=a"}},
		{[]string{"APP_*", "APP_API_KEY"}, []string{"APP_API_KEY=k", "APP_NAME=a"}},
		{[]string{"*"}, []string{"APP_NAME=a", "EMPTY=", "HOME=/home/u", "LC_ALL=C", "MULTI=a=b", "PATH=/bin", "TERM=xterm"}},
		{[]string{"TERM", "TERM=dumb"}, []string{"TERM=dumb"}},
		{[]string{"TERM=dumb", "TERM"}, []string{"TERM=xterm"}},
		{[]string{"X=1=2", "Y="}, []string{"X=1=2", "Y="}},
		{[]string{"TERM", "-TERM"}, nil},
		{[]string{"-TERM", "TERM"}, []string{"TERM=xterm"}},
		{[]string{"APP_API_KEY", "X=1", "-APP_*", "-X"}, nil},
		{[]string{"GH_TOKEN"}, []string{"GH_TOKEN=t"}},
		{[]string{"*", "-*"}, nil},
	} {
		if got := CleanEnv(environ, c.entries); !slices.Equal(got, c.want) {
			t.Errorf("%q gives %q, want %q", c.entries, got, c.want)
		}
	}
}

func TestCheckEnv(t *testing.T) {
	for _, ok := range []string{"A", "a_1", "A*", "*", "-A", "-A*", "-*", "A=", "A=b c", "A=-*\n"} {
		if err := CheckEnv(ok); err != nil {
			t.Errorf("%q: %v", ok, err)
		}
	}
	for _, bad := range []string{"", "-", "=", "=x", "A B", "A*B", "A**", "--A", "-A=b", "A*=b", "A\x00", "A=\x00", "É"} {
		if CheckEnv(bad) == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

func BenchmarkCleanEnv(b *testing.B) {
	environ := os.Environ()
	for b.Loop() {
		CleanEnv(environ, base.Env)
	}
}
