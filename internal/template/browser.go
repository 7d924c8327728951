package template

import (
	"embed"
	"io/fs"
	"slices"
	"strings"
)

//go:embed chromium browser desktop
var recipeFiles embed.FS

//go:embed browser.sh
var browserStart string

// browser is Debian with Chromium, without a screen, whose DevTools answer on port 9222 to whatever
// host name the client has for it.
func browser() made {
	r := chromium()
	r.Packages = append(r.Packages, "nginx-light")
	r.add("browser")
	t := baseDefaults()
	t.Names = []string{"browser"}
	t.Limits.Memory = 2 << 30
	t.Start = browserStart
	t.Ready = "curl -sf http://localhost:9222/json/version"
	return made{r, nil, t}
}

// desktop has what E2B's desktop SDKs start and use in a sandbox: they bring up the screen, Xfce and
// noVNC themselves, so there is no start command.
func desktop() made {
	r := chromium()
	r.Packages = append(r.Packages,
		"xvfb", "x11-utils", "x11-xserver-utils", "dbus-x11", // the screen, xdpyinfo, xrandr
		"xfce4-session", "xfwm4", "xfdesktop4", "xfce4-panel", "xfce4-settings", "exo-utils",
		"xfce4-terminal", "thunar", "mousepad", "adwaita-icon-theme", "fonts-dejavu-core",
		"xdotool", "scrot", "libgtk-3-bin", "xdg-utils", // gtk-launch, xdg-open
		"x11vnc", "novnc", "websockify", "net-tools",
	)
	r.add("desktop")
	r.Setup += `
ln -s /usr/share/novnc /opt/noVNC
ln -s vnc.html /usr/share/novnc/index.html
`
	t := baseDefaults()
	t.Names = []string{"desktop"}
	t.Limits.Memory, t.Limits.Disk = 4<<30, 4<<30
	return made{r, nil, t}
}

// chromium is base with Chromium and fonts in the place of Node.js.
func chromium() recipe {
	r := base()
	r.Packages = slices.DeleteFunc(r.Packages, func(p string) bool { return p == "nodejs" || p == "npm" })
	r.Packages = append(r.Packages, "chromium", "fonts-liberation", "fonts-noto-color-emoji")
	r.add("chromium")
	return r
}

// add adds the files of a directory beside this one, by their paths below it.
func (r recipe) add(dir string) {
	err := fs.WalkDir(recipeFiles, dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := recipeFiles.ReadFile(path)
		r.Files[strings.TrimPrefix(path, dir+"/")] = string(content)
		return err
	})
	if err != nil {
		panic(err) // embedded files can be read
	}
}
