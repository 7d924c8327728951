package main

import (
	"context"
	"fmt"
	"os"

	"github.com/berm-sandbox/berm"
	"github.com/berm-sandbox/berm/internal/cli/local"
	"github.com/berm-sandbox/berm/internal/network/policy"
	"github.com/berm-sandbox/berm/internal/template"
)

func init() {
	local.Templates, local.TemplateNames = localTemplate, localTemplates
	local.Groups = func(context.Context) []string { return policy.Groups() }
	local.Program = func() (*os.File, error) { return os.Open("/proc/self/exe") }
}

// localTemplate finds a template for berm run, and keeps its layers while this process
// lives.
func localTemplate(ctx context.Context, name string) (berm.Template, error) {
	store, err := template.Open("")
	if err != nil {
		return berm.Template{}, err
	}
	t, err := store.Resolve(ctx, "", name)
	if err != nil {
		return berm.Template{}, err
	}
	return t, store.Lease(ctx, berm.NewSandboxID(), fmt.Sprintf("/proc/%d", os.Getpid()), t)
}

// localTemplates lists what localTemplate finds.
func localTemplates(ctx context.Context) (names []string) {
	store, err := template.Open("")
	if err != nil {
		return nil
	}
	templates, _ := store.List(ctx)
	for _, t := range templates {
		if t.For("") {
			names = append(names, t.Names...)
		}
	}
	return names
}
