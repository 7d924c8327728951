package main

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/berm-sandbox/berm/test/harness"
)

// loads are what the cost of recording is measured with, as scripts.
var loads = []struct{ name, script string }{
	{"processes", "for i in $(seq 1500); do /bin/true; done"},
	{"build", `mkdir -p /tmp/b && cd /tmp/b && for i in $(seq 150); do printf '%s\n' "line $i" >$i.c; sed s/line/text/ $i.c | sort | tr a-z A-Z >$i.o; cat $i.o >>all; done; gzip -c all >all.gz; cd /; rm -r /tmp/b`},
	{"git", `command -v git >/dev/null || exit 0; rm -rf /tmp/g; git init -q /tmp/g && cd /tmp/g && git config user.email a@b.c && git config user.name a && for i in $(seq 60); do echo $i >f$((i % 7)); git add -A; git commit -qm $i; git status -s >/dev/null; done`},
	{"files", `mkdir -p /tmp/n && cd /tmp/n && for i in $(seq 40); do mkdir -p p$i/lib; for j in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25; do echo "module $i $j" >p$i/lib/$j.js; done; done; tar cf - . | (mkdir -p /tmp/m && cd /tmp/m && tar xf -); cd /; rm -rf /tmp/n /tmp/m`},
	{"output", "seq 1 1500000"},
	{"slow output", "for i in $(seq 30); do seq 1 2000; sleep 0.01; done"},
}

// record compares servers that record all and nothing beside actions, with both alive and
// taking turns.
func (b *bench) record(ctx context.Context) error {
	type side struct {
		name   string
		flags  []string
		server *harness.Server
		box    *harness.Sandbox
	}
	sides := []*side{{name: "nothing", flags: []string{"--record", ""}}, {name: "all"}}
	for _, s := range sides {
		data, err := harness.DataDir()
		if err != nil {
			return err
		}
		defer os.RemoveAll(data)
		server, err := harness.Start(ctx, data, s.flags...)
		if err != nil {
			return err
		}
		defer func() { _ = server.Stop(context.WithoutCancel(ctx)) }()
		s.server = server
		if s.box, err = server.Create(ctx, time.Hour, nil); err != nil {
			return fmt.Errorf("%w\n%s", err, server.Log())
		}
	}
	rounds := max(3, int(math.Round(15*b.scale)))
	for _, load := range loads {
		took := map[string][]time.Duration{}
		var ratios []float64
		cpu := map[string]time.Duration{}
		for round := range rounds + 1 {
			pair := map[string]time.Duration{}
			for i := range sides {
				s := sides[(i+round)%2]
				begin, used := time.Now(), processorTime(s.server.PID())
				r, err := s.box.Run(ctx, harness.Shell("root", load.script))
				if err != nil || r.Code != 0 {
					return fmt.Errorf("%s: %w: %d %s", load.name, err, r.Code, r.Stderr)
				}
				pair[s.name] = time.Since(begin)
				if round > 0 {
					cpu[s.name] += processorTime(s.server.PID()) - used
				}
			}
			if round == 0 { // what is loaded once
				continue
			}
			for name, d := range pair {
				took[name] = append(took[name], d)
			}
			ratios = append(ratios, float64(pair["all"])/float64(pair["nothing"]))
		}
		slices.Sort(ratios)
		for _, all := range took {
			slices.Sort(all)
		}
		middle := func(d []time.Duration) float64 { return float64(d[len(d)/2].Microseconds()) / 1000 }
		work := float64(cpu["all"]) / float64(cpu["nothing"])
		fmt.Printf("%-12s nothing %8.1f ms   all %8.1f ms   ratio %.3f (quarters %.3f to %.3f)   processor time %.3f\n", load.name,
			middle(took["nothing"]), middle(took["all"]), ratios[len(ratios)/2], ratios[len(ratios)/4], ratios[len(ratios)*3/4], work)
		b.results[load.name] = map[string]any{
			"nothing_ms": middle(took["nothing"]), "all_ms": middle(took["all"]), "ratio": ratios[len(ratios)/2], "processor_ratio": work, "rounds": rounds,
		}
	}
	return nil
}

// processorTime is what a process and all below it have used, with those that have ended.
func processorTime(root int) (all time.Duration) {
	parents, used := map[int]int{}, map[int]time.Duration{}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		// "pid (name) state ppid …": the name may hold anything.
		fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		parents[pid], _ = strconv.Atoi(fields[1])
		for _, ticks := range fields[11:15] { // user and system, then of children that have ended
			n, _ := strconv.Atoi(ticks)
			used[pid] += time.Duration(n) * 10 * time.Millisecond // USER_HZ is 100
		}
	}
	for pid := range parents {
		for up := pid; up > 1; up = parents[up] {
			if up == root {
				all += used[pid]
				break
			}
		}
	}
	return all
}
