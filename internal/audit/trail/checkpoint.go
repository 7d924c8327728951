package trail

import (
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

// Checkpoint says what a log was at a moment, in the form of C2SP tlog-checkpoint: a signed
// note of origin, number of lines and root of their tree, and lines of ours after them.
type Checkpoint struct {
	Origin string    // the name of the log, which is that of its keys
	Size   uint64    // lines
	Root   tlog.Hash // of the RFC 6962 tree over them
	Time   time.Time
	Boot   string // boot id of the machine that signed
}

// text is what is signed.
func (c Checkpoint) text() string {
	return fmt.Sprintf("%s\n%d\n%s\ntime %s\nboot %s\n", c.Origin, c.Size, base64.StdEncoding.EncodeToString(c.Root[:]),
		c.Time.UTC().Format(time.RFC3339Nano), c.Boot)
}

// parseCheckpoint reads the text of a note. It says nothing about who signed it.
func parseCheckpoint(text string) (Checkpoint, error) {
	lines := strings.Split(text, "\n")
	if len(lines) < 4 {
		return Checkpoint{}, errors.New("a checkpoint has at least three lines")
	}
	c := Checkpoint{Origin: lines[0]}
	var err error
	if c.Size, err = strconv.ParseUint(lines[1], 10, 63); err != nil || lines[1] != strconv.FormatUint(c.Size, 10) {
		return Checkpoint{}, errors.New("the second line of a checkpoint is the number of records")
	}
	root, err := base64.StdEncoding.DecodeString(lines[2])
	if err != nil || len(root) != tlog.HashSize {
		return Checkpoint{}, errors.New("the third line of a checkpoint is a hash")
	}
	c.Root = tlog.Hash(root)
	for _, line := range lines[3:] {
		switch name, value, _ := strings.Cut(line, " "); name {
		case "time":
			if c.Time, err = time.Parse(time.RFC3339Nano, value); err != nil {
				return Checkpoint{}, errors.New("the time of a checkpoint is RFC 3339")
			}
		case "boot":
			c.Boot = value
		}
	}
	return c, nil
}

// openCheckpoint checks a note against keys and returns which of them signed it.
func openCheckpoint(text string, keys []note.Verifier) (Checkpoint, note.Verifier, error) {
	for _, key := range keys {
		n, err := note.Open([]byte(text), note.VerifierList(key))
		if err != nil {
			continue
		}
		c, err := parseCheckpoint(n.Text)
		if err == nil && c.Origin != key.Name() {
			err = fmt.Errorf("it is of the log %s and not of %s", c.Origin, key.Name())
		}
		return c, key, err
	}
	return Checkpoint{}, nil, errors.New("no key of the log signed it")
}

func sign(c Checkpoint, key note.Signer) (string, error) {
	signed, err := note.Sign(&note.Note{Text: c.text()}, key)
	return string(signed), err
}

// BootID is the file with the kernel's name of its run; see random(4).
const BootID = "/proc/sys/kernel/random/boot_id"

// bootID tells one start of the machine from another.
func bootID() string {
	id, err := os.ReadFile(BootID)
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(id))
}
