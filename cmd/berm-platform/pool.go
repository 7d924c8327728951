package main

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/control"
)

// maxPool is how many sandboxes of one kind may wait.
const maxPool = 1000

// poolFlag takes "TEMPLATE=N" or "TEMPLATE@LEVEL=N", any number of times.
type poolFlag []control.Pool

func (f *poolFlag) String() string {
	all := make([]string, len(*f))
	for i, p := range *f {
		all[i] = p.Template
		if p.Level != "" {
			all[i] += "@" + string(p.Level)
		}
		all[i] += "=" + strconv.Itoa(p.Size)
	}
	return strings.Join(all, ",")
}

// Type is what help calls the value.
func (f *poolFlag) Type() string { return "pool" }

func (f *poolFlag) Set(s string) error {
	for text := range strings.SplitSeq(s, ",") {
		name, size, _ := strings.Cut(text, "=")
		template, level, _ := strings.Cut(name, "@")
		n, err := strconv.Atoi(size)
		if template == "" || err != nil || n < 1 || n > maxPool {
			return fmt.Errorf("%q is not TEMPLATE=N or TEMPLATE@LEVEL=N, with N from 1 to %d", text, maxPool)
		}
		p := control.Pool{Template: template, Level: berm.Level(level), Size: n}
		if !slices.Contains([]berm.Level{"", berm.Auto, berm.Namespace, berm.GVisor, berm.MicroVM}, p.Level) {
			return fmt.Errorf("%q is no isolation level", level)
		}
		if slices.ContainsFunc(*f, func(o control.Pool) bool { return o.Template == p.Template && o.Level == p.Level }) {
			return errors.New("there are two pools of " + name)
		}
		*f = append(*f, p)
	}
	return nil
}
