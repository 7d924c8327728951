package change

import (
	"io/fs"
	"strings"
	"testing"
	"unicode"

	"golang.org/x/text/cases"
)

func TestDanger(t *testing.T) {
	evil := []string{
		".git/hooks/pre-commit", ".git/config", ".git/config.worktree", ".git/info/attributes", ".git/commondir", ".git/gitdir",
		".git/objects/info/alternates", ".git/objects/info/http-alternates", ".git", "sub/.git", "sub/.git/config", ".git/info/sparse-checkout", ".git/info/grafts",
		".git/modules/a/config", ".git/modules/a/hooks/x", ".git/modules/objects/config", ".git/modules/a/objects/config", ".git/modules/refs/heads/config",
		".git/modules/a/b/info/attributes", ".git/modules/a/objects/info/alternates", ".git/modules/a/modules/b/config", ".git/modules/x", ".git/worktrees/w/gitdir", ".git/worktrees/w/commondir",
		".git/worktrees/w/config.worktree", ".git/rebase-merge/git-rebase-todo", ".git/new-thing", ".git/objects/config", ".git/objects/ab/config", ".git/objects/pack/hooks/x",
		"mirror.git/config", "mirror.git/hooks/post-update", "deep/HEAD", "HEAD", "head",
		".GIT/config", ".gIt/HoOks/x", ".g\u200cit/config", ".git\ufeff/config", "\u202e.git/config", ".git./config", ".git /hooks/x", ".git . ./config", "git~1/config", "GIT~1/hooks/x",
		".git::$INDEX_ALLOCATION/config", ".git/config::$DATA", ".git/hooks./x", ".g\u0131t/config", ".git/con\ufb01g", ".git\\hooks\\x", "a\\..\\.git\\config", ".git/refs\\..\\config",
		".git\u00ad/config", ".git\U000e0041/config", ".gi\ufe0ft/config",
		".envrc", "a/b/.envrc", ".envrc.local", ".ENVRC", ".vscode/tasks.json", ".vscode/a/b", "a.code-workspace", "x/.idea/workspace.xml", ".devcontainer/devcontainer.json", ".devcontainer.json",
		".github/workflows/x.yml", ".github/workflows/..\\..\\x.yml", ".github/workflows/a:b.yml", ".github/actions/x/action.yml", ".github/copilot-instructions.md", "action.yml", ".gitlab-ci.yml", ".circleci/config.yml", "Jenkinsfile", "Jenkinsfile.release",
		".husky/pre-commit", ".pre-commit-config.yaml", "lefthook.yml", "lefthook-local.toml", ".config/lefthook.yml", ".claude/settings.json", "CLAUDE.md", "sub/Claude.md", "CLAUDE.local.md", "\u200bCLAUDE.md", ".mcp.json", "AGENTS.md", "agent\u017f.md",
		".cursor/rules/x.mdc", ".cursorrules", ".codex/config.toml", ".gemini/settings.json", "GEMINI.md", ".aider.conf.yml", ".gitmodules", "gitmod~1", "GITMOD~4", "gi7eba~1", ".gitattributes", "gitatt~1", "sub/.gitattributes",
		"mise.toml", ".mise.local.toml", "mise.dev.toml", ".tool-versions", ".python-version", "sub/.nvmrc", ".npmrc", ".yarnrc.yml", ".yarn/releases/yarn.cjs", ".pnpmfile.cjs", ".bazelrc", "tools/bazel", "x/tools/bazel", ".cargo/config.toml", ".cargo/config", "rust-toolchain", "rust-toolchain.toml",
		"berm.yaml", "sub/Berm.yaml", ".bsp/x.json", "x:y.pth", "x.pth", ".venv/bin/python", ".bashrc", ".Rprofile", ".config/autostart/x", "CLAUDE.md.", "CLAUDE.md ", "CLAUDE.md:x",
	}
	for _, p := range evil {
		if Danger(p, Entry{Mode: 0o644}) == "" {
			t.Errorf("%q is not told", p)
		}
	}
	harmless := []string{
		"main.go", "README.md", "src/git/config", "config", "hooks/x", ".gitignore", ".github", ".editorconfig", "git", "x.git", "Makefile", "package.json", "headers/x.h", "src/head.tsx", "agents/x.md", "claude/x", "mise", "tools/x/bazel", "bazel",
		".git/objects/ab/" + strings.Repeat("0", 38), ".git/objects/pack/pack-1.idx", ".git/objects/pack/tmp_pack_x", ".git/objects/info/packs", ".git/objects/info/commit-graph", ".git/objects/info/commit-graphs/commit-graph-chain",
		".git/refs/heads/config", ".git/refs/heads/a/b", ".git/logs/HEAD", ".git/index", ".git/HEAD", ".git/packed-refs", ".git/ORIG_HEAD", ".git/FETCH_HEAD", ".git/COMMIT_EDITMSG", ".git/description", ".git/info/exclude", ".git/hooks/pre-commit.sample",
		".git/modules/a/HEAD", ".git/modules/a/b/refs/heads/x", ".git/modules/a/objects/ab/" + strings.Repeat("0", 38), ".git/worktrees/w/HEAD", ".git/worktrees/w/index", ".git/worktrees/w/logs/HEAD", "mirror.git/refs/heads/x",
		".venv/lib/python3/site-packages/x.py", "file~1", "a~b", "~1", "x/…/ü", ".yarn/cache/x.zip", "\xff",
	}
	for _, p := range harmless {
		if why := Danger(p, Entry{Mode: 0o644}); why != "" {
			t.Errorf("%q: %s", p, why)
		}
	}
	for _, test := range []struct {
		p    string
		e    Entry
		want bool
	}{
		{"a", Entry{Mode: fs.ModeSetuid | 0o755}, true},
		{"a", Entry{Mode: fs.ModeSetgid | 0o755}, true},
		{"a", Entry{Mode: fs.ModeDir | fs.ModeSetgid | 0o755}, false},
		{".git", Entry{Mode: fs.ModeDir}, false},
		{"sub/.git", Entry{Mode: fs.ModeSymlink, Target: "x"}, true},
		{".git/hooks", Entry{Mode: fs.ModeDir}, false},
		{".git/hooks", Entry{Mode: fs.ModeSymlink, Target: "../x"}, true},
		{".git/refs", Entry{Mode: fs.ModeSymlink, Target: "../x"}, true},
		{".git/HEAD", Entry{Mode: fs.ModeSymlink, Target: "refs/heads/main"}, true},
		{".git/index", Entry{Mode: fs.ModeNamedPipe}, true},
		{"x.git", Entry{Mode: fs.ModeSymlink, Target: "y"}, true},
		{".vscode", Entry{Mode: fs.ModeDir}, false},
		{".vscode", Entry{Mode: fs.ModeSymlink, Target: "x"}, true},
		{".github/workflows", Entry{Mode: fs.ModeSymlink, Target: "../x"}, true},
	} {
		if got := Danger(test.p, test.e) != ""; got != test.want {
			t.Errorf("%s %+v: got %v", test.p, test.e, got)
		}
	}
}

func TestLinks(t *testing.T) {
	for _, test := range []struct {
		p, target string
		out       bool
	}{
		{"a", "b", false}, {"a", "b/c", false}, {"a", "./b", false}, {"a", ".", false}, {"d/a", "..", false}, {"d/a", "../b", false}, {"d/e/a", "../../b", false}, {"a", "b//c/", false},
		{"a", "..", true}, {"a", "../b", true}, {"d/a", "../../b", true}, {"a", "/etc", true}, {"a", "/", true}, {"a", "", true},
		// b may be a link to the top: b/.. is then outside.
		{"a", "b/../c", true}, {"d/a", "../b/../c", true}, {"d/a", ".././..", true},
	} {
		got := Danger(test.p, Entry{Mode: fs.ModeSymlink | 0o777, Target: test.target})
		if (got == whyLink) != test.out || (got != "") != test.out {
			t.Errorf("%s -> %s: %q", test.p, test.target, got)
		}
	}
}

// Every rule has a reason, is written as it is looked up, and matches at any depth.
func TestRules(t *testing.T) {
	seen := map[string]bool{}
	for _, rule := range rules {
		if rule.why == "" {
			t.Errorf("%s has no reason", rule.patterns)
		}
		for p := range strings.FieldsSeq(rule.patterns) {
			if seen[p] {
				t.Errorf("%s twice", p)
			}
			seen[p] = true
			if folded := fold(strings.TrimSuffix(p, "/**")); len(folded) != 1 || strings.Join(folded[0], "/") != strings.TrimSuffix(p, "/**") {
				t.Errorf("%s is not in its folded form", p)
			}
			name := strings.ReplaceAll(strings.ReplaceAll(p, "/**", "/x"), "*", "x")
			if Danger(name, Entry{}) == "" || Danger("a/"+strings.ToUpper(name), Entry{}) == "" {
				t.Errorf("%s does not match %s", p, name)
			}
		}
	}
}

// What is dangerous under its plain name is so under every name that folds to it, by the
// folding of Unicode and whatever invisible characters are strewn in.
func FuzzDanger(f *testing.F) {
	for _, p := range []string{".git/config", ".GI\u017f/hooks", "\u212aelvin", ".g\u200dit/hooks/x", "a/.envrc ", "CLAUDE.md", "git~1/x", "con\ufb01g", ".git\\config", "a/../.git/config", "\xff\xfe/.git", ".git/objects/../config"} {
		f.Add(p, uint(3), 'I')
		f.Add(p, uint(1), '\u200b')
		f.Add(p, uint(0), '\u00ad')
	}
	f.Fuzz(func(t *testing.T, p string, at uint, r rune) {
		plain := strings.Map(func(r rune) rune {
			if unicode.Is(unicode.Cf, r) {
				return -1
			}
			return r
		}, cases.Fold().String(p))
		if !strings.Contains(p, "\ufffd") && strings.ToValidUTF8(p, "\ufffd") == p {
			if Danger(plain, Entry{}) != "" && Danger(p, Entry{}) == "" {
				t.Errorf("%q is told, %q is not", plain, p)
			}
		}
		// The reference knows a few names by itself.
		for name := range strings.SplitSeq(plain, "/") {
			switch strings.TrimRight(name, " .") {
			case ".envrc", "claude.md", "agents.md", ".mcp.json", ".npmrc", ".gitmodules":
				if strings.HasSuffix(plain, name) && Danger(p, Entry{}) == "" {
					t.Errorf("%q is not told", p)
				}
			}
		}
		for _, part := range []string{".git/hooks/", ".vscode/", ".claude/", ".github/workflows/"} {
			if before, after, ok := strings.Cut(plain, part); ok && (before == "" || strings.HasSuffix(before, "/")) &&
				after != "" && !strings.Contains(before, ".git") && !strings.Contains(after, ".sample") && Danger(p, Entry{}) == "" {
				t.Errorf("%q is not told", p)
			}
		}
		// An invisible character anywhere changes nothing.
		if i := int(at % uint(len(p)+1)); unicode.Is(unicode.Cf, r) && strings.ToValidUTF8(p[:i], "") == p[:i] && strings.ToValidUTF8(p[i:], "") == p[i:] {
			if q := p[:i] + string(r) + p[i:]; Danger(p, Entry{}) != "" && Danger(q, Entry{}) == "" {
				t.Errorf("%q is told, %q is not", p, q)
			}
		}
	})
}

func BenchmarkDanger(b *testing.B) {
	for b.Loop() {
		Danger("node_modules/some-package/dist/esm/internal/index.js", Entry{Mode: 0o644})
	}
}
