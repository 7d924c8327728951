package apply

import "os"

// Interrupted says whether an apply of the session in dir is at work or was stopped in the
// middle.
func Interrupted(dir string) bool {
	_, err := os.Lstat(journalPath(dir))
	return err == nil
}
