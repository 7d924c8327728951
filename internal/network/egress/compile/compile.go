// Package compile makes the policy of an order what it is judged by.
package compile

import (
	"os"

	"github.com/berm-sandbox/berm/internal/network/egress"
	"github.com/berm-sandbox/berm/internal/network/policy"
	"github.com/berm-sandbox/berm/internal/trust"
	"github.com/berm-sandbox/berm/internal/trust/root"
)

// Policy makes a policy of the form in which it came. Kinds: Invalid.
func Policy(source egress.Policy) (*policy.Policy, error) {
	p := &policy.Policy{}
	var err error
	switch {
	case len(source.JSON) > 0:
		p, err = policy.DecodeJSON(source.Source, source.JSON)
	case source.YAML != "":
		p, err = policy.DecodeYAML(source.Source, []byte(source.YAML))
	}
	if err != nil {
		return nil, err
	}
	var rules []policy.Rule
	for _, entry := range source.Entries {
		rule, err := policy.ParseEntry(entry)
		if err != nil {
			return nil, err
		}
		rules = append(rules, rule)
	}
	p.Rules, p.Revision = append(rules, p.Rules...), source.Revision
	for _, a := range source.Attach {
		attachment := policy.Attachment{Credential: a.Credential}
		for _, host := range a.Hosts {
			target, err := policy.ParseTarget(host)
			if err != nil {
				return nil, err
			}
			attachment.To = append(attachment.To, target)
		}
		p.Attach = append(p.Attach, attachment)
	}
	return p, nil
}

// Credentials are the ids of those that a policy wants.
func Credentials(p *policy.Policy) (ids []string) {
	for _, a := range p.Attach {
		ids = append(ids, a.Credential)
	}
	for i := range p.Rules {
		ids = append(ids, p.Rules[i].Attach...)
	}
	return ids
}

// Trust says what has to be trusted inside, where the programs are those of a root, or, when
// that is nil, of this machine.
func Trust(programs *root.Root, authority []byte) (*egress.Trust, error) {
	if programs == nil {
		own, err := root.Survey(os.DirFS("/"))
		if err != nil {
			return nil, err
		}
		programs = &own
	}
	files, env, err := trust.Files(*programs, authority, nil)
	if err != nil {
		return nil, err
	}
	return &egress.Trust{Files: files, Env: env}, nil
}
