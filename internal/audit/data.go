package audit

// Command is a command that the API started in a sandbox.
type Command struct {
	PID  int      `json:"pid,omitempty"` // inside; the record of a start is written before there is one
	Argv []string `json:"argv"`
	Cut  bool     `json:"cut,omitempty"` // Argv or Env is longer than what was kept
	Cwd  string   `json:"cwd,omitempty"`
	User string   `json:"user,omitempty"`
	Env  []string `json:"env,omitempty"` // the names of variables: values may be secrets
	TTY  *Size    `json:"tty,omitempty"` // nil: it has no terminal
	// Of its end.
	Code   *int   `json:"code,omitempty"`
	Signal string `json:"signal,omitempty"`
	Millis int64  `json:"ms,omitempty"`
	Output int64  `json:"output,omitempty"` // bytes that it wrote, of which Frames may keep a part
}

// NotStarted begins the reason of an exec.exit whose command never ran.
const NotStarted = "not started"

// Size is the size of a terminal in characters.
type Size struct {
	Columns int `json:"columns"`
	Rows    int `json:"rows"`
}

// Process is a process of a sandbox at one moment.
type Process struct {
	PID  int `json:"pid"`            // inside, 0 if the source knows only HostPID
	PPID int `json:"ppid,omitempty"` // inside
	Host int `json:"host,omitempty"` // the process id on the host
	UID  int `json:"uid"`            // inside, or on the host if the source knows no other
	// Ago is how many microseconds before the record it was: the kernel's events are gathered.
	Ago int64 `json:"ago,omitempty"`
	// Of an execution.
	Exe    string   `json:"exe,omitempty"` // the file that runs, by its path inside
	SHA256 string   `json:"sha256,omitempty"`
	Argv   []string `json:"argv,omitempty"`
	Cwd    string   `json:"cwd,omitempty"`
	Cut    bool     `json:"cut,omitempty"` // Argv is longer than what was kept
	// Asked: Exe and Argv are what the process asked for, which it can have changed meanwhile, and
	// which the kernel may have refused.
	Asked bool `json:"asked,omitempty"`
	// Of an end.
	Code   *int   `json:"code,omitempty"`
	Signal string `json:"signal,omitempty"`
	// Of a system call.
	Call  string `json:"call,omitempty"`
	Error string `json:"error,omitempty"` // such as "EPERM"; "" of one that worked
}

// ProcessSum tells of many things of one kind in the second that the record ends.
type ProcessSum struct {
	Type  Type   `json:"type"`          // of the records in whose place it is
	Exe   string `json:"exe,omitempty"` // of executions: the program; "" for those of many others
	Call  string `json:"call,omitempty"`
	Count int    `json:"count"`
}

// FileAccess is one use of the files API.
type FileAccess struct {
	Path   string `json:"path"`
	Op     string `json:"op"` // "read", "write", "remove", "move", "mkdir", "list"
	Size   int64  `json:"size,omitempty"`
	SHA256 string `json:"sha256,omitempty"` // of what was written or read in whole
	To     string `json:"to,omitempty"`     // of a move
}

// Changes is what a sandbox's writable layer differs in from its template, at the end or
// when it was looked at. Content of small text files lies beside as blobs, under the hashes
// that the changes name, with what looks like a secret masked; those that one record has no room
// for are named by records that continue it.
type Changes struct {
	At string `json:"at"` // "end" or the reason of the look
	// Continues says that this is no other look: the record has no changes, and names more
	// content of the look before it, whose trace it shares.
	Continues bool     `json:"continues,omitempty"`
	Changes   []Change `json:"changes"`
	More      int      `json:"more,omitempty"` // how many did not fit; the blob "changes" has all, as JSON
	// Unhashed is how many files were too much to be read in the time that there was.
	Unhashed int `json:"unhashed,omitempty"`
}

// Change is one path that differs.
type Change struct {
	Path   string `json:"path"`
	Op     string `json:"op"`   // "add", "modify", "delete", "mode"
	Kind   string `json:"kind"` // "file", "dir", "link", "fifo", "socket", "device"; of what is there now, or was
	Size   int64  `json:"size,omitempty"`
	Mode   string `json:"mode,omitempty"`   // octal
	Before string `json:"before,omitempty"` // SHA-256 of the template's content, or of a link's target
	After  string `json:"after,omitempty"`  // SHA-256 of the content, or of a link's target
	Target string `json:"target,omitempty"` // of a link
	// Where what looks like a secret is masked in the content that is kept, that has these hashes.
	KeptBefore string `json:"keptBefore,omitempty"`
	KeptAfter  string `json:"keptAfter,omitempty"`
	// Where they are no valid UTF-8, Path and Target are not exact, and these are.
	PathBytes   []byte `json:"pathBytes,omitempty"`
	TargetBytes []byte `json:"targetBytes,omitempty"`
}

// KeyChange names the key that signs from now on, as a note verifier
// (golang.org/x/mod/sumdb/note).
type KeyChange struct {
	New string `json:"new"`
}

// Removal names the first and the last of adjacent records that were removed.
type Removal struct {
	From uint64 `json:"from"`
	To   uint64 `json:"to"`
}

// Erasure names records of one sandbox that were erased.
type Erasure struct {
	Records int    `json:"records"`
	Seqs    string `json:"seqs"` // their numbers, as 1-5,9
}

// The kinds of blobs.
const (
	KindFrames  = "frames"  // see Frames
	KindContent = "content" // of a file
	KindChanges = "changes" // a list of Change, as JSON
)
