package replay

import (
	"cmp"
	"slices"
	"time"

	"github.com/berm-sandbox/berm/internal/audit"
)

// Process is a process of the sandbox over its life.
type Process struct {
	PID, PPID int // inside, 0 if they are not known
	Host      int
	Start     time.Time
	End       time.Time // zero while it lives
	Images    []Image   // what it executed, in order
	Code      *int
	Signal    string
	Trust     audit.Trust
	Command   *Command // that the API started as this process
}

// Image is what a process ran from a time on.
type Image struct {
	Time   time.Time
	Exe    string
	SHA256 string
	Argv   []string
	Cwd    string
	Cut    bool
}

// At is what the process ran at a time; nil before it executed anything.
func (p *Process) At(t time.Time) *Image {
	for i := len(p.Images) - 1; i >= 0; i-- {
		if !p.Images[i].Time.After(t) {
			return &p.Images[i]
		}
	}
	return nil
}

// Ended says whether it had at a time.
func (p *Process) Ended(t time.Time) bool { return !p.End.IsZero() && !p.End.After(t) }

// processes follows the processes of a sandbox. Numbers are used again: each stands for the
// one that lives.
type processes struct {
	all    []*Process
	inside map[int]*Process
	host   map[int]*Process
}

func (s *processes) find(pid, host int) *Process {
	if p := s.host[host]; host != 0 && p != nil {
		return p
	}
	if p := s.inside[pid]; pid != 0 && p != nil && (host == 0 || p.Host == 0) {
		return p
	}
	return nil
}

func (s *processes) add(p *Process) *Process {
	if s.inside == nil {
		s.inside, s.host = map[int]*Process{}, map[int]*Process{}
	}
	s.all = append(s.all, p)
	s.name(p)
	return p
}

func (s *processes) name(p *Process) {
	if p.PID != 0 {
		s.inside[p.PID] = p
	}
	if p.Host != 0 {
		s.host[p.Host] = p
	}
}

func (s *processes) gone(p *Process, at time.Time) {
	p.End = at
	if s.inside[p.PID] == p {
		delete(s.inside, p.PID)
	}
	if s.host[p.Host] == p {
		delete(s.host, p.Host)
	}
}

// see takes in a record of a process.
func (s *processes) see(e *Event, data *audit.Process) {
	p := s.find(data.PID, data.Host)
	if p != nil && e.Type == audit.ProcFork && p.Command == nil { // its end was not told
		s.gone(p, e.Time)
		p = nil
	}
	if p == nil && e.Type == audit.ProcExit {
		return // its command's end was told before
	}
	if p == nil {
		p = s.add(&Process{PID: data.PID, PPID: data.PPID, Host: data.Host, Start: e.Time, Trust: e.Trust})
		// Until it executes something it is a copy of its parent.
		if parent := s.inside[data.PPID]; parent != nil && e.Type == audit.ProcFork && len(parent.Images) > 0 {
			image := parent.Images[len(parent.Images)-1]
			image.Time = e.Time
			p.Images = []Image{image}
		}
	}
	p.PID, p.PPID, p.Host = cmp.Or(p.PID, data.PID), cmp.Or(data.PPID, p.PPID), cmp.Or(p.Host, data.Host)
	s.name(p)
	switch e.Type {
	case audit.ProcExec:
		p.Images = append(p.Images, Image{Time: e.Time, Exe: data.Exe, SHA256: data.SHA256, Argv: data.Argv, Cwd: data.Cwd, Cut: data.Cut})
	case audit.ProcExit:
		p.Code, p.Signal = data.Code, data.Signal
		s.gone(p, e.Time)
	}
}

// command takes in the start or the end of a command of the API.
func (s *processes) command(c *Command, ended bool) {
	p := s.find(c.PID, 0)
	if c.PID == 0 { // it never ended
		if !ended && len(s.host) == 0 { // else it is told of as a process
			s.add(&Process{Start: c.Start, Trust: c.Trust, Images: []Image{{Time: c.Start, Argv: c.Argv, Cwd: c.Cwd}}, Command: c})
		}
		return
	}
	if p == nil && ended {
		return // its own end was told
	}
	if p == nil {
		p = s.add(&Process{PID: c.PID, Start: c.Start, Trust: c.Trust, Images: []Image{{Time: c.Start, Argv: c.Argv, Cwd: c.Cwd}}})
	}
	p.Command = c
	if ended && c.Ended {
		p.Code, p.Signal = c.Code, c.Signal
		s.gone(p, c.End)
	}
}

func (s *processes) end(at time.Time) {
	for _, p := range s.all {
		if p.End.IsZero() {
			p.End = at
		}
	}
	s.inside, s.host = map[int]*Process{}, map[int]*Process{}
}

// Node is a process in a tree.
type Node struct {
	*Process
	Depth int
}

// Tree is the processes that lived at a time, or had ended at most linger before, each after
// its parent.
func (t *Timeline) Tree(at time.Time, linger time.Duration) (tree []Node) {
	children := map[int][]*Process{} // by the number of the parent
	known := map[int]bool{}
	var here []*Process
	for _, p := range t.Processes {
		if !p.Start.After(at) && !p.Ended(at.Add(-linger)) {
			here = append(here, p)
			known[p.PID] = true
		}
	}
	for _, p := range here {
		parent := p.PPID
		if parent == p.PID || !known[parent] {
			parent = 0
		}
		children[parent] = append(children[parent], p)
	}
	placed := map[*Process]bool{}
	var place func(of int, depth int)
	place = func(of, depth int) {
		list := children[of]
		slices.SortStableFunc(list, func(a, b *Process) int { return a.Start.Compare(b.Start) })
		for _, p := range list {
			if placed[p] {
				continue
			}
			placed[p] = true
			tree = append(tree, Node{p, depth})
			if p.PID != 0 && depth < 64 {
				place(p.PID, depth+1)
			}
		}
	}
	place(0, 0)
	for _, p := range here { // in a ring, which forged records can make
		if !placed[p] {
			tree = append(tree, Node{p, 0})
		}
	}
	return tree
}
