package writer

import (
	"strconv"
	"time"

	"github.com/spf13/pflag"
)

// Settings are what a writer is started with.
type Settings struct {
	After     int64         // the last record that the server knows; unknown at its start
	Wait      time.Duration // as Config
	Keep      time.Duration // as trail.Options
	Limit     int64         // as trail.Options
	Anchors   int           // files that get checkpoints, which come as descriptors
	Witnesses []string      // URLs that get checkpoints
}

// unknown is the last record for a server that begins.
const unknown = -1

// Flags are the flags by which the command gets them.
func (s *Settings) Flags(flags *pflag.FlagSet) {
	flags.Int64Var(&s.After, "after", unknown, "number of the last record that is known")
	flags.DurationVar(&s.Wait, "wait", 0, "how long another process that writes the log is waited for")
	flags.DurationVar(&s.Keep, "keep", 0, "how long records are kept")
	flags.Int64Var(&s.Limit, "limit", 0, "bytes that they may take")
	flags.IntVar(&s.Anchors, "anchors", 0, "files that get checkpoints, by descriptor")
	flags.StringArrayVar(&s.Witnesses, "witness", nil, "URL that gets checkpoints")
}

func (s *Settings) args() []string {
	args := []string{
		"--after", strconv.FormatInt(s.After, 10), "--wait", s.Wait.String(), "--keep", s.Keep.String(), "--limit", strconv.FormatInt(s.Limit, 10),
		"--anchors", strconv.Itoa(s.Anchors),
	}
	for _, url := range s.Witnesses {
		args = append(args, "--witness", url)
	}
	return args
}
