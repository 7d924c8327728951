package change

import (
	"io/fs"
	"path"
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// rules lists what the host, or a tool that people use on a project, executes or obeys
// without being asked to: when a directory is entered or opened in an editor, when a
// repository is read or pushed, when a package manager or an agent starts. What runs only
// when the project is built, tested or linted (Makefile, package.json, build.rs, …) is
// the project's code and not listed; a person reviews that anyway. Names that only choose
// how files look (.editorconfig) or are left out (.gitignore) do nothing.
//
// A pattern holds at any depth and whatever the case. "/**" at its end means all that
// lies below a directory, "*" any text.
// Repositories of git are judged by gitDanger.
var rules = []struct{ patterns, why string }{
	{".gitmodules", "git fetches submodules from where this file says"},
	{".gitattributes", "git runs the filters and drivers that this file names"},
	{".gitconfig .lfsconfig", "git configuration: names programs and servers"},
	{".githooks/** .git-hooks/**", "directory of git hooks"},
	{".hg/** .svn/** .bzr/** .jj/** .sl/**", "another version control system's configuration and hooks"},

	{".envrc* .direnv/**", "direnv runs it when a shell enters the directory"},
	{".env .env.local", "environment variables that editors and tools load by themselves"},
	{".autoenv*", "autoenv runs it when a shell enters the directory"},
	{"mise.toml .mise.toml mise.local.toml .mise.local.toml mise.*.toml .mise/** mise/config.toml mise/config.*.toml .rtx.toml", "mise obeys it when a shell enters the directory"},
	{".tool-versions .python-version .python-versions .nvmrc .node-version .ruby-version .rvmrc .java-version .sdkmanrc .go-version", "version managers choose programs by it when a shell enters the directory"},
	{"rust-toolchain rust-toolchain.toml", "rustup takes the compiler from where this file says"},
	{".venv/bin/** venv/bin/** pyvenv.cfg", "editors run a project's interpreter when they open it"},
	{"*.pth sitecustomize.py usercustomize.py", "Python runs it at every start"},

	{".vscode/** .vscode-server/** *.code-workspace", "Visual Studio Code settings: tasks and programs that run when the project is opened"},
	{".idea/** .run/** *.iml *.ipr *.iws .fleet/**", "JetBrains settings: programs that run when the project is opened"},
	{".zed/** .helix/** .vs/** .nova/** .theia/** *.sublime-project .kakrc", "editor settings that name programs"},
	{".vimrc .exrc .gvimrc .nvimrc .nvim.lua .lvimrc .vim/** .nvim/** .ycm_extra_conf.py", "vim runs it when the project is opened"},
	{".dir-locals.el .dir-locals-2.el .emacs .emacs.d/**", "Emacs obeys it when a file is opened"},
	{".clangd .bsp/** .externaltoolbuilders/**", "language servers start programs that it names"},
	{".devcontainer/** .devcontainer.json devcontainer.json", "development container: commands that run when the project is opened"},
	{".gitpod.yml .gitpod.dockerfile .idx/** .replit", "cloud development environment: commands that run when the project is opened"},

	{".github/workflows/** .github/actions/** action.yml action.yaml", "GitHub runs this workflow with the repository's rights"},
	{".github/**", "GitHub's bots, reviews and agents obey it"},
	{".gitlab-ci.yml .gitlab-ci.yaml .gitlab-ci/** .gitlab/**", "GitLab runs it with the repository's rights"},
	{".circleci/** jenkinsfile jenkinsfile.* .travis.yml appveyor.yml .appveyor.yml azure-pipelines* .azure-pipelines/** .azuredevops/** bitbucket-pipelines.yml .drone.yml .drone.star .woodpecker* .woodpecker/** .buildkite/** .cirrus.yml .cirrus.star .forgejo/** .gitea/** .teamcity/** .semaphore/** .build.yml .builds/** buildspec.yml cloudbuild.yaml .tekton/** .zuul.yaml .zuul.d/** .harness/** codemagic.yaml", "a build service runs it with the repository's rights"},

	{".husky/** .huskyrc*", "husky: a git hook"},
	{".pre-commit-config.yaml .pre-commit-config.yml prek.toml", "pre-commit runs what it names at every commit"},
	{"lefthook.* .lefthook.* lefthook-local.* .lefthook-local.* .lefthook/** .lefthook-local/** .config/lefthook.*", "lefthook runs what it names at every commit"},
	{".overcommit.yml simple-git-hooks.* .simple-git-hooks.* .lintstagedrc* lint-staged.config.* captainhook.json grumphp.yml .commitlintrc* commitlint.config.*", "runs at every commit"},

	{".claude/** claude.md claude.local.md .claude.json", "Claude Code obeys it: instructions, permissions and hooks"},
	{".mcp.json mcp.json", "agents start the servers that it names"},
	{"agents.md agents.override.md agent.md .agents/** .agent/**", "instructions that coding agents obey"},
	{".codex/**", "Codex obeys it: instructions, permissions and programs"},
	{".gemini/** gemini.md", "Gemini CLI obeys it: instructions, permissions and programs"},
	{".cursor/** .cursorrules", "Cursor obeys it: instructions, hooks and servers that it starts"},
	{".aider*", "aider obeys it: commands that it runs"},
	{".windsurf/** .windsurfrules .clinerules .clinerules/** .roo/** .roorules* .roomodes .kiro/** .continue/** .continuerc.json .continuerules .opencode/** opencode.json opencode.jsonc .goose/** .goosehints .amp/** .augment/** .augment-guidelines .junie/** .trae/** .qwen/** qwen.md .crush/** .crush.json crush.json .factory/** .copilot/** .aiassistant/** .warp/** warp.md .openhands/** .rules", "a coding agent obeys it"},

	{".npmrc", "npm configuration: registries, tokens, scripts"},
	{".yarnrc .yarnrc.yml .yarn/releases/** .yarn/plugins/**", "yarn runs or obeys it at every start"},
	{".pnpmfile.cjs .pnpmfile.mjs pnpmfile.js pnpm-workspace.yaml", "pnpm runs or obeys it at every start"},
	{"bunfig.toml .bunfig.toml", "bun loads what it names at every start"},
	{".bazelrc .bazeliskrc .bazelversion tools/bazel .buckconfig .buckconfig.d/**", "bazel or buck obeys it at every start"},
	{".cargo/**", "cargo runs the programs that it names in place of its own"},
	{".mvn/** gradle/wrapper/** .jvmopts .sbtopts", "Java build tools obey it at every start"},
	{".bundle/** uv.toml poetry.toml nuget.config .swiftpm/**", "package manager configuration: where packages come from"},
	{".rprofile .renviron .ghci .ocamlinit .irbrc .pryrc .gdbinit .lldbinit .pdbrc", "an interpreter or debugger runs it when it starts in the directory"},

	{".bashrc .bash_profile .bash_login .bash_logout .profile .zshrc .zshenv .zprofile .zlogin .zlogout .kshrc .cshrc .tcshrc .login .inputrc .pam_environment .xprofile .xsession .xsessionrc .xinitrc .tmux.conf .screenrc", "runs at log-in or when a shell starts"},
	{".config/** .local/bin/** .local/share/** .ssh/** .gnupg/** .kube/** .docker/config.json .docker/cli-plugins/** .aws/** .azure/**", "configuration that programs of its user obey"},
	{"*.desktop autorun.inf desktop.ini", "a desktop starts what it names"},
	{"berm.yaml berm.yml", "berm's own configuration of this project"},
}

const (
	whySetid = "set-uid or set-gid: runs with its owner's rights, whoever starts it"
	whyLink  = "symbolic link that leads, or may lead, out of the workspace"
	whyBare  = "git takes a directory with HEAD, objects and refs for a repository and runs what its config names"
)

// Danger says why the host, or a tool that a person uses on it, would execute or obey what
// lies at a path of a project without being asked to; "" when nothing would. It takes
// names for equal that some file system takes for equal, so it may warn where none does.
// It knows only the path: List and Compare find bare repositories of any name besides.
func Danger(p string, e Entry) string {
	if e.Mode.IsRegular() && e.Mode&(fs.ModeSetuid|fs.ModeSetgid) != 0 {
		return whySetid
	}
	for _, names := range fold(p) {
		if why := gitDanger(names, e.Mode.Type()); why != "" {
			return why
		}
		if e.Mode.IsDir() {
			continue
		}
		if why := ruleDanger(names, e.Mode.Type()); why != "" {
			return why
		}
	}
	if e.Mode.Type() == fs.ModeSymlink && leadsOut(p, e.Target) {
		return whyLink
	}
	return ""
}

// leadsOut judges a link's target by its text. Each ".." must come first: after a name it
// goes up from where that name leads, which may be a link too.
func leadsOut(p, target string) bool {
	depth := strings.Count(p, "/")
	down := false
	for name := range strings.SplitSeq(target, "/") {
		switch name {
		case "", ".":
		case "..":
			if depth--; down || depth < 0 {
				return true
			}
		default:
			down = true
		}
	}
	return target == "" || target[0] == '/'
}

// pattern is one of the table, taken apart.
type pattern struct {
	names []string
	below bool // all that lies below, not the path itself
	why   string
}

// affixed is a pattern whose first name has a star, taken apart there.
type affixed struct {
	before, after string
	pattern
}

type index struct {
	exact map[string][]pattern // by first name
	glob  []affixed            // whose first name has a star
	short []string             // first names that get a short one on FAT and NTFS
}

var table = sync.OnceValue(func() index {
	t := index{exact: map[string][]pattern{}}
	for _, rule := range rules {
		for text := range strings.FieldsSeq(rule.patterns) {
			p := pattern{why: rule.why}
			text, p.below = strings.CutSuffix(text, "/**")
			p.names = strings.Split(text, "/")
			if before, after, star := strings.Cut(p.names[0], "*"); star {
				t.glob = append(t.glob, affixed{before, after, p})
			} else {
				t.exact[p.names[0]] = append(t.exact[p.names[0]], p)
				t.short = append(t.short, p.names[0])
			}
		}
	}
	return t
})

func ruleDanger(names []string, mode fs.FileMode) string {
	t := table()
	for i, name := range names {
		candidates := t.exact[name]
		if strings.Contains(name, "~") {
			for _, long := range t.short {
				if isShort(name, long) {
					candidates = append(candidates[:len(candidates):len(candidates)], t.exact[long]...)
				}
			}
		}
		for _, p := range candidates {
			if p.matches(names[i:], mode) {
				return p.why
			}
		}
		for j := range t.glob {
			p := &t.glob[j]
			if hasAffixes(name, p.before, p.after) && p.matches(names[i:], mode) {
				return p.why
			}
		}
	}
	return ""
}

// matches says whether names, whose first one is known to match, are what p means.
func (p *pattern) matches(names []string, mode fs.FileMode) bool {
	if len(names) < len(p.names) {
		return false
	}
	for i, want := range p.names[1:] {
		if !glob(want, names[i+1]) {
			return false
		}
	}
	if len(names) == len(p.names) {
		return !p.below || mode == fs.ModeSymlink // to a directory, perhaps
	}
	return p.below
}

func glob(pattern, name string) bool {
	before, after, star := strings.Cut(pattern, "*")
	if !star {
		return pattern == name
	}
	return hasAffixes(name, before, after)
}

func hasAffixes(name, before, after string) bool {
	return len(name) >= len(before)+len(after) && strings.HasPrefix(name, before) && strings.HasSuffix(name, after)
}

// gitDanger judges what lies in a repository's directory, or is one. Only what is known
// to be data is safe.
func gitDanger(names []string, mode fs.FileMode) string {
	for i, name := range names {
		// A bare repository is customarily named x.git.
		if name != ".git" && !strings.HasSuffix(name, ".git") && !isShort(name, ".git") {
			continue
		}
		switch {
		case mode == fs.ModeDir:
			return ""
		case i < len(names)-1:
			return repositoryDanger(names[i+1:], mode)
		case name == ".git" || mode == fs.ModeSymlink || isShort(name, ".git"):
			return "git is sent to another repository, whose hooks and configuration it obeys"
		}
	}
	if mode != fs.ModeDir && names[len(names)-1] == "head" {
		return whyBare
	}
	return ""
}

func repositoryDanger(names []string, mode fs.FileMode) string {
	const unknown = "git may obey this file of its repository"
	if mode != 0 {
		return unknown // a link or a special file in the place of data
	}
	first, last := names[0], names[len(names)-1]
	switch first {
	case "hooks":
		if len(names) == 2 && strings.HasSuffix(last, ".sample") {
			return ""
		}
		return "git runs this hook"
	case "modules", "worktrees":
		// A module's own name may have slashes, so that the start of its repository is
		// not known: a name that could be obeyed is taken to be.
		for _, name := range names[1:] {
			switch name {
			case "config", "config.worktree", "hooks", "commondir", "gitdir", "attributes", "alternates", "http-alternates":
				return "git obeys this file of a submodule or work tree: it names programs, or where the repository is"
			}
		}
		if len(names) < 3 {
			return unknown
		}
		for i := 2; i < len(names); i++ {
			if gitData(names[i:]) {
				return ""
			}
		}
		return unknown
	case "config", "config.worktree":
		return "git runs programs that its configuration names"
	}
	if gitData(names) {
		return ""
	}
	return unknown
}

// gitData says whether a path inside a repository is data that git reads and never obeys.
// Files of a rebase are not: their lists of steps may name commands.
func gitData(names []string) bool {
	first, rest := names[0], names[1:]
	switch first {
	case "refs", "logs", "branches":
		return len(rest) > 0
	case "objects":
		return gitObject(rest)
	case "info":
		return len(rest) == 1 && (rest[0] == "exclude" || rest[0] == "refs")
	case "lfs":
		return len(rest) > 1 && rest[0] == "objects"
	}
	if len(rest) > 0 {
		return false
	}
	switch first {
	case "index", "index.lock", "head", "head.lock", "packed-refs", "shallow", "description", "commit_editmsg", "merge_msg",
		"merge_mode", "merge_rr", "squash_msg", "tag_editmsg", "auto_merge", "gc.log", "gc.pid":
		return true
	}
	return strings.HasSuffix(first, "_head") || strings.HasPrefix(first, "sharedindex.")
}

// gitObject says whether a path below objects is one of those that git makes, and not
// objects/info/alternates or part of a submodule named like that.
func gitObject(names []string) bool {
	if len(names) < 2 {
		return false
	}
	last := names[len(names)-1]
	switch dir := names[0]; dir {
	case "pack":
		return len(names) == 2 && (strings.HasPrefix(last, "pack-") || strings.HasPrefix(last, "tmp_") || strings.HasPrefix(last, ".tmp-") || strings.HasPrefix(last, "multi-pack-index"))
	case "info":
		return last == "packs" || strings.HasPrefix(last, "commit-graph") || len(names) == 3 && names[1] == "commit-graphs"
	default:
		return len(names) == 2 && len(dir) == 2 && isHex(dir) && (len(last) >= 38 && isHex(last) || strings.HasPrefix(last, "tmp_obj_"))
	}
}

func isHex(s string) bool { return strings.Trim(s, "0123456789abcdef") == "" }

// isShort says whether a name may be the short one that FAT and NTFS give to a long one:
// up to six characters of it, "~" and a number, or two, four hexadecimal digits, "~" and
// a number.
func isShort(name, long string) bool {
	base, number, ok := strings.Cut(name, "~")
	number, _, _ = strings.Cut(number, ".")
	if !ok || number == "" || strings.Trim(number, "0123456789") != "" {
		return false
	}
	stem := strings.TrimLeft(long, ".")
	if dot := strings.LastIndexByte(stem, '.'); dot >= 0 {
		stem = stem[:dot]
	}
	stem = strings.ReplaceAll(stem, ".", "")
	if len(base) == 6 && len(stem) >= 2 && base[:2] == stem[:2] && isHex(base[2:]) {
		return true
	}
	// The number takes the place of characters when it has more digits than one.
	return len(base) > 0 && len(base) <= 6 && strings.HasPrefix(stem, base) && len(base) >= min(len(stem), 7-len(number))
}

// fold returns the names of a path without what file systems ignore: case, and the
// characters that HFS+ and ext4 skip. If Windows would read the path in another way, that
// way comes second: dots, spaces and streams at the end of names do not count there, and
// the backslash separates.
func fold(p string) [][]string {
	p = foldText(p)
	names := strings.Split(p, "/")
	folded := [][]string{names}
	if !strings.ContainsAny(p, `\:`) && !slices.ContainsFunc(names, ignoredEnd) {
		return folded
	}
	windows := strings.Split(path.Clean(strings.ReplaceAll(p, `\`, "/")), "/")
	for i, name := range windows {
		name, _, _ = strings.Cut(name, ":")
		windows[i] = strings.TrimRight(name, ". ")
	}
	return append(folded, windows)
}

func ignoredEnd(name string) bool {
	return strings.HasSuffix(name, ".") || strings.HasSuffix(name, " ")
}

func foldText(p string) string {
	plain := true
	for i := range len(p) {
		if c := p[i]; c >= utf8.RuneSelf || c >= 'A' && c <= 'Z' {
			plain = false
			break
		}
	}
	if plain {
		return p
	}
	var b strings.Builder
	for _, r := range p {
		switch {
		case r < utf8.RuneSelf:
			b.WriteRune(unicode.ToLower(r))
		case ignored(r):
		default:
			b.WriteString(foldRune(r))
		}
	}
	return b.String()
}

// ignored says whether some file system ignores a character (Default_Ignorable_Code_Point
// of Unicode, and all other format characters).
func ignored(r rune) bool {
	return unicode.In(r, unicode.Cf, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector)
}

// foldRune folds what becomes ASCII; the rest need not be equal to anything in the table.
func foldRune(r rune) string {
	switch r {
	case 'İ', 'ı':
		return "i"
	case 'ß', 'ẞ':
		return "ss"
	case 'ﬀ':
		return "ff"
	case 'ﬁ':
		return "fi"
	case 'ﬂ':
		return "fl"
	case 'ﬃ':
		return "ffi"
	case 'ﬄ':
		return "ffl"
	case 'ﬅ', 'ﬆ':
		return "st"
	}
	for f := unicode.SimpleFold(r); f != r; f = unicode.SimpleFold(f) {
		if f < utf8.RuneSelf {
			return string(unicode.ToLower(f))
		}
	}
	return string(r)
}
