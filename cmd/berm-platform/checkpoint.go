package main

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/berm-sandbox/berm/internal/cli"
	"github.com/berm-sandbox/berm/internal/client"
)

// checkpointFlag takes "every=5m", "exec", "keep=N", and several of them with commas between.
type checkpointFlag client.Checkpoints

func (f *checkpointFlag) String() string {
	var parts []string
	if f.Every > 0 {
		parts = append(parts, "every="+(time.Duration(f.Every)*time.Second).String())
	}
	if f.Exec {
		parts = append(parts, "exec")
	}
	if f.Keep > 0 {
		parts = append(parts, fmt.Sprintf("keep=%d", f.Keep))
	}
	return strings.Join(parts, ",")
}

// Type is what help calls the value.
func (f *checkpointFlag) Type() string { return "when" }

func (f *checkpointFlag) Set(s string) error {
	for part := range strings.SplitSeq(s, ",") {
		switch name, value, _ := strings.Cut(part, "="); {
		case name == "every":
			var every cli.DurationFlag
			if err := every.Set(value); err != nil {
				return fmt.Errorf("every: %w", err)
			}
			if time.Duration(every) < time.Second {
				return errors.New("every: a second is the least")
			}
			f.Every = int64(time.Duration(every) / time.Second)
		case part == "exec":
			f.Exec = true
		case name == "keep":
			n, err := strconv.Atoi(value)
			if err != nil || n < 1 {
				return errors.New("keep: it must be a number from 1")
			}
			f.Keep = n
		default:
			return fmt.Errorf(`%q is not every=TIME, exec or keep=N`, part)
		}
	}
	return nil
}
