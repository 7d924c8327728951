package template

import (
	"embed"
	"fmt"
	"strings"
)

//go:embed httpbin.py
var httpbinServer string

// httpbin is base with a server that tells what it was asked, on port 8080: what E2B's tests have
// for the other end of a sandbox's requests.
func httpbin() made {
	t := baseDefaults()
	t.Names, t.Limits.Memory = []string{"httpbin"}, 512<<20
	t.Start = "exec python3 - 8080 <<'END'\n" + httpbinServer + "END\n"
	t.Ready = "curl -sf http://localhost:8080/headers"
	return made{base(), nil, t}
}

// Interpreter is the name of the template of the code interpreter, as E2B's clients ask for it.
const Interpreter = "code-interpreter-v1"

//go:embed interpreter/*.py
var interpreterFiles embed.FS

// interpreterPackages is what `pip freeze` says of the Python packages of the code interpreter:
// its server and kernels, and what code of users expects.
//
//go:embed interpreter/requirements.txt
var interpreterPackages string

// interpreterDir is where the server of the code interpreter lies.
const interpreterDir = "usr/local/lib/berm/interpreter"

// interpreter is base with Jupyter kernels and a server for them, on port 49999.
func interpreter() made {
	r := base()
	r.Packages = append(r.Packages, "fonts-droid-fallback", "openjdk-17-jdk-headless", "r-cran-irkernel")
	r.Include = append(r.Include, "/usr/share/man/man1") // the alternatives of Java are not set up without
	r.Python = strings.Fields(interpreterPackages)
	// Whoever installs packages means to, and the sandbox goes with them.
	r.Files["etc/pip.conf"] = "[global]\nbreak-system-packages = true\n"
	r.Setup += `
# Code may be told to work there, as with E2B; who may use sudo is kept out of nothing.
chmod 0711 /root
# Glyphs that matplotlib's own font lacks.
rc=/usr/local/lib/python3.11/dist-packages/matplotlib/mpl-data/matplotlibrc
sed -i 's/^#font.family: *sans-serif/&, Droid Sans Fallback/' $rc
grep -q 'Droid Sans Fallback' $rc
# What matplotlib finds out once.
setpriv --reuid 1000 --regid 1000 --clear-groups env HOME=/home/user python3 -c 'import matplotlib.font_manager'
`
	files := map[string]string{}
	entries, err := interpreterFiles.ReadDir("interpreter")
	for _, e := range entries {
		var content []byte
		if content, err = interpreterFiles.ReadFile("interpreter/" + e.Name()); err != nil {
			break
		}
		files[interpreterDir+"/"+e.Name()] = string(content)
	}
	if err != nil {
		panic(err) // they are embedded
	}
	t := baseDefaults()
	t.Names, t.Limits.Memory, t.Limits.Disk = []string{Interpreter}, 2<<30, 4<<30
	t.Start = fmt.Sprintf("cd /home/user\nwhile :; do python3 -B /%s/server.py; sleep 0.2; done", interpreterDir)
	t.Ready = "curl -sf http://127.0.0.1:49999/health"
	return made{r, files, t}
}
